"""The pipeline over a real directory store; tests/plane/fetch/conftest.py has its faults."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from harness.waiting import WAIT_S, until, until_idle
from sgl_kvfetch.codec.bitstream.base import Decoders
from sgl_kvfetch.errors import CorruptError, StoreError
from sgl_kvfetch.plane.fetch.fetcher import Fetcher, FetchResult, PoolPages
from sgl_kvfetch.plane.fetch.link import Link
from sgl_kvfetch.plane.fetch.plan import ReadSize, read_units
from sgl_kvfetch.plane.fetch.pool import DecodePool
from sgl_kvfetch.plane.memory_cache import MemoryCache
from sgl_kvfetch.plane.write.writer import commit_segment
from tests.plane.fetch.conftest import (
    MakeFetcher,
    PoisonedPool,
    Segment,
    SpoiltStore,
    assert_nothing_held,
    fetch,
    holds,
    measured_link,
    sources,
)
from tests.segments import SMALL, make_segment


@pytest.mark.parametrize(
    "pages", [range(8), range(3), range(5, 8), range(1, 6), [3]], ids=["all", "start", "end", "middle", "one"]
)
async def test_pages_land_where_they_are_wanted(
    fetcher: Fetcher, segment: Segment, store: SpoiltStore, pages: Sequence[int]
) -> None:
    """Computing would take longer, and only the spans that are needed are read."""
    wanted, pool = sources(segment, pages), PoisonedPool(32)
    pool_pages = [31 - 2 * i for i in range(len(pages))]
    result = await fetcher.fetch(wanted, PoolPages(pool, pool_pages), WAIT_S, compute_s=WAIT_S)
    assert result == FetchResult(len(pages))
    assert holds(pool, segment, pages, pool_pages)
    assert all(pool.is_poisoned(page) for page in set(range(32)) - set(pool_pages))
    spans = {page // 2 for page in pages}
    assert store.num_gets == sum(len(read_units(wanted[0].reader, span, ReadSize(600))) for span in spans)


async def test_begun_spans_of_several_conversations_are_kept_within_bounds(
    store: SpoiltStore, segment: Segment, make_fetcher: MakeFetcher
) -> None:
    wanted = sources(segment, range(8))
    largest = max(unit.size_bytes for span in range(4) for unit in read_units(wanted[0].reader, span, ReadSize(600)))
    for room, kept in ((20 * largest, [1, 3, 5]), (largest, [5])):  # in the second case, of the last span alone
        fetcher = make_fetcher(inflight_bytes=8 * room)
        for page in (0, 2, 4):
            assert (await fetch(fetcher, wanted[page : page + 1], PoisonedPool(8), [page])).num_pages == 1
        num_gets = store.num_gets
        for page in kept:
            memory = PoisonedPool(8)
            assert (await fetch(fetcher, wanted[page : page + 1], memory, [page])).num_pages == 1
            assert holds(memory, segment, [page], [page])
        assert store.num_gets == num_gets
        await fetch(fetcher, wanted[1:2], PoisonedPool(8), [1])
        assert (store.num_gets == num_gets) == (1 in kept)


async def test_a_corrupt_span_ends_the_hit(fetcher: Fetcher, segment: Segment, store: SpoiltStore) -> None:
    """The store is told, and nothing is deleted: only the store can tell that its bytes are sound."""
    wanted = sources(segment, range(8))
    store.flip_from = read_units(wanted[0].reader, 2, ReadSize(600))[0].reads[0][1]
    pool = PoisonedPool(8)
    result = await fetch(fetcher, wanted, pool, list(range(8)))
    assert result.num_pages == 4
    assert isinstance(result.failures[0], CorruptError)
    assert holds(pool, segment, range(4), range(4))
    await until_idle()
    assert set(store.reports) == {segment[0].manifest.key.manifest_name}
    assert {info.name async for info in store.list()} == {*store.reports, segment[0].data_name}


async def test_a_begun_span_that_came_damaged_is_read_again(
    fetcher: Fetcher, segment: Segment, store: SpoiltStore
) -> None:
    wanted, pool = sources(segment, [2]), PoisonedPool(3)  # the first page of a span of two
    store.flip_from = 0
    assert (await fetch(fetcher, wanted, pool, [2])).num_pages == 0
    store.flip_from = None
    assert (await fetch(fetcher, wanted, pool, [2])).num_pages == 1
    assert holds(pool, segment, [2], [2])


async def test_memory_keeps_nothing_of_a_segment_that_was_deleted_as_damaged(
    segment: Segment, store: SpoiltStore, make_fetcher: MakeFetcher
) -> None:
    """What is read ahead may come after the damage was found, and before the store has deleted the segment."""
    store.flip_from, store.is_damaged, store.answers = 0, True, asyncio.Event()
    wanted, pool = sources(segment, range(8)), PoisonedPool(8)
    memory = MemoryCache(bytearray(1 << 20), 1 << 20)
    fetcher = make_fetcher(memory=memory)
    assert (await fetch(fetcher, wanted[:2], pool, [0, 1])).num_pages == 0
    fetcher.reads.read_ahead(wanted, expire_s=60)
    await until(lambda: store.num_gets > 4 and fetcher.link.outstanding_bytes == 0)
    store.answers.set()
    await until_idle()
    store.flip_from = None
    await commit_segment(store, segment[0])
    assert (await fetch(fetcher, wanted, pool, list(range(8)))).num_pages == 8
    assert holds(pool, segment, range(8), range(8))


async def test_reports_are_bounded(store: SpoiltStore, make_fetcher: MakeFetcher) -> None:
    """A segment is reported once at a time, and few segments are at once."""
    store.flip_from, store.answers = 0, asyncio.Event()
    segments = [make_segment(SMALL, 2, seed=str(i)) for i in range(6)]
    for coded, _ in segments:
        await commit_segment(store, coded)
    fetcher = make_fetcher(inflight_bytes=4000)
    for segment in segments * 2:
        await fetch(fetcher, sources(segment, range(2)), PoisonedPool(2), [0, 1])
        await asyncio.sleep(0)
    assert store.reports == [coded.manifest.key.manifest_name for coded, _ in segments[:4]]
    store.answers.set()
    await until_idle()
    await fetch(fetcher, sources(segments[5], range(2)), PoisonedPool(2), [0, 1])
    await until_idle()
    assert len(store.reports) == 5


@pytest.mark.parametrize("may_delete", [True, False])
async def test_a_missing_object_is_a_miss_and_is_reported_by_who_may_write(
    make_fetcher: MakeFetcher, segment: Segment, store: SpoiltStore, may_delete: bool
) -> None:
    (store.root / segment[0].data_name).unlink()
    fetcher = make_fetcher(inflight_bytes=4000, may_delete=may_delete)
    result = await fetch(fetcher, sources(segment, range(8)), PoisonedPool(8), list(range(8)))
    assert result.num_pages == 0
    assert isinstance(result.failures[0], StoreError)
    assert result.failures[0].reason == "missing"
    await until_idle()
    # Or lookups would name it for ever.
    assert store.reports == [segment[0].manifest.key.manifest_name] * may_delete


async def test_after_the_deadline_nothing_is_written(fetcher: Fetcher, segment: Segment, store: SpoiltStore) -> None:
    store.gate.clear()
    pool = PoisonedPool(8)
    result = await fetcher.fetch(sources(segment, range(8)), PoolPages(pool, range(8)), 0.1)
    assert result.num_pages == 0
    assert [type(each) for each in result.failures] == [TimeoutError]
    store.gate.set()
    await assert_nothing_held(fetcher)
    assert all(pool.is_poisoned(page) for page in range(8))


async def test_a_cancelled_fetch_gives_everything_back(fetcher: Fetcher, segment: Segment, store: SpoiltStore) -> None:
    store.gate.clear()
    destination = PoolPages(PoisonedPool(8), range(8))
    task = asyncio.create_task(fetcher.fetch(sources(segment, range(8)), destination, WAIT_S))
    await until(lambda: store.num_gets > 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await assert_nothing_held(fetcher)
    assert not destination.write(pytest.fail)


async def test_pages_that_are_not_fetched_measure_the_link(
    make_fetcher: MakeFetcher, segment: Segment, store: SpoiltStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And are not kept: a span that was read in pieces of another size would never be whole in memory."""
    fetcher = make_fetcher(memory=MemoryCache(bytearray(1 << 20), 1 << 20))
    monkeypatch.setattr(fetcher.link, "begin_probe", lambda: 600)
    await fetcher.reads.probe(sources(segment, range(8)))
    assert store.num_gets == len(fetcher.link._transfers) == 2
    assert not fetcher.reads.memory._entries
    store.fail_from = 0
    await fetcher.reads.probe(sources(segment, range(8)))  # a store that fails is nobody's loss
    assert fetcher.link.outstanding_bytes == 0


async def test_a_fetch_ends_once_the_rest_would_be_computed_sooner(
    fetcher: Fetcher, segment: Segment, store: SpoiltStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, pool = sources(segment, range(8)), PoisonedPool(8)
    get, present_bps = store.get, fetcher.link.present_bps
    silent_from = sum(map(wanted[0].reader.coded_bytes, wanted[0].reader.span_cells(0)))

    async def get_the_first_span(name: str, start: int = 0, length: int | None = None) -> bytes | None:
        if start >= silent_from:
            await asyncio.Event().wait()
        return await get(name, start, length)

    def after_the_first_span(now_s: float) -> float | None:
        """On a slow machine, too: nothing is compared before it is restored."""
        return present_bps(now_s) if all(each.num_pages == 2 for each in fetcher._running) else None

    monkeypatch.setattr(store, "get", get_the_first_span)
    monkeypatch.setattr(fetcher.link, "present_bps", after_the_first_span)
    fetcher.reads.read_ahead(wanted, expire_s=600)
    result = await fetcher.fetch(wanted, PoolPages(pool, range(8)), WAIT_S, compute_s=1.0)
    assert result == FetchResult(2, late=True)
    assert holds(pool, segment, range(2), range(2))
    await assert_nothing_held(fetcher)  # nor is the rest read ahead


async def test_the_link_is_left_to_others_once_all_is_requested(
    store: SpoiltStore, segment: Segment, monkeypatch: pytest.MonkeyPatch, make_fetcher: MakeFetcher
) -> None:
    monkeypatch.setattr(Link, "is_full", False)
    store.gate.clear()
    fetcher = make_fetcher()
    destination, is_requested = PoolPages(PoisonedPool(8), range(8)), asyncio.Event()
    task = asyncio.create_task(
        fetcher.fetch(sources(segment, range(8)), destination, WAIT_S, on_requested=is_requested.set)
    )
    await asyncio.wait_for(is_requested.wait(), WAIT_S)
    assert not task.done()
    store.gate.set()
    assert (await task).num_pages == 8


async def test_what_is_decoded_is_bounded(
    segment: Segment, make_fetcher: MakeFetcher, decoders: DecodePool[Decoders], monkeypatch: pytest.MonkeyPatch
) -> None:
    futures: list[Future[Any]] = []
    submit = decoders.submit

    def submit_one(*args: Any, **options: Any) -> Future[Any]:
        assert all(each.done() for each in futures)
        futures.append(submit(*args, **options))
        return futures[-1]

    monkeypatch.setattr(decoders, "submit", submit_one)
    memory = PoisonedPool(8)  # each cell takes more than a byte, so they are decoded one by one
    assert (await fetch(make_fetcher(decode_bytes=1), sources(segment, range(8)), memory, range(8))).num_pages == 8
    assert holds(memory, segment, range(8), range(8))


@pytest.mark.parametrize(("bytes_per_s", "is_late"), [(1.0, True), (1e9, False)])
async def test_what_would_come_too_late_is_not_asked_for(
    make_fetcher: MakeFetcher, segment: Segment, store: SpoiltStore, bytes_per_s: float, is_late: bool
) -> None:
    fetcher = make_fetcher(inflight_bytes=4000, link=measured_link(1000, bytes_per_s))
    result = await fetch(fetcher, sources(segment, range(8)), PoisonedPool(8), range(8))
    assert (result.late, result.failures) == (is_late, ())
    assert (result.num_pages, store.num_gets > 0) == ((0, False) if is_late else (8, True))
    await assert_nothing_held(fetcher)


def test_a_span_is_read_in_three_parts_unless_it_is_short() -> None:
    size = ReadSize(4 << 20)
    assert [size.of(num_bytes) for num_bytes in (512 << 10, 3 << 20, 24 << 20)] == [512 << 10, 1 << 20, 4 << 20]
