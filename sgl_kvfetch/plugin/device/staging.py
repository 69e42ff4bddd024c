"""Staging memory: pinned memory on the host, and as much on the device."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from sgl_kvfetch.codec import Device, Event, Stream
from sgl_kvfetch.errors import UnsupportedError

ALIGNMENT = 256  # of tensors in staging memory, in bytes


@dataclass(eq=False)
class _Region:
    begin: int
    end: int
    done: Event | None = None  # marks the end of the work that uses it; None while it is lent


class StagingBuffer:
    """A piece of pinned host memory, and one of equal size on the device."""

    def __init__(self, host: torch.Tensor, device: torch.Tensor, region: _Region) -> None:
        self._host = host
        self.device = device
        self.region = region

    @property
    def memory(self) -> memoryview:
        """The host half."""
        return self._host.numpy().data

    def put(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy host tensors into the pinned half. Return a device tensor for each, which has its values after `upload`.
        They take `needed_bytes`."""
        views = []
        end = 0
        for tensor in tensors:
            begin = aligned(end)
            end = begin + tensor.nbytes
            assert end <= self._host.numel(), (end, self._host.numel())
            self._host[begin:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            views.append(self.device[begin:end].view(tensor.dtype).view(tensor.shape))
        return views

    def upload(self) -> None:
        self.device.copy_(self._host, non_blocking=True)

    def room(self, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``num_bytes`` of the host half and of the device half."""
        return self._host[:num_bytes], self.device[:num_bytes]


class StagingRing:
    """Staging memory of ``num_bytes``, lent as buffers of any size. Thread-safe.

    Buffers follow each other in memory, so that a thread waits only when the ring is full, and then for the oldest. A
    restore may have to wait for forward passes. Slots and scales take a few KB, so hundreds of restores fit.
    """

    def __init__(self, device: Device, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._gpu = device
        self._host = device.pinned(num_bytes)
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
        self._taking = threading.Lock()  # held while waiting for room: large buffers get their turn, too
        self._regions: deque[_Region] = deque()  # lent or still in use, the oldest first
        self._returned = threading.Condition()

    @contextmanager
    def buffer(self, num_bytes: int, stream: Stream) -> Iterator[StagingBuffer]:
        """Lend a buffer for work on ``stream``. Waits until there is room: until the device has finished with earlier
        buffers. Raises UnsupportedError if the whole ring is too small."""
        buffer = self.lend(num_bytes)
        try:
            yield buffer
        finally:
            self.take_back(buffer, stream)

    def lend(self, num_bytes: int) -> StagingBuffer:
        """Return a `buffer` for `take_back`."""
        region = self._take(num_bytes)
        return StagingBuffer(self._host[region.begin : region.end], self._device[region.begin : region.end], region)

    def take_back(self, buffer: StagingBuffer, stream: Stream) -> None:
        """Lend a buffer's memory again once the work is done that was launched on ``stream``."""
        with self._returned:
            buffer.region.done = self._gpu.mark(stream)
            self._returned.notify_all()

    def _take(self, num_bytes: int) -> _Region:
        if num_bytes > self.num_bytes:
            raise UnsupportedError(f"{num_bytes} bytes do not fit into staging memory of {self.num_bytes}")
        with self._taking:
            while (begin := self._place(num_bytes)) is None:
                oldest = self._regions[0]
                with self._returned:
                    while oldest.done is None:
                        self._returned.wait()
                oldest.done.synchronize()
                self._regions.popleft()
            self._regions.append(_Region(begin, begin + num_bytes))
            return self._regions[-1]

    def _place(self, num_bytes: int) -> int | None:
        """Return where a buffer of this size may begin, or None if there is no room."""
        if not self._regions:
            return 0
        first, begin = self._regions[0].begin, aligned(self._regions[-1].end)
        if self._regions[-1].begin < first:  # the ring has wrapped around
            return begin if begin + num_bytes <= first else None
        if begin + num_bytes <= self.num_bytes:
            return begin
        return 0 if num_bytes <= first else None


def aligned(num_bytes: int) -> int:
    """Return the next multiple of ``ALIGNMENT``."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def needed_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return how many bytes these tensors take in a buffer, at most."""
    return sum(aligned(tensor.nbytes) for tensor in tensors)
