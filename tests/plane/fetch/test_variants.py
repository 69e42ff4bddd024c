"""Fetches that choose among a segment's variants as they go."""

from __future__ import annotations

import asyncio
from contextlib import closing

import pytest

from harness.waiting import WAIT_S, until, until_idle
from sgl_kvfetch.codec.bitstream.base import Decoders
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.plane.fetch.fetcher import Fetcher
from sgl_kvfetch.plane.fetch.plan import Chooser, LevelPolicy, LookAhead, PageSource, ReadSize
from sgl_kvfetch.plane.fetch.pool import DecodePool
from tests.plane.fetch.conftest import (
    PROFILE,
    PoisonedPool,
    Recorder,
    Segment,
    SpoiltStore,
    assert_nothing_held,
    fetch,
    holds,
    measured_link,
    wanted,
)


async def test_a_span_may_come_from_several_variants(
    choosing: Fetcher, made: CodedSegment, segment: Segment, recorder: Recorder
) -> None:
    pool = PoisonedPool(8)
    result = await fetch(choosing, wanted(made), pool, range(8))
    assert (result.num_pages, result.failures) == (8, ())
    assert holds(pool, segment, range(8), range(8))
    # SMALL has two layer groups: of each of the four spans' two cells each is a run.
    first = recorder.situations[0]
    assert (first.remaining, first.available) == (8, (0, 1))
    assert [s.remaining for s in recorder.situations] == list(range(8, 0, -1))
    assert sum(s.sizes_bytes[1] for s in recorder.situations) == len(made.data)
    assert sum(s.sizes_bytes[0] for s in recorder.situations) == len(made.variant_data(1))


async def test_what_is_read_ahead_is_not_chosen_again(
    choosing: Fetcher, made: CodedSegment, segment: Segment, store: SpoiltStore, recorder: Recorder
) -> None:
    choosing.read_ahead(wanted(made)[:4], expire_s=60)
    await until_idle()
    assert store.num_gets == len(recorder.situations) == 4
    pool = PoisonedPool(8)
    assert (await fetch(choosing, wanted(made), pool, range(8))).num_pages == 8
    assert holds(pool, segment, range(8), range(8))
    assert store.num_gets == len(recorder.situations) == 8
    await assert_nothing_held(choosing)


async def test_a_segment_in_one_variant_needs_no_choice(
    choosing: Fetcher, segment: Segment, store: SpoiltStore, recorder: Recorder
) -> None:
    reader = SegmentReader(segment[0].manifest, make_quantiser("exact"))
    pool = PoisonedPool(8)
    sources = [PageSource(reader, page) for page in range(8)]
    assert (await fetch(choosing, sources, pool, range(8))).num_pages == 8
    assert holds(pool, segment, range(8), range(8))
    assert not recorder.situations


@pytest.mark.parametrize(("bytes_per_s", "expected"), [(1e3, "zstd"), (1e9, "hevc")])
async def test_slow_links_bring_small_chunks_and_fast_ones_easy_ones(
    made: CodedSegment, bytes_per_s: float, expected: str
) -> None:
    link = measured_link(10_000, bytes_per_s, 8)
    with closing(DecodePool[Decoders]([{}, {}], PROFILE)) as pool:
        chooser = Chooser(LookAhead(), pool, link)
        reader = SegmentReader(made.manifest, make_quantiser("exact"))
        chosen = chooser.choose(reader, chooser.runs(reader, 0, ReadSize(600))[0], LevelPolicy(), WAIT_S, 8)
        assert chosen.variant.codec == expected


async def test_fetches_that_share_link_and_decoders_are_looked_ahead_over_together(
    choosing: Fetcher, made: CodedSegment, store: SpoiltStore, recorder: Recorder
) -> None:
    store.gate.clear()
    first = asyncio.create_task(fetch(choosing, wanted(made), PoisonedPool(8), range(8)))
    await until(lambda: store.num_gets == 4)  # as many as may always be under way
    num_alone = len(recorder.situations)
    alone = recorder.situations[-1].remaining
    second = asyncio.create_task(fetch(choosing, wanted(made)[:2], PoisonedPool(8), range(2)))
    await until(lambda: len(recorder.situations) > num_alone)
    assert recorder.situations[-1].remaining > alone
    store.gate.set()
    await asyncio.gather(first, second)
    assert min(s.remaining for s in recorder.situations) == 1
    recorder.situations.clear()
    await fetch(choosing, wanted(made), PoisonedPool(8), range(8))
    assert recorder.situations[0].remaining == 8  # the fetches that have ended do not count
