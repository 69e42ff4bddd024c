"""The part of ``torch.cuda`` that we use. A fake in tests runs work in any order that streams allow."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from mmap import mmap
from typing import Any, Protocol, cast

import numpy as np
import torch

logger = logging.getLogger(__name__)

GPU_ENV = "KVFETCH_GPU"  # an environment variable; 0 leaves to the CPU whatever the CPU can do


def why_no_gpu() -> str:
    """Return why no GPU may decode, restore or quantise; an empty string if it may. Copies to and from SGLang's pool
    always run on the GPU."""
    return f"{GPU_ENV}=0 is set" if os.environ.get(GPU_ENV) == "0" else ""


class Event(Protocol):
    """A point in a stream that threads can ask about and wait for. Only `Device.mark` makes it."""

    def query(self) -> bool:
        """Return whether the stream has passed this event."""

    def synchronize(self) -> None:
        """Wait until the stream has passed this event. Never call it on the scheduler's thread."""


class Fence(Protocol):
    """A point in a stream that other streams can wait for. Threads ask an `Event` instead, because torch's own events
    do not select their device first."""

    def wait(self, stream: Any) -> None:
        """Do the same as ``stream.wait_event``."""


class Stream(Protocol):
    """A queue of work that runs in launch order. Work on different streams is ordered only by events."""

    @property
    def cuda_stream(self) -> int:
        """The driver's handle. Never 0, which is the default stream."""

    def record_event(self) -> Fence: ...

    def wait_event(self, event: Fence) -> None:
        """Make work launched on this stream from now on run after ``event``. The caller does not wait."""


class _SelectingEvent:
    """An event of torch that selects its device before it asks the driver."""

    def __init__(self, event: Event, select: Callable[[], None]) -> None:
        self._event = event
        self._select = select

    def query(self) -> bool:
        self._select()
        return self._event.query()

    def synchronize(self) -> None:
        self._select()
        self._event.synchronize()


class Device:
    """One GPU. Its streams and the default stream do not wait for each other. Thread-safe.

    It becomes the current device of each thread that calls its methods or those of its events: on a thread that has
    none, torch would create a context on GPU 0, for every rank.
    """

    def __init__(self, device: torch.device) -> None:
        # As in the device of each tensor, with which it is compared.
        assert device.type != "cuda" or device.index is not None, f"{device} has no index"
        self.torch_device = device
        self._local = threading.local()
        self._batch: Callable[..., int] | None = None  # the driver's, once a trial has passed
        self._why_no_batch: str | None = None  # "" if there is one; None before the trial
        self._trying = threading.Lock()

    def _select(self) -> None:
        if not getattr(self._local, "is_selected", False):
            torch.cuda.set_device(self.torch_device)
            self._local.is_selected = True

    def new_stream(self) -> Stream:
        """Return a stream that is none of SGLang's. torch hands out streams from a pool of 32, over and over, and
        SGLang goes on taking some after we have ours. All of its streams have normal priority; high priority has a pool
        of its own."""
        self._select()
        return cast(Stream, torch.cuda.Stream(self.torch_device, priority=-1))  # type: ignore[no-untyped-call]

    def current_stream(self) -> Stream:
        """Return the calling thread's current stream."""
        self._select()
        return cast(Stream, torch.cuda.current_stream(self.torch_device))

    def launch(self, stream: Stream, work: Callable[[], object]) -> None:
        """Enqueue the work that ``work`` launches. It may run at any later time that the stream allows."""
        with self.launching(stream) as launch:
            launch(work)

    @contextmanager
    def launching(self, stream: Stream) -> Iterator[Callable[[Callable[[], object]], object]]:
        """Yield `launch` for many pieces of work on one stream, which is selected only once: that takes time."""
        self._select()
        with torch.cuda.stream(cast(torch.cuda.Stream, stream)):
            yield lambda work: work()

    def mark(self, stream: Stream) -> Event:
        """Record an event. A thread that waits for it does not busy-wait. Any thread may ask about it."""
        return _SelectingEvent(self._record(stream), self._select)

    def _record(self, stream: Stream) -> Event:
        self._select()
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(cast(torch.cuda.Stream, stream))
        return cast(Event, event)

    def empty(self, shape: Sequence[int], stream: Stream) -> torch.Tensor:
        """Allocate a uint8 tensor on the device for use on ``stream``."""
        self._select()
        with torch.cuda.stream(cast(torch.cuda.Stream, stream)):
            return torch.empty(*shape, dtype=torch.uint8, device=self.torch_device)

    def free_bytes(self) -> int:
        """Return how many bytes of the device nobody has allocated."""
        self._select()
        free: int = torch.cuda.mem_get_info(self.torch_device)[0]
        return free

    def upload(self, x: Any, stream: Stream) -> Any:
        """Copy a tensor, or what has tensors and a method ``to``, to the device on ``stream``, and wait for it. Any
        stream may use the copy."""
        self._select()
        with torch.cuda.stream(cast(torch.cuda.Stream, stream)):
            return x.to(self.torch_device)

    def used_on(self, tensor: torch.Tensor, stream: Stream) -> None:
        """When ``tensor`` is freed, keep its memory until all work launched on ``stream`` by then is done."""
        tensor.record_stream(cast(torch.cuda.Stream, stream))

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Allocate pinned uint8 memory on the host, for asynchronous copies to and from the device."""
        self._select()
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy_ranges(
        self,
        into: torch.Tensor,
        places: np.ndarray,
        source: torch.Tensor,
        begins: np.ndarray,
        sizes: np.ndarray,
        *,
        is_pinned: bool = True,
    ) -> None:
        """Copy ranges of ``source`` into ``into`` on the current stream, in any order.

        Both are contiguous uint8, one of them on the host. The arrays are int64 ``(ranges,)``: where a range goes,
        where it begins, and its bytes. All go to the driver in one call, if `why_no_batches` says nothing, and the
        ranges on the host are pinned: a copy by itself takes torch 5 us. Raises RuntimeError.
        """
        batch = self._batch if is_pinned and not self.why_no_batches() else None
        if batch is not None:
            stream = torch.cuda.current_stream(self.torch_device).cuda_stream
            try:
                copy_batch(batch, stream, into.data_ptr() + places, source.data_ptr() + begins, sizes)
            except RuntimeError as error:  # what has been copied is copied again
                self._why_no_batch = str(error)
                logger.warning("kvfetch: ranges are copied one by one from now on: %s", error)
            else:
                return
        for place, begin, size in zip(places.tolist(), begins.tolist(), sizes.tolist(), strict=True):
            into[place : place + size].copy_(source[begin : begin + size], non_blocking=True)

    def why_no_batches(self) -> str:
        """Return why the driver does not get many copies in one call; an empty string if it does. The first call makes
        a trial, and waits for it. Raises nothing."""
        with self._trying:
            if self._why_no_batch is None:
                try:
                    self._why_no_batch = self._try_batch() if self.torch_device.type == "cuda" else "there is no GPU"
                except Exception as error:  # a driver fails in many ways
                    self._why_no_batch = f"a trial failed: {error}"
            return self._why_no_batch

    def _try_batch(self) -> str:
        """Copy three ranges to the device and back. Return what is wrong; an empty string if nothing is."""
        try:
            driver = ctypes.CDLL("libcuda.so.1")
            batch = driver.cuMemcpyBatchAsync
        except (OSError, AttributeError):
            return "the driver has no cuMemcpyBatchAsync, as before CUDA 12.8"
        self._select()
        if not takes_host_pointers(driver, self.torch_device.index):
            return "the device does not take the host's pointers to registered memory"
        batch.argtypes = BATCH_ARGUMENTS
        begins, sizes = np.array([0, 5000, 9000]), np.array([4096, 16, 3001])
        host = torch.frombuffer(mmap(-1, 2 * 12288), dtype=torch.uint8).view(2, -1)  # pages of its own
        host[0] = torch.arange(12288) % 251
        stream = self.new_stream()
        there = self.empty((12288,), stream)
        self.pin(host)
        try:
            for into, source in ((there, host[0]), (host[1], there)):
                copy_batch(batch, stream.cuda_stream, into.data_ptr() + begins, source.data_ptr() + begins, sizes)
            self.mark(stream).synchronize()
        finally:
            self.unpin(host)
        ranges = [slice(begin, begin + size) for begin, size in zip(begins.tolist(), sizes.tolist(), strict=True)]
        if not all(torch.equal(host[0, each], host[1, each]) for each in ranges):
            return "a trial of cuMemcpyBatchAsync copied other bytes"
        self._batch = batch
        return ""

    def pin(self, memory: torch.Tensor) -> None:
        """Pin memory that another process may share, so that copies from it are asynchronous. It must stay mapped until
        `unpin`. Raises RuntimeError."""
        self._select()
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        _require_success("cudaHostRegister", runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo `pin`, once no copy from the memory is under way. Raises RuntimeError."""
        self._select()
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        _require_success("cudaHostUnregister", runtime.cudaHostUnregister(memory.data_ptr()))


class _CopyAttributes(ctypes.Structure):
    """``CUmemcpyAttributes``. The hints are for memory that has no fixed place."""

    _fields_ = [
        ("source_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("destination_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


_IN_STREAM_ORDER, _BESIDE_KERNELS = 1, 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, CU_MEMCPY_FLAG_PREFER_OVERLAP_...
_COPY_ATTRIBUTES = _CopyAttributes(source_order=_IN_STREAM_ORDER, flags=_BESIDE_KERNELS)
# Destinations, sources, sizes, their count; attributes, from which copy each holds, their count; the copy that failed;
# the stream.
BATCH_ARGUMENTS = (
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p),
)
_FROM_THE_FIRST = ctypes.c_size_t(0)  # all copies of a batch have these attributes


_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91  # a CUdevice_attribute


def takes_host_pointers(driver: Any, number: int) -> bool:
    """Return whether a device takes the host's own addresses of registered memory. Where it does not, as with
    paravirtualised GPUs (WSL2), a batch of copies is accepted and destroys the process's context when it runs
    (https://github.com/sgl-project/sglang/issues/40232), so no trial may ask. Raises RuntimeError."""
    device, value = ctypes.c_int(0), ctypes.c_int(0)
    _require_success("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), number))
    attribute = _CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    result = driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    _require_success("cuDeviceGetAttribute", result)
    return bool(value.value)


def copy_batch(
    batch: Callable[..., int], stream: int, destinations: np.ndarray, sources: np.ndarray, sizes: np.ndarray
) -> None:
    """Launch copies from and to these addresses with the driver's ``cuMemcpyBatchAsync``. Raises RuntimeError.

    CUDA 13's headers give the name to a function of other arguments, ``cuMemcpyBatchAsync_v2``. Drivers for CUDA 13
    have both.
    """
    arrays = [np.ascontiguousarray(x, dtype=np.int64) for x in (destinations, sources, sizes)]
    failed = ctypes.c_size_t(0)
    attributes = ctypes.byref(_COPY_ATTRIBUTES), ctypes.byref(_FROM_THE_FIRST), 1
    result = batch(*(x.ctypes.data for x in arrays), len(sizes), *attributes, ctypes.byref(failed), stream)
    if result:
        which = f"copy {failed.value} of {len(sizes)}" if failed.value < len(sizes) else f"{len(sizes)} copies"
        _require_success(f"cuMemcpyBatchAsync ({which})", result)


def _require_success(call: str, result: Any) -> None:
    """Raise RuntimeError unless CUDA's result is 0."""
    if int(result):
        raise RuntimeError(f"{call} failed: error {int(result)} of CUDA")
