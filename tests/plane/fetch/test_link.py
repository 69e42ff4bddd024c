from __future__ import annotations

import asyncio

import pytest

from sgl_kvfetch.plane.fetch.link import BytesBudget, Link


class Clock:
    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def transferred(link: Link, clock: Clock, size_bytes: int, seconds: float) -> None:
    clock.now_s -= seconds
    link.started(size_bytes)
    clock.now_s += seconds
    link.ended(size_bytes, clock.now_s - seconds, is_whole=True)


async def test_a_link_is_full_while_more_is_asked_of_it_than_it_brings_at_once(clock: Clock) -> None:
    link = Link(clock.monotonic)
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
    link = Link(clock.monotonic)
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


def carried(clock: Clock, *transfers: tuple[int, float, float]) -> Link:
    """A link that has carried transfers of so many bytes, from and until these seconds."""
    link = Link(clock.monotonic)
    events = sorted(
        ((at, is_end, size, start) for size, start, end in transfers for at, is_end in ((start, 0), (end, 1)))
    )
    for at, is_end, size, start in events:
        clock.now_s = 1000 + at
        link.ended(size, 1000 + start, is_whole=True) if is_end else link.started(size)
    return link


@pytest.mark.parametrize(
    ("transfers", "goodput_bps"),
    [
        ([(1_000_000, 0, 1)] * 4, 4 * 8e6),
        # Bursts of two that each get half of the link, the second one ending almost with the first.
        ([(500, at, at + end) for at in (0.0, 3.0, 10.0) for end in (1.0, 1.0001)], 8000.0),
        # Sixteen, one beginning when another one ends: never is the link idle.
        ([(1000, i / 16, i / 16 + 1) for i in range(200)], 16 * 8000.0),
    ],
    ids=["at once", "pauses", "all the time"],
)
async def test_goodput_is_that_of_all_connections_and_grows_stale(
    clock: Clock, transfers: list[tuple[int, float, float]], goodput_bps: float
) -> None:
    link = carried(clock, *transfers)
    link.started(1000)
    link.ended(1000, clock.now_s - 100, is_whole=False)  # what failed says nothing
    assert link.outstanding_bytes == 0
    assert link.recent_bps(clock.now_s) == pytest.approx(goodput_bps, rel=0.1)
    assert link.recent_bps(clock.now_s + 29) is not None
    assert link.recent_bps(clock.now_s + 31) is None


async def test_a_link_that_becomes_faster_is_followed_after_two_transfers(clock: Clock) -> None:
    """Their time is short, so a mean over the time of all transfers would hardly notice them."""
    slow = [(1_000_000, i, i + 1) for i in range(8)]
    assert carried(clock, *slow, (1_000_000, 9, 9.1)).goodput_bps == pytest.approx(9 * 8e6 / 8.1)
    link = carried(clock, *slow, (1_000_000, 9, 9.1), (1_000_000, 9.1, 9.2))
    assert link.goodput_bps == pytest.approx(80e6)
    clock.now_s += 1
    transferred(link, clock, 1_000_000, 1.0)  # slower: its time is long enough to count
    assert link.goodput_bps == pytest.approx(3 * 8e6 / 1.2)


async def test_a_link_is_probed_when_it_was_neither_used_nor_measured_lately(clock: Clock) -> None:
    link = Link(clock.monotonic)
    clock.now_s += 100
    assert link.begin_probe() == 1  # it was never measured
    assert link.begin_probe() == 0
    transferred(link, clock, 1_000_000, 1.0)
    assert link.begin_probe() == 0
    clock.now_s += 40
    link.started(1)
    assert link.begin_probe() == 0
    link.ended(1, clock.now_s, is_whole=False)
    assert link.begin_probe() == 100_000  # 0.1 s
    assert link.begin_probe() == 0
    clock.now_s += 6
    assert link.begin_probe() == 100_000  # the first one failed


async def test_a_silent_link_brings_less_the_longer_it_is_silent(clock: Clock) -> None:
    link = Link(clock.monotonic)
    assert link.present_bps(clock.now_s) is None
    transferred(link, clock, 1_000_000, 1.0)
    link.started(100_000)
    clock.now_s += 0.2  # as long as a store may take to answer
    assert link.present_bps(clock.now_s) == pytest.approx(8e6)
    clock.now_s += 1.05
    assert link.present_bps(clock.now_s) == pytest.approx(8e5)  # the 100,000 bytes did not come in a second
    link.ended(100_000, clock.now_s - 1.25, is_whole=False)
    assert link.present_bps(clock.now_s) == pytest.approx(8e6)


async def test_a_transfer_that_is_given_up_tells_how_fast_the_link_is_at_most(clock: Clock) -> None:
    link = Link(clock.monotonic)
    link.started(100_000)
    link.started(100_000)
    clock.now_s += 0.25
    link.give_up()  # it is too soon to tell
    assert link.recent_bps(clock.now_s) is None
    clock.now_s += 2.0
    for _ in range(2):
        link.give_up()
        link.ended(100_000, clock.now_s - 2.25, is_whole=False)
    assert link.recent_bps(clock.now_s) == pytest.approx(8e5)
    assert link.recent_bps(clock.now_s + 31) is None
    assert link.goodput_bps == pytest.approx(8e5)
    clock.now_s += 5.0
    assert link.begin_probe() == pytest.approx(8e5 / 8 * 0.1)
    transferred(link, clock, 1_000_000, 1.0)
    assert link.recent_bps(clock.now_s) == pytest.approx(8e6)


async def test_pieces_of_transfers_under_way_count_when_another_one_ends(clock: Clock) -> None:
    """Four share the link, so the first one to end had a quarter of it."""
    link = Link(clock.monotonic)
    for size in (100_000, 200_000, 200_000, 200_000):
        link.started(size)
    clock.now_s += 1.0
    for _ in range(4):
        link.received(100_000)
    link.ended(100_000, clock.now_s - 1.0, is_whole=True)
    assert link.recent_bps(clock.now_s) == pytest.approx(4 * 8e5)
    clock.now_s += 0.75
    for _ in range(3):
        link.received(100_000)
    for _ in range(3):
        link.ended(200_000, clock.now_s - 1.75, is_whole=True)
    assert link.recent_bps(clock.now_s) == pytest.approx(4 * 8e5)


async def test_pieces_tell_how_fast_a_link_is_before_a_transfer_ends(clock: Clock) -> None:
    link = Link(clock.monotonic)
    link.started(1_000_000)
    link.received(10_000)
    clock.now_s += 0.25
    assert link.present_bps(clock.now_s) is None
    clock.now_s += 1.0
    link.received(10_000)
    assert link.present_bps(clock.now_s) == pytest.approx(20_000 * 8)
    link.give_up()
    link.ended(1_000_000, clock.now_s - 1.25, is_whole=False)
    assert link.recent_bps(clock.now_s) == pytest.approx(20_000 * 8)
    link.started(1_000_000)  # nothing has come of it
    clock.now_s += 1.25
    assert link.present_bps(clock.now_s) == pytest.approx(8)


async def test_a_budget_is_first_come_first_served() -> None:
    budget = BytesBudget(10)
    order: list[str] = []

    async def take(name: str, num_bytes: int) -> None:
        await budget.acquire(num_bytes)
        order.append(name)

    await budget.acquire(6)
    tasks = [asyncio.create_task(take(name, n)) for name, n in (("large", 8), ("small", 1))]
    await asyncio.sleep(0)
    assert order == []
    budget.release(6)
    await asyncio.gather(*tasks)
    assert order == ["large", "small"]
    assert budget.used_bytes == 9


@pytest.mark.parametrize("is_granted", [False, True])
async def test_a_wait_for_the_budget_that_is_cancelled_leaves_nothing_behind(is_granted: bool) -> None:
    """Also if the bytes were granted in the same moment."""
    budget = BytesBudget(10)
    await budget.acquire(1000)  # more than the budget counts as all of it
    waiting, behind = (asyncio.create_task(budget.acquire(num_bytes)) for num_bytes in (5, 10))
    await asyncio.sleep(0)
    if is_granted:
        budget.release(1000)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    if not is_granted:
        budget.release(1000)
    await behind
    assert budget.used_bytes == 10
    budget.release(10)
    assert budget.used_bytes == 0
