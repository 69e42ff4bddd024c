"""Record when each request was in which stage, as a file of spans to plot a run from.

This is off unless the environment variable ``KVFETCH_TIMELINE`` names a file. Each rank appends to its own file (that
name with ``.0``, ``.1`` and so on), and its data plane to another one (``.0.data``), one JSON object a span:
``{"request": ..., "stage": ..., "start_s": ..., "end_s": ...}``. Times are from ``time.monotonic()``, which all
processes of a Linux machine share.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from sgl_kvfetch.errors import ConfigError, FormatError
from sgl_kvfetch.log import LimitedLogger

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)

TIMELINE_ENV = "KVFETCH_TIMELINE"
FLUSH_S = 0.25
MAX_WAITING = 1 << 16  # spans in the queue

Stage = Literal["queued", "parked", "transmit", "decode", "restore", "prefill", "generate"]


class Span(msgspec.Struct, frozen=True):
    """A line of the file."""

    request: str
    stage: Stage
    start_s: float
    end_s: float


def read_spans(path: Path) -> list[Span]:
    """Read a file that a server wrote. A last line without its end is still being written, and left out.

    Raises OSError, and FormatError for a line that is no span.
    """
    decoder = msgspec.json.Decoder(Span)
    content = path.read_bytes()
    spans = []
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
        try:
            spans.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            raise FormatError(f"{path}, line {number}: expected a span of a timeline: {e}") from e
    return spans


class Timeline:
    """Writes spans to a file on its own thread. Without ``close``, the last quarter of a second may be lost."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the file. Raises OSError if it cannot be written."""
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by the thread
        self._spans: deque[tuple[str, Stage, float, float]] = deque(maxlen=MAX_WAITING)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write, name="kvfetch-timeline", daemon=True)
        self._thread.start()

    def add(self, request_id: str, stage: Stage, start_s: float, end_s: float) -> None:
        """Record a span. Thread-safe; never waits for the disk. If ``MAX_WAITING`` spans wait, the oldest is lost."""
        self._spans.append((request_id, stage, start_s, end_s))

    def close(self) -> None:
        """Write the queued spans and stop. Idempotent."""
        self._closing.set()
        self._thread.join()

    def _write(self) -> None:
        with self._file:
            # Poll: a wake-up by each span would take the interpreter from the thread that adds it.
            while not self._closing.wait(FLUSH_S):
                self._drain()
            self._drain()

    def _drain(self) -> None:
        lines: list[str] = []
        for _ in range(len(self._spans)):
            request_id, stage, start_s, end_s = self._spans.popleft()
            span = {"request": request_id, "stage": stage, "start_s": round(start_s, 6), "end_s": round(end_s, 6)}
            lines.append(json.dumps(span) + "\n")
        try:
            self._file.writelines(lines)
            self._file.flush()
        except OSError as e:
            _limited.warning("timeline", f"timeline could not be written: {e}")


_process: Timeline | None = None


def start(rank: int | str, environ: Mapping[str, str] = os.environ) -> None:
    """Start the timeline of this process, if the environment asks for it. Further calls do nothing.

    Raises ConfigError if the file cannot be written.
    """
    global _process
    name = environ.get(TIMELINE_ENV)
    if not name or _process is not None:
        return
    path = Path(f"{name}.{rank}")
    try:
        _process = Timeline(path)
    except OSError as e:
        raise ConfigError(f"{TIMELINE_ENV} = {name!r}: cannot write {path}: {e}") from e
    atexit.register(_process.close)
    logger.info("timeline of rank %s: %s", rank, path)


def is_on() -> bool:
    return _process is not None


def add(request_id: str, stage: Stage, start_s: float, end_s: float) -> None:
    """Record a span of this process. Does nothing if the timeline is off, or for a request without a name ("")."""
    if _process is not None and request_id:
        _process.add(request_id, stage, start_s, end_s)
