"""Measures how much CPU time other processes used during a benchmark, since a busy machine distorts its times."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Self

import psutil  # type: ignore[import-untyped]

from benchmarks.processes import usage


@dataclass(frozen=True)
class CpuUse:
    """CPU seconds since some time in the past: of all cores that we may use, and of this process and its children."""

    at_s: float
    all_s: float
    ours_s: float

    @classmethod
    def now(cls) -> Self:
        cores = os.sched_getaffinity(0)
        busy_s = 0.0
        for core, times in enumerate(psutil.cpu_times(percpu=True)):
            if core in cores:
                # A guest's time is part of user time.
                busy_s += sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
        return cls(time.monotonic(), busy_s, usage(os.getpid()).cpu_s)


def other_cores(before: CpuUse, after: CpuUse) -> float:
    """Return how many cores other processes used on average in between. Our child processes must outlive it."""
    others_s = (after.all_s - before.all_s) - (after.ours_s - before.ours_s)
    return max(0.0, others_s / (after.at_s - before.at_s))
