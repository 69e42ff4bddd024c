"""Tests of the linker with SGLang's own tree: with each of its cores, where that could matter."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest

from harness.waiting import wait_until
from sgl_kvfetch.errors import StoreError
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


def test_a_stored_prompt_is_loaded_and_joins_the_tree(rig: Rig) -> None:
    tokens = rig.stored(prompt(0))
    request = rig.arrive(tokens)
    assert rig.is_parked(request)
    rig.await_unparked(request)
    assert request.host_hit_is_storage
    assert rig.admit(request) == [32]
    assert rig.holds(tokens, 32)
    rig.assert_nothing_held()


@pytest.mark.parametrize("is_before", [True, False], ids=["at its arrival", "at its admission"])
def test_a_prompt_of_which_the_tree_has_a_part_is_loaded_from_there_on(rig: Rig, is_before: bool) -> None:
    tokens = rig.stored(prompt(0))
    if is_before:
        rig.compute(tokens[:12])
    request = rig.arrive_staged(tokens)
    if not is_before:
        rig.compute(tokens[:12])
    assert rig.admit(request) == [20]
    assert rig.holds(tokens, 32)
    rig.assert_nothing_held()


@pytest.mark.parametrize("rid", ["\ud800", "x" * (1 << 20)])
def test_what_users_call_their_requests_is_cut(make: MakeRig, rid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_MOST_BYTES", 4096)
    rig = make()
    tokens = rig.stored(prompt(0))
    request = rig.arrive_staged(tokens, rid)
    assert rig.admit(request) == [32]
    assert status._state.recent[-1].request_id == label_of_request(rid)
    rig.assert_nothing_held()


def test_a_prompt_that_is_not_stored_is_computed_and_written(rig: Rig) -> None:
    tokens = prompt(0)
    request = rig.arrive_staged(tokens)
    assert rig.admit(request) == [0]
    rig.write_all()
    rig.flush()
    # A part that was written behind another one is found in its place.
    longer = tokens + prompt(1, 4)
    request = rig.arrive_staged(longer)
    assert rig.admit(request) == [32]
    rig.write_all()
    rig.flush()
    request = rig.arrive_staged(longer)
    assert rig.admit(request) == [48]
    assert rig.holds(longer, 48)
    rig.assert_nothing_held()


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
    assert not rig.is_parked(second)
    assert rig.admit(second, third) == [8, 0]
    assert rig.holds(longer, 40)
    rig.assert_nothing_held()


def test_followers_compute_with_the_request_whose_pages_are_not_stored(rig: Rig) -> None:
    first, second = rig.arrive(prompt(0)), rig.arrive(prompt(0) + prompt(1, 2))
    rig.await_unparked(first, second)
    assert rig.store.num_lookups <= 2  # the second one ends perhaps before it has begun
    assert rig.admit(first) == [0]
    assert rig.admit(second) == [0]
    rig.assert_nothing_held()


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
    rig.assert_nothing_held()


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
    rig.assert_nothing_held()


def test_a_load_that_was_queued_can_be_cancelled(make: MakeRig) -> None:
    rig = make()
    tokens = rig.stored(prompt(0))
    request = rig.arrive_staged(tokens)
    request.init_next_round_input(rig.cache)
    rig.load_back(request)
    slots = rig.cache.linker.private_load_indices[request.rid]
    rig.cache.release_aborted_request(request.cache_request_handle)
    rig.cache.token_to_kv_pool_allocator.free(slots)
    assert rig.cache.ready_to_load_host_cache() == -1
    rig.assert_nothing_held()


def test_a_prompt_that_would_take_too_much_memory_waits_for_those_before_it(make: MakeRig) -> None:
    rig = make(device={"pool_share": 16 * PAGE / 256})
    longer, shorter = prompt(0, 20), prompt(1, 8)
    rig.stored(longer)
    rig.stored(shorter)
    first = rig.arrive_staged(longer)
    second = rig.arrive(shorter)
    for _ in range(20):
        rig.step()
    assert rig.is_parked(second)
    assert rig.admit(first) == [20 * PAGE]
    rig.await_unparked(second)
    assert rig.admit(second) == [32]
    assert rig.holds(longer, 80)
    assert rig.holds(shorter, 32)
    rig.assert_nothing_held()


def test_what_left_the_pool_comes_back_from_memory(make: MakeRig) -> None:
    rig = make(memory_cache="1MiB")
    tokens = prompt(0)
    rig.compute(tokens)
    rig.write_all()
    rig.evict()
    num_lookups = rig.store.num_lookups
    rig.store.lookups.error = rig.store.reads.error = StoreError("io", "the network is down")
    for _ in range(2):
        request = rig.arrive_staged(tokens)
        assert rig.admit(request) == [32]
        assert rig.holds(tokens, 32)
        rig.evict()
    assert rig.store.num_lookups == num_lookups


def test_a_staged_request_is_held_back_while_the_pool_has_no_room_for_it(make: MakeRig) -> None:
    rig = make()
    tokens = rig.stored(prompt(0))
    request = rig.arrive_staged(tokens)
    needed = len(tokens) + 1 + 1 + PAGE  # the last token, which is always computed, a new one, and a page
    rig.linker.prefixes.hold_back(lambda: needed)
    assert rig.is_parked(request)
    rig.linker.prefixes.hold_back(lambda: needed + 1)
    assert not rig.is_parked(request)
    assert rig.linker.prefixes.take_changed()[-2:] == [request.cache_request_handle] * 2
    # Not for ever: others may go ahead only so often.
    for number in range(parking._MOST_AHEAD):
        rig.linker.prefixes.hold_back(lambda: 0)
        assert rig.is_parked(request)
        rig.linker.prefixes.leave(f"other {number}")
    rig.linker.prefixes.hold_back(lambda: 0)
    assert not rig.is_parked(request)
    assert rig.admit(request) == [32]
    rig.assert_nothing_held()


def test_a_staged_request_is_not_held_back_if_nothing_else_runs(make: MakeRig) -> None:
    rig = make()
    rig.stored(prompt(0))
    request = rig.arrive_staged(prompt(0))
    rig.linker.prefixes.hold_back(lambda: 0)
    assert rig.is_parked(request)
    rig.linker.prefixes.hold_back(lambda: math.inf)
    assert not rig.is_parked(request)
    rig.linker.prefixes.hold_back(lambda: 0)
    rig.linker.prefixes.leave(request.rid)
    assert not rig.is_parked(request)
    rig.assert_nothing_held()
