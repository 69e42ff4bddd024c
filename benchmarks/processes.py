"""Measures what other processes use."""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]


@dataclass(frozen=True)
class Usage:
    """What a process and its children use. CPU time leaves out children that have ended."""

    cpu_s: float
    rss_bytes: int
    open_files: int


def usage(pid: int) -> Usage:
    """Raises psutil.NoSuchProcess if the process has ended."""
    root = psutil.Process(pid)
    found = [_own_usage(root)]
    for child in root.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(_own_usage(child))
    return Usage(
        sum(each.cpu_s for each in found),
        sum(each.rss_bytes for each in found),
        sum(each.open_files for each in found),
    )


def _own_usage(process: psutil.Process) -> Usage:
    try:  # in nanoseconds, where /proc counts in ticks of 10 ms: the clock that clock_getcpuclockid(3) names
        cpu_s = time.clock_gettime((~process.pid << 3) | 2)
    except OSError as e:
        raise psutil.NoSuchProcess(process.pid) from e
    with process.oneshot():
        return Usage(cpu_s, process.memory_info().rss, process.num_fds())


def main_thread_cpu_s(pid: int) -> float:
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def peak_rss_bytes(pid: int) -> int:
    """Return the largest resident set of a process since it began, without its children."""
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(peak) << 10
