"""Where restored values go."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from sgl_kvfetch.container.segment import CellFrames
from sgl_kvfetch.quant import CellValues
from sgl_kvfetch.types import TensorName

Guard = Callable[[Callable[[], None]], bool]


class PagePool(ABC):
    """A pool's pages, by index. Layers and heads are counted from the pool's first."""

    @abstractmethod
    def write(self, layers: range, heads: range, pages: Sequence[int], values: CellValues) -> None:
        """Copy ``values``, K and V ``(pages * page_size, layers, heads, dim)``, into ``pages``."""

    @abstractmethod
    def read(self, tensor: TensorName, pages: Sequence[int]) -> torch.Tensor:
        """Return a copy of all layers and heads of ``pages``: ``(pages, page_size, layers, heads, dim)``."""


class FramePool(PagePool):
    """A pool that dequantises for itself, where its pages are: on the device that decoders decode to, if any."""

    @abstractmethod
    def restore(self, cell: CellFrames, span_pages: Sequence[int], pages: Sequence[int], guarded: Guard) -> None:
        """Restore pages ``span_pages`` of the cell's span into ``pages``. Nothing is written to them but within
        ``guarded``, and nothing after it has said False. Raises UnsupportedError."""


class GuardedSink:
    """Writes to a pool until it is closed, and not a byte after: the pages' owner may give them to someone else."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self._lock = threading.Lock()
        self._closed = False

    def write(self, layers: range, heads: range, pages: Sequence[int], values: CellValues) -> bool:
        """True if the values were written, False if the sink was closed before."""
        return self.run(lambda: self.pool.write(layers, heads, pages, values))

    def run(self, write: Callable[[], None]) -> bool:
        """True if ``write`` was called, False if the sink was closed before."""
        with self._lock:
            if self._closed:
                return False
            write()
            return True

    def close(self) -> None:
        with self._lock:
            self._closed = True
