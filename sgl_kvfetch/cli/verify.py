"""``kvfetch verify``: read everything that is stored, and report what is corrupt."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import xxhash
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from sgl_kvfetch.cli.options import TARGET_HELP, JsonOption, TokenFileOption, TokenOption, make_console, read_token
from sgl_kvfetch.cli.target import Target, open_target
from sgl_kvfetch.cli.units import format_size, printable
from sgl_kvfetch.container.manifest import Cell, Manifest
from sgl_kvfetch.container.segment import SegmentReader
from sgl_kvfetch.errors import ConfigError, FormatError, StoreError, StoreErrorReason
from sgl_kvfetch.fetch.plan import ReadUnit, read_units
from sgl_kvfetch.quant import quantiser_from_identity
from sgl_kvfetch.stores.base import ObjectInfo
from sgl_kvfetch.stores.listing import Objects, StoredSegment, list_segments, read_manifest

MAX_PROBLEMS_AN_OBJECT = 5
# Failures that concern one object, not the whole store.
_OBJECT_REASONS: frozenset[StoreErrorReason] = frozenset({"truncated", "io", "invalid", "too_large", "protocol"})


def verify(
    target: Annotated[str, typer.Argument(metavar="TARGET", help=TARGET_HELP, show_default=False)],
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
    jobs: Annotated[
        int, typer.Option(min=1, max=256, help="Segments read at once, and decoding threads.", show_default="cores")
    ] = os.cpu_count() or 1,
) -> None:
    """Read and decode everything that is stored, and compare it with its checksums.

    The exit code is 0 if everything is valid, 1 if something is corrupt or missing, 2 if the store cannot be read.
    Nothing is changed. Data without a manifest, left by a crashed writer, are counted but are no error.

    Examples:

        kvfetch verify http://127.0.0.1:8700

        kvfetch verify file:///var/cache/kv#4f0c

        kvfetch verify backup/8-91ab.kvm
    """
    if not asyncio.run(_run(target, read_token(token, token_file), as_json, jobs)):
        raise typer.Exit(1)


async def _run(text: str, token: str | None, as_json: bool, jobs: int) -> bool:
    """Verify the target and print a report. Return True if nothing is corrupt. Raises KVFetchError."""
    try:
        target = open_target(text, token)
    except FormatError as e:  # TARGET is the path of an invalid manifest
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
        typer.echo(f"{len(report.orphans)} data objects ({size}) have no manifest: being written, or left by a crash")
    if report.num_gone:
        typer.echo(f"{report.num_gone} segments were deleted or replaced during the run")


@dataclass(frozen=True, slots=True)
class Problem:
    name: str  # of the object
    what: str


@dataclass(slots=True)
class Report:
    """``orphans`` are data objects that no manifest names: still being written, or left by a writer that crashed.
    ``num_gone`` counts segments that were deleted or replaced during the run; they are no problem."""

    num_segments: int = 0
    num_chunks: int = 0
    read_bytes: int = 0
    num_gone: int = 0
    problems: list[Problem] = field(default_factory=list)
    orphans: list[ObjectInfo] = field(default_factory=list)


class _Gone(Exception):
    """The segment was deleted or replaced while it was read."""


class Verifier:
    """Verifies ``jobs`` segments at a time. Each job holds one read of about ``read_bytes`` bytes in memory."""

    def __init__(
        self,
        objects: Objects,
        decode_pool: Executor,
        *,
        jobs: int,
        read_bytes: int = 4 << 20,
        on_read: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        self.report = Report()
        self._objects = objects
        self._decode_pool = decode_pool
        self._jobs = jobs
        self._read_bytes = read_bytes
        self._on_read = on_read

    async def run(self, segments: Sequence[StoredSegment]) -> Report:
        """Verify ``segments`` and return the report. Raises StoreError if the store cannot be read at all."""
        queue = iter(segments)
        await asyncio.gather(*(self._work(queue) for _ in range(self._jobs)))
        self.report.problems.sort(key=lambda problem: problem.name)
        return self.report

    async def _work(self, queue: Iterator[StoredSegment]) -> None:
        for stored in queue:
            if stored.manifest is None:
                self.report.orphans += stored.data.values()
                continue
            try:
                await self._verify_segment(stored, stored.manifest)
            except _Gone:
                self.report.num_gone += 1

    async def _verify_segment(self, stored: StoredSegment, info: ObjectInfo) -> None:
        try:
            manifest = await read_manifest(self._objects, info.name)
            if manifest is None:
                raise _Gone
            self._note_read(info.size_bytes)
            quantiser = quantiser_from_identity(manifest.namespace.quantiser)
            readers = [SegmentReader(manifest, quantiser, index) for index in range(len(manifest.variants))]
        except (FormatError, StoreError) as e:
            self._blame(info.name, e)
            return
        self.report.num_segments += 1
        for reader in readers:
            await self._verify_data(stored.data.get(reader.data_name), reader)
        named = {reader.data_name for reader in readers}
        self.report.orphans += [data for name, data in stored.data.items() if name not in named]

    async def _verify_data(self, info: ObjectInfo | None, reader: SegmentReader) -> None:
        name, expected = reader.data_name, reader.manifest.data_bytes(reader.variant)
        if info is None:
            # The segment may have been replaced after the listing; then its data are newer than the listing.
            info = await self._objects_head(name, reader.manifest)
        if info is None:
            self._add(name, "missing, though its manifest names it")
            return
        if info.size_bytes != expected:
            self._add(name, f"has {info.size_bytes} bytes, expected {expected} as its manifest says")
            return
        digest = xxhash.xxh3_128()
        try:
            for span in range(reader.manifest.num_spans):
                for unit in read_units(reader, span, self._read_bytes):
                    data = await self._objects.get(name, unit.start, unit.size_bytes)
                    if data is None:
                        await self._require_present(reader.manifest)
                        self._add(name, "missing, though its manifest names it")
                        return
                    self._note_read(len(data))
                    digest.update(data)
                    await self._verify_unit(name, unit, data)
        except StoreError as e:
            self._blame(name, e)
            return
        if digest.hexdigest() != reader.variant.data_digest:
            self._add(name, "its bytes do not match the digest in its name")

    async def _verify_unit(self, name: str, unit: ReadUnit, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        found = await asyncio.gather(
            *(loop.run_in_executor(self._decode_pool, _check_cell, unit, cell, data) for cell in unit.cells)
        )
        self.report.num_chunks += len(unit.cells) * unit.reader.manifest.chunks_per_cell
        for error in found:
            if error is not None:
                self._add(name, error)

    async def _objects_head(self, name: str, manifest: Manifest) -> ObjectInfo | None:
        """Look again for data that the listing lacks. Raises _Gone if the manifest was deleted or replaced too."""
        async for info in self._objects.list(name):
            return info
        await self._require_present(manifest)
        return None

    async def _require_present(self, manifest: Manifest) -> None:
        """Raise _Gone unless the store still has exactly this manifest."""
        try:
            if await read_manifest(self._objects, manifest.key.manifest_name) == manifest:
                return
        except FormatError:
            pass
        raise _Gone

    def _note_read(self, num_bytes: int) -> None:
        self.report.read_bytes += num_bytes
        self._on_read(num_bytes)

    def _blame(self, name: str, error: FormatError | StoreError) -> None:
        """Report an error that concerns only this object; raise any other."""
        if isinstance(error, StoreError) and error.reason not in _OBJECT_REASONS:
            raise error
        self._add(name, str(error))

    def _add(self, name: str, what: str) -> None:
        self.report.problems.append(Problem(name, what))


def _check_cell(unit: ReadUnit, cell: Cell, data: bytes) -> str | None:
    """Decode one cell. Return an error message if it is corrupt, or else None. Runs on the decode pool."""
    start, end = unit.reader.cell_range(cell)
    try:
        unit.reader.decode_cell(cell, memoryview(data)[start - unit.start : end - unit.start])
    except FormatError as e:
        return str(e)
    return None
