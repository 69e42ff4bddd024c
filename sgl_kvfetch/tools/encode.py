"""``kvfetch encode``: re-encode stored segments in the background."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sgl_kvfetch.codec import EncoderName, open_encoders
from sgl_kvfetch.stores import HttpOptions, Store
from sgl_kvfetch.tools.encoding.encoder import EncodeOptions, Encoder, Step, Tally
from sgl_kvfetch.tools.encoding.targets import make_targets
from sgl_kvfetch.tools.options import (
    JsonOption,
    ManifestKeyFileOption,
    TokenFileOption,
    TokenOption,
    make_console,
    print_json,
    read_keys,
    read_token,
)
from sgl_kvfetch.tools.target import open_existing_store
from sgl_kvfetch.tools.units import format_ratio, format_size, printable

logger = logging.getLogger(__name__)

_LINE_EVERY_S = 10.0  # between progress lines when stderr is not a terminal
_MAX_OBJECT_BYTES = 4 << 30  # the default limit of ``kvfetch serve``
_MAX_FAILURES_SHOWN = 20


def encode(
    store: Annotated[
        str, typer.Option(metavar="URL", help="http://HOST:PORT, https://..., s3://BUCKET/PREFIX or file:///DIRECTORY.")
    ],
    watch: Annotated[
        bool, typer.Option("--watch/--once", help="Keep encoding new segments, or exit when all are done.")
    ] = False,
    codec: Annotated[str, typer.Option(metavar="NAMES", help="One or more, such as hevc,hevc420.")] = "hevc",
    resolutions: Annotated[
        str, typer.Option(metavar="NAMES", help="One or more of 240p,480p,640p,1080p; the first is the read default.")
    ] = "240p",
    keep_source: Annotated[
        bool, typer.Option("--keep-source", help="Also keep existing variants, for readers without the codec.")
    ] = False,
    namespace: Annotated[
        str, typer.Option(metavar="PREFIX", help="Only objects with this name prefix: a namespace or part of one.")
    ] = "",
    manifest_key_file: ManifestKeyFileOption = None,
    encoder: Annotated[
        EncoderName,
        typer.Option(help="What encodes HEVC; auto uses NVENC if this machine's GPU has it, or else the CPU."),
    ] = "auto",
    workers: Annotated[
        int,
        typer.Option(
            min=1, max=256, help="Parallel segments; each uses a thread and is held in memory.", show_default="cores"
        ),
    ] = os.cpu_count() or 1,
    grace_s: Annotated[
        float,
        typer.Option(
            "--grace",
            min=0,
            metavar="SECONDS",
            help="How long to keep replaced data for readers that hold the old manifest: at least as long as a fetch "
            "can take. Use 0 only if nobody else uses the store.",
        ),
    ] = 60.0,
    poll_interval_s: Annotated[
        float, typer.Option("--poll-interval", min=0.05, metavar="SECONDS", help="With --watch: time between listings.")
    ] = 5.0,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print each step on stderr.")] = False,
) -> None:
    """Encode segments that servers wrote with a fast codec as video, at one or more resolutions.

    Runs on any machine, beside servers and other encoders; needs neither the model nor its profile. HEVC is encoded on
    the CPU (libx265) or by NVENC. Consumer GPUs, L4, L20 and L40S have NVENC; H100, H200 and A100 do not. A segment's
    new data are written, read back and decoded (on the CPU) before its manifest is replaced. The old data are deleted
    only after that, so the command can be killed at any time and continues from there when it is started again.
    Segments that already have the wanted variants are skipped. During the grace period a segment takes space twice: a
    store that is nearly full evicts other segments to make room.

    The exit code is 0 on success, 1 if a segment could not be encoded, 2 if the store cannot be used.

    Examples:

        kvfetch encode --store http://127.0.0.1:8700 --watch

        kvfetch encode --store file:///var/cache/kv --resolutions 240p,480p --keep-source
    """
    codecs = codec.split(",")
    options = EncodeOptions(
        targets=make_targets(codecs, resolutions.split(",")),
        prefix=namespace,
        keep_source=keep_source,
        grace_s=grace_s,
        workers=workers,
    )
    encoders, about = open_encoders(encoder, codecs, workers)
    make_encoder = partial(Encoder, options=options, encoders=encoders)
    opened = partial(
        open_existing_store,
        store,
        read_token(token, token_file),
        HttpOptions(max_object_bytes=_MAX_OBJECT_BYTES),
        read_keys(manifest_key_file),
    )
    reporter = _Reporter(verbose)
    with reporter.progress:
        if about:
            logger.info(about)
        try:
            poll_s = poll_interval_s if watch else None
            asyncio.run(_run(opened, make_encoder, reporter, poll_s))
        except KeyboardInterrupt:
            _print(reporter.tally, as_json)
            raise
    _print(reporter.tally, as_json)
    if reporter.tally.failures:
        raise typer.Exit(1)


async def _run(
    open_it: Callable[[], Store], make_encoder: Callable[..., Encoder], reporter: _Reporter, poll_s: float | None
) -> None:
    """Encode once, or poll every ``poll_s`` seconds until SIGTERM. Raises KVFetchError."""
    store = open_it()
    encoder = make_encoder(store, on_step=reporter.step, on_total=reporter.total, on_segment=reporter.segment_done)
    reporter.tally = encoder.tally
    working = asyncio.ensure_future(encoder.run_once() if poll_s is None else encoder.watch(poll_s))
    # Service managers stop a service with SIGTERM. asyncio itself cancels on Ctrl-C.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
    try:
        await working
    except asyncio.CancelledError:
        if (current := asyncio.current_task()) is not None and current.cancelling():
            raise
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
        await encoder.close()
        await store.close()


class _Reporter:
    """Shows a progress bar, or a line every ten seconds if it is disabled; with ``verbose``, also each step."""

    def __init__(self, verbose: bool) -> None:
        """Also set up logging."""
        console = make_console(stderr=True)
        has_bar = console.is_terminal and not verbose
        handlers = [RichHandler(console=console, show_time=False, show_level=False, show_path=False)]
        level = logging.INFO if verbose else logging.WARNING
        logging.basicConfig(
            level=level, format="kvfetch: %(message)s", handlers=handlers if has_bar else None, force=True
        )
        columns = (TextColumn("encoding"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[sizes]}"))
        self.progress = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not has_bar)
        self.progress.add_task("", total=None, sizes="looking")
        (self._task,) = self.progress.tasks
        self.tally = Tally()
        self._verbose = verbose
        self._said_s = time.monotonic()

    def step(self, step: Step, name: str) -> None:
        if self._verbose:
            print(f"{step} {name}", file=sys.stderr, flush=True)

    def total(self, segments: int) -> None:
        self.progress.update(self._task.id, total=(self._task.total or 0) + segments, sizes="")

    def segment_done(self) -> None:
        sizes = _sizes(self.tally)
        self.progress.update(self._task.id, advance=1, sizes=sizes)
        if self.progress.disable and time.monotonic() - self._said_s >= _LINE_EVERY_S:
            self._said_s = time.monotonic()
            done = f"{self._task.completed:.0f} of {self._task.total:.0f}"
            print(f"{done} segments, {sizes}", file=sys.stderr, flush=True)


def _sizes(tally: Tally) -> str:
    return f"{format_size(tally.before_bytes)} -> {format_size(tally.after_bytes)}"


def _print(tally: Tally, as_json: bool) -> None:
    if as_json:
        print_json(tally)
        return
    for name, what in list(tally.failures.items())[:_MAX_FAILURES_SHOWN]:
        typer.echo(f"FAILED {name}: {printable(what)}")
    if len(tally.failures) > _MAX_FAILURES_SHOWN:
        typer.echo(f"FAILED and {len(tally.failures) - _MAX_FAILURES_SHOWN} more")
    typer.echo(f"{tally.num_encoded} segments encoded, {tally.num_done} already done, {len(tally.failures)} failed")
    if tally.num_encoded:
        ratio = format_ratio(tally.raw_bytes / tally.after_bytes)
        typer.echo(f"raw {format_size(tally.raw_bytes)}, stored {_sizes(tally)}: {ratio} smaller than raw")
    if tally.num_deleted:
        typer.echo(f"{tally.num_deleted} replaced data objects deleted ({format_size(tally.deleted_bytes)})")
    if tally.num_changed:
        typer.echo(f"{tally.num_changed} segments were deleted or replaced during the run")
