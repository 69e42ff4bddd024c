"""What is read between a lookup and its fetches, over a real directory store."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from harness.waiting import LoopClock, until, until_idle
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.plane.fetch.fetcher import Fetcher
from sgl_kvfetch.plane.fetch.plan import ReadSize, read_units
from sgl_kvfetch.plane.write.writer import commit_segment
from sgl_kvfetch.tools.encoder import make_targets, transcode
from tests.plane.fetch.conftest import (
    MakeFetcher,
    PoisonedPool,
    Recorder,
    Segment,
    SpoiltStore,
    assert_nothing_held,
    fetch,
    holds,
    sources,
    wanted,
)
from tests.segments import SMALL, make_segment


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_fetch_that_overtakes_leaves_nothing_to_be_read_twice(
    recorder: Recorder, made: CodedSegment, segment: Segment, store: SpoiltStore
) -> None:
    """Over a slow link: at first, no more ways to read are chosen than keep it busy."""
    store.gate.clear()
    recorder.fetcher.reads.read_ahead(wanted(made), expire_s=60)
    await until(lambda: store.num_gets == 4)
    await turns()
    assert store.num_gets == 4
    assert len(recorder.spans) < 4
    pool = PoisonedPool(8)
    fetching = asyncio.create_task(fetch(recorder.fetcher, wanted(made), pool, range(8)))
    await turns()
    store.gate.set()
    assert (await fetching).num_pages == 8
    assert holds(pool, segment, range(8), range(8))
    await assert_nothing_held(recorder.fetcher)
    assert recorder.spans == [0, 1, 2, 3]
    ways = list(wanted(made)[0].reader.ways(0))
    read = [ways[number % len(ways)] for number in range(1, 5)]
    assert store.num_gets == sum(len(read_units(way, span, ReadSize(600))) for span, way in enumerate(read))


async def test_it_goes_on_as_fetches_make_room(store: SpoiltStore, segment: Segment, make_fetcher: MakeFetcher) -> None:
    """SGLang fetches in batches: while one is restored, the next ones come."""
    all_pages = sources(segment, range(8))
    units = [unit for span in range(4) for unit in read_units(all_pages[0].reader, span, ReadSize(600))]
    largest = max(unit.size_bytes for unit in units)
    fetcher = make_fetcher(inflight_bytes=4 * largest)
    fetcher.reads.read_ahead(all_pages, expire_s=600)
    memory = PoisonedPool(8)
    for span in range(4):
        # What is read ahead waits for a fetch, and some of this span's units are among it.
        read = len([unit for unit in units if unit.cells[0].span < span])
        await until(lambda: store.num_gets > read and fetcher.link.outstanding_bytes == 0)  # noqa: B023
        assert store.num_gets < len(units) or span > 0
        pages = range(2 * span, 2 * span + 2)
        assert (await fetch(fetcher, sources(segment, pages), memory, list(pages))).num_pages == 2
    assert holds(memory, segment, range(8), range(8))
    assert store.num_gets == len(units)
    await assert_nothing_held(fetcher)


async def test_a_lookup_whose_fetch_never_comes_is_forgotten(
    store: SpoiltStore, segment: Segment, make_fetcher: MakeFetcher
) -> None:
    fetcher = make_fetcher(inflight_bytes=2000)
    clock = LoopClock()
    fetcher.reads.read_ahead(sources(segment, range(8)), expire_s=60)
    await until(lambda: store.num_gets > 0 and fetcher.link.outstanding_bytes == 0)
    await turns()
    assert len(asyncio.all_tasks()) == 2  # it waits for room
    num_gets = store.num_gets
    await clock.advance(60)
    await assert_nothing_held(fetcher)
    assert store.num_gets == num_gets


async def test_a_store_that_fails_is_not_asked_on_before_a_fetch(
    store: SpoiltStore, segment: Segment, fetcher: Fetcher
) -> None:
    """It may be back by then, and a segment that was deleted as damaged may have been written again."""
    store.fail_from = 0
    wanted, pool = sources(segment, range(8)), PoisonedPool(8)
    fetcher.reads.read_ahead(wanted, expire_s=60)
    await until(lambda: store.num_gets > 0 and fetcher.link.outstanding_bytes == 0)
    assert store.num_gets <= 4
    store.fail_from = None
    assert (await fetch(fetcher, wanted, pool, range(8))).num_pages == 8
    assert holds(pool, segment, range(8), range(8))
    await assert_nothing_held(fetcher)


@pytest.mark.parametrize(
    ("before", "after"),
    [({"span_pages": 2}, {"span_pages": 4}), ({"cell_heads": 1}, {"cell_heads": SMALL.num_heads})],
    ids=["spans", "cells"],
)
async def test_a_segment_that_was_cut_anew_in_the_meantime_is_not_taken_for_the_old_one(
    recorder: Recorder, segment: Segment, store: SpoiltStore, before: dict[str, Any], after: dict[str, Any]
) -> None:
    """With the same pages, under the same name: in longer spans, or by a server with another ``max_tp_size``, whose
    cells have other heads under the same numbers."""
    old, anew = (
        transcode(coded.manifest, coded.data, make_targets(["hevc", "zstd"], ["240p"]))
        for coded, _ in (make_segment(SMALL, 8, **how) for how in (before, after))
    )
    assert old.manifest.key == anew.manifest.key
    await commit_segment(store, old)
    recorder.fetcher.reads.read_ahead(wanted(old), expire_s=60)
    await until_idle()
    await commit_segment(store, anew)
    pool = PoisonedPool(8)
    assert (await fetch(recorder.fetcher, wanted(anew), pool, range(8))).num_pages == 8
    assert holds(pool, segment, range(8), range(8))
