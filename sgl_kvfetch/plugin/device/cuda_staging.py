"""Staging memory between host and GPU: a few buffers, allocated once and used in turn."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from sgl_kvfetch.cuda_streams import Device, Event, Stream
from sgl_kvfetch.errors import UnsupportedError

_ALIGNMENT = 256


class StagingBuffer:
    """A buffer in pinned host memory, and one of equal size on the device."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._host = device.pinned(num_bytes)
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
        self.done: Event | None = None  # marks the end of its last use

    def put(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
        """Copy host tensors into the pinned half. Return a device tensor for each, and how many bytes must be uploaded
        before they can be used. Raises UnsupportedError if they do not fit."""
        views = []
        end = 0
        for tensor in tensors:
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = begin + tensor.nbytes
            if end > self._host.numel():
                needed = needed_bytes(tensors)
                raise UnsupportedError(f"{needed} bytes do not fit into a staging buffer of {self._host.numel()}")
            self._host[begin:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            views.append(self._device[begin:end].view(tensor.dtype).view(tensor.shape))
        return views, end

    def upload(self, num_bytes: int) -> None:
        self._device[:num_bytes].copy_(self._host[:num_bytes], non_blocking=True)

    def room(self, begin: int, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``num_bytes`` of the host half and of the device half, from ``begin``, rounded up to the alignment."""
        begin = -(-begin // _ALIGNMENT) * _ALIGNMENT
        return self._host[begin : begin + num_bytes], self._device[begin : begin + num_bytes]


class Staging:
    """A pool of staging buffers of ``num_bytes`` each."""

    def __init__(self, device: Device, num_buffers: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._device = device
        self._free: queue.SimpleQueue[StagingBuffer] = queue.SimpleQueue()
        for _ in range(num_buffers):
            self._free.put(StagingBuffer(device, num_bytes))

    @contextmanager
    def buffer(self, stream: Stream) -> Iterator[StagingBuffer]:
        """Lend a buffer for work on ``stream``. Waits until one is free, and until the device has finished with it."""
        buffer = self._free.get()
        try:
            if buffer.done is not None:
                buffer.done.synchronize()
            yield buffer
        finally:
            buffer.done = self._device.mark(stream)
            self._free.put(buffer)


def needed_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return how many bytes these tensors take in a buffer, at most."""
    return sum(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)
