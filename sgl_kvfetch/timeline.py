"""Which request was in which stage, and when: a file of spans, to draw a run from.

Off, unless the environment's ``KVFETCH_TIMELINE`` names a file. Each rank then appends to a file of its own (``.0``,
``.1`` and so on after that name), and its data plane to another one (``.0.data``), one JSON object a span:
``{"request": ..., "stage": ..., "start_s": ..., "end_s": ...}``. Times are those of ``time.monotonic()``, which all
processes of a Linux machine share.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Literal

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.log import LimitedLogger

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)

TIMELINE_ENV = "KVFETCH_TIMELINE"
FLUSH_S = 0.25
MAX_WAITING = 1 << 16  # spans

Stage = Literal["queued", "parked", "transmit", "decode", "restore", "prefill", "generate"]
_Span = tuple[str, Stage, float, float]


class Timeline:
    """Writes spans to a file, on a thread of its own. ``close`` it, or the last quarter of a second may be lost."""

    def __init__(self, path: str | os.PathLike[str], *, max_waiting: int = MAX_WAITING) -> None:
        """Raises OSError if the file cannot be written."""
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by the thread
        self._max_waiting = max_waiting
        self._spans: SimpleQueue[_Span] = SimpleQueue()
        self._dropping = threading.Lock()
        self._num_dropped = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write, name="kvfetch-timeline", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Spans for which there was no room."""
        return self._num_dropped

    def add(self, request_id: str, stage: Stage, start_s: float, end_s: float) -> None:
        """Record a span. From any thread; never waits for the disk. Spans beyond ``max_waiting`` are dropped."""
        if self._spans.qsize() < self._max_waiting and not self._closing.is_set():
            self._spans.put((request_id, stage, start_s, end_s))
        else:
            with self._dropping:
                self._num_dropped += 1

    def close(self) -> None:
        """Write what waits. Idempotent."""
        self._closing.set()
        self._thread.join()

    def _write(self) -> None:
        with self._file:
            # Not woken by each span: that would take the interpreter from the thread that adds it.
            while not self._closing.wait(FLUSH_S):
                self._drain()
            self._drain()

    def _drain(self) -> None:
        lines: list[str] = []
        try:
            while len(lines) < self._max_waiting:
                request_id, stage, start_s, end_s = self._spans.get_nowait()
                span = {"request": request_id, "stage": stage, "start_s": round(start_s, 6), "end_s": round(end_s, 6)}
                lines.append(json.dumps(span) + "\n")
        except Empty:
            pass
        try:
            self._file.writelines(lines)
            self._file.flush()
        except OSError as e:
            _limited.warning("timeline", f"timeline not written: {e}")


_process: Timeline | None = None


def start(rank: int | str, environ: Mapping[str, str] = os.environ) -> None:
    """Begin to record what this process does, if the environment asks for it. Once; further calls do nothing.

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
    """Record a span of this process. Nothing, if that was not begun, or for a request without a name ("")."""
    if _process is not None and request_id:
        _process.add(request_id, stage, start_s, end_s)
