"""Times work on a device, and how long other threads keep a Python thread from running."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Self

import torch

_REPLAYS = 5


def seconds_of(work: Callable[[], object], device: torch.device, *, repeats: int = 20, warm_ups: int = 3) -> float:
    """Return the median seconds of a run of ``work``.

    On a GPU, ``repeats`` runs are captured as a CUDA graph, once, and the graph is replayed. Launched one by one, small
    kernels would end before the host has launched the next, and the host would be measured. ``work`` must not wait for
    the device; no other thread may use the device during the capture.
    """
    for _ in range(warm_ups):
        work()
    if device.type != "cuda":
        return statistics.median(_seconds_on_cpu(work, repeats))
    return statistics.median(_seconds_on_gpu(_captured(work, repeats), repeats))


def make_busy(seconds: float, device: torch.device, side: int = 4096) -> Callable[[], object]:
    """Return a function that keeps the device busy for about ``seconds``, with products of bfloat16 matrices of
    ``side`` rows and columns on the current stream. On a GPU it returns at once."""
    a, b = (torch.randn((side, side), device=device).to(torch.bfloat16) for _ in range(2))
    product = partial(torch.matmul, a, b, out=torch.empty_like(a))
    count = max(1, round(seconds / seconds_of(product, device)))
    return _captured(product, count) if device.type == "cuda" else lambda: [product() for _ in range(count)]


def _captured(work: Callable[[], object], repeats: int) -> Callable[[], None]:
    """Return a function that launches ``repeats`` runs of ``work`` as one CUDA graph, on the current stream."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            work()
    return partial(_replay, graph, work)


def _replay(graph: torch.cuda.CUDAGraph, work: object) -> None:
    """``work`` owns the memory that the graph uses."""
    graph.replay()


def _seconds_on_gpu(replay: Callable[[], None], repeats: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPLAYS + 1)]  # type: ignore[no-untyped-call]
    replay()  # keeps the device busy until the next replay is in its queue
    events[0].record()
    for event in events[1:]:
        replay()
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


TICK_S = 0.001


class Ticker:
    """A thread that sleeps for a millisecond, over and over. ``longest_s``: the most seconds that passed between two of
    its ticks. The gap is long if another thread holds the interpreter lock, for example while the driver waits."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._began = threading.Event()
        self.longest_s = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        self._began.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        last_s = time.perf_counter()
        self._began.set()
        while not self._is_over.is_set():
            time.sleep(TICK_S)
            now_s = time.perf_counter()
            self.longest_s = max(self.longest_s, now_s - last_s)
            last_s = now_s
