"""Where a fetch puts its pages: a pool, guarded against late writes.

The engine imports this module before SGLang shares metrics: see `sgl_kvfetch.metrics`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sgl_kvfetch.codec import Cell, CellValues, Decoders, SegmentReader


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


Keep = Callable[[], None]  # keeps the cells that were decoded


class CodedPool(PagePool):
    """A pool that takes cells before they are restored: their integers, coded or not."""

    @abstractmethod
    def is_kept(self, part: int) -> bool:
        """Return whether the cells of a fetch's part were verified by another fetch, and need not be read."""

    @abstractmethod
    def places(self, reader: SegmentReader, cells: Sequence[Cell]) -> list[list[memoryview]] | None:
        """Return where the chunks of some cells may be received: what the pool takes as it is coded, in its own memory.
        Return None if they must be decoded first."""

    @abstractmethod
    def decoded(
        self, reader: SegmentReader, cells: Sequence[tuple[Cell, Sequence[memoryview]]], decoders: Decoders
    ) -> Keep:
        """Verify the chunks of some cells of one span, which may lie in `places`, and decode what the pool takes
        decoded. Raises CorruptError, FormatError. What is returned raises UnsupportedError if a cell does not fit."""

    @abstractmethod
    def working_bytes(self, reader: SegmentReader, cells: Sequence[Cell]) -> int:
        """Return the bytes of memory that `decoded` needs until the cells are kept."""

    def write(self, layers: range, heads: range, pages: Sequence[int], values: CellValues) -> None:
        raise AssertionError("cells are kept as they are coded")


class Sink:
    """Writes to a pool until it is closed. Closing waits for nothing: a write under way goes on."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self._closed = False

    def write(self, layers: range, heads: range, pages: Sequence[int], values: CellValues) -> bool:
        """Write ``values``. Return False, without writing, if the sink is closed."""
        return self.run(lambda: self.pool.write(layers, heads, pages, values))

    def run(self, write: Callable[[], None]) -> bool:
        """Call ``write``. Return False, perhaps without calling it, if the sink is closed."""
        if not self._closed:
            write()
        return not self._closed

    def close(self) -> None:
        self._closed = True


class GuardedSink(Sink):
    """Closing waits for the write under way, and nothing is written afterwards: the pages may then belong to another
    request."""

    def __init__(self, pool: PagePool) -> None:
        super().__init__(pool)
        self._lock = threading.Lock()

    def run(self, write: Callable[[], None]) -> bool:
        with self._lock:
            return super().run(write)

    def close(self) -> None:
        with self._lock:
            super().close()


@dataclass(frozen=True, slots=True)
class Destination:
    """The pool pages that a fetch restores to. The sink is closed when the fetch ends."""

    pool_pages: Sequence[int]
    sink: Sink
