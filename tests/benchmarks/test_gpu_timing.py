"""Timing of work on a GPU, with a fake of ``torch.cuda`` that has two clocks, the host's and the device's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from benchmarks.gpu_check import timing

CUDA = torch.device("cuda")
LAUNCH_S, REPLAY_S = 100e-6, 10e-6  # what a call costs the host


class FakeCuda:
    """A device that runs work in order, and never before the host has launched it."""

    def __init__(self) -> None:
        self.host_s = self.device_s = 0.0
        self.captured: list[float] | None = None

    def launch(self, seconds: float, host_s: float = LAUNCH_S) -> None:
        self.host_s += host_s
        if self.captured is not None:
            self.captured.append(seconds)
        else:
            self.device_s = max(self.device_s, self.host_s) + seconds

    def synchronize(self) -> None:
        self.host_s = max(self.host_s, self.device_s)

    @contextmanager
    def graph(self, graph: FakeGraph) -> Iterator[None]:
        self.captured = graph.nodes
        yield
        self.captured = None


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.nodes: list[float] = []

    def replay(self) -> None:
        self.cuda.launch(sum(self.nodes), REPLAY_S)


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.at_s = 0.0

    def record(self) -> None:
        self.cuda.launch(0.0, 0.0)
        self.at_s = self.cuda.device_s

    def synchronize(self) -> None:
        self.cuda.host_s = max(self.cuda.host_s, self.at_s)

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1000 * (end.at_s - self.at_s)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(fake))
    monkeypatch.setattr(torch.cuda, "graph", fake.graph)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(fake))
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    return fake


@pytest.mark.parametrize("kernel_s", [3e-6, 120e-6, 5e-3])
def test_a_kernel_is_timed_and_not_its_launch(kernel_s: float, cuda: FakeCuda) -> None:
    assert timing.seconds_of(lambda: cuda.launch(kernel_s), CUDA) == pytest.approx(kernel_s)


def test_work_is_captured_once_for_all_measurements(cuda: FakeCuda) -> None:
    launches = []

    def work() -> None:
        launches.append(cuda.captured is not None)
        cuda.launch(1e-3)

    measure = timing.make_timer(work, CUDA, repeats=7, warm_ups=2)
    assert launches == [False] * 2 + [True] * 7
    for _ in range(2):
        assert measure() == pytest.approx([1e-3] * timing._REPLAYS)
    assert len(launches) == 9


def test_a_graph_keeps_the_tensors_that_it_uses(cuda: FakeCuda) -> None:
    used = torch.ones(1)
    is_used = weakref.ref(used)
    replay = timing._captured(lambda used=used: used.add_(1), 2)  # type: ignore[misc]
    del used
    gc.collect()
    assert is_used() is not None
    replay()


def test_a_device_is_kept_busy_for_as_long_as_asked(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "make_product", lambda device, side: lambda: cuda.launch(2e-4))
    launch = timing.make_busy(0.05, CUDA)
    cuda.synchronize()
    started_s = cuda.host_s
    launch()
    assert cuda.device_s - started_s == pytest.approx(0.05, rel=0.02)
