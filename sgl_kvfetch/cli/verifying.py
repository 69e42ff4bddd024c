"""What ``kvfetch verify`` prints."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from sgl_kvfetch.cli.options import make_console
from sgl_kvfetch.cli.target import Target, open_target
from sgl_kvfetch.cli.units import format_size, printable
from sgl_kvfetch.cli.verification import Problem, Report, Verifier
from sgl_kvfetch.errors import ConfigError, FormatError
from sgl_kvfetch.stores.listing import StoredSegment, list_segments

MAX_PROBLEMS_AN_OBJECT = 5


async def run(text: str, token: str | None, as_json: bool, jobs: int) -> bool:
    """Verify, print a report and say whether all is well. Raises KVFetchError."""
    try:
        target = open_target(text, token)
    except FormatError as e:  # a file that was given by its path
        report = Report(problems=[Problem(str(Path(text)), str(e))])
    else:
        try:
            segments = await list_segments(target.objects, target.prefix)
            if target.prefix and not segments:
                raise ConfigError(f"{target.label}: nothing is stored under this name")
            report = await _verify(target, segments, jobs)
        finally:
            await target.objects.close()
    _print(report, as_json)
    return not report.problems


async def _verify(target: Target, segments: list[StoredSegment], jobs: int) -> Report:
    console = make_console(stderr=True)
    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(True), TransferSpeedColumn(), TimeRemainingColumn())
    total = sum(segment.stored_bytes for segment in segments if segment.manifest is not None)
    with (
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
        ThreadPoolExecutor(jobs, thread_name_prefix="kvfetch-verify") as pool,
    ):
        task = progress.add_task("", total=total)
        verifier = Verifier(
            target.objects, pool, jobs=jobs, on_read=lambda num_bytes: progress.advance(task, num_bytes)
        )
        return await verifier.run(segments)


def _print(report: Report, as_json: bool) -> None:
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
        return
    by_object: dict[str, list[str]] = {}
    for problem in report.problems:
        by_object.setdefault(problem.name, []).append(problem.what)
    for name, found in by_object.items():
        for what in found[:MAX_PROBLEMS_AN_OBJECT]:
            typer.echo(f"CORRUPT {name}: {printable(what)}")
        if len(found) > MAX_PROBLEMS_AN_OBJECT:
            typer.echo(f"CORRUPT {name}: and {len(found) - MAX_PROBLEMS_AN_OBJECT} more")
    read = f"{report.num_segments} segments, {report.num_chunks} chunks, {format_size(report.read_bytes)} read"
    typer.echo(f"{read}: {len(by_object)} objects corrupt or missing" if by_object else f"{read}: all is well")
    if report.orphans:
        size = format_size(sum(info.size_bytes for info in report.orphans))
        typer.echo(f"{len(report.orphans)} data objects ({size}) belong to no segment: being written, or left behind")
    if report.num_gone:
        typer.echo(f"{report.num_gone} segments were deleted or replaced meanwhile")
