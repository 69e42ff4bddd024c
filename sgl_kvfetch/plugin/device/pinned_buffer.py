"""Buffers for reads from a device: pinned memory on the host, and as much on the device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sgl_kvfetch.codec import Device
from sgl_kvfetch.errors import UnsupportedError


class PinnedBuffer:
    """``num_bytes`` of either memory, lent to one reader at a time. Thread-safe."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._host = device.pinned(num_bytes)
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
        self._lock = threading.Lock()

    @contextmanager
    def lend(self, num_bytes: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Lend ``num_bytes`` of the host's and of the device's memory, uint8. When the reader returns them, the device
        must have finished with them. Raises UnsupportedError if there are too few."""
        if num_bytes > self.num_bytes:
            raise UnsupportedError(f"{num_bytes} bytes do not fit into a buffer of {self.num_bytes}")
        with self._lock:
            yield self._host[:num_bytes], self._device[:num_bytes]
