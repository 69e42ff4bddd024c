"""Measures how much CPU time other processes used during a benchmark, since a busy machine distorts its times."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_PROC = Path("/proc")
_IDLE_FIELDS = (3, 4)  # idle, iowait: proc_stat(5)
_NUM_EXCLUSIVE_FIELDS = 8  # guest times, which follow, are part of user time


@dataclass(frozen=True)
class CpuUse:
    """CPU seconds since some time in the past: of all cores that we may use, and of this process and its children."""

    at_s: float
    all_s: float
    ours_s: float

    @classmethod
    def now(cls) -> Self | None:
        """Read the present values. Return None if the system does not provide them, because it is not Linux."""
        try:
            return cls(time.monotonic(), _all_cpu_s(), _tree_cpu_s(os.getpid()))
        except (OSError, AttributeError):
            return None


def other_cores(before: CpuUse | None, after: CpuUse | None) -> float | None:
    """Return how many cores other processes used on average in between. Our child processes must outlive it."""
    if before is None or after is None or after.at_s <= before.at_s:
        return None
    others_s = (after.all_s - before.all_s) - (after.ours_s - before.ours_s)
    return max(0.0, others_s / (after.at_s - before.at_s))


def _all_cpu_s() -> float:
    cores = {f"cpu{i}" for i in os.sched_getaffinity(0)}
    ticks = 0
    for line in (_PROC / "stat").read_text().splitlines():
        name, *fields = line.split()
        if name in cores:
            counts = [int(field) for field in fields[:_NUM_EXCLUSIVE_FIELDS]]
            ticks += sum(count for i, count in enumerate(counts) if i not in _IDLE_FIELDS)
    return ticks / os.sysconf("SC_CLK_TCK")


def _tree_cpu_s(root: int) -> float:
    """Return the CPU seconds of a process and its living descendants."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in _PROC.glob("[0-9]*/stat"):
        try:
            # The process name, in parentheses, may hold any character. Split only the text after the last ")".
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        pid = int(path.parent.name)
        parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    return sum(ticks[pid] for pid in ticks if _descends(pid, root, parents)) / os.sysconf("SC_CLK_TCK")


def _descends(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid and pid != root:
        pid = parents.get(pid, 0)
    return pid == root
