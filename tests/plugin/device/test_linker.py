"""Tests of the linker with SGLang's own tree: with each of its cores, where that could matter."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

from harness.waiting import wait_until
from sgl_kvfetch.keys import label_of_request
from sgl_kvfetch.plugin import status
from sgl_kvfetch.plugin.device import parking
from sgl_kvfetch.plugin.device.pools import DevicePages
from sgl_kvfetch.protocol import messages
from sgl_kvfetch.reasons import Reason
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.rig import PAGE, Rig, prompt
from tests.reasons import assert_counted

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("tree_has", ["nothing", "a part at its arrival", "a part at its admission"])
def test_a_stored_prompt_is_loaded_and_joins_the_tree(rig: Rig, tree_has: str) -> None:
    tokens = rig.stored(prompt(0))
    if tree_has == "a part at its arrival":
        rig.compute(tokens[:12])
    request = rig.arrive(tokens)
    assert rig.is_parked(request)
    rig.await_unparked(request)
    assert request.host_hit_is_storage
    if tree_has == "a part at its admission":
        rig.compute(tokens[:12])
    assert rig.admit(request) == [32 if tree_has == "nothing" else 20]
    assert rig.holds(tokens, 32)


@pytest.mark.parametrize("rid", ["\ud800", "x" * (1 << 20)])
def test_what_users_call_their_requests_is_cut(make: MakeRig, rid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_MOST_BYTES", 4096)
    rig = make()
    tokens = rig.stored(prompt(0))
    assert rig.admit(rig.arrive_staged(tokens, rid)) == [32]
    assert status._state.recent[-1].request_id == label_of_request(rid)


def test_requests_that_share_a_prefix_wait_until_one_of_them_has_brought_it(rig: Rig) -> None:
    shared = prompt(0)
    longer = shared + prompt(1, 2)
    rig.stored(longer)
    first, second, third = rig.arrive(shared), rig.arrive(longer), rig.arrive(shared)
    rig.await_unparked(first)
    wait_until(lambda: not rig.service._stager._turns.pages_ahead)  # the second one's own pages are staged, too
    rig.step()
    assert rig.is_parked(second)
    assert rig.is_parked(third)
    assert len(set(rig.store.data_reads)) == len(rig.store.data_reads)
    assert rig.admit(first) == [32]
    rig.await_unparked(second, third)
    assert rig.admit(second, third) == [8, 0]
    assert rig.holds(longer, 40)


def test_followers_compute_with_the_request_whose_pages_are_not_stored(rig: Rig) -> None:
    first, second = rig.arrive(prompt(0)), rig.arrive(prompt(0) + prompt(1, 2))
    rig.await_unparked(first, second)
    assert rig.store.num_lookups <= 2  # the second one ends perhaps before it has begun
    assert rig.admit(first) == [0]
    assert rig.admit(second) == [0]


@pytest.mark.parametrize("when", ["staging", "staged"])
def test_followers_of_a_request_that_is_gone_look_again(make: MakeRig, when: str) -> None:
    rig = make()
    shared = rig.stored(prompt(0))
    rig.store.reads.is_open = when == "staged"
    first, second = rig.arrive(shared), rig.arrive(shared)
    if when == "staged":
        rig.await_unparked(first)
    rig.linker.prefixes.leave(first.rid)
    rig.store.reads.is_open = True
    rig.await_unparked(second)
    assert rig.admit(second) == [32]
    assert rig.holds(shared, 32)


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_load_that_fails_is_tried_once_more_and_then_aborts_its_request(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, num_failures: int
) -> None:
    left, write_layer = [None] * num_failures, DevicePages.write_layer

    def fail(self: DevicePages, layer: int, *args: Any) -> None:
        if layer == 1 and left:
            left.pop()
            raise RuntimeError("no")
        write_layer(self, layer, *args)

    monkeypatch.setattr(DevicePages, "write_layer", fail)
    tokens = rig.stored(prompt(0))
    request = rig.arrive_staged(tokens)
    with assert_counted("load", Reason.INTERNAL) if num_failures > 1 else nullcontext():
        rig.admit(request)
    assert (request.discard_output_reason is None) == rig.holds(tokens, 32) == (num_failures == 1)
    assert rig.holds(tokens, PAGE) == (num_failures == 1)


def test_a_staged_request_is_held_back_while_the_pool_has_no_room_for_it(make: MakeRig) -> None:
    """Not for ever: others may go ahead only so often."""
    rig = make()
    tokens = rig.stored(prompt(0))
    request = rig.arrive_staged(tokens)
    needed = len(tokens) + 1 + 1 + PAGE  # the last token, which is always computed, a new one, and a page
    for free, is_held in ((needed, True), (needed + 1, False), (0, True), (math.inf, False)):
        rig.linker.prefixes.hold_back(partial(float, free))
        assert rig.is_parked(request) == is_held
        assert request.cache_request_handle in rig.linker.prefixes.take_changed()
    for number in range(parking._MOST_AHEAD):
        rig.linker.prefixes.hold_back(lambda: 0)
        assert rig.is_parked(request)
        rig.linker.prefixes.leave(f"other {number}")
    rig.linker.prefixes.hold_back(lambda: 0)
    assert rig.admit(request) == [32]
