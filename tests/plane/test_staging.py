"""Tests of staging: stored pages are restored into shared memory, where the engine takes them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.waiting import WAIT_S, wait_until
from sgl_kvfetch.metrics import shortfall
from sgl_kvfetch.plane.arena import Room
from sgl_kvfetch.plane.config import parse_config
from sgl_kvfetch.plane.engine_end import DataPlane
from sgl_kvfetch.plane.staging import StagedValues, _Staging, _Turns
from sgl_kvfetch.reasons import Reason
from sgl_kvfetch.types import TENSORS
from tests.plane.test_plane import NUM_PAGES, Launcher, launcher, open_plane, page_values, plane, store
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


def test_stored_pages_are_staged_layer_by_layer(plane: DataPlane) -> None:
    hashes = page_hashes(NUM_PAGES)
    store(plane, hashes[:12])
    _, staged = stage(plane, hashes)
    assert staged.end == "landed"
    assert_staged(staged, 12)


def test_nothing_is_staged_of_pages_that_are_not_stored(plane: DataPlane) -> None:
    _, staged = stage(plane, page_hashes(3, "other"))
    assert (staged.num_pages, staged.end, staged.reason) == (0, "missed", "")


@pytest.mark.parametrize(
    ("num_pages", "num_found", "reason", "end"),
    [
        (4, 4, "", "landed"),
        (4, 4, Reason.DIVERGES, "landed"),
        (3, 4, Reason.LATE, "partly"),
        (0, 4, Reason.LATE, "failed"),
        (0, 4, Reason.SOONER, "recomputed"),
        (0, 0, "", "missed"),
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
    assert shortfall([Reason.DIVERGES]) == Reason.DIVERGES
    assert shortfall([]) == ""


def test_stagings_of_the_same_pages_are_one_until_the_last_is_released(tmp_path: Path, launcher: Launcher) -> None:
    hashes = page_hashes(NUM_PAGES)
    with closing(open_plane(tmp_path, launcher, staging_bytes=NUM_PAGES * SMALL.page_bytes)) as plane:
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
        _, none = stage(plane, page_hashes(3, "other"))
        assert none.num_pages == 0
        assert_staged(staged, NUM_PAGES)
        plane.unstage(later)
        # There was room for one of them in all: a staging of other pages shows that nobody holds it any more.
        _, half = stage(plane, hashes[: NUM_PAGES // 2])
        assert half.num_pages == NUM_PAGES // 2


@pytest.mark.usefixtures("launcher")
def test_staged_pages_stay_readable_when_the_data_plane_has_ended(plane: DataPlane, launcher: Launcher) -> None:
    hashes = page_hashes(NUM_PAGES)
    store(plane, hashes)
    _, staged = stage(plane, hashes)
    launcher.started[-1].kill()
    assert launcher.started[-1].join(WAIT_S)
    assert_staged(staged, NUM_PAGES)


async def test_the_shortest_prompt_goes_first_while_another_one_fills_the_link() -> None:
    turns = _Turns(parse_config({"store": "file:///kv", "model_id": "m"}), SMALL, Room(1 << 20))
    order: list[int] = []

    async def take_turn(num_pages: int, **fields: Any) -> _Staging:
        turn = asyncio.get_running_loop().create_future()
        staging = _Staging({}, turn, num_pages=num_pages, num_bytes=num_pages, **fields)
        await turns.wait(staging, time.monotonic() + WAIT_S)
        order.append(num_pages)
        return staging

    fills = 8192 // SMALL.page_size
    first = await take_turn(fills)
    async with asyncio.TaskGroup() as group:
        longer = group.create_task(take_turn(fills - 1))
        shorter = group.create_task(take_turn(4))
        in_memory = group.create_task(take_turn(fills - 2, needs_link=False))
        await in_memory  # which waits for no link
        assert order == [fills, fills - 2]
        turns.link_has_room(first)
        turns.end(await shorter)
        await longer
    assert order == [fills, fills - 2, 4, fills - 1]
