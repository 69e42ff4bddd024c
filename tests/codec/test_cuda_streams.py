"""Tests of our part of `torch.cuda` that need no GPU."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock, call

import numpy as np
import pytest
import torch

from sgl_kvfetch.codec.cuda_streams import BATCH_ARGUMENTS, Device, Stream

POOL_SIZE = 32  # torch's


def test_no_stream_of_ours_is_one_of_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {0: count(), -1: count()}  # torch has a pool for each priority

    def stream(device: torch.device, priority: int = 0) -> SimpleNamespace:
        return SimpleNamespace(cuda_stream=(priority, next(numbers[priority]) % POOL_SIZE))

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    gpu = torch.device("cuda", 0)
    device = Device(gpu)
    ours, sglangs = set(), set()
    for _ in range(2 * POOL_SIZE):  # SGLang creates streams before and after we do
        sglangs.add(torch.cuda.Stream(gpu).cuda_stream)
        ours.add(device.new_stream().cuda_stream)
    assert ours.isdisjoint(sglangs)


def test_every_thread_uses_the_ranks_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread starts with GPU 0, where torch would create a context."""
    calls = MagicMock()
    monkeypatch.setattr(torch, "cuda", calls)
    monkeypatch.setattr(torch, "empty", calls.empty)
    gpu = torch.device("cuda", 3)
    device = Device(gpu)
    event = device.mark(Mock())
    for use in (
        device.new_stream,
        device.current_stream,
        lambda: device.launch(Mock(), lambda: None),
        lambda: device.mark(Mock()),
        lambda: device.empty((1,), Mock()),
        lambda: device.pinned(1),
        event.query,  # the event loop's thread polls events, and does nothing else with it
        event.synchronize,
    ):
        calls.reset_mock()
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        assert calls.mock_calls[0] == call.set_device(gpu)
        assert len(calls.mock_calls) > 1


_Batch = ctypes.CFUNCTYPE(ctypes.c_int, *BATCH_ARGUMENTS)


class Driver:
    """The driver's ``cuMemcpyBatchAsync``, on the host. ``bad``: the copy that it refuses. ``skips``: the one that it
    leaves out."""

    def __init__(self, bad: int | None = None, skips: int | None = None, takes_host_pointers: int = 1) -> None:
        self.bad, self.skips = bad, skips
        self._takes_host_pointers = takes_host_pointers
        self.num_batches = 0
        self.cuMemcpyBatchAsync = _Batch(self._copy)

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = 100 + number
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: ctypes.c_int) -> int:
        assert (attribute, device.value) == (91, 103)  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        value._obj.value = self._takes_host_pointers
        return 0

    def _copy(self, *arguments: int) -> int:
        destinations, sources, sizes, count, _, _, _, failed, _ = arguments
        self.num_batches += 1
        arrays = ((ctypes.c_size_t * count).from_address(at) for at in (destinations, sources, sizes))
        for index, (there, here, size) in enumerate(zip(*arrays, strict=True)):
            if index == self.bad:
                ctypes.c_size_t.from_address(failed).value = index
                return 1
            if index != self.skips:
                ctypes.memmove(there, here, size)
        return 0


class HostGpu(Device):
    """A GPU whose memory is the host's."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda", 3))
        self.pinned_memory: list[torch.Tensor] = []

    def _select(self) -> None:
        pass

    def new_stream(self) -> Any:
        return SimpleNamespace(cuda_stream=7)

    def empty(self, shape: Sequence[int], stream: Stream) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.uint8)

    def mark(self, stream: Stream) -> Any:
        return SimpleNamespace(synchronize=lambda: None)

    def pin(self, memory: torch.Tensor) -> None:
        self.pinned_memory.append(memory)

    def unpin(self, memory: torch.Tensor) -> None:
        self.pinned_memory.remove(memory)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> HostGpu:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    return HostGpu()


def copy_some(gpu: HostGpu, *, is_pinned: bool = True) -> None:
    places, begins, sizes = np.array([5, 0, 40]), np.array([60, 3, 20]), np.array([10, 2, 7])
    source, (into, expected) = torch.arange(80, dtype=torch.uint8), torch.zeros(2, 64, dtype=torch.uint8)
    for place, begin, size in zip(places, begins, sizes, strict=True):
        expected[place : place + size] = source[begin : begin + size]
    gpu.copy_ranges(into, places, source, begins, sizes, is_pinned=is_pinned)
    assert torch.equal(into, expected)


@pytest.mark.parametrize(
    ("driver", "why", "num_tried"),
    [
        (Driver(), "", 2),  # there and back
        # Where this attribute is 0, a batch destroys the process's context: not even a trial may launch one.
        (Driver(takes_host_pointers=0), "does not take the host's pointers to registered memory", 0),
        (Driver(bad=1), r"a trial failed: cuMemcpyBatchAsync (copy 1 of 3) failed: error 1", 1),
        (Driver(skips=2), "a trial of cuMemcpyBatchAsync copied other bytes", 2),
        (object(), "the driver has no cuMemcpyBatchAsync, as before CUDA 12.8", None),
    ],
    ids=["sound", "host pointers", "refused", "other bytes", "old"],
)
def test_a_trial_decides_whether_ranges_of_pinned_memory_are_one_call_of_the_driver(
    driver: Any, why: str, num_tried: int | None, gpu: HostGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not pinned is copied by torch, which waits for it."""
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    copy_some(gpu, is_pinned=False)
    assert why in gpu.why_no_batches()
    assert bool(why) == bool(gpu.why_no_batches())
    copy_some(gpu)
    copy_some(gpu)
    assert num_tried is None or driver.num_batches == num_tried + (0 if why else 2)
    assert gpu.pinned_memory == []


def test_after_a_refusal_ranges_are_copied_one_by_one(
    gpu: HostGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    copy_some(gpu)
    driver.bad = 1
    copy_some(gpu)
    driver.bad = None
    copy_some(gpu)
    assert driver.num_batches == 2 + 2
    assert gpu.why_no_batches() == "cuMemcpyBatchAsync (copy 1 of 3) failed: error 1 of CUDA"
    assert caplog.text.count("ranges are copied one by one from now on") == 1
