"""Which offers are taken, and fetches of segments that may be read in several ways."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from harness.waiting import WAIT_S, until
from sgl_kvfetch.codec.bitstream.base import Decoders
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.plane.fetch.fetcher import Fetcher
from sgl_kvfetch.plane.fetch.link import Link
from sgl_kvfetch.plane.fetch.offers import Chooser, Offer, Supply, Tolerance, best_offer
from sgl_kvfetch.plane.fetch.plan import span_parts
from sgl_kvfetch.plane.fetch.pool import DecodePool
from tests.plane.fetch.conftest import (
    PoisonedPool,
    Recorder,
    Segment,
    SpoiltStore,
    fetch,
    holds,
    measured_link,
    wanted,
)


def offer(num_bytes: float, decode_s: float = 0.0, divergence: int = 0) -> Offer:
    return Offer(cast(Any, None), num_bytes, decode_s, divergence)


def supply(
    num_cells: int = 10,
    outstanding_bytes: int = 0,
    bytes_per_s: float = 100.0,
    queued_s: float = 0.0,
    num_sessions: int = 2,
) -> Supply:
    return Supply(num_cells, outstanding_bytes, bytes_per_s, queued_s, num_sessions)


def test_a_fetch_ends_when_the_slower_of_link_and_decoders_is_done() -> None:
    assert supply().seconds(offer(20)) == pytest.approx(2)
    assert supply(outstanding_bytes=100).seconds(offer(20)) == pytest.approx(3)
    assert supply().seconds(offer(20, 0.3)) == pytest.approx(2.3)  # the last cell is decoded after it has come
    assert supply().seconds(offer(20, 0.6)) == pytest.approx(3)
    assert supply(queued_s=2).seconds(offer(20, 0.6)) == pytest.approx(4)
    assert supply(outstanding_bytes=100).seconds(offer(0, 0.3)) == pytest.approx(1.5)  # what is here needs no link


def test_of_equal_divergence_the_sooner_one_is_taken() -> None:
    small, large = offer(20, 1.0), offer(100, 0.1)
    assert best_offer([small, large], supply(bytes_per_s=100), 1e9) is small
    assert best_offer([small, large], supply(bytes_per_s=1000), 1e9) is large
    assert best_offer([offer(30, 1.0), small], supply(bytes_per_s=1e9), 1e9) is small  # of both, the decoders are late


def test_the_least_divergence_in_time_is_taken_or_else_the_coarsest() -> None:
    offers = [offer(10, divergence=2), offer(20, divergence=1), offer(40, divergence=0), offer(60, divergence=0)]
    assert best_offer(offers, supply(), 4.0) is offers[2]
    assert best_offer(offers, supply(), 3.9) is offers[1]
    assert best_offer(offers, supply(outstanding_bytes=1), 2.0) is offers[0]
    assert best_offer(offers, supply(), 0.1) is offers[0]


def chosen(
    made: CodedSegment, pool: DecodePool[Decoders], link: Link, *, takes: bool = True, here: str = ""
) -> SegmentReader:
    part = span_parts(wanted(made))[0]
    chooser = Chooser(Tolerance(), pool, link)
    assert chooser.is_free(part.reader)
    return chooser.choose(part, WAIT_S, 8, lambda _: takes, lambda reader: reader.codec == here)


@pytest.mark.parametrize(
    ("bytes_per_s", "options", "expected"),
    [
        (1e3, {}, "zstd"),
        (1e12, {}, "hevc"),
        (None, {}, "hevc"),  # the first one, where the link was not measured
        (1e3, {"takes": False}, "hevc"),
        (1e3, {"here": "hevc"}, "hevc"),
    ],
    ids=["slow link", "fast link", "unmeasured", "no place for others", "in memory"],
)
def test_slow_links_bring_small_cells_and_fast_ones_easy_ones(
    made: CodedSegment,
    decoders: DecodePool[Decoders],
    bytes_per_s: float | None,
    options: dict[str, Any],
    expected: str,
) -> None:
    for way in wanted(made)[0].reader.ways(0):
        decoders._rates.add(way.coding, 1_000_000, 1000, 1.0 if way.codec == "zstd" else 0.1)
    link = Link() if bytes_per_s is None else measured_link(10_000, bytes_per_s, 8)
    assert chosen(made, decoders, link, **options).codec == expected


def test_what_was_never_decoded_is_tried_where_decoders_are_the_limit(
    made: CodedSegment, decoders: DecodePool[Decoders]
) -> None:
    zstd = next(way for way in wanted(made)[0].reader.ways(0) if way.codec == "zstd")
    slow, fast = (measured_link(10_000, bytes_per_s, 8) for bytes_per_s in (1e3, 1e12))
    decoders._rates.add(zstd.coding, 1_000_000, 1000, 1.0)
    assert chosen(made, decoders, slow).codec == "zstd"
    assert chosen(made, decoders, fast).codec == "hevc"


async def test_a_fetch_chooses_once_a_span_and_its_spans_may_differ(
    choosing: Fetcher, made: CodedSegment, segment: Segment, recorder: Recorder
) -> None:
    pool = PoisonedPool(8)
    result = await fetch(choosing, wanted(made), pool, range(8))
    assert (result.num_pages, result.failures) == (8, ())
    assert holds(pool, segment, range(8), range(8))
    assert recorder.spans == [0, 1, 2, 3]
    assert recorder.left == [8, 6, 4, 2]  # of two cells each
    for way in wanted(made)[0].reader.ways(0):
        assert choosing.pool.seconds(way.coding, 1000) > 0  # both are learnt


async def test_what_a_fetch_has_begun_goes_on_as_it_began(
    choosing: Fetcher, made: CodedSegment, segment: Segment, store: SpoiltStore, recorder: Recorder
) -> None:
    pool = PoisonedPool(8)
    assert (await fetch(choosing, wanted(made)[:1], pool, [0])).num_pages == 1
    num_gets = store.num_gets
    assert (await fetch(choosing, wanted(made)[1:2], pool, [1])).num_pages == 1
    assert (store.num_gets, recorder.spans) == (num_gets, [0])
    assert holds(pool, segment, range(2), range(2))


async def test_fetches_that_share_link_and_decoders_are_counted_together(
    choosing: Fetcher, made: CodedSegment, store: SpoiltStore, recorder: Recorder
) -> None:
    store.gate.clear()
    first = asyncio.create_task(fetch(choosing, wanted(made), PoisonedPool(8), range(8)))
    await until(lambda: store.num_gets == 4)  # as many as may always be under way
    num_alone = len(recorder.left)
    second = asyncio.create_task(fetch(choosing, wanted(made)[:2], PoisonedPool(8), range(2)))
    await until(lambda: len(recorder.left) > num_alone)
    assert recorder.left[-1] > recorder.left[num_alone - 1] - 2
    store.gate.set()
    await asyncio.gather(first, second)
    recorder.left.clear()
    await fetch(choosing, wanted(made), PoisonedPool(8), range(8))
    assert recorder.left == [8, 6, 4, 2]  # the fetches that have ended do not count
