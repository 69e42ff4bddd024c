"""Times work on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch


def seconds_of(work: Callable[[], object], device: torch.device, *, repeats: int = 20, warm_ups: int = 3) -> float:
    """Return the median seconds of ``repeats`` runs of ``work``, by the GPU's own clock if ``device`` is a GPU."""
    for _ in range(warm_ups):
        work()
    timed = _on_gpu if device.type == "cuda" else _on_cpu
    return statistics.median(timed(work, repeats))


def _on_gpu(work: Callable[[], object], repeats: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1000 for before, after in pairwise(events)]


def _on_cpu(work: Callable[[], object], repeats: int) -> list[float]:
    found = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        work()
        found.append(time.perf_counter() - started_s)
    return found
