"""Times work on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch

_REPLAYS = 5


def seconds_of(work: Callable[[], object], device: torch.device, *, repeats: int = 20, warm_ups: int = 3) -> float:
    """Return the median seconds of a run of ``work``, as `make_timer` measures it."""
    return statistics.median(make_timer(work, device, repeats=repeats, warm_ups=warm_ups)())


def make_timer(
    work: Callable[[], object], device: torch.device, *, repeats: int, warm_ups: int = 3
) -> Callable[[], list[float]]:
    """Return a function that measures the seconds of a run of ``work``, several times.

    On a GPU, ``repeats`` runs are captured as a CUDA graph, once, and the graph is replayed. Launched one by one, small
    kernels would end before the host has launched the next, and the host would be measured. ``work`` must not wait for
    the device; no other thread may use the device during the capture.
    """
    for _ in range(warm_ups):
        work()
    return _gpu_timer(work, repeats) if device.type == "cuda" else lambda: _seconds_on_cpu(work, repeats)


def _gpu_timer(work: Callable[[], object], repeats: int) -> Callable[[], list[float]]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            work()
    return lambda: _seconds_on_gpu(graph, repeats)


def _seconds_on_gpu(graph: torch.cuda.CUDAGraph, repeats: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPLAYS + 1)]  # type: ignore[no-untyped-call]
    graph.replay()  # keeps the device busy until the next replay is in its queue
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    events[-1].synchronize()
    return [before.elapsed_time(after) / 1000 / repeats for before, after in pairwise(events)]


def _seconds_on_cpu(work: Callable[[], object], repeats: int) -> list[float]:
    found = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        work()
        found.append(time.perf_counter() - started_s)
    return found
