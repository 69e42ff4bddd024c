"""Fetches of segments whose coefficients are in levels: how many are read, and what faults of a level do."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec
import pytest
import torch

from harness.memory_pool import MemoryPool
from harness.metrics import own_metric
from harness.waiting import WAIT_S, until
from sgl_kvfetch.codec.bitstream.base import Decoders
from sgl_kvfetch.codec.container.encryption import StoreKeys
from sgl_kvfetch.codec.container.manifest import coarsened, decode_manifest
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.codec.quant.base import CellValues
from sgl_kvfetch.errors import CorruptError, StoreError
from sgl_kvfetch.plane.fetch.fetcher import Fetcher, FetchResult, PoolPages
from sgl_kvfetch.plane.fetch.finder import PageFinder
from sgl_kvfetch.plane.fetch.offers import Chooser, Tolerance
from sgl_kvfetch.plane.fetch.plan import PageSource, span_parts
from sgl_kvfetch.plane.fetch.pool import DecodePool
from sgl_kvfetch.plane.memory_cache import MemoryCache
from sgl_kvfetch.plane.write.writer import commit_segment
from sgl_kvfetch.stores.keyed import KeyedStore
from sgl_kvfetch.tools.encoder import make_targets, transcode
from tests import fetchers
from tests.codec.container.test_levels import GEOMETRY, KLT, LEVELS, SPEC, make
from tests.plane.fetch.conftest import MakeFetcher, SpoiltStore, assert_nothing_held, measured_link

NUM_PAGES = 4


ANY, NONE = Tolerance(LEVELS - 1, 1e9), Tolerance()
AT_ONCE = Tolerance(LEVELS - 1, 1e-9)  # always too late


@pytest.fixture
async def laddered(store: SpoiltStore) -> CodedSegment:
    coded, _ = await commit_segment(store, make(num_pages=NUM_PAGES))
    assert isinstance(coded, CodedSegment)
    return coded


def sources(coded: CodedSegment) -> list[PageSource]:
    reader = SegmentReader(coded.manifest, KLT)
    return [PageSource(reader, page) for page in range(coded.manifest.num_pages)]


async def fetched(fetcher: Fetcher, wanted: list[PageSource]) -> tuple[FetchResult, CellValues]:
    memory = MemoryPool(GEOMETRY, NUM_PAGES, 57.0)
    result = await fetcher.fetch(wanted, PoolPages(memory, range(NUM_PAGES)), WAIT_S)
    await assert_nothing_held(fetcher)
    return result, CellValues(*(memory.read(tensor, range(NUM_PAGES)) for tensor in ("k", "v")))


def values_at(coded: CodedSegment, num_levels: int) -> CellValues:
    """The values that the first levels restore, by page as in the pool."""
    reader = SegmentReader(coded.manifest, KLT, num_levels=num_levels)
    memory = MemoryPool(GEOMETRY, NUM_PAGES, 0.0)
    objects = [coded.data, *coded.level_data][:num_levels]
    for cell in coded.manifest.cells():
        values = reader.dequantise_cell(cell, reader.decode_cell(cell, reader.chunks_in(cell, objects)))
        memory.write(
            coded.manifest.grid.layers(cell.layer_group),
            coded.manifest.grid.heads(cell.head_block),
            range(*coded.manifest.span_range(cell.span)),
            values,
        )
    return CellValues(*(memory.read(tensor, range(NUM_PAGES)) for tensor in ("k", "v")))


def same(a: CellValues, b: CellValues) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("tolerance", "coarseness"), [*((Tolerance(count, 1e-9), count) for count in range(LEVELS)), (ANY, 0)]
)
async def test_levels_that_would_be_late_are_left_out_as_far_as_allowed(
    make_fetcher: MakeFetcher, laddered: CodedSegment, tolerance: Tolerance, coarseness: int
) -> None:
    fetcher = make_fetcher(tolerance=tolerance)
    await fetched(fetcher, sources(laddered))  # measures the link
    before = own_metric("sgl_kvfetch_read_cells_total", coarseness=str(coarseness))
    result, values = await fetched(fetcher, sources(laddered))
    assert result == FetchResult(NUM_PAGES)
    is_at = [same(values, values_at(laddered, LEVELS - left_out)) for left_out in range(LEVELS)]
    assert is_at == [left_out == coarseness for left_out in range(LEVELS)]
    num_cells = len(list(laddered.manifest.cells()))
    assert own_metric("sgl_kvfetch_read_cells_total", coarseness=str(coarseness)) == before + num_cells


async def test_what_was_read_ahead_is_fetched_in_the_same_levels(
    make_fetcher: MakeFetcher, laddered: CodedSegment
) -> None:
    fetcher = make_fetcher(tolerance=ANY)
    fetcher.reads.read_ahead(sources(laddered), expire_s=60)
    await until(lambda: fetcher.link.goodput_bps is not None)
    fetcher.reads.chooser.tolerance = AT_ONCE
    result, values = await fetched(fetcher, sources(laddered))
    assert result.num_pages == NUM_PAGES
    assert same(values, values_at(laddered, LEVELS))


@pytest.mark.parametrize("fault", ["missing", "corrupt"])
@pytest.mark.parametrize("level", range(1, LEVELS))
async def test_the_levels_before_a_bad_one_count(
    store: SpoiltStore, make_fetcher: MakeFetcher, laddered: CodedSegment, level: int, fault: str
) -> None:
    name = laddered.manifest.data_name(laddered.manifest.levels[level - 1])
    if fault == "missing":
        assert await store.delete(name)
    else:
        path = store.root / name
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    result, values = await fetched(make_fetcher(tolerance=ANY), sources(laddered))
    assert result == FetchResult(NUM_PAGES)
    expected = values_at(laddered, level), values_at(laddered, LEVELS)  # only one cell is corrupt
    if fault == "missing":
        assert same(values, expected[0])
    else:
        assert not same(values, expected[1])
    assert set(store.reports) == {laddered.manifest.key.manifest_name}

    result, _ = await fetched(make_fetcher(tolerance=NONE), sources(laddered))
    kind = StoreError if fault == "missing" else CorruptError
    assert result.num_pages < NUM_PAGES
    assert isinstance(result.failures[0], kind)


async def test_memory_has_fewer_levels_for_fetches_that_would_be_late_alone(
    store: SpoiltStore, make_fetcher: MakeFetcher, laddered: CodedSegment
) -> None:
    memory = MemoryCache(bytearray(1 << 22), 1 << 22)
    fetcher = make_fetcher(tolerance=AT_ONCE, memory=memory, link=measured_link(10_000, 1e6))
    for _ in range(2):
        _, values = await fetched(fetcher, sources(laddered))
        assert same(values, values_at(laddered, 1))
        store.fail_from = 0
    assert memory.find(laddered.manifest.page_hashes) == []
    fetcher.reads.chooser.tolerance, store.fail_from = ANY, None
    assert same((await fetched(fetcher, sources(laddered)))[1], values_at(laddered, LEVELS))


async def test_segments_that_lost_more_levels_than_allowed_are_misses(
    store: SpoiltStore, laddered: CodedSegment
) -> None:
    (variant,) = laddered.manifest.variants
    lost = msgspec.structs.replace(laddered.manifest, variants=(variant.with_levels(1),))
    await store.put(lost.key.manifest_name, lost.encode())
    faults: list[Exception] = []
    find = partial(PageFinder, store, SPEC.heads, KLT, faults.append)
    assert len(await find(tolerance=Tolerance(1)).find_pages(list(lost.page_hashes), WAIT_S)) == NUM_PAGES
    assert not faults
    assert await find(tolerance=NONE).find_pages(list(lost.page_hashes), WAIT_S) == []
    (fault,) = faults
    assert isinstance(fault, StoreError)
    assert (fault.reason, "has lost 1 levels; 0 may be left out" in str(fault)) == ("coarse", True)


@pytest.mark.parametrize(("bytes_per_s", "expected_s"), [(1.0, 1.0), (0.45, 2.0), (0.01, None)])
def test_how_long_a_fetch_takes(bytes_per_s: float, expected_s: float | None) -> None:
    """All levels, if that is in time; else as long as it may take, or longer if not even the fewest come in time. The
    rate is in shares of all bytes."""
    parts = span_parts(sources(make(num_pages=NUM_PAGES)))
    whole = sum(part.size_bytes for part in parts)
    least = sum(part.reader.coarser.span_bytes(part.span) for part in parts if part.reader.coarser is not None)
    assert 0.1 < least / whole < 0.9
    expected_s = least / whole / bytes_per_s if expected_s is None else expected_s
    assert Tolerance(1, 2.0).seconds(parts, whole * bytes_per_s) == pytest.approx(expected_s)
    assert Tolerance(0, 2.0).seconds(parts, whole * bytes_per_s) == pytest.approx(1 / bytes_per_s)


@pytest.mark.parametrize(
    ("bytes_per_s", "within_s", "codec", "left_out"),
    [(1e9, 1e3, "hevc", 0), (1e3, 1e9, "hevc", 0), (1e3, 1e-3, "ans", LEVELS - 1)],
    ids=["fast link", "slow link and time", "slow link and none"],
)
def test_video_and_levels_are_chosen_together(
    decoders: DecodePool[Decoders], bytes_per_s: float, within_s: float, codec: str, left_out: int
) -> None:
    """As if levels were slow to decode. Video has one level, so a fetch that is late would not be sooner with it."""
    coded = make(num_pages=NUM_PAGES)
    video = transcode(coded.manifest, coded.data, make_targets(["hevc"], ["240p"]), levels=coded.level_data)
    both = *video.manifest.variants, *coded.manifest.variants
    reader = SegmentReader(msgspec.structs.replace(coded.manifest, variants=both), KLT)
    (part, *_) = span_parts([PageSource(reader, page) for page in range(NUM_PAGES)])
    for way in reader.ways(LEVELS):
        decoders._rates.add(way.coding, 1000, 1000, 1e-6 if way.codec == "hevc" else 1e-2)
    chooser = Chooser(Tolerance(LEVELS - 1), decoders, measured_link(10_000, bytes_per_s, 8))
    chosen = chooser.choose(part, within_s, 8, lambda _: True, lambda _: False)
    assert (chosen.codec, chosen.coarseness) == (codec, left_out)


async def test_a_store_drops_levels_that_it_cannot_read(store: SpoiltStore, decoders: DecodePool[Decoders]) -> None:
    """With them goes video: its values would be finer than the others."""
    coded, keyed = make(num_pages=NUM_PAGES), KeyedStore(store, StoreKeys(bytes(32)))
    manifest = coded.manifest
    video = transcode(manifest, coded.data, make_targets(["hevc"], ["240p"]), levels=coded.level_data)
    both = msgspec.structs.replace(manifest, variants=(*manifest.variants, *video.manifest.variants))
    await commit_segment(keyed, replace(coded, manifest=both, more_data=(video.data,)))
    for num_lost in (0, 1):
        if num_lost:
            content = await store.get(manifest.key.manifest_name)
            assert content is not None
            coarser = coarsened(decode_manifest(content), content)
            assert coarser is not None
            await store.put(manifest.key.manifest_name, coarser[0])
        finder = PageFinder(keyed, SPEC.heads, KLT, print, tolerance=Tolerance(1))
        found = await finder.find_pages(list(manifest.page_hashes), WAIT_S)
        of_store = found[0].reader.manifest
        assert (of_store.is_encrypted, len(of_store.variants)) == (True, 2 - num_lost)
        result, values = await fetched(fetchers.make_fetcher(keyed, decoders), found)
        assert result == FetchResult(NUM_PAGES)
        assert same(values, values_at(coded, LEVELS - num_lost))
