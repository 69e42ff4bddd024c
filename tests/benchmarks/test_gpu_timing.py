"""Timing of work on a GPU, with a fake of ``torch.cuda`` that has two clocks, the host's and the device's."""

from __future__ import annotations

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
