"""Where restored values go."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from sgl_kvfetch.types import TensorName


class PagePool(ABC):
    """A pool's pages, by index. ``values`` are ``(pages, page_size, layers, heads, dim)``."""

    @abstractmethod
    def write(self, tensor: TensorName, first_layer: int, pages: Sequence[int], values: torch.Tensor) -> None:
        """Copy ``values``, whose layers are the pool's from ``first_layer`` on, into ``pages``."""

    @abstractmethod
    def read(self, tensor: TensorName, pages: Sequence[int]) -> torch.Tensor:
        """A copy of all layers of ``pages``."""


class GuardedSink:
    """Writes to a pool until it is closed, and not a byte after: the pages' owner may give them to someone else."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._closed = False

    def write(self, tensor: TensorName, first_layer: int, pages: Sequence[int], values: torch.Tensor) -> bool:
        """True if the values were written, False if the sink was closed before."""
        with self._lock:
            if self._closed:
                return False
            self._pool.write(tensor, first_layer, pages, values)
            return True

    def close(self) -> None:
        with self._lock:
            self._closed = True
