"""Sinks that restored values are written to."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

from sgl_kvfetch.codec import CellFrames, CellValues

Guard = Callable[[Callable[[], None]], bool]


class PagePool(ABC):
    """Writes a pool's pages by index. Layers and heads count from the pool's first."""

    @abstractmethod
    def write(self, layers: range, heads: range, pages: Sequence[int], values: CellValues) -> None:
        """Copy ``values``, K and V ``(pages * page_size, layers, heads, dim)``, into ``pages``."""


def consecutive_runs(pages: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Split ``pages`` into runs of consecutive numbers. Yield each run's pages, and its positions in ``pages``.

    A copy of one run takes torch half the time or less of one that is indexed by a list of pages.
    """
    start = 0
    for end in range(1, len(pages) + 1):
        if end == len(pages) or pages[end] != pages[end - 1] + 1:
            yield slice(pages[start], pages[start] + end - start), slice(start, end)
            start = end


class FramePool(PagePool):
    """A pool that dequantises frames itself, on the device of its pages, which decoders may decode to."""

    @abstractmethod
    def restore(self, cell: CellFrames, span_pages: Sequence[int], pages: Sequence[int], guarded: Guard) -> None:
        """Restore pages ``span_pages`` of the cell's span into ``pages``. Write to them only within ``guarded``, and no
        more after it has returned False. Raises UnsupportedError."""


class GuardedSink:
    """Writes to a pool until it is closed, and never afterwards: the pages may then belong to another request."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self._lock = threading.Lock()
        self._closed = False

    def write(self, layers: range, heads: range, pages: Sequence[int], values: CellValues) -> bool:
        """Write ``values``. Return False, without writing, if the sink is closed."""
        return self.run(lambda: self.pool.write(layers, heads, pages, values))

    def run(self, write: Callable[[], None]) -> bool:
        """Call ``write``. Return False, without calling it, if the sink is closed."""
        with self._lock:
            if self._closed:
                return False
            write()
            return True

    def close(self) -> None:
        with self._lock:
            self._closed = True
