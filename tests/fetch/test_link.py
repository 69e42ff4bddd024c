from __future__ import annotations

import asyncio
import time

import pytest

from sgl_kvfetch.fetch import link as link_module
from sgl_kvfetch.fetch.link import DecodeRate, Link


def transferred(link: Link, size_bytes: int, seconds: float) -> None:
    link.started(size_bytes)
    link.ended(size_bytes, time.monotonic() - seconds, is_whole=True)


async def test_a_link_is_full_while_more_is_asked_of_it_than_it_brings_at_once() -> None:
    link = Link()
    transferred(link, 1_000_000, 1.0)  # 8 Mbps
    enough = int(1_000_000 * link_module._FULL_S)
    link.started(enough - 10_000)
    assert not link.is_full
    link.started(20_000)
    assert link.is_full
    waiting = asyncio.create_task(link.has_room())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    link.ended(20_000, time.monotonic() - 0.02, is_whole=True)
    await asyncio.wait_for(waiting, 1)
    assert link.outstanding_bytes == enough - 10_000


async def test_some_reads_are_always_under_way() -> None:
    link = Link()
    for _ in range(link_module._LEAST_READS - 1):
        link.started(1 << 30)
    assert link.is_full
    await asyncio.wait_for(link.may_read(), 1)
    link.started(1 << 30)
    waiting = asyncio.create_task(link.may_read())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    link.ended(1 << 30, time.monotonic() - 10, is_whole=True)
    await asyncio.wait_for(waiting, 1)


async def test_what_failed_says_nothing_about_the_link() -> None:
    link = Link()
    link.started(1000)
    link.ended(1000, time.monotonic() - 100, is_whole=False)
    assert link.goodput_bps(time.monotonic()) is None
    assert link.outstanding_bytes == 0


async def test_goodput_is_that_of_all_connections_and_grows_stale() -> None:
    link = Link()
    for _ in range(4):
        transferred(link, 1_000_000, 1.0)
    now_s = time.monotonic()
    assert link.goodput_bps(now_s) == pytest.approx(4 * 8e6, rel=0.3)
    assert link.goodput_bps(now_s + link_module._STALE_S + 1) is None


def test_threads_decode_side_by_side() -> None:
    rate = DecodeRate(4)
    assert rate.bytes_per_s is None
    rate.add(1000, 0.5)
    rate.add(3000, 0.5)
    assert rate.bytes_per_s == pytest.approx(4 * 4000)
