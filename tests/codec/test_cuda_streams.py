"""Tests of our part of `torch.cuda` that need no GPU."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
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


EVENTS: dict[Device, Any] = {}  # that another thread has marked


@pytest.mark.parametrize(
    "use",
    [
        lambda device: device.new_stream(),
        lambda device: device.current_stream(),
        lambda device: device.launch(Mock(), lambda: None),
        lambda device: device.launching(Mock()).__enter__(),
        lambda device: device.mark(Mock()),
        lambda device: device.empty((1,), Mock()),
        lambda device: device.pinned(1),
        lambda device: EVENTS[device].query(),  # the event loop's thread polls events, and does nothing else with it
        lambda device: EVENTS[device].synchronize(),
    ],
)
def test_every_thread_uses_the_ranks_own_gpu(use: Callable[[Device], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread starts with GPU 0, where torch would create a context."""
    calls = MagicMock()
    monkeypatch.setattr(torch, "cuda", calls)
    monkeypatch.setattr(torch, "empty", calls.empty)
    gpu = torch.device("cuda", 3)
    device = Device(gpu)
    EVENTS[device] = device.mark(Mock())
    for _ in range(2):
        calls.reset_mock()
        thread = threading.Thread(target=lambda: (use(device), use(device)))
        thread.start()
        thread.join()
        names = [name for name, _, _ in calls.mock_calls]
        assert calls.mock_calls[0] == call.set_device(gpu)
        assert names.count("set_device") == 1
        assert len(names) > 1


_Batch = ctypes.CFUNCTYPE(ctypes.c_int, *BATCH_ARGUMENTS)


class Driver:
    """The driver's ``cuMemcpyBatchAsync``, on the host. It reads its arguments as CUDA 12.8's header has them. ``bad``:
    the copy that it refuses. ``skips``: the one that it leaves out."""

    def __init__(
        self, bad: int | None = None, skips: int | None = None, takes_host_pointers: int = 1, device_error: int = 0
    ) -> None:
        self.bad, self.skips = bad, skips
        self._takes_host_pointers, self._device_error = takes_host_pointers, device_error
        self.batches: list[tuple[int, int]] = []  # the stream and the number of copies
        self.function = _Batch(self._copy)

    def load(self, name: str) -> Any:
        assert name == "libcuda.so.1"
        return SimpleNamespace(
            cuMemcpyBatchAsync=self.function, cuDeviceGet=self._device, cuDeviceGetAttribute=self._attribute
        )

    def _device(self, device: Any, number: int) -> int:
        device._obj.value = 100 + number
        return self._device_error

    def _attribute(self, value: Any, attribute: int, device: ctypes.c_int) -> int:
        assert (attribute, device.value) == (91, 103)  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        value._obj.value = self._takes_host_pointers
        return 0

    def _copy(self, *arguments: int) -> int:
        destinations, sources, sizes, count, attributes, starts, num_attributes, failed, stream = arguments
        *copies, of_attributes = (
            ctypes.cast(at, ctypes.POINTER(ctypes.c_size_t))[:n]
            for at, n in ((destinations, count), (sources, count), (sizes, count), (starts, num_attributes))
        )
        assert of_attributes == [0]
        # The order of the source's accesses, hints of no place, and the flag for copies beside kernels.
        assert list((ctypes.c_uint * 6).from_address(attributes)) == [1, 0, 0, 0, 0, 1]
        self.batches.append((stream, count))
        for index, (there, here, size) in enumerate(zip(*copies, strict=True)):
            if index == self.bad:
                ctypes.c_size_t.from_address(failed).value = index
                return 1
            if index != self.skips:
                ctypes.memmove(there, here, size)
        return 0


RANGES = np.array([5, 0, 40]), np.array([60, 3, 20]), np.array([10, 2, 7])  # places, begins, sizes


class HostGpu(Device):
    """A GPU whose memory is the host's. Its stream has the number 7. ``pinned``: what is."""

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
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=70 + device.index))
    return HostGpu()


def copy_some(gpu: HostGpu, *, is_pinned: bool = True) -> None:
    places, begins, sizes = RANGES
    source, (into, expected) = torch.arange(80, dtype=torch.uint8), torch.zeros(2, 64, dtype=torch.uint8)
    for place, begin, size in zip(*RANGES, strict=True):
        expected[place : place + size] = source[begin : begin + size]
    gpu.copy_ranges(into, places, source, begins, sizes, is_pinned=is_pinned)
    assert torch.equal(into, expected)


TRIAL = [(7, 3), (7, 3)]


def test_ranges_of_pinned_memory_are_one_call_of_the_driver(gpu: HostGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device's current stream, once a trial has copied three ranges to the device and back. What is not pinned
    is copied by torch, which waits for it."""
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", driver.load)
    copy_some(gpu, is_pinned=False)
    assert driver.batches == []
    assert gpu.why_no_batches() == ""
    copy_some(gpu)
    copy_some(gpu)
    assert driver.batches == [*TRIAL, (73, 3), (73, 3)]
    assert gpu.pinned_memory == []


@pytest.mark.parametrize(
    ("driver", "why", "tried"),
    [
        # Where this attribute is 0, a batch destroys the process's context: not even a trial may launch one.
        (Driver(takes_host_pointers=0), "does not take the host's pointers to registered memory", []),
        (Driver(bad=1), r"a trial failed: cuMemcpyBatchAsync (copy 1 of 3) failed: error 1", TRIAL[:1]),
        (Driver(skips=2), "a trial of cuMemcpyBatchAsync copied other bytes", TRIAL),
        (Driver(device_error=101), "a trial failed: cuDeviceGet failed: error 101", []),
        (object(), "the driver has no cuMemcpyBatchAsync, as before CUDA 12.8", []),  # lacks the function
        (None, "the driver has no cuMemcpyBatchAsync, as before CUDA 12.8", []),  # there is another driver
    ],
    ids=["host pointers", "refused", "other bytes", "no device", "old", "none"],
)
def test_a_trial_decides_on_batches(
    driver: object, why: str, tried: list[Any], gpu: HostGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> Any:
        if driver is None:
            raise OSError(name)
        return driver.load(name) if isinstance(driver, Driver) else driver

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert why in gpu.why_no_batches()
    copy_some(gpu)
    assert not isinstance(driver, Driver) or driver.batches == tried
    assert gpu.pinned_memory == []


def test_after_a_refusal_ranges_are_copied_one_by_one(
    gpu: HostGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", driver.load)
    copy_some(gpu)
    driver.bad = 1
    copy_some(gpu)
    driver.bad = None
    copy_some(gpu)
    assert driver.batches == [*TRIAL, (73, 3), (73, 3)]
    assert gpu.why_no_batches() == "cuMemcpyBatchAsync (copy 1 of 3) failed: error 1 of CUDA"
    assert caplog.text.count("ranges are copied one by one from now on") == 1
