"""What is read between a lookup and its fetches, over a real directory store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing

import pytest

from sgl_kvfetch.adapt.pool import DecodePool
from sgl_kvfetch.container.segment import CodedSegment
from sgl_kvfetch.encode.targets import make_targets
from sgl_kvfetch.encode.transcode import transcode
from sgl_kvfetch.fetch.fetcher import Fetcher
from sgl_kvfetch.fetch.plan import read_units
from sgl_kvfetch.fetch.sink import GuardedSink
from sgl_kvfetch.write.commit import commit_segment
from tests.fetch.test_fetcher import PoisonedPool, Segment, SpoiltStore, fetch, holds, segment, sources, store
from tests.fetch.test_variants import PROFILE, Recorder, made, wanted
from tests.segments import SMALL, make_segment

__all__ = ["made", "segment", "store"]  # fixtures


@pytest.fixture
async def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def choosing(store: SpoiltStore, recorder: Recorder) -> Iterator[Fetcher]:
    with closing(DecodePool([{}], PROFILE)) as pool:
        yield Fetcher(store, pool, read_bytes=600, inflight_bytes=1 << 20, may_delete=False, policy=recorder)


async def test_variants_are_chosen_as_the_link_brings_them(
    choosing: Fetcher, made: CodedSegment, store: SpoiltStore, recorder: Recorder
) -> None:
    """A slow link: at first no more is chosen than keeps it busy, whatever there is room for."""
    store.delay_s = 0.2
    choosing.read_ahead(wanted(made), expire_s=60)
    await asyncio.sleep(0.1)
    assert len(recorder.situations) == store.num_gets == 4  # of 8 runs
    (reading,) = choosing._ahead._lookups.values()
    await asyncio.wait_for(reading, 30)
    assert len(recorder.situations) == store.num_gets == 8
    assert recorder.situations[-1].transfers


async def test_a_fetch_that_overtakes_leaves_nothing_to_be_read_twice(
    choosing: Fetcher, made: CodedSegment, segment: Segment, store: SpoiltStore, recorder: Recorder
) -> None:
    store.delay_s = 0.05
    choosing.read_ahead(wanted(made), expire_s=60)
    await asyncio.sleep(0.02)
    pool = PoisonedPool(8)
    assert (await choosing.fetch(wanted(made), range(8), GuardedSink(pool), 10)).num_pages == 8
    assert holds(pool, segment, range(8), range(8))
    await asyncio.sleep(0.5)
    assert store.num_gets == len(recorder.situations) == 8
    assert choosing._ahead._reads == choosing._ahead._by_cells == choosing._ahead._lookups == {}
    assert choosing._ahead_budget.used_bytes == 0


async def test_it_goes_on_as_fetches_make_room(store: SpoiltStore, segment: Segment) -> None:
    """SGLang fetches in batches: while one is restored, the next ones come."""
    all_pages = sources(segment, range(8))
    units = [unit for span in range(4) for unit in read_units(all_pages[0].reader, span, 600)]
    largest = max(unit.size_bytes for unit in units)
    with closing(DecodePool([{}, {}])) as pool:
        fetcher = Fetcher(store, pool, read_bytes=600, inflight_bytes=4 * largest, may_delete=False)
        fetcher.read_ahead(all_pages, expire_s=60)
        await asyncio.sleep(0.2)
        assert 2 <= store.num_gets < len(units)
        memory = PoisonedPool(8)
        for span in range(4):
            pages = range(2 * span, 2 * span + 2)
            assert (await fetch(fetcher, sources(segment, pages), memory, list(pages))).num_pages == 2
            await asyncio.sleep(0.1)
            read = len([unit for unit in units if unit.cells[0].span <= span])
            assert store.num_gets == len(units) or store.num_gets > read  # some of the next span's is here
        assert holds(memory, segment, range(8), range(8))
        assert store.num_gets == len(units)
        assert fetcher._ahead_budget.used_bytes == 0


async def test_a_lookup_whose_fetch_never_comes_is_forgotten(store: SpoiltStore, segment: Segment) -> None:
    with closing(DecodePool([{}, {}])) as pool:
        fetcher = Fetcher(store, pool, read_bytes=600, inflight_bytes=2000, may_delete=False)
        fetcher.read_ahead(sources(segment, range(8)), expire_s=0.1)
        await asyncio.sleep(0.05)
        assert fetcher._ahead._lookups  # waits for room
        num_gets = store.num_gets
        await asyncio.sleep(0.3)
        assert fetcher._ahead._reads == fetcher._ahead._by_cells == fetcher._ahead._lookups == {}
        assert fetcher._ahead_budget.used_bytes == 0
        assert store.num_gets == num_gets


async def test_a_store_that_fails_is_not_asked_on(store: SpoiltStore, segment: Segment) -> None:
    store.fail_from = 0
    with closing(DecodePool([{}, {}])) as pool:
        fetcher = Fetcher(store, pool, read_bytes=600, inflight_bytes=1 << 20, may_delete=False)
        fetcher.read_ahead(sources(segment, range(8)), expire_s=60)
        await asyncio.sleep(0.2)
        assert store.num_gets <= 4
        assert not fetcher._ahead._lookups


async def test_a_segment_that_was_cut_anew_in_the_meantime_is_not_taken_for_the_old_one(
    choosing: Fetcher, made: CodedSegment, segment: Segment, store: SpoiltStore
) -> None:
    """With the same pages, under the same name, in longer spans."""
    anew = make_segment(SMALL, 8, span_pages=4)[0]
    coded = transcode(anew.manifest, anew.data, make_targets(["hevc", "zstd"], ["240p"]))
    assert coded.manifest.key == made.manifest.key
    choosing.read_ahead(wanted(made), expire_s=60)
    await asyncio.sleep(0.1)
    await commit_segment(store, coded)
    pool = PoisonedPool(8)
    assert (await choosing.fetch(wanted(coded), range(8), GuardedSink(pool), 10)).num_pages == 8
    assert holds(pool, segment, range(8), range(8))
