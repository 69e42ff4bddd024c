"""Tests of staging: stored pages are restored into shared memory, where the engine takes them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future
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
from tests.plane.test_plane import NUM_PAGES, Launcher, launcher, page_values, plane, store
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
        staging = _Staging(turn, num_pages=num_pages, num_bytes=num_pages, **fields)
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
