"""Fetches whose pages get their destination late, in rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from harness.fetching import fetch_pages, measured_link
from harness.waiting import WAIT_S, LoopClock, until
from sgl_kvfetch.codec.bitstream.base import Decoders
from sgl_kvfetch.codec.quant.base import CellValues
from sgl_kvfetch.plane.adapt.pool import DecodePool
from sgl_kvfetch.plane.fetch.fetcher import Fetcher, FetchResult
from sgl_kvfetch.plane.fetch.plan import read_units
from sgl_kvfetch.plane.fetch.restore import working_bytes
from sgl_kvfetch.plane.fetch.rounds import Round
from sgl_kvfetch.plane.fetch.sink import Destination, GuardedSink
from tests.plane.fetch.conftest import (
    PoisonedPool,
    Segment,
    SpoiltStore,
    assert_nothing_held,
    holds,
    queued_bytes,
    sources,
)


def give(each: Round, pool: PoisonedPool) -> None:
    each.give(Destination(list(range(each.first_page, each.end_page)), GuardedSink(pool)))


async def start(
    fetcher: Fetcher, segment: Segment, ends: Sequence[int], timeout_s: float = WAIT_S
) -> tuple[list[Round], asyncio.Task[FetchResult]]:
    rounds = [Round(first, end) for first, end in zip((0, *ends), ends, strict=False)]
    task = asyncio.create_task(fetcher.fetch_rounds(sources(segment, range(ends[-1])), rounds, timeout_s))
    return rounds, task


async def test_bytes_come_before_there_is_a_destination(fetcher: Fetcher, segment: Segment) -> None:
    rounds, task = await start(fetcher, segment, [4, 8])
    assert await asyncio.shield(rounds[0].wanted)
    await until(lambda: fetcher.link.outstanding_bytes == 0)
    assert 0 < queued_bytes() <= 2000
    pool = PoisonedPool(8)
    for each in rounds:
        give(each, pool)
    assert await task == FetchResult(8, (), False)
    assert holds(pool, segment, range(8), range(8))
    await assert_nothing_held(fetcher)


async def test_a_round_ends_while_the_next_one_waits(fetcher: Fetcher, segment: Segment) -> None:
    rounds, task = await start(fetcher, segment, [2, 8])
    pool = PoisonedPool(8)
    give(rounds[0], pool)
    assert await asyncio.shield(rounds[0].done) == 2
    assert holds(pool, segment, range(2), range(2))
    assert await asyncio.shield(rounds[1].wanted)
    assert not rounds[1].done.done()
    give(rounds[1], pool)
    assert (await task).num_pages == 8
    assert holds(pool, segment, range(8), range(8))


async def test_rounds_end_in_their_order(store: SpoiltStore, segment: Segment) -> None:
    with closing(DecodePool[Decoders]([{}] * 2)) as decoders:
        fetcher = Fetcher(store, decoders, read_bytes=600, inflight_bytes=1 << 20, may_delete=False)
        rounds, task = await start(fetcher, segment, [2, 4])
        pool = PoisonedPool(8)
        give(rounds[1], pool)
        await until(lambda: holds(pool, segment, range(2, 4), range(2, 4)))
        assert not rounds[1].done.done()
        give(rounds[0], pool)
        assert (await task).num_pages == 4
        assert [each.done.result() for each in rounds] == [2, 2]


async def test_a_round_may_end_inside_a_span(fetcher: Fetcher, segment: Segment) -> None:
    rounds, task = await start(fetcher, segment, [3, 5])
    pool = PoisonedPool(8)
    for each in rounds:
        give(each, pool)
    assert (await task).num_pages == 5
    assert holds(pool, segment, range(5), range(5))


async def test_nobody_wants_the_second_round(fetcher: Fetcher, segment: Segment) -> None:
    rounds, task = await start(fetcher, segment, [4, 8])
    pool = PoisonedPool(8)
    rounds[1].give(None)
    give(rounds[0], pool)
    assert await task == FetchResult(4, (), False)
    assert all(pool.is_poisoned(page) for page in range(4, 8))
    await assert_nothing_held(fetcher)


async def test_a_failure_ends_a_fetch_whose_later_rounds_wait(
    fetcher: Fetcher, segment: Segment, store: SpoiltStore
) -> None:
    wanted = sources(segment, range(8))
    store.fail_from = next(read_units(wanted[0].reader, 2, 600)).reads[0][1]
    rounds, task = await start(fetcher, segment, [2, 8])
    pool = PoisonedPool(8)
    give(rounds[0], pool)
    give(rounds[1], pool)
    result = await task
    assert (result.num_pages, result.timed_out) == (4, False)
    assert [each.done.result() for each in rounds] == [2, 2]
    await assert_nothing_held(fetcher)


async def test_a_deadline_that_passes_for_want_of_a_destination_is_not_the_stores_fault(
    fetcher: Fetcher, segment: Segment
) -> None:
    clock = LoopClock()
    rounds, task = await start(fetcher, segment, [4, 8])
    pool = PoisonedPool(8)
    give(rounds[0], pool)
    assert await asyncio.shield(rounds[0].done) == 4
    assert await asyncio.shield(rounds[1].wanted)
    await until(lambda: fetcher.link.outstanding_bytes == 0)
    await clock.advance(WAIT_S)
    assert await task == FetchResult(4, (), timed_out=False, starved=True)
    late = GuardedSink(pool)
    rounds[1].give(Destination([0, 1, 2, 3], late))
    assert not late.write(range(1), range(1), [0], CellValues(torch.zeros(1), torch.zeros(1)))
    await assert_nothing_held(fetcher)


async def test_a_store_that_hangs_is_at_fault(fetcher: Fetcher, segment: Segment, store: SpoiltStore) -> None:
    store.gate.clear()
    rounds, task = await start(fetcher, segment, [4, 8], timeout_s=0.2)
    result = await task
    assert (result.timed_out, result.starved) == (True, False)
    assert rounds[0].wanted.result() is False
    store.gate.set()
    await assert_nothing_held(fetcher)


@pytest.mark.parametrize("moment", ["before", "transmitting", "restored"])
async def test_a_cancelled_fetch_leaves_nothing_behind(
    fetcher: Fetcher, segment: Segment, store: SpoiltStore, moment: str
) -> None:
    if moment == "transmitting":
        store.gate.clear()
    rounds, task = await start(fetcher, segment, [4, 8])
    give(rounds[0], PoisonedPool(8))
    match moment:
        case "transmitting":
            await until(lambda: store.num_gets > 0)
        case "restored":
            await asyncio.shield(rounds[0].done)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    if moment != "before":  # one that is cancelled before its first step runs no line of it
        assert all(each.done.done() for each in rounds)
    await assert_nothing_held(fetcher)


async def test_what_is_decoded_is_bounded(store: SpoiltStore, segment: Segment) -> None:
    wanted = sources(segment, range(8))
    reader = wanted[0].reader
    largest = max(working_bytes(reader, cell, Mock()) for span in range(4) for cell in reader.manifest.span_cells(span))
    under_way = most = 0

    class Watched(DecodePool[Decoders]):
        def submit(self, *args: Any, **options: Any) -> Future[Any]:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            future = super().submit(*args, **options)
            future.add_done_callback(ended)
            return future

    def ended(_: object) -> None:
        nonlocal under_way
        under_way -= 1

    with closing(Watched([{}] * 4)) as pool:
        bounded = Fetcher(
            store, pool, read_bytes=600, inflight_bytes=1 << 20, may_delete=False, decode_bytes=2 * largest
        )
        memory = PoisonedPool(8)
        result = await fetch_pages(bounded, wanted, range(8), GuardedSink(memory), WAIT_S)
        assert result.num_pages == 8
        assert holds(memory, segment, range(8), range(8))
    assert 1 <= most <= 2
    assert bounded.pool.bytes_per_s is not None


@pytest.mark.parametrize(("bytes_per_s", "is_late"), [(1.0, True), (1e9, False)])
async def test_what_would_come_too_late_is_not_asked_for(
    fetcher: Fetcher, segment: Segment, store: SpoiltStore, bytes_per_s: float, is_late: bool
) -> None:
    link = measured_link(1000, bytes_per_s)
    fetcher = Fetcher(store, fetcher.pool, read_bytes=600, inflight_bytes=4000, may_delete=True, link=link)
    rounds, task = await start(fetcher, segment, [8])
    give(rounds[0], PoisonedPool(8))
    result = await task
    assert (result.late, result.timed_out) == (is_late, False)
    assert (result.num_pages, store.num_gets > 0) == ((0, False) if is_late else (8, True))
    await assert_nothing_held(fetcher)
