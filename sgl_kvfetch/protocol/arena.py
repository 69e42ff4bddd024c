"""Memory shared by the engine and its data plane, through which values and pages go from one to the other, and what
lies in it: pools of pages, and what a `Staged` answer points to. That is K and V of a prompt's pages, its side pages,
or, where the engine restores them on its GPU, cells that are still coded, with the tables that kernels need.

The data plane lays these out (`plane/staging.py`, `plane/coded.py`), and the engine's process loads them. An engine may
load fewer pages than were staged: other ranks have fewer, or a request shares only a part. `of_pages` makes the tables
of these alone, so that no table names a page that has no slot.

The engine imports this module before SGLang shares metrics: see `sgl_kvfetch.metrics`.
"""

from __future__ import annotations

import math
import mmap
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from sgl_kvfetch.codec import CellValues
from sgl_kvfetch.protocol import messages as m
from sgl_kvfetch.reasons import Reason
from sgl_kvfetch.types import TENSORS, KVGeometry, SideKey


def consecutive_runs(pages: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Split ``pages`` into runs of consecutive numbers. Yield each run's pages, and its positions in ``pages``.

    A copy of one run takes torch half the time or less of one that is indexed by a list of pages.
    """
    start = 0
    for end in range(1, len(pages) + 1):
        if end == len(pages) or pages[end] != pages[end - 1] + 1:
            yield slice(pages[start], pages[start] + end - start), slice(start, end)
            start = end


class StridedPages:
    """Pages in memory. ``views``: K and V, ``(pages, page_size, layers, heads, dim)`` each, of which only dim need be
    contiguous. They may have another dtype of the same size: torch cannot index fp8 everywhere."""

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        self.views = views

    def write(self, layers: range, heads: range, pages: Sequence[int], values: CellValues) -> None:
        """Copy ``values``, K and V ``(pages * page_size, layers, heads, dim)``, into ``pages``. Layers and heads count
        from the pool's first."""
        for into, x in zip(self.of_cell(layers, heads), values, strict=True):
            rows = x.view(into.dtype).reshape(len(pages), -1, *x.shape[1:])
            for run, positions in consecutive_runs(pages):
                into[run] = rows[positions]

    def read_into(self, pages: Sequence[int], memory: torch.Tensor, offset: int) -> bool:
        """Copy ``pages`` into uint8 ``memory``, from a byte on, as `pages_in` finds them. Return that they are there:
        see `process.ReadPages`."""
        shapes = ((x.shape[2], len(pages), x.shape[1], *x.shape[3:]) for x in self.views)
        for view, into in zip(self.views, tensors_in(memory[offset:], self.views[0].dtype, shapes), strict=True):
            for run, positions in consecutive_runs(pages):
                into[:, positions] = view[run].permute(2, 0, 1, 3, 4)
        return True

    def of_cell(self, layers: range, heads: range) -> list[torch.Tensor]:
        """Return the views of some layers and heads, counted from the pool's first."""
        return [x[:, :, layers.start : layers.stop, heads.start : heads.stop] for x in self.views]


_ALIGNMENT = 64

Emit = Callable[[m.Event], None]


class Arena:
    """Memory that two processes map. It is freed when both have unmapped it or ended, however they ended."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        """Map a memory file, which stays open."""
        self.fd = fd
        self.num_bytes = num_bytes
        self._map = mmap.mmap(fd, num_bytes)
        self.whole = torch.frombuffer(self._map, dtype=torch.uint8)  # all bytes

    @classmethod
    def create(cls, num_bytes: int) -> Arena:
        fd = os.memfd_create("kvfetch")
        os.ftruncate(fd, num_bytes)
        return cls(fd, num_bytes)

    def buffer(self, offset: int, num_bytes: int) -> memoryview:
        return memoryview(self._map)[offset : offset + num_bytes]

    def lend(self, offset: int, num_bytes: int, on_returned: Callable[[], object]) -> torch.Tensor:
        """Return some bytes, uint8 ``(num_bytes,)``. ``on_returned`` is called once no tensor refers to them any
        longer, on any thread, at any point of a program: it must not take locks."""
        array = np.frombuffer(self._map, np.uint8, num_bytes, offset)
        # Tensors refer to the array, and the array to the map.
        weakref.finalize(array, on_returned).atexit = False
        return torch.from_numpy(array)

    def view(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        (found,) = tensors_in(self.whole[offset:], dtype, [shape])
        return found

    def views(self, offset: int, dtype: torch.dtype, shapes: Iterable[tuple[int, ...]]) -> list[torch.Tensor]:
        """Return tensors that lie one after another."""
        return tensors_in(self.whole[offset:], dtype, shapes)

    def close(self) -> None:
        """Close the file. The memory stays mapped as long as tensors of it are in use."""
        os.close(self.fd)


def tensors_in(memory: torch.Tensor, dtype: torch.dtype, shapes: Iterable[tuple[int, ...]]) -> list[torch.Tensor]:
    """Return tensors that lie one after another, from the first byte of ``memory`` on, which is uint8 and flat."""
    found, offset = [], 0
    for shape in shapes:
        end = offset + dtype.itemsize * math.prod(shape)
        found.append(memory[offset:end].view(dtype).view(shape))
        offset = end
    return found


def pages_in(memory: torch.Tensor, geometry: KVGeometry, num_pages: int) -> list[torch.Tensor]:
    """Return K and V of pages: ``(pages, page_size, layers, heads, dim)`` each. Each layer of all pages lies by itself,
    as in a pool on a device: so nobody transposes, neither who copies them from there nor who reads some layers."""
    common = geometry.num_layers, num_pages, geometry.page_size, geometry.num_heads
    found = tensors_in(memory, geometry.torch_dtype, ((*common, geometry.head_dim(t)) for t in TENSORS))
    return [x.permute(1, 2, 0, 3, 4) for x in found]


class Room:
    """Allocates the bytes of an arena, for the side that writes into it. Any thread may call its methods.

    It takes the first gap that is large enough. Gaps are few, because bytes are freed soon, and roughly in the order of
    allocation.
    """

    def __init__(self, num_bytes: int, first: int = 0) -> None:
        """``first``: the offset from which on the bytes may be used; it is rounded up."""
        self._first = -(-first // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = first + num_bytes - self._first
        self._taken: dict[int, int] = {}  # ends, by start
        self._changed = threading.Condition()
        self._closed = False

    def allocate(self, num_bytes: int, timeout_s: float | None = None) -> int | None:
        """Wait for ``num_bytes`` free bytes and return their offset, or None after ``timeout_s`` or once closed."""
        assert num_bytes <= self.num_bytes, num_bytes
        size = _rounded(num_bytes)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._gap(size) is not None, timeout_s)
            offset = None if self._closed else self._gap(size)
            if offset is not None:
                self._taken[offset] = offset + size
            return offset

    def _gap(self, size: int) -> int | None:
        """Return the offset of the first gap of at least ``size`` bytes, or None."""
        offset = self._first
        for start, end in sorted(self._taken.items()):
            if start - offset >= size:
                break
            offset = end
        return offset if offset + size <= self._first + self.num_bytes else None

    def shrink(self, offset: int, num_bytes: int) -> None:
        """Free all but the first ``num_bytes`` of what was allocated at ``offset``."""
        with self._changed:
            assert offset + _rounded(num_bytes) <= self._taken[offset], num_bytes
            self._taken[offset] = offset + _rounded(num_bytes)
            self._changed.notify_all()

    def free(self, offset: int) -> None:
        with self._changed:
            del self._taken[offset]
            self._changed.notify_all()

    def close(self) -> None:
        """Let every present and later call of ``allocate`` return None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _rounded(num_bytes: int) -> int:
    return -(-max(1, num_bytes) // _ALIGNMENT) * _ALIGNMENT


class SharedPool:
    """A pool of pages in memory files of the engine's process, into which its data plane writes."""

    def __init__(self, files: Sequence[tuple[int, torch.Tensor]], views: Sequence[torch.Tensor]) -> None:
        """``files``: descriptors, and the memory that they are mapped to, uint8. ``views``: K and V in this memory,
        ``(pages, page_size, layers, heads, dim)`` each."""
        self.views = views
        self._own: Arena | None = None
        self.files = tuple((fd, memory.nbytes) for fd, memory in files)
        self.places = tuple(_place(view, [memory for _, memory in files]) for view in views)

    @classmethod
    def create(cls, geometry: KVGeometry, num_pages: int) -> SharedPool:
        """Return a pool of its own, which takes memory as it is used."""
        arena = Arena.create(num_pages * geometry.page_bytes)
        pool = cls([(arena.fd, arena.whole)], pages_in(arena.whole, geometry, num_pages))
        pool._own = arena
        return pool

    def close(self) -> None:
        """Close the file of a pool of its own."""
        own, self._own = self._own, None
        if own is not None:
            own.close()


def _place(view: torch.Tensor, memories: Sequence[torch.Tensor]) -> m.Place:
    starts = [view.data_ptr() - memory.data_ptr() for memory in memories]
    file = next(i for i, start in enumerate(starts) if 0 <= start < memories[i].nbytes)
    return m.Place(file, starts[file] // view.itemsize, tuple(view.shape), tuple(view.stride()))


def map_pool(files: Sequence[tuple[int, int]], places: Sequence[m.Place], dtype: torch.dtype) -> StridedPages:
    """Map a `SharedPool` of another process. ``files``: descriptors and sizes in bytes."""
    raw = torch.uint8 if dtype.itemsize == 1 else dtype
    memories = [Arena(*file).whole.view(raw) for file in files]
    return StridedPages([memories[p.file].as_strided(p.shape, p.strides, p.offset) for p in places])


@dataclass(frozen=True)
class Line:
    """A data plane's ends of the two sockets of `Channel`, shared memory for the values that it sends, and shared
    memory for the pages that it receives. ``pool``: the memory files of the pool whose pages are fetched, with their
    sizes in bytes."""

    commands: socket.socket
    staged: socket.socket
    values: Arena
    pages: Arena
    pool: tuple[tuple[int, int], ...] = ()

    @property
    def files(self) -> dict[int, str]:
        """The numbers of its open files, each with the argument from which `of` makes it again in another process."""
        memories = *((each.fd, each.num_bytes) for each in (self.values, self.pages)), *self.pool
        sockets = ((each.fileno(), 0) for each in (self.commands, self.staged))
        return {fd: f"{fd}:{num_bytes}" for fd, num_bytes in (*sockets, *memories)}

    @classmethod
    def of(cls, arguments: Sequence[str]) -> Line:
        files = ((int(fd), int(num_bytes)) for fd, _, num_bytes in (each.partition(":") for each in arguments))
        (commands, _), (staged, _), values, pages, *pool = files
        sockets = socket.socket(fileno=commands), socket.socket(fileno=staged)
        return cls(*sockets, Arena(*values), Arena(*pages), tuple(pool))


NO_VALUES = CellValues(*(torch.empty((0, 0, 0, 0)) for _ in TENSORS))
CODE_ALIGNMENT = 16  # of a chunk with integers, in bytes: GPUs read them from there

# A cell of a staged prompt. What it has beside its integers is at ``packed`` of the tables. The pages of its span are
# ``num_pages`` entries of the page tables, from ``table`` on. Layers count from the rank's first one, heads from its
# first one, and tokens in the sequence. ``num_chunks`` is the same for all cells.
CELL = np.dtype(
    [
        *((name, "<i8") for name in ("first_layer", "num_layers", "first_head", "num_heads")),
        *((name, "<i8") for name in ("model_layer", "model_head")),  # the same firsts, counted in the model
        *((name, "<i8") for name in ("first_token", "num_tokens", "table", "num_pages", "num_exact")),
        *((name, "<i8") for name in ("packed", "num_chunks")),
    ]
)
# A chunk of a cell with ``num_rows`` integers for each of its tokens, of which it may have more behind: ``size`` bytes
# at ``start`` of the arena. If it is not coded, these are the integers themselves, which need no checksum. In
# `ans-tables`, its first ``skipped`` bytes are its ``num_tables`` distributions, which are unpacked at ``tables`` of
# what cells have beside their integers.
CHUNK = np.dtype(
    [
        *((name, "<i8") for name in ("start", "size", "num_rows", "is_coded", "tables", "num_tables", "skipped")),
        ("digest", "u1", (16,)),  # of the integers
    ]
)


@dataclass(frozen=True, slots=True)
class StagedCode:
    """The engine's view of a prompt that it restores. ``cells``: of `CELL`, ordered by layers. ``chunks``: of `CHUNK`,
    ``(cells, chunks)``, which lie in the same order. ``page_tables``: int32, which page of the prompt each page of a
    span is; -1 if it is not loaded. ``packed``: uint8, what the cells have beside their integers."""

    cells: np.ndarray
    chunks: np.ndarray
    page_tables: np.ndarray
    packed: torch.Tensor

    @classmethod
    def of(cls, tables: torch.Tensor, num_cells: int) -> StagedCode:
        """``tables``: what `CodedRegion.tables` returns, uint8."""
        raw = tables.numpy().data
        cells = np.frombuffer(raw, dtype=CELL, count=num_cells)
        count = int(cells["num_chunks"][0])
        chunks = np.frombuffer(raw, dtype=CHUNK, count=num_cells * count, offset=cells.nbytes)
        num_pages, begin = int((cells["table"] + cells["num_pages"]).max()), cells.nbytes + chunks.nbytes
        page_tables = np.frombuffer(raw, dtype=np.int32, count=num_pages, offset=begin)
        return cls(cells, chunks.reshape(-1, count), page_tables, tables[begin + page_tables.nbytes :])

    def of_pages(self, pages: range) -> StagedCode:
        """Return the cells that have some of ``pages``, with page tables that count from the first of these pages."""
        is_loaded = (self.page_tables >= pages.start) & (self.page_tables < pages.stop)
        tables = np.where(is_loaded, self.page_tables - np.int32(pages.start), np.int32(-1))
        num_loaded = np.concatenate([[0], np.cumsum(is_loaded)])  # before each entry
        first = self.cells["table"]
        has_some = num_loaded[first + self.cells["num_pages"]] > num_loaded[first]
        return StagedCode(self.cells[has_some], self.chunks[has_some], tables, self.packed)


@dataclass(frozen=True, slots=True)
class StagedValues:
    """The engine's view of `messages.Staged`. It stays readable when the data plane has ended."""

    num_pages: int  # restored and verified, or still coded
    num_found: int
    memory: torch.Tensor  # all shared memory, uint8
    values: CellValues = NO_VALUES  # of these pages, as `region_views` returns them; none if `code` has them
    code: StagedCode | None = None  # these pages' cells, if they are still coded
    reason: str = ""
    sides: Mapping[SideKey, torch.Tensor] = field(default_factory=dict)  # side pages that they need, uint8 (bytes,)

    @classmethod
    def of(
        cls, staged: m.Staged, arena: Arena, geometry: KVGeometry, side_bytes: Mapping[str, int] | None = None
    ) -> StagedValues:
        """``side_bytes``: of a page in each side pool."""
        values, code = NO_VALUES, None
        if staged.code is not None:
            tables = arena.view(staged.code.offset, torch.uint8, (staged.code.num_bytes,))
            code = StagedCode.of(tables, staged.code.num_cells)
        elif staged.num_pages:
            values = region_views(arena, staged.offset, geometry, staged.num_found)
        sides = side_views(staged, arena, side_bytes or {})
        return cls(staged.num_pages, staged.num_found, arena.whole, values, code, staged.reason, sides)

    def of_pages(self, pages: range, page_size: int) -> StagedValues:
        """Return ``pages`` of these alone, counted from the first of them. No table of the result names another page,
        so whoever loads it cannot write behind the slots of these."""
        assert 0 <= pages.start <= pages.stop <= self.num_pages, (pages, self.num_pages)
        tokens = slice(pages.start * page_size, pages.stop * page_size)
        values = CellValues(*(x[:, tokens] for x in self.values))
        if len(pages) == self.num_pages:  # of code and side pages, there are no others
            return replace(self, values=values)
        code = None if self.code is None else self.code.of_pages(pages)
        sides = {(pool, page - pages.start): x for (pool, page), x in self.sides.items() if page in pages}
        return replace(self, num_pages=len(pages), values=values, code=code, sides=sides)

    @property
    def end(self) -> str:
        """The outcome, one of `metrics.ENDS`."""
        if self.num_pages:
            return "landed" if self.num_pages == self.num_found else "partly"
        if self.reason == Reason.SOONER:
            return "recomputed"
        return "failed" if self.num_found else "missed"


def region_views(arena: Arena, offset: int, geometry: KVGeometry, num_pages: int) -> CellValues:
    """Return K and V of a region: ``(layers, num_pages * page_size, heads, dim)`` each. A layer's values lie together,
    since the engine takes them layer by layer."""
    common = geometry.num_layers, num_pages * geometry.page_size, geometry.num_heads
    return CellValues(*arena.views(offset, geometry.torch_dtype, ((*common, geometry.head_dim(t)) for t in TENSORS)))


def side_views(
    staged: m.Staged | m.Fetched, arena: Arena, side_bytes: Mapping[str, int]
) -> dict[SideKey, torch.Tensor]:
    """Return the side pages that were staged, uint8 ``(bytes,)``. ``side_bytes``: of a page in each side pool."""
    if staged.sides is None:
        return {}
    sizes = ((side_bytes[pool],) for pool, _ in staged.sides.keys)
    return dict(zip(staged.sides.keys, arena.views(staged.sides.offset, torch.uint8, sizes), strict=True))
