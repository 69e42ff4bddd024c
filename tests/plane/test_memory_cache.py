"""Tests of the cache of coded bytes: what is found, what is evicted, and what may not be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.plane.fetch.plan import PageSource, ReadSize, ReadUnit, read_units, span_parts
from sgl_kvfetch.plane.memory_cache import Held, MemoryCache
from sgl_kvfetch.protocol.arena import CODE_ALIGNMENT
from tests.segments import make_segment

READ_SIZE = ReadSize(2000)  # several units a span
NUM_PAGES = 4  # in two spans
BEFORE = 1 << 20  # bytes of the arena that are others'


class Stored:
    """A segment, and its spans as they are read."""

    def __init__(self, seed: str) -> None:
        self.segment: CodedSegment = make_segment(num_pages=NUM_PAGES, seed=seed)[0]
        self.reader = SegmentReader(self.segment.manifest, make_quantiser("exact"))
        self.hashes = self.segment.manifest.page_hashes
        self.num_bytes = len(self.segment.data)

    def units(self, span: int) -> Sequence[ReadUnit]:
        return read_units(self.reader, span, READ_SIZE)

    def data(self, unit: ReadUnit) -> bytes:
        ((_, start, end),) = unit.reads
        return self.segment.data[start:end]

    def put_in(self, cache: MemoryCache) -> None:
        cache.put_segment(self.reader, self.segment, READ_SIZE)

    @property
    def sources(self) -> list[PageSource]:
        return [PageSource(self.reader, page) for page in range(NUM_PAGES)]


@pytest.fixture(scope="module")
def stored() -> list[Stored]:
    return [Stored(f"segment {index}") for index in range(3)]


def holds(held: Held, stored: Stored) -> bool:
    units = stored.units(0)
    return [held.chunks(unit) for unit in units] == [unit.split(stored.data(unit)) for unit in units]


def make_cache(num_bytes: int) -> MemoryCache:
    num_bytes += 4096  # what allocations are rounded up by
    return MemoryCache(bytearray(BEFORE + num_bytes), num_bytes)


def test_the_least_recently_used_span_goes_first(stored: list[Stored]) -> None:
    cache = make_cache(2 * max(each.num_bytes for each in stored))
    for each in stored[:2]:
        each.put_in(cache)
    Held(cache, span_parts(stored[0].sources)).let_go()
    stored[2].put_in(cache)
    assert [len(cache.find(each.hashes)) for each in stored] == [4, 0, 4]
    assert [cache.keeps(each.reader) for each in stored] == [True, False, True]
    small = MemoryCache(bytearray(4096), 4096)
    stored[0].put_in(small)  # which has no room for a span
    assert small.find(stored[0].hashes) == []


def test_an_opened_span_is_filled_by_who_opened_it(stored: list[Stored]) -> None:
    one, cache = stored[0], make_cache(stored[0].num_bytes)
    parts, (first, *rest) = span_parts(one.sources), one.units(0)
    held, other = Held(cache), Held(cache)
    held.open(parts)
    other.open(parts)
    assert other.places(first) is None
    for unit in (first, *rest):
        cache.put(unit, one.data(unit))  # what another one has read: it is not taken
        places = held.places(unit)
        assert places is not None
        for place, cell in zip(places, unit.split(one.data(unit)), strict=True):
            for piece, content in zip(place, cell, strict=True):
                piece[:] = content
        assert cache.find(one.hashes) == []
        held.received(unit)
        assert held.places(unit) is None
    assert cache.find(one.hashes) == one.sources[:2]
    assert holds(held, one)
    held.let_go()
    assert not cache.has(one.reader, 1)
    other.open(parts)
    assert holds(other, one)
    assert other.places(one.units(1)[0]) is not None
    other.let_go()


def test_what_a_reader_leaves_is_completed_by_the_next_one(stored: list[Stored]) -> None:
    one, cache = stored[0], make_cache(stored[0].num_bytes)
    parts, (first, *rest) = span_parts(one.sources)[:1], one.units(0)
    held = Held(cache)
    held.open(parts)
    chunks = first.split(one.data(first))
    assert held.put(first, chunks) == chunks
    held.end_filling()
    assert not held.entries
    held = Held(cache)
    held.open(parts)
    assert held.chunks(first) == chunks
    assert held.places(first) is None
    for unit in rest:
        held.put(unit, unit.split(one.data(unit)))
    cache.drop()
    held.open(parts)  # what is held already stays, and whoever comes may fill it anew
    assert holds(held, one)
    held.let_go()
    one.put_in(cache)
    assert cache.find(one.hashes) == one.sources


def test_chunks_lie_where_gpus_take_them(stored: list[Stored]) -> None:
    """Behind what is others', each at a multiple of 16, one after another."""
    one, cache = stored[0], make_cache(stored[0].num_bytes)
    one.put_in(cache)
    held = Held(cache, span_parts(one.sources))
    for entry in held.entries.values():
        assert entry.offset >= BEFORE
        assert not (entry.integers % CODE_ALIGNMENT).any()
        cells = list(one.reader.span_cells(entry.key[2]))
        sizes = np.array([each.row.size_bytes for cell in cells for each in one.reader.laid_out(cell)])
        assert ((entry.integers[1:] - (entry.integers + sizes)[:-1]) < CODE_ALIGNMENT).all()
    held.let_go()
