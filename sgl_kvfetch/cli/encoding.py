"""What ``kvfetch encode`` does and prints."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

import msgspec
import typer
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from sgl_kvfetch.cli.options import make_console
from sgl_kvfetch.cli.units import format_ratio, format_size, printable
from sgl_kvfetch.codecs import EncoderName
from sgl_kvfetch.codecs.nvenc import open_encoders
from sgl_kvfetch.encode.encoder import EncodeOptions, Encoder, Step, Tally
from sgl_kvfetch.encode.targets import make_targets
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.stores.base import Store
from sgl_kvfetch.stores.http import HttpOptions
from sgl_kvfetch.stores.open import open_store

logger = logging.getLogger(__name__)

_LINE_EVERY_S = 10.0  # where there is no terminal
_MAX_OBJECT_BYTES = 4 << 30  # what ``kvfetch serve`` takes if not told otherwise
_MAX_FAILURES_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Request:
    url: str
    token: str | None
    watch: bool
    codecs: list[str]
    resolutions: list[str]
    keep_source: bool
    namespace: str
    encoder: EncoderName
    workers: int
    grace_s: float
    poll_interval_s: float
    as_json: bool
    verbose: bool


async def run(request: Request) -> bool:
    """Encode, print a summary and say whether all went well. Raises KVFetchError."""
    options = EncodeOptions(
        targets=make_targets(request.codecs, request.resolutions),
        prefix=request.namespace,
        keep_source=request.keep_source,
        grace_s=request.grace_s,
        workers=request.workers,
    )
    encoders, about = open_encoders(request.encoder, request.codecs, request.workers)
    store = _open(request)
    with _reporter(request) as reporter:
        if about:
            logger.info(about)
        encoder = Encoder(
            store,
            options,
            encoders=encoders,
            on_step=reporter.step,
            on_total=reporter.total,
            on_segment=reporter.segment_done,
        )
        reporter.tally = encoder.tally
        working = asyncio.ensure_future(encoder.watch(request.poll_interval_s) if request.watch else encoder.run_once())
        # A service is stopped by SIGTERM; Ctrl-C cancels as well.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
        try:
            await working
        except asyncio.CancelledError:
            if (current := asyncio.current_task()) is not None and current.cancelling():
                _print(encoder.tally, request)
                raise
        finally:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
            await encoder.close()
            await store.close()
    _print(encoder.tally, request)
    return not encoder.tally.failures


def _open(request: Request) -> Store:
    parts = urlsplit(request.url)
    if parts.scheme == "file" and not Path(unquote(parts.path)).is_dir():
        raise ConfigError(f"{request.url} is not a directory")  # an empty store is a finished one, a typo is not
    token = request.token if parts.scheme in ("http", "https") else None
    return open_store(request.url, token=token, options=HttpOptions(max_object_bytes=_MAX_OBJECT_BYTES))


class _Reporter(Protocol):
    tally: Tally

    def step(self, step: Step, name: str) -> None: ...

    def total(self, segments: int, raw_bytes: int) -> None: ...

    def segment_done(self, raw_bytes: int) -> None: ...


@contextmanager
def _reporter(request: Request) -> Iterator[_Reporter]:
    console = make_console(stderr=True)
    level = logging.INFO if request.verbose else logging.WARNING
    if not console.is_terminal or request.verbose:
        logging.basicConfig(level=level, format="kvfetch: %(message)s", force=True)
        yield _Lines(request.verbose)
        return
    columns = (TextColumn("encoding"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[sizes]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        handler = RichHandler(console=console, show_time=False, show_level=False, show_path=False)
        logging.basicConfig(level=level, format="kvfetch: %(message)s", handlers=[handler], force=True)
        yield _Bar(progress)


class _Bar:
    """A bar that counts segments, on a terminal."""

    def __init__(self, progress: Progress) -> None:
        self.tally = Tally()
        self._progress = progress
        self._task: TaskID = progress.add_task("", total=None, sizes="looking")
        self._total = 0

    def step(self, step: Step, name: str) -> None:
        pass

    def total(self, segments: int, raw_bytes: int) -> None:
        self._total += segments
        self._progress.update(self._task, total=self._total, sizes="")

    def segment_done(self, raw_bytes: int) -> None:
        self._progress.update(self._task, advance=1, sizes=_sizes(self.tally))


class _Lines:
    """A line now and then, or with ``verbose`` for each step."""

    def __init__(self, verbose: bool) -> None:
        self.tally = Tally()
        self._verbose = verbose
        self._done = self._total = 0
        self._said_s = time.monotonic()

    def step(self, step: Step, name: str) -> None:
        if self._verbose:
            print(f"{step} {name}", file=sys.stderr, flush=True)

    def total(self, segments: int, raw_bytes: int) -> None:
        self._total += segments

    def segment_done(self, raw_bytes: int) -> None:
        self._done += 1
        now = time.monotonic()
        if now - self._said_s >= _LINE_EVERY_S:
            self._said_s = now
            print(f"{self._done} of {self._total} segments, {_sizes(self.tally)}", file=sys.stderr, flush=True)


def _sizes(tally: Tally) -> str:
    return f"{format_size(tally.before_bytes)} -> {format_size(tally.after_bytes)}"


def _print(tally: Tally, request: Request) -> None:
    if request.as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(tally), indent=2).decode())
        return
    for name, what in list(tally.failures.items())[:_MAX_FAILURES_SHOWN]:
        typer.echo(f"FAILED {name}: {printable(what)}")
    if len(tally.failures) > _MAX_FAILURES_SHOWN:
        typer.echo(f"FAILED and {len(tally.failures) - _MAX_FAILURES_SHOWN} more")
    typer.echo(f"{tally.num_encoded} segments encoded, {tally.num_done} were already, {len(tally.failures)} failed")
    if tally.num_encoded:
        ratio = format_ratio(tally.raw_bytes / tally.after_bytes)
        typer.echo(f"raw {format_size(tally.raw_bytes)}, stored {_sizes(tally)}: {ratio} smaller than raw")
    if tally.num_deleted:
        typer.echo(f"{tally.num_deleted} data objects deleted ({format_size(tally.deleted_bytes)}): replaced before")
    if tally.num_changed:
        typer.echo(f"{tally.num_changed} segments were deleted or replaced meanwhile")
