"""Where a fetch puts its pages: a pool, guarded against late writes, and a count of the layers that are whole.

The engine imports this module before SGLang shares metrics: see `sgl_kvfetch.metrics`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType

from sgl_kvfetch.codec import Cell, CellFrames, CellPlace, CellValues, Decoders, Quantiser, SegmentReader

Guard = Callable[[Callable[[], None]], bool]
IsFinished = Callable[[], bool]  # whether a device has finished with what a cell was restored from


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


class FramePool(ABC):
    """A pool that dequantises frames itself, on the device of its pages, which decoders may decode to.

    ``spare_decoders`` decode on that device what comes while the CPU is busy.
    """

    spare_decoders: Decoders = MappingProxyType({})

    @abstractmethod
    def restore(
        self, cell: CellFrames, span_pages: Sequence[int], pages: Sequence[int], guarded: Guard
    ) -> Future[IsFinished]:
        """Restore pages ``span_pages`` of the cell's span into ``pages``. The future is done when all work is launched,
        now or soon. Write to the pages only within ``guarded``, and no more after it has returned False. Raises
        UnsupportedError, here or in the future."""

    @abstractmethod
    def prepare(self, quantiser: Quantiser, places: Iterable[CellPlace]) -> None:
        """Keep on the device what restores of such cells need, beside their frames."""

    @abstractmethod
    def prepare_writes(self, quantiser: Quantiser, places: Iterable[CellPlace]) -> None:
        """Keep on the device what it needs to quantise the pool's cells, if it can. ``places``: all, in storage order.
        Raises nothing."""


# Keeps what was decoded: pages ``span_pages`` of its span are ``pages``.
Keep = Callable[[Sequence[int], Sequence[int]], None]


class CodedPool(PagePool):
    """A pool that takes cells before they are restored: their integers, coded or not."""

    @abstractmethod
    def decoded(self, reader: SegmentReader, cell: Cell, data: bytes | memoryview, decoders: Decoders) -> Keep:
        """Verify a cell's bytes, and decode what the pool takes decoded. Raises CorruptError, FormatError. What is
        returned raises UnsupportedError if the cell does not fit."""

    @abstractmethod
    def working_bytes(self, reader: SegmentReader, cell: Cell) -> int:
        """Return the bytes of memory that `decoded` needs until the cell is kept."""

    def write(self, layers: range, heads: range, pages: Sequence[int], values: CellValues) -> None:
        raise AssertionError("cells are kept as they are coded")


Pool = PagePool | FramePool  # takes values or coded cells, or frames that it dequantises itself


class Sink:
    """Writes to a pool until it is closed. Closing waits for nothing: a write under way goes on."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._closed = False

    def write(self, layers: range, heads: range, pages: Sequence[int], values: CellValues) -> bool:
        """Write ``values``. Return False, without writing, if the sink is closed."""
        pool = self.pool
        assert isinstance(pool, PagePool)
        return self.run(lambda: pool.write(layers, heads, pages, values))

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

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self._lock = threading.Lock()

    def run(self, write: Callable[[], None]) -> bool:
        with self._lock:
            return super().run(write)

    def close(self) -> None:
        with self._lock:
            super().close()


class LayerProgress:
    """Counts what is restored, layer by layer. Any thread may call its methods."""

    def __init__(self, num_layers: int, num_each: int) -> None:
        """A layer is whole when ``num_each`` were counted: the round's pages times its heads."""
        self._left = [num_each] * num_layers
        self._changed = threading.Condition()
        self._is_over = False

    def count_cell(self, layers: range, number: int) -> None:
        with self._changed:
            for layer in layers:
                self._left[layer] -= number
            self._changed.notify_all()

    def end(self) -> None:
        """Note that nothing more comes."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def wait(self, layer: int, timeout_s: float) -> bool:
        """Wait until ``layer`` and all before it are whole, until nothing more comes, or for ``timeout_s``. Return
        whether they are whole."""
        with self._changed:
            self._changed.wait_for(lambda: not any(self._left[: layer + 1]) or self._is_over, timeout_s)
            return not any(self._left[: layer + 1])


@dataclass(frozen=True, slots=True)
class Destination:
    """The pool pages that a round is restored to. The sink is closed when the round ends. ``layers`` counts what is
    restored, if the engine waits for single layers."""

    pool_pages: Sequence[int]
    sink: Sink
    layers: LayerProgress | None = None

    def count(self, layers: range, heads: range, num_pages: int) -> None:
        if self.layers is not None:
            self.layers.count_cell(layers, len(heads) * num_pages)
