"""``kvfetch encode``: re-encode stored segments in the background."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from sgl_kvfetch.tools.target import StorePart, run_on_part
from sgl_kvfetch.tools.terminal import (
    KeyFileOption,
    PartArgument,
    StoreAccess,
    format_ratio,
    format_size,
    json_flag,
    make_progress,
    option,
    say,
    show,
    show_log,
)

if TYPE_CHECKING:  # these load torch and codecs
    from sgl_kvfetch.tools.encoder import Encoder, Tally

_LINE_EVERY_S = 10.0  # between progress lines when stderr is not a terminal
_MAX_OBJECT_BYTES = 4 << 30  # the largest data object that is read into memory
_POLL_S = 5.0  # between listings


def encode(
    store: PartArgument,
    access: StoreAccess,
    watch: Annotated[
        bool, option(None, "Go on with segments that are written meanwhile, until SIGTERM or Ctrl-C.", "--watch")
    ] = False,
    codec: Annotated[str, option("NAMES", "One or more, such as hevc,hevc420.")] = "hevc",
    resolutions: Annotated[
        str, option("NAMES", "One or more of 240p,480p,640p,1080p; the first is the read default.")
    ] = "240p",
    keep_source: Annotated[
        bool, option(None, "Also keep what is stored, for readers without the codec.", "--keep-source")
    ] = False,
    workers: Annotated[
        int, option("COUNT", "Parallel segments, each in a thread and in memory.", min=1, max=256, show_default="cores")
    ] = os.cpu_count() or 1,
    grace_s: Annotated[
        float,
        option(
            "SECONDS",
            "How long to keep replaced data for readers that hold the old manifest: at least as long as a fetch "
            "can take. Use 0 only if nobody else uses the store.",
            "--grace",
            min=0,
        ),
    ] = 60.0,
    key_file: KeyFileOption = None,
    as_json: Annotated[
        bool,
        json_flag(
            "an object with num_done, num_encoded, num_changed, raw_bytes, before_bytes, after_bytes, num_deleted, "
            "deleted_bytes and failures"
        ),
    ] = False,
    verbose: Annotated[bool, option(None, "Log each step on stderr.", "--verbose", "-v")] = False,
) -> None:
    """Encode segments that servers wrote with a fast codec as video, at one or more resolutions.

    Runs on any machine, beside servers and other encoders; needs neither the model nor its profile. HEVC is encoded on
    the CPU (libx265). A segment's new data are written, read back and decoded before its manifest is replaced. The old
    data are deleted only after that, so the command can be killed at any time and continues from there when it is
    started again. Segments that are already stored so are skipped. During the grace period a segment takes
    space twice: a store that is nearly full evicts other segments to make room.

    The exit code is 0 on success, 1 if a segment could not be encoded, 2 if the store cannot be used.

    Examples:

        kvfetch encode http://127.0.0.1:8700 --watch

        kvfetch encode /var/cache/kv --resolutions 240p,480p --keep-source
    """
    from sgl_kvfetch.codec import StoreKeys
    from sgl_kvfetch.stores import HttpOptions
    from sgl_kvfetch.tools.encoder import EncodeOptions, Encoder, make_targets

    options = EncodeOptions(
        targets=make_targets(codec.split(","), resolutions.split(",")),
        keep_source=keep_source,
        grace_s=grace_s,
        workers=workers,
    )
    reporter = _Reporter(verbose)

    async def work(part: StorePart) -> None:
        made = Encoder(
            part.store,
            replace(options, prefix=part.prefix),
            keys=keys,
            on_progress=reporter.show,
        )
        reporter.tally = made.tally
        await _encode(made, _POLL_S if watch else None)

    with reporter.progress:
        http = HttpOptions(max_object_bytes=_MAX_OBJECT_BYTES)
        keys = StoreKeys.read(key_file)
        try:
            run_on_part(store, access, work, options=http)
        except KeyboardInterrupt:
            with contextlib.suppress(typer.Exit):
                show(reporter.tally, as_json, _lines(reporter.tally), reporter.tally.failures)
            raise
    show(reporter.tally, as_json, _lines(reporter.tally), reporter.tally.failures)


async def _encode(encoder: Encoder, poll_s: float | None) -> None:
    """Encode once, or poll every ``poll_s`` seconds until SIGTERM. Raises KVFetchError."""
    working = asyncio.ensure_future(encoder.run_once() if poll_s is None else encoder.watch(poll_s))
    if poll_s is not None:
        # Service managers stop a service with SIGTERM. It kills who encodes once: that has not done what it was to do.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
    try:
        await working
    except asyncio.CancelledError:
        if (current := asyncio.current_task()) is not None and current.cancelling():
            raise
    finally:
        await encoder.close()


class _Reporter:
    """Shows a progress bar, or a line every ten seconds if it is disabled; with ``verbose``, logs each step."""

    def __init__(self, verbose: bool) -> None:
        """Make the progress bar, and set up logging."""
        from rich.logging import RichHandler
        from rich.progress import MofNCompleteColumn, TextColumn

        from sgl_kvfetch.tools.encoder import Tally

        self.tally = Tally()
        self.progress = make_progress("encoding", MofNCompleteColumn(), TextColumn("{task.fields[sizes]}"))
        if verbose:
            self.progress.disable = True
        above = RichHandler(console=self.progress.console, show_time=False, show_level=False, show_path=False)
        show_log(
            logging.INFO if verbose else logging.WARNING, logging.StreamHandler() if self.progress.disable else above
        )
        self._task = self.progress.add_task("", total=None, sizes="looking")
        self._said_s = time.monotonic()

    def show(self, finished: int, total: int) -> None:
        """Say that so many segments, of so many, were encoded or failed."""
        self.progress.update(self._task, completed=finished, total=total, sizes=_sizes(self.tally))
        if self.progress.disable and time.monotonic() - self._said_s >= _LINE_EVERY_S:
            self._said_s = time.monotonic()
            say(f"{finished} of {total} segments, {_sizes(self.tally)}", err=True)


def _sizes(tally: Tally) -> str:
    return f"{format_size(tally.before_bytes)} -> {format_size(tally.after_bytes)}"


def _lines(tally: Tally) -> Iterator[str]:
    yield f"{tally.num_encoded} segments encoded, {tally.num_done} already done, {len(tally.failures)} failed"
    if tally.num_encoded:
        ratio = format_ratio(tally.raw_bytes / tally.after_bytes)
        yield f"raw {format_size(tally.raw_bytes)}, stored {_sizes(tally)}: {ratio} smaller than raw"
    if tally.num_deleted:
        yield f"{tally.num_deleted} replaced data objects deleted ({format_size(tally.deleted_bytes)})"
    if tally.num_changed:
        yield f"{tally.num_changed} segments were deleted or replaced during the run"
