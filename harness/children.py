"""Ends this process's descendants when it gets SIGTERM or SIGINT: Python runs no ``finally`` for SIGTERM, and a server
in a session of its own sees no Ctrl-C."""

from __future__ import annotations

import contextlib
import resource
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil  # type: ignore[import-untyped]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_before: dict[int, Any] = {}  # the handlers that ours replaced
_noted_s = 0.0  # CPU time that the kernel does not count for this process
_running: dict[int, bool] = {}  # processes whose CPU time counts while they run, and whether their descendants' does


def start_child(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that ends with this one, as `end_children_on_signals` says. Its CPU time counts while it runs.
    ``options``: those of Popen."""
    end_children_on_signals()
    process = subprocess.Popen(command, **options)
    _running[process.pid] = False
    return process


def state_of(pid: int) -> str:
    """Return the state of a process, as proc(5) has it, such as Z of a zombie; "gone" if there is none."""
    path = Path(f"/proc/{pid}/stat")
    return path.read_text().rpartition(")")[2].split()[0] if path.exists() else "gone"


def end_children_on_signals() -> None:
    """On SIGTERM and SIGINT, kill all descendants of this process. Then call the handler that was set before, if there
    was one; otherwise raise KeyboardInterrupt, so that temporary folders are removed.

    Do nothing for signals that are ignored, and nothing outside the main thread, which alone may set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in _SIGNALS:
        before = signal.getsignal(number)
        if before not in (_end, signal.SIG_IGN):
            _before[number] = before
            signal.signal(number, _end)


def children_cpu_s() -> float:
    """Return the CPU seconds of this process's descendants: of those that were waited for, of those that `start_child`
    and `count_with_descendants` count while they run, and those that `note_cpu_time` has counted."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    running_s = 0.0
    for pid, has_descendants in list(_running.items()):
        try:
            process = psutil.Process(pid)
            running_s += _cpu_s([process, *(process.children(recursive=True) if has_descendants else ())])
        except psutil.NoSuchProcess:
            del _running[pid]
    return usage.ru_utime + usage.ru_stime + _noted_s + running_s


def count_with_descendants(pid: int) -> None:
    """Count the CPU time of a process and its descendants while it runs: a server that tests share belongs to each of
    them, and not to the last one."""
    _running[pid] = True


def note_cpu_time(pid: int) -> None:
    """Count the CPU time of a child's descendants. Call this before the child is killed together with them: nobody
    waits for them then, so the kernel adds their CPU time to no other process's."""
    with contextlib.suppress(psutil.NoSuchProcess):
        global _noted_s
        _noted_s += _cpu_s(psutil.Process(pid).children(recursive=True))
        _running.pop(pid, None)


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    total_s = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            total_s += sum(process.cpu_times()[:4])  # its own, and of children that it has waited for
    return total_s


def _end(number: int, frame: FrameType | None) -> None:
    _kill_descendants()
    before = _before[number]
    if callable(before):
        before(number, frame)
        return
    raise KeyboardInterrupt(signal.Signals(number).name)


def _kill_descendants() -> None:
    found: set[psutil.Process] = set()
    # Stop all of them before killing any. A stopped process starts no others, and those that it started stay its
    # children, so that they are found.
    while new := set(psutil.Process().children(recursive=True)) - found:
        for process in new:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        found |= new
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def data_planes() -> list[int]:
    """Return the processes of the data planes that run, of all servers that this process has started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "sgl_kvfetch.plane" in " ".join(process.cmdline()).split():  # of a forked one, it is one word
                found.append(process.pid)
    return found
