"""Memory shared by the engine and its data plane, through which values and pages go from one to the other.

The engine imports this module before SGLang shares metrics: see `sgl_kvfetch.metrics`.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from sgl_kvfetch.codec import CellValues
from sgl_kvfetch.plane import protocol as m
from sgl_kvfetch.types import TENSORS, KVGeometry


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
    """Pages in memory, in any layout. ``views``: K and V, ``(pages, page_size, layers, heads, dim)`` each. They may
    have another dtype of the same size: torch cannot index fp8 everywhere."""

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        self.views = views

    def write(self, layers: range, heads: range, pages: Sequence[int], values: CellValues) -> None:
        """Copy ``values``, K and V ``(pages * page_size, layers, heads, dim)``, into ``pages``. Layers and heads count
        from the pool's first."""
        for view, x in zip(self.views, values, strict=True):
            rows = x.view(view.dtype).reshape(len(pages), -1, *x.shape[1:])
            into = view[:, :, layers.start : layers.stop, heads.start : heads.stop]
            for run, positions in consecutive_runs(pages):
                into[run] = rows[positions]


_ALIGNMENT = 64

Emit = Callable[[m.Event], None]


class Arena:
    """Memory that two processes map. It is freed when both have unmapped it or ended, however they ended."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        """Map a memory file, which stays open."""
        self.fd = fd
        self.num_bytes = num_bytes
        self._map = mmap.mmap(fd, num_bytes)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    @classmethod
    def create(cls, num_bytes: int) -> Arena:
        fd = os.memfd_create("kvfetch")
        os.ftruncate(fd, num_bytes)
        return cls(fd, num_bytes)

    @property
    def whole(self) -> torch.Tensor:
        """All bytes."""
        return self._bytes

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
        (found,) = tensors_in(self._bytes[offset:], dtype, [shape])
        return found

    def views(self, offset: int, dtype: torch.dtype, shapes: Iterable[tuple[int, ...]]) -> list[torch.Tensor]:
        """Return tensors that lie one after another."""
        return tensors_in(self._bytes[offset:], dtype, shapes)

    def pages(self, offset: int, geometry: KVGeometry, num_pages: int) -> list[torch.Tensor]:
        """Return K and V of pages: ``(pages, page_size, layers, heads, dim)`` each."""
        return pages_in(self._bytes[offset:], geometry, num_pages)

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
    """Return K and V of pages: ``(pages, page_size, layers, heads, dim)`` each."""
    common = num_pages, geometry.page_size, geometry.num_layers, geometry.num_heads
    return tensors_in(memory, geometry.torch_dtype, ((*common, geometry.head_dim(t)) for t in TENSORS))


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
        pool = cls([(arena.fd, arena.whole)], arena.pages(0, geometry, num_pages))
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
