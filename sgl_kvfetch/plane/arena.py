"""Memory shared by the engine and its data plane, through which values and pages go from one to the other."""

from __future__ import annotations

import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from sgl_kvfetch.codec import CellValues
from sgl_kvfetch.plane import messages as m
from sgl_kvfetch.plane.fetch.sink import Destination, PagePool, Sink
from sgl_kvfetch.types import TENSORS, KVGeometry

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


def arena_destination(arena: Arena, room: Room, emit: Emit, work: int, num_pages: int) -> Destination:
    """Return a destination from which pages are sent to the engine through shared memory."""
    # Not guarded: closing would wait for a write that waits for room. The engine guards its pages.
    return Destination(range(num_pages), Sink(_ArenaPool(arena, room, emit, work)))


class _ArenaPool(PagePool):
    """The pages of one fetch, which are sent to the engine in pieces."""

    def __init__(self, arena: Arena, room: Room, emit: Emit, work: int) -> None:
        self._arena, self._room, self._emit, self._work = arena, room, emit, work

    def write(self, layers: range, heads: range, pages: Sequence[int], values: CellValues) -> None:
        """Send values to the engine. Waits for room, which the engine frees."""
        offset = self._room.allocate(sum(x.nbytes for x in values))
        if offset is None:
            return  # the engine is gone
        for into, x in zip(self._arena.views(offset, values.k.dtype, (x.shape for x in values)), values, strict=True):
            into.copy_(x)
        self._emit(m.Piece(self._work, layers.start, layers.stop, heads.start, heads.stop, tuple(pages), offset))


def send_side_page(arena: Arena, room: Room, emit: Emit, work: int, page: int, content: bytearray) -> None:
    """Send a side page to the engine through shared memory. Waits for room, which the engine frees."""
    offset = room.allocate(len(content))
    if offset is not None:
        arena.view(offset, torch.uint8, (len(content),)).copy_(torch.frombuffer(content, dtype=torch.uint8))
        emit(m.SidePiece(work, page, len(content), offset))
