"""Ends what this process has started when it is asked to end: Python runs no ``finally`` for SIGTERM, and a server in a
session of its own sees no Ctrl-C."""

from __future__ import annotations

import contextlib
import resource
import signal
import subprocess
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

import psutil  # type: ignore[import-untyped]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_before: dict[int, Any] = {}  # the handlers that ours took the place of
_noted_s = 0.0


def start_child(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that ends with this one, as `end_children_on_signals` says. ``options``: those of Popen."""
    end_children_on_signals()
    return subprocess.Popen(command, **options)


def end_children_on_signals() -> None:
    """On SIGTERM and SIGINT, kill all descendants of this process first. Then do what would have been done before; for
    SIGTERM, where that was to end at once, raise KeyboardInterrupt, so that temporary folders are removed.

    Does nothing in other threads than the main one, which alone may set handlers, and for signals that are ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in _SIGNALS:
        before = signal.getsignal(number)
        if before not in (_end, signal.SIG_IGN):
            _before[number] = before
            signal.signal(number, _end)


def children_cpu_s() -> float:
    """Return the CPU seconds that children of this process have used, and theirs: those that were waited for, and what
    was noted."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime + _noted_s


def note_cpu_time(pid: int) -> None:
    """Call before a child is ended together with its own children: nobody waits for them then, and the kernel adds
    their CPU time to that of no other process."""
    global _noted_s
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                _noted_s += times.user + times.system + times.children_user + times.children_system


def note_s(cpu_s: float) -> None:
    """Count what a process has used that is none of this one's children."""
    global _noted_s
    _noted_s += cpu_s


def _end(number: int, frame: FrameType | None) -> None:
    _kill_descendants()
    before = _before[number]
    if callable(before):
        before(number, frame)
        return
    raise KeyboardInterrupt(signal.Signals(number).name)


def _kill_descendants() -> None:
    found: set[psutil.Process] = set()
    # Stop them before one is killed: what a stopped process has started stays its child, and it starts no more.
    while new := set(psutil.Process().children(recursive=True)) - found:
        for process in new:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        found |= new
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
