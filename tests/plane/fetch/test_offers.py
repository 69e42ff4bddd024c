"""Which offers are taken, and fetches of segments that may be read in several ways."""

from __future__ import annotations

from typing import Any, cast

import pytest

from harness.waiting import WAIT_S
from sgl_kvfetch.codec.bitstream.base import Decoders
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.container.segment import CodedSegment
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


def supply(outstanding_bytes: int = 0, bytes_per_s: float = 100.0, queued_s: float = 0.0) -> Supply:
    """Of 10 cells, with 2 sessions."""
    return Supply(10, outstanding_bytes, bytes_per_s, queued_s, 2)


def test_a_fetch_ends_when_the_slower_of_link_and_decoders_is_done() -> None:
    assert supply(outstanding_bytes=100).seconds(offer(20)) == pytest.approx(3)
    assert supply().seconds(offer(20, 0.3)) == pytest.approx(2.3)  # the last cell is decoded after it has come
    assert supply(queued_s=2).seconds(offer(20, 0.6)) == pytest.approx(4)
    assert supply(outstanding_bytes=100).seconds(offer(0, 0.3)) == pytest.approx(1.5)  # what is here needs no link


def test_the_least_divergence_in_time_is_taken_or_else_the_coarsest() -> None:
    offers = [offer(10, divergence=2), offer(20, divergence=1), offer(40, divergence=0), offer(60, divergence=0)]
    assert best_offer(offers, supply(), 4.0) is offers[2]
    assert best_offer(offers, supply(), 3.9) is offers[1]
    assert best_offer(offers, supply(outstanding_bytes=1), 2.0) is offers[0]
    assert best_offer(offers, supply(), 0.1) is offers[0]
    small = offer(20, 1.0)
    assert best_offer([offer(30, 1.0), small], supply(bytes_per_s=1e9), 1e9) is small  # with both, decoders are late


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
    recorder: Recorder, made: CodedSegment, segment: Segment
) -> None:
    pool = PoisonedPool(8)
    result = await fetch(recorder.fetcher, wanted(made), pool, range(8))
    assert (result.num_pages, result.failures) == (8, ())
    assert holds(pool, segment, range(8), range(8))
    assert recorder.spans == [0, 1, 2, 3]
    for way in wanted(made)[0].reader.ways(0):
        assert recorder.fetcher.pool.seconds(way.coding, 1000) > 0  # both are learnt


async def test_what_a_fetch_has_begun_goes_on_as_it_began(
    recorder: Recorder, made: CodedSegment, segment: Segment, store: SpoiltStore
) -> None:
    pool = PoisonedPool(8)
    assert (await fetch(recorder.fetcher, wanted(made)[:1], pool, [0])).num_pages == 1
    num_gets = store.num_gets
    assert (await fetch(recorder.fetcher, wanted(made)[1:2], pool, [1])).num_pages == 1
    assert (store.num_gets, recorder.spans) == (num_gets, [0])
    assert holds(pool, segment, range(2), range(2))
