"""How much of the machine others used meanwhile: on a busy one, times say more about the neighbours."""

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
    """Seconds of CPU time since some moment in the past: on all cores that we may use, and by us and our children."""

    at_s: float
    all_s: float
    ours_s: float

    @classmethod
    def now(cls) -> Self | None:
        """None where the system does not say (it is not Linux)."""
        try:
            return cls(time.monotonic(), _all_cpu_s(), _tree_cpu_s(os.getpid()))
        except (OSError, AttributeError):
            return None


def other_cores(before: CpuUse | None, after: CpuUse | None) -> float | None:
    """Cores' worth of CPU time that processes other than ours used in between. Children must live through it."""
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
    """CPU time of a process and its living descendants."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in _PROC.glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may hold anything: what follows the last one is safe to split.
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
