"""Tests of our part of `torch.cuda` that need no GPU."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock, call

import numpy as np
import pytest
import torch

from sgl_kvfetch.codec import cuda_streams
from sgl_kvfetch.codec.cuda_streams import BATCH_ARGUMENTS, Device, copy_batch

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
    ],
    ids=["new stream", "current stream", "launch", "launching", "mark", "empty", "pinned"],
)
def test_every_thread_uses_the_ranks_own_gpu(use: Callable[[Device], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread starts with GPU 0, where torch would create a context."""
    calls = MagicMock()
    monkeypatch.setattr(torch, "cuda", calls)
    monkeypatch.setattr(torch, "empty", calls.empty)
    gpu = torch.device("cuda", 3)
    device = Device(gpu)
    for _ in range(2):
        calls.reset_mock()
        thread = threading.Thread(target=lambda: (use(device), use(device)))
        thread.start()
        thread.join()
        names = [name for name, _, _ in calls.mock_calls]
        assert calls.mock_calls[0] == call.set_device(gpu)
        assert names.count("set_device") == 1
        assert len(names) > 2


@pytest.mark.parametrize("ask", ["query", "synchronize"])
def test_a_thread_that_asks_about_an_event_uses_the_ranks_own_gpu(ask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop's thread polls events, and does nothing else with the GPU."""
    calls = MagicMock()
    monkeypatch.setattr(torch, "cuda", calls)
    gpu = torch.device("cuda", 3)
    event = Device(gpu).mark(Mock())
    calls.reset_mock()
    thread = threading.Thread(target=getattr(event, ask))
    thread.start()
    thread.join()
    assert calls.mock_calls == [call.set_device(gpu), getattr(call.Event(), ask)()]


def test_a_gpu_has_its_index() -> None:
    """Tensors name theirs, and are compared with the device."""
    with pytest.raises(AssertionError, match="cuda has no index"):
        Device(torch.device("cuda"))
    assert Device(torch.device("cuda", 1)).torch_device.index == 1


_Batch = ctypes.CFUNCTYPE(ctypes.c_int, *BATCH_ARGUMENTS)


class Driver:
    """The driver's ``cuMemcpyBatchAsync``, on the host. It reads its arguments as CUDA 12.8's header has them. ``bad``:
    the copy that it refuses."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad
        self.batches: list[tuple[int, int]] = []  # the stream and the number of copies
        self.function = _Batch(self._copy)

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
            ctypes.memmove(there, here, size)
        return 0


RANGES = np.array([5, 0, 40]), np.array([60, 3, 20]), np.array([10, 2, 7])  # places, begins, sizes


def expected_ranges(source: torch.Tensor) -> torch.Tensor:
    expected = torch.zeros(64, dtype=torch.uint8)
    for place, begin, size in zip(*(x.tolist() for x in RANGES), strict=True):
        expected[place : place + size] = source[begin : begin + size]
    return expected


@pytest.mark.parametrize("is_pinned", [True, False])
def test_ranges_of_pinned_memory_are_one_call_of_the_driver(is_pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device's current stream. What is not pinned is copied by torch, which waits for it."""
    driver, gpu = Driver(), torch.device("cuda", 3)
    monkeypatch.setattr(cuda_streams, "_driver_batch", lambda: driver.function)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=70 + device.index))
    places, begins, sizes = RANGES
    source, into = torch.arange(80, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    Device(gpu).copy_ranges(into, places, source, begins, sizes, is_pinned=is_pinned)
    assert torch.equal(into, expected_ranges(source))
    assert driver.batches == ([(73, 3)] if is_pinned else [])


@pytest.mark.parametrize("is_there", [True, False])
def test_without_batches_ranges_are_copied_one_by_one(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that lacks the function, and a device that has another driver."""

    def load(name: str) -> object:
        if is_there:
            return object()
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    cuda_streams._driver_batch.cache_clear()
    places, begins, sizes = RANGES
    source, into = torch.arange(80, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    Device(torch.device("cuda", 0)).copy_ranges(into, places, source, begins, sizes)
    assert torch.equal(into, expected_ranges(source))
    cuda_streams._driver_batch.cache_clear()


def test_the_driver_says_which_copy_it_refuses() -> None:
    source, into = torch.arange(80, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    places, begins, sizes = RANGES
    with pytest.raises(RuntimeError, match=r"cuMemcpyBatchAsync \(copy 1 of 3\) failed: error 1 of CUDA"):
        copy_batch(Driver(bad=1).function, 7, into.data_ptr() + places, source.data_ptr() + begins, sizes)
