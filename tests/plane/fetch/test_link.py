from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from sgl_kvfetch.plane.fetch import link as link_module
from sgl_kvfetch.plane.fetch.link import DecodeRate, Link


class Clock:
    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(link_module, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


def transferred(link: Link, clock: Clock, size_bytes: int, seconds: float) -> None:
    link.started(size_bytes)
    link.ended(size_bytes, clock.now_s - seconds, is_whole=True)


async def test_a_link_is_full_while_more_is_asked_of_it_than_it_brings_at_once(clock: Clock) -> None:
    link = Link()
    transferred(link, clock, 1_000_000, 1.0)
    link.started(40_000)  # it brings 50,000 in 0.05 s
    assert not link.is_full
    link.started(20_000)
    assert link.is_full
    waiting = asyncio.create_task(link.has_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    link.ended(20_000, clock.now_s - 0.02, is_whole=True)
    await waiting
    assert link.outstanding_bytes == 40_000


async def test_four_reads_are_always_under_way(clock: Clock) -> None:
    link = Link()
    for _ in range(3):
        link.started(1 << 30)
    assert link.is_full
    await link.may_read()
    link.started(1 << 30)
    waiting = asyncio.create_task(link.may_read())
    await asyncio.sleep(0)
    assert not waiting.done()
    link.ended(1 << 30, clock.now_s - 10, is_whole=True)
    await waiting


async def test_what_failed_says_nothing_about_the_link(clock: Clock) -> None:
    link = Link()
    link.started(1000)
    link.ended(1000, clock.now_s - 100, is_whole=False)
    assert link.goodput_bps(clock.now_s) is None
    assert link.outstanding_bytes == 0


async def test_goodput_is_that_of_all_connections_and_grows_stale(clock: Clock) -> None:
    link = Link()
    for _ in range(4):
        transferred(link, clock, 1_000_000, 1.0)
    assert link.goodput_bps(clock.now_s) == pytest.approx(4 * 8e6)
    assert link.goodput_bps(clock.now_s + 29) is not None
    assert link.goodput_bps(clock.now_s + 31) is None


def test_threads_decode_side_by_side() -> None:
    rate = DecodeRate(4)
    assert rate.bytes_per_s is None
    rate.add(1000, 0.5)
    rate.add(3000, 0.5)
    assert rate.bytes_per_s == pytest.approx(4 * 4000)
