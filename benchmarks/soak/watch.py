"""Samples what a store uses, and judges whether it grows."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import psutil  # type: ignore[import-untyped]

from benchmarks.processes import peak_rss_bytes

_MAX_POINTS = 400  # of a trend


@dataclass(frozen=True)
class Sample:
    at_s: float  # monotonic
    pid: int
    rss_bytes: int
    peak_rss_bytes: int  # since the process began
    open_files: int
    disk_bytes: int


def take_sample(folder: Path, pid: int) -> Sample:
    """Raises psutil.NoSuchProcess if the store has ended."""
    process = psutil.Process(pid)
    memory, files = process.memory_info().rss, process.num_fds()
    return Sample(time.monotonic(), pid, memory, peak_rss_bytes(pid), files, disk_bytes(folder, pid))


def disk_bytes(folder: Path, pid: int | None = None) -> int:
    """Return the size of all files under ``folder``, and of those that a process holds open though they are deleted."""
    sizes: dict[int, int] = {}
    for path, _, names in os.walk(folder):
        for name in names:
            _note_size(sizes, Path(path, name))
    if pid is not None:
        for name in _listed(Path(f"/proc/{pid}/fd")):
            link = Path(f"/proc/{pid}/fd/{name}")
            try:
                if os.readlink(link).startswith(str(folder)):
                    _note_size(sizes, link, follow=True)
            except OSError:
                continue  # closed meanwhile
    return sum(sizes.values())


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _note_size(sizes: dict[int, int], path: Path, follow: bool = False) -> None:
    try:
        status = os.stat(path, follow_symlinks=follow)
    except FileNotFoundError:
        return
    sizes[status.st_ino] = status.st_size


def growth(samples: Sequence[Sample], field: str) -> float:
    """Return by how much a field grew over the samples, by Theil and Sen's slope: the median over all pairs of them.

    Outliers do not change it, unlike a line by least squares or the difference between the last and the first.
    """
    if len(samples) < 3:
        return 0.0
    chosen = samples[:: -(-len(samples) // _MAX_POINTS)]
    slopes = [
        (getattr(b, field) - getattr(a, field)) / (b.at_s - a.at_s)
        for a, b in combinations(chosen, 2)
        if b.at_s > a.at_s
    ]
    return float(np.median(slopes)) * (samples[-1].at_s - samples[0].at_s)
