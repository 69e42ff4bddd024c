"""Tests of staging: stored pages are restored into shared memory, where the engine takes them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from harness.waiting import WAIT_S, wait_until
from sgl_kvfetch.engine.data_plane import DataPlane
from sgl_kvfetch.metrics import shortfall
from sgl_kvfetch.plane.staging import AGEING_PAGES, Waiting, _Turns
from sgl_kvfetch.protocol.arena import Room, StagedValues
from sgl_kvfetch.protocol.config import parse_config
from sgl_kvfetch.reasons import Reason
from sgl_kvfetch.side_by_side import Tasks
from sgl_kvfetch.types import TENSORS
from tests.engine.test_data_plane import NUM_PAGES, Launcher, launcher, open_plane, page_values, plane, store
from tests.segments import SMALL, page_hashes

pytestmark = pytest.mark.process

__all__ = ["launcher", "plane"]


def stage(plane: DataPlane, hashes: Sequence[bytes]) -> tuple[int, StagedValues]:
    staged: Future[StagedValues] = Future()
    work = plane.stage(hashes, staged.set_result)

    def is_staged() -> bool:
        plane.step()
        return staged.done()

    wait_until(is_staged)
    return work, staged.result()


def assert_staged(staged: StagedValues, num_pages: int) -> None:
    assert staged.num_pages == num_pages
    for tensor, values in zip(TENSORS, staged.values, strict=True):
        expected = page_values(num_pages)[tensor].flatten(0, 1).transpose(0, 1)
        assert torch.equal(values[:, : num_pages * SMALL.page_size], expected), tensor


@pytest.mark.parametrize(
    ("num_pages", "num_found", "reason", "end"),
    [
        (4, 4, Reason.DIVERGES, "landed"),
        (3, 4, Reason.LATE, "partly"),
        (0, 4, Reason.LATE, "failed"),
        (0, 4, Reason.SOONER, "recomputed"),
        (0, 0, Reason.DATA_PLANE, "missed"),
    ],
)
def test_the_outcome_follows_from_what_was_found_and_staged(
    num_pages: int, num_found: int, reason: str, end: str
) -> None:
    assert StagedValues(num_pages, num_found, torch.empty(0), reason=reason).end == end


def test_that_computing_is_sooner_is_told_before_what_a_lookup_noted() -> None:
    assert shortfall([Reason.DIVERGES, Reason.AUDIT, Reason.SOONER]) == Reason.SOONER
    assert shortfall([Reason.DIVERGES, Reason.LATE, Reason.TIMEOUT]) == Reason.LATE


def test_stagings_of_the_same_pages_are_one_until_the_last_is_released(url: str, launcher: Launcher) -> None:
    hashes = page_hashes(NUM_PAGES)
    with closing(open_plane(url, launcher, staging_bytes=NUM_PAGES * SMALL.page_bytes)) as plane:
        store(plane, hashes)
        stagings: list[Future[StagedValues]] = [Future() for _ in range(3)]
        works = [plane.stage(hashes, each.set_result) for each in stagings]

        def all_are_staged() -> bool:
            plane.step()
            return all(each.done() for each in stagings)

        plane.unstage(works[0])  # soon, perhaps while it is fetched for the others, which go on
        wait_until(all_are_staged)
        later, staged = stage(plane, [*hashes, *page_hashes(1, "longer")])
        for each in [*[each.result() for each in stagings[1:]], staged]:
            assert_staged(each, NUM_PAGES)
            assert each.values.k.data_ptr() == staged.values.k.data_ptr()
        for work in works[1:]:
            plane.unstage(work)
        plane.unstage(later)
        # There was room for one of them in all: a staging of other pages shows that nobody holds it any more.
        _, half = stage(plane, hashes[: NUM_PAGES // 2])
        assert half.num_pages == NUM_PAGES // 2


def test_each_staging_of_the_same_pages_has_its_own_reason(plane: DataPlane) -> None:
    """One prompt ends with these pages, another one goes on with others than those that are stored."""
    hashes = page_hashes(NUM_PAGES)
    store(plane, hashes)
    ends, diverges = hashes[:12], [*hashes[:12], *page_hashes(1, "other")]
    for first, then in ((ends, diverges), (diverges, ends)):
        stagings: list[Future[StagedValues]] = [Future(), Future()]
        works = [plane.stage(each, staged.set_result) for each, staged in zip((first, then), stagings, strict=True)]
        work, later = stage(plane, then)
        found = [*(each.result() for each in stagings), later]
        assert [each.num_pages for each in found] == [12] * 3
        assert [each.reason for each in found] == [
            Reason.DIVERGES if x is diverges else "" for x in (first, then, then)
        ]
        assert len({each.values.k.data_ptr() for each in found}) == 1
        for each in [*works, work]:
            plane.unstage(each)


def test_staged_pages_stay_readable_when_the_data_plane_has_ended(plane: DataPlane, launcher: Launcher) -> None:
    hashes = page_hashes(NUM_PAGES)
    store(plane, hashes[:12])
    _, staged = stage(plane, hashes)
    launcher.started[-1].kill()
    assert launcher.started[-1].join(WAIT_S)
    assert_staged(staged, 12)


class Turns:
    """Stagings that take turns, and the order in which they got theirs. 16 pages share the link, and 512 bytes are for
    several."""

    def __init__(self) -> None:
        config = parse_config({"store": "http://kv", "model_id": "m", "device": {"pool_share": 0.5}})
        self.turns = _Turns(config, replace(SMALL, page_size=8192 // 16), Room(1 << 10))
        self.began: list[Waiting] = []
        self.tasks = Tasks()

    async def begin(self, num_pages: int, num_bytes: int = 0, *, needs_link: bool = True) -> Waiting:
        """Pages that wait for their turn, unless that has come."""
        waiting = self.turns.enter(num_pages, num_bytes, needs_link=needs_link)
        self.tasks.begin(self._wait(waiting))
        await self.settle()
        return waiting

    async def _wait(self, waiting: Waiting) -> None:
        await self.turns.wait(waiting, time.monotonic() + WAIT_S)
        self.began.append(waiting)

    async def settle(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    async def end(self, *begun: Waiting) -> None:
        for each in begun:
            self.turns.end(each.turn.result())
        await self.settle()


@pytest.fixture
async def turns() -> AsyncIterator[Turns]:
    turns = Turns()
    yield turns
    await turns.tasks.cancel()


async def test_the_shortest_prompt_goes_first_and_short_ones_share_the_link(turns: Turns) -> None:
    first, longer, shorter = [await turns.begin(num_pages) for num_pages in (16, 40, 4)]
    in_memory = await turns.begin(14, needs_link=False)  # which waits for no link
    assert turns.began == [first, in_memory]
    assert turns.turns.pages_ahead == 16 + 40 + 4
    turns.turns.link_has_room(first.turn.result())
    await turns.settle()
    short = await turns.begin(6)
    assert turns.began == [first, in_memory, shorter, short]
    await turns.end(first, shorter, short)
    assert turns.began == [first, in_memory, shorter, short, longer]
    assert turns.turns.pages_ahead == 40


async def test_none_starves(turns: Turns) -> None:
    present = await turns.begin(16)
    long = await turns.begin(100)
    for _ in range(2 * 100 // AGEING_PAGES):
        await turns.begin(12)
        await turns.end(present)
        present = turns.began[-1]
    assert turns.began.index(long) == (100 - 12) // AGEING_PAGES


async def test_prompts_take_a_share_of_the_room_together_and_one_alone_takes_all(turns: Turns) -> None:
    all_of_it = await turns.begin(1, num_bytes=1 << 10)
    others = [await turns.begin(1, num_bytes=256) for _ in range(2)]
    assert turns.began == [all_of_it]
    turns.turns.shrink(all_of_it.turn.result(), 256)
    await turns.settle()
    assert turns.began == [all_of_it, others[0]]
    turns.turns.free(all_of_it.turn.result())
    await turns.settle()
    assert turns.began == [all_of_it, *others]


async def test_who_gets_no_turn_in_time_leaves_and_one_that_comes_at_the_end_is_given_back(turns: Turns) -> None:
    present = await turns.begin(16)
    with pytest.raises(TimeoutError):
        await turns.turns.wait(turns.turns.enter(2, 256, needs_link=True), time.monotonic() + 0.01)
    assert turns.turns.pages_ahead == 16
    waiting = turns.turns.enter(2, 256, needs_link=True)
    task = asyncio.create_task(turns.turns.wait(waiting, time.monotonic() + WAIT_S))
    await turns.settle()
    turns.turns.end(present.turn.result())
    assert turns.turns._used_bytes == 256
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert turns.turns._used_bytes == turns.turns.pages_ahead == 0
