"""The memory through which bytes go between host and GPU: a few buffers, made once, used in turn."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from sgl_kvfetch.cuda_streams import Device, Event, Stream
from sgl_kvfetch.errors import UnsupportedError

_ALIGNMENT = 256


class StagingBuffer:
    """As many bytes of pinned host memory as of the device's."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._host = device.pinned(num_bytes)
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
        self.done: Event | None = None  # of its last use

    def put(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
        """Copy host tensors into the pinned half. Returns where each will be on the device, once the first so many
        bytes were uploaded. Raises UnsupportedError if they do not fit."""
        views = []
        end = 0
        for tensor in tensors:
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = begin + tensor.nbytes
            if end > self._host.numel():
                needed = needed_bytes(tensors)
                raise UnsupportedError(f"{needed} bytes at once do not fit into buffers of {self._host.numel()}")
            self._host[begin:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            views.append(self._device[begin:end].view(tensor.dtype).view(tensor.shape))
        return views, end

    def upload(self, num_bytes: int) -> None:
        self._device[:num_bytes].copy_(self._host[:num_bytes], non_blocking=True)

    def room(self, begin: int, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A part of both halves, host and device."""
        begin = -(-begin // _ALIGNMENT) * _ALIGNMENT
        return self._host[begin : begin + num_bytes], self._device[begin : begin + num_bytes]


class Staging:
    """Some buffers of ``num_bytes`` each."""

    def __init__(self, device: Device, num_buffers: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._device = device
        self._free: queue.SimpleQueue[StagingBuffer] = queue.SimpleQueue()
        for _ in range(num_buffers):
            self._free.put(StagingBuffer(device, num_bytes))

    @contextmanager
    def buffer(self, stream: Stream) -> Iterator[StagingBuffer]:
        """One to be used by what the caller launches on ``stream``. Waits for one, and until the device is through with
        what it was used for before."""
        buffer = self._free.get()
        try:
            if buffer.done is not None:
                buffer.done.synchronize()
            yield buffer
        finally:
            buffer.done = self._device.mark(stream)
            self._free.put(buffer)


def needed_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """What these take in a buffer, at most."""
    return sum(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)
