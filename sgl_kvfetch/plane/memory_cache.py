"""Keeps coded bytes in memory: what was read or written lately is found, and decoded again, without the network.

An entry is a span of a segment, in one variant and with so many levels. It holds the units in which a span is read, as
they are stored; so they are verified, and decrypted, each time they are decoded. The least recently used entry goes
first; entries that a request waits for stay.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sgl_kvfetch import metrics
from sgl_kvfetch.codec import Cell, CodedSegment, EncodedSegment, SegmentReader
from sgl_kvfetch.plane.arena import Arena, Room
from sgl_kvfetch.plane.fetch.plan import READS_A_SPAN, PageSource, ReadUnit, SpanPart, read_units

_SpanKey = tuple[str, int, int]  # data object, number of levels, span
_UnitKey = tuple[Cell, int]  # first cell, number of cells


@dataclass(slots=True, eq=False)
class _Entry:
    """``places``: the offset of each unit that is here. ``missing_bytes``: of the units that are not.

    ``num_holders``: how many keep the entry. ``is_dropped``: its memory is freed when the last of them lets go.
    """

    key: _SpanKey
    reader: SegmentReader
    offset: int
    num_bytes: int
    missing_bytes: int
    places: dict[_UnitKey, int] = field(default_factory=dict)
    num_holders: int = 0
    is_dropped: bool = False


class MemoryCache:
    """Belongs to one event loop."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._room = Room(arena.num_bytes)
        self._entries: OrderedDict[_SpanKey, _Entry] = OrderedDict()  # the least recently used first
        self._pages: dict[bytes, PageSource] = {}  # by hash; those of which all bytes are here
        self._used_bytes = 0
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

    def hold(self, parts: Iterable[SpanPart]) -> Held:
        """Keep those of these spans that are here, until the result is let go."""
        keys = (_key(part.reader, part.span) for part in parts)
        entries = {key: entry for key in keys if (entry := self._entries.get(key)) and not entry.missing_bytes}
        for key, entry in entries.items():
            entry.num_holders += 1
            self._entries.move_to_end(key)
        return Held(self, entries)

    def put(self, unit: ReadUnit, data: Iterable[bytes | memoryview]) -> None:
        """Keep a unit's bytes, if there is room or something can be evicted for its span. ``data``: they, in pieces."""
        span = unit.cells[0].span
        entry = self._entries.get(_key(unit.reader, span)) or self._open(unit.reader, span)
        place = unit.cells[0], len(unit.cells)
        if entry is None or place in entry.places or unit.size_bytes > entry.missing_bytes:
            return  # the last: it overlaps with units of another size
        # Units lie one behind another in the order in which they came, whatever their place in the span.
        offset = entry.offset + entry.num_bytes - entry.missing_bytes
        into = self.buffer(offset, unit.size_bytes)
        for piece in data:
            into[: len(piece)], into = piece, into[len(piece) :]
        entry.places[place] = offset
        entry.missing_bytes -= unit.size_bytes
        self._entries.move_to_end(entry.key)
        if not entry.missing_bytes:
            self._list_pages(entry)

    def put_segment(
        self,
        reader: SegmentReader,
        segment: CodedSegment | EncodedSegment,
        read_bytes: int,
        reads_a_span: int = READS_A_SPAN,
    ) -> None:
        """Keep a segment that was written, in the units in which it is read."""
        objects = dict(segment.data_objects())
        for span in range(reader.manifest.num_spans):
            for unit in read_units(reader, span, read_bytes, reads_a_span):
                self.put(unit, [objects[name][start:end] for name, start, end in unit.reads])

    def drop(self, data_name: str) -> None:
        """Forget what is here of a data object, which is damaged."""
        for key in [key for key in self._entries if key[0] == data_name]:
            self._evict(self._entries[key])

    def clear(self) -> None:
        for entry in list(self._entries.values()):
            self._evict(entry)

    def buffer(self, offset: int, num_bytes: int) -> memoryview:
        return self._arena.buffer(offset, num_bytes)

    def let_go(self, entry: _Entry) -> None:
        entry.num_holders -= 1
        if entry.is_dropped and not entry.num_holders:
            self._free(entry)

    def _open(self, reader: SegmentReader, span: int) -> _Entry | None:
        """Make room for a span. Return None if what is held, or the size of the cache, leaves too little."""
        num_bytes = reader.span_bytes(span)
        if num_bytes > self._arena.num_bytes:
            return None
        while (offset := self._room.allocate(num_bytes, 0)) is None:
            oldest = next((each for each in self._entries.values() if not each.num_holders), None)
            if oldest is None:
                return None
            self._evict(oldest)
        self._count(num_bytes)
        entry = _Entry(_key(reader, span), reader, offset, num_bytes, num_bytes)
        self._entries[entry.key] = entry
        self._num_entries[reader] += 1
        return entry

    def _list_pages(self, entry: _Entry) -> None:
        manifest = entry.reader.manifest
        mine = entry.reader.rank_heads
        if mine.start < manifest.first_head or mine.stop > manifest.first_head + manifest.num_heads:
            return  # other segments have the rest of the rank's heads: the store is asked for these pages
        for page in range(*manifest.span_range(entry.key[2])):
            self._pages[manifest.page_hashes[page]] = PageSource(entry.reader, page)

    def _evict(self, entry: _Entry) -> None:
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
            self._free(entry)

    def _free(self, entry: _Entry) -> None:
        self._room.free(entry.offset)
        self._count(-entry.num_bytes)

    def _count(self, num_bytes: int) -> None:
        self._used_bytes += num_bytes
        metrics.MEMORY_CACHE_BYTES.set(self._used_bytes)


class Held:
    """Spans that a fetch keeps in the cache. Call ``let_go`` once, at its end."""

    def __init__(self, cache: MemoryCache | None = None, entries: dict[_SpanKey, _Entry] | None = None) -> None:
        self._cache = cache
        self._entries = entries or {}

    def has(self, reader: SegmentReader, span: int) -> bool:
        return _key(reader, span) in self._entries

    def has_unit(self, unit: ReadUnit) -> bool:
        return self._offset(unit) is not None

    def _offset(self, unit: ReadUnit) -> int | None:
        entry = self._entries.get(_key(unit.reader, unit.cells[0].span))
        return None if entry is None else entry.places.get((unit.cells[0], len(unit.cells)))

    def data(self, unit: ReadUnit) -> memoryview | None:
        """Return a unit's bytes, which stay as they are until ``let_go``; None if they are not here."""
        offset = self._offset(unit)
        if self._cache is None or offset is None:
            return None
        metrics.MEMORY_CACHE_READ_BYTES.inc(unit.size_bytes)
        return self._cache.buffer(offset, unit.size_bytes)

    def let_go(self) -> None:
        for entry in self._entries.values():
            assert self._cache is not None
            self._cache.let_go(entry)
        self._entries = {}


def _key(reader: SegmentReader, span: int) -> _SpanKey:
    return reader.data_name, reader.num_levels, span
