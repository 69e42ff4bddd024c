"""Keeps coded bytes in memory: what was read or written lately is found, and restored again, without the network.

An entry is a span of a segment, in the objects of one reader. It holds the chunks of the span's cells as they are
stored. The least recently used entry goes first; entries that a request waits for stay.

The memory is shared with the engine, and a chunk lies where a GPU can take it. So an entry has a life:

* **It is filled.** Whoever reads a span opens an entry, into which the bytes are received; nobody else fills it
  meanwhile. Bytes that come another way are copied. A reader that fails leaves what has come to the next one.
* **It is listed** once all bytes are there: `find` names its pages.
* **It is verified** by whoever restores it. What a GPU decodes is verified once: the entry keeps what was unpacked
  (`CachedSpan.kept`), so the next prompt with the span takes it as it lies. All else, such as what is encrypted, is
  verified each time.
* **It is held** while a fetch reads it, or while the engine may take it. What is evicted or dropped meanwhile is found
  no more, and its memory is freed by the last holder.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from sgl_kvfetch import metrics
from sgl_kvfetch.codec import Cell, CellChunks, CodedSegment, EncodedSegment, SegmentReader
from sgl_kvfetch.plane.fetch.plan import PageSource, ReadSize, ReadUnit, SpanPart, UnitKey, read_units
from sgl_kvfetch.protocol import CODE_ALIGNMENT, Room


class Kept(NamedTuple):
    """What was unpacked of a cell. ``content``: what it has beside its integers. ``distributions``: for each of its
    chunks with integers where its own distributions begin in ``content``, how many it has, and the size of them in the
    chunk."""

    content: bytes
    num_exact: int
    distributions: tuple[tuple[int, int, int], ...]


_SpanKey = tuple[str, int, int]  # the first data object, how many are read, span


class _Layout(NamedTuple):
    """Where the chunks of a span's cells lie in its entry. ``chunks``: the begin and the end of each. ``integers``:
    where those with integers begin, int64, in storage order: they lie together, so that a few copies take them."""

    chunks: dict[Cell, list[tuple[int, int]]]
    integers: np.ndarray
    num_bytes: int


@dataclass(slots=True, eq=False)
class CachedSpan:
    """An entry of the cache: what memory has of a span."""

    key: _SpanKey
    reader: SegmentReader
    layout: _Layout
    memory: memoryview
    offset: int
    missing_bytes: int  # of units that are not here
    units: set[UnitKey] = field(default_factory=set)  # whose bytes are here
    # By cell in storage order, once it is verified and a GPU may take it as it lies; threads that verify write it
    kept: list[Kept | None] = field(default_factory=list)
    filler: Held | None = None  # who fills it
    num_holders: int = 0  # how many keep the entry
    is_dropped: bool = False  # the last holder frees its memory

    @property
    def integers(self) -> np.ndarray:
        """Where the chunks with integers begin in shared memory, int64, in storage order."""
        return self.offset + self.layout.integers

    def places(self, unit: ReadUnit) -> list[CellChunks]:
        """Return where the chunks of a unit's cells lie."""
        chunks = (self.layout.chunks[cell] for cell in unit.cells)
        return [[self.memory[self.offset + begin : self.offset + end] for begin, end in each] for each in chunks]


class MemoryCache:
    """Belongs to one event loop. One without memory is as any other one, but keeps nothing."""

    def __init__(self, memory: bytes | bytearray | memoryview = b"", num_bytes: int = 0) -> None:
        """``num_bytes``: at the end of the memory, are the cache's."""
        self._memory = memoryview(memory)
        self._room = Room(num_bytes, len(memory) - num_bytes)
        self._entries: OrderedDict[_SpanKey, CachedSpan] = OrderedDict()  # the least recently used first
        self._pages: dict[bytes, PageSource] = {}  # by hash; those of which all bytes are here
        self._num_entries: Counter[SegmentReader] = Counter()

    def keeps(self, reader: SegmentReader) -> bool:
        """Return whether the cache has bytes that this reader reads, and so keeps the reader alive."""
        return reader in self._num_entries

    def find(self, hashes: Sequence[bytes]) -> list[PageSource]:
        """Return the sources of the longest run of these pages whose bytes are all here."""
        now_s = time.time()
        found: list[PageSource] = []
        for page_hash in hashes:
            source = self._pages.get(page_hash)
            if source is None or source.reader.manifest.is_expired(now_s):
                break
            found.append(source)
        return found

    def has(self, reader: SegmentReader, span: int) -> bool:
        """Return whether all bytes of a span are here."""
        entry = self._entries.get(_key(reader, span))
        return entry is not None and not entry.missing_bytes

    def put(self, unit: ReadUnit, data: bytes | memoryview) -> None:
        """Copy a unit's bytes, if there is room or something can be evicted for its span."""
        entry = self._open(unit.reader, unit.cells[0].span)
        if entry is not None and entry.filler is None and unit.key not in entry.units:
            self._copy(entry, unit, unit.split(data))

    def put_segment(self, reader: SegmentReader, segment: CodedSegment | EncodedSegment, size: ReadSize) -> None:
        """Copy a segment that was written, in the units in which it is read."""
        objects = dict(segment.data_objects())
        for span in range(reader.manifest.num_spans):
            for unit in read_units(reader, span, size):
                self.put(unit, b"".join(objects[name][start:end] for name, start, end in unit.reads))

    def _copy(self, entry: CachedSpan, unit: ReadUnit, chunks: Sequence[CellChunks]) -> list[CellChunks]:
        """Copy a unit's chunks to their places, which are returned."""
        places = entry.places(unit)
        for into, cell in zip(places, chunks, strict=True):
            for place, chunk in zip(into, cell, strict=True):
                place[:] = chunk
        self._filled(entry, unit)
        return places

    def _filled(self, entry: CachedSpan, unit: ReadUnit) -> None:
        """Record that a unit's bytes are in their places."""
        entry.units.add(unit.key)
        entry.missing_bytes -= unit.size_bytes
        if entry.is_dropped:
            return
        self._entries.move_to_end(entry.key)
        if not entry.missing_bytes:
            self._list_pages(entry)

    def drop(self, data_name: str | None = None) -> None:
        """Forget all that is here, or what is here of a data object, which is damaged."""
        for key in [key for key in self._entries if data_name in (None, key[0])]:
            self._evict(self._entries[key])

    def _open(self, reader: SegmentReader, span: int) -> CachedSpan | None:
        """Return a span's entry. Make room for one that is not here; return None if what is held, or the size of the
        cache, leaves too little."""
        key = _key(reader, span)
        if (found := self._entries.get(key)) is not None:
            return found
        if self._room.num_bytes <= 0 or (layout := _layout(reader, span)).num_bytes > self._room.num_bytes:
            return None
        while (offset := self._room.allocate(layout.num_bytes, 0)) is None:
            oldest = next((each for each in self._entries.values() if not each.num_holders), None)
            if oldest is None:
                return None
            self._evict(oldest)
        what = key, reader, layout, self._memory, offset, reader.span_bytes(span)
        entry = CachedSpan(*what, kept=[None] * len(layout.chunks))
        self._entries[key] = entry
        self._num_entries[reader] += 1
        return entry

    def _list_pages(self, entry: CachedSpan) -> None:
        manifest = entry.reader.manifest
        mine = entry.reader.rank_heads
        has_all_heads = mine.start >= manifest.first_head and mine.stop <= manifest.first_head + manifest.num_heads
        if not has_all_heads or not entry.reader.is_finest:
            return  # the store has the rest, and is asked for these pages
        for page in range(*manifest.span_range(entry.key[2])):
            self._pages[manifest.page_hashes[page]] = PageSource(entry.reader, page)

    def _evict(self, entry: CachedSpan) -> None:
        del self._entries[entry.key]
        manifest = entry.reader.manifest
        for page in range(*manifest.span_range(entry.key[2])):
            page_hash = manifest.page_hashes[page]
            # Another segment with the same page may have been listed since; that one stays.
            if (source := self._pages.get(page_hash)) is not None and source.reader is entry.reader:
                del self._pages[page_hash]
        self._num_entries[entry.reader] -= 1
        if not self._num_entries[entry.reader]:
            del self._num_entries[entry.reader]
        entry.is_dropped = True
        if not entry.num_holders:
            self._room.free(entry.offset)


class Held:
    """Spans that are kept in the cache for one request. Call ``let_go`` at its end."""

    def __init__(self, cache: MemoryCache, parts: Iterable[SpanPart] = ()) -> None:
        """Keep those of these spans that are here."""
        self._cache = cache
        self.entries: dict[_SpanKey, CachedSpan] = {}
        for part in parts:
            self.hold(part.reader, part.span)

    def hold(self, reader: SegmentReader, span: int) -> None:
        """Keep a span if it is here."""
        if self._cache.has(reader, span):
            self._hold(self._cache._entries[_key(reader, span)])

    def _hold(self, entry: CachedSpan) -> None:
        if entry.key not in self.entries:
            self.entries[entry.key] = entry
            entry.num_holders += 1
            self._cache._entries.move_to_end(entry.key)

    def open(self, parts: Iterable[SpanPart]) -> None:
        """Open entries for spans that are not here, as far as there is room or something can be evicted, and nobody
        else fills them. They are held, too. What is held already stays, although the cache may have dropped it."""
        for part in parts:
            if self.entry(part.reader, part.span) is not None:
                continue
            entry = self._cache._open(part.reader, part.span)
            if entry is None or entry.filler is not None:
                continue
            if entry.missing_bytes:
                entry.filler = self
            self._hold(entry)

    def entry(self, reader: SegmentReader, span: int) -> CachedSpan | None:
        return self.entries.get(_key(reader, span))

    def has(self, reader: SegmentReader, span: int) -> bool:
        """Return whether all bytes of a span are here."""
        entry = self.entry(reader, span)
        return entry is not None and not entry.missing_bytes

    def has_unit(self, unit: ReadUnit) -> bool:
        entry = self.entry(unit.reader, unit.cells[0].span)
        return entry is not None and unit.key in entry.units

    def chunks(self, unit: ReadUnit) -> list[CellChunks] | None:
        """Return the chunks of a unit's cells, which stay as they are until ``let_go``; None if they are not here."""
        entry = self.entry(unit.reader, unit.cells[0].span)
        if entry is None or unit.key not in entry.units:
            return None
        metrics.MEMORY_CACHE_READ_BYTES.inc(unit.size_bytes)
        return entry.places(unit)

    def places(self, unit: ReadUnit) -> list[CellChunks] | None:
        """Return where the chunks of a unit's cells are to be received, before `received`; None if they are not wanted
        here."""
        entry = self._filling(unit)
        return None if entry is None else entry.places(unit)

    def received(self, unit: ReadUnit) -> None:
        """Record that a unit's bytes are in their `places`."""
        if (entry := self._filling(unit)) is not None:
            self._cache._filled(entry, unit)

    def put(self, unit: ReadUnit, chunks: list[CellChunks]) -> list[CellChunks]:
        """Copy a unit's chunks to their places, if they are wanted here. Return the chunks that are to be used."""
        entry = self._filling(unit)
        return chunks if entry is None else self._cache._copy(entry, unit, chunks)

    def _filling(self, unit: ReadUnit) -> CachedSpan | None:
        entry = self.entry(unit.reader, unit.cells[0].span)
        return entry if entry is not None and entry.filler is self and unit.key not in entry.units else None

    def end_filling(self) -> None:
        """Let go of what is not all here: others may fill it."""
        self._let_go([entry for entry in self.entries.values() if entry.missing_bytes])

    def let_go(self) -> None:
        self._let_go(list(self.entries.values()))

    def _let_go(self, entries: Sequence[CachedSpan]) -> None:
        for entry in entries:
            del self.entries[entry.key]
            if entry.filler is self:
                entry.filler = None
            entry.num_holders -= 1
            if not entry.num_holders and entry.is_dropped:
                self._cache._room.free(entry.offset)
            elif not entry.num_holders and not entry.units:  # nothing has come
                self._cache._evict(entry)


def _key(reader: SegmentReader, span: int) -> _SpanKey:
    return reader.data_name, len(reader.object_names), span


_layouts: WeakKeyDictionary[SegmentReader, dict[int, _Layout]] = WeakKeyDictionary()


def _layout(reader: SegmentReader, span: int) -> _Layout:
    """Return the layout of a span's entry: integers first, which are most of it. It is computed once."""
    made = _layouts.setdefault(reader, {})
    if span not in made:
        cells, laid_out = list(reader.span_cells(span)), reader.laid_out_parts
        sizes = [[each.size_bytes for each in reader.stored(cell)] for cell in cells]
        rooms = [-(-each[number] // CODE_ALIGNMENT) * CODE_ALIGNMENT for each in sizes for number in laid_out]
        *begins, end = accumulate(rooms, initial=0)
        chunks: dict[Cell, list[tuple[int, int]]] = {}
        next_begin = iter(begins)
        for cell, each in zip(cells, sizes, strict=True):
            place = chunks[cell] = []
            for number, size in enumerate(each):
                if number in laid_out:
                    begin = next(next_begin)
                    place.append((begin, begin + size))
                else:
                    place.append((end, end + size))
                    end += size
        made[span] = _Layout(chunks, np.array(begins, dtype=np.int64), end)
    return made[span]
