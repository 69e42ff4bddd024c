"""Prefixes that would be computed faster than they could be fetched."""

from __future__ import annotations

import time

import pytest

from harness.metrics import own_metric
from harness.waiting import WAIT_S
from sgl_kvfetch.plugin.device.fetch_state import State
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.rig import prompt

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_prefix_that_is_computed_faster_is_not_fetched(make: MakeRig) -> None:
    rig = make(recompute="auto")
    tokens = prompt(0)
    rig.stored(tokens)
    assert rig.cache.prefill_meter.speed.seconds_for(32) is None
    assert rig.fetch(tokens) == (32, 32)
    rig.flush()
    for num_tokens in (10_000, 20_000, 30_000, 40_000):
        rig.cache.prefill_meter.speed.add_batch(num_tokens, num_tokens * 1e-9)
    before = own_metric("sgl_kvfetch_device_requests_total", end="recomputed")
    assert rig.fetch(tokens) == (0, 0)
    assert own_metric("sgl_kvfetch_device_requests_total", end="recomputed") == before + 1
    assert own_metric("sgl_kvfetch_decisions_total", decision="recompute", reason="decoder") > 0
    # Pages that the store has are not written again.
    rig.compute(tokens)
    assert not rig.cache.has_pending_cache_operations()
    rig.settle()
    for num_tokens in range(10_000, 40_000, 1000):
        rig.cache.prefill_meter.speed.add_batch(num_tokens, num_tokens * 1.0)
    rig.flush()
    assert rig.fetch(tokens) == (32, 32)


def test_a_prefix_is_fetched_while_the_engine_is_busy_with_other_prompts(make: MakeRig) -> None:
    """It would wait for the engine, so a link that is slower than the engine brings it sooner."""
    rig = make(recompute="auto")
    tokens = prompt(0)
    rig.stored(tokens)
    assert rig.fetch(tokens) == (32, 32)
    rig.flush()
    meter = rig.cache.prefill_meter
    for num_tokens in (10_000, 20_000, 30_000, 40_000):
        meter.speed.add_batch(num_tokens, num_tokens * 1e-9)
    meter.queue.add(WAIT_S, time.monotonic())
    assert rig.fetch(tokens) == (32, 32)
    rig.flush()
    meter.queue.clear()
    assert rig.fetch(tokens) == (0, 0)


def test_prompts_that_are_computed_keep_the_engine_busy(make: MakeRig) -> None:
    rig = make(recompute="auto")
    meter = rig.cache.prefill_meter
    for num_tokens in (16, 24, 32, 40):
        meter.speed.add_batch(num_tokens, num_tokens * 100.0)
    assert rig.fetch(prompt(0)) == (0, 0)  # is not stored
    assert 0 < meter.queue.seconds(time.monotonic()) <= 32 * 100


def test_the_rest_is_computed_once_that_is_faster(make: MakeRig) -> None:
    rig = make(device={"round_tokens": 16}, recompute="auto")
    tokens = prompt(0)
    rig.stored(tokens)
    warm = rig.arrive(tokens[:16])
    rig.await_over(warm)
    rig.abort(warm)
    rig.flush()
    rig.store.reads.is_open = False
    rig.store.reads.lets_through = lambda name, start: start == 0
    handle = rig.arrive(tokens)
    rig.settle(lambda: rig.states() == [State.AWAITING_BYTES])
    for num_tokens in (10_000, 20_000, 30_000, 40_000):
        rig.cache.prefill_meter.speed.add_batch(num_tokens, num_tokens * 1e-9)
    rig.store.reads.is_open = True
    rig.await_over(handle)
    cached, loaded, lock = rig.admit(handle, tokens)
    assert (cached, loaded) == (16, 16)
    assert rig.holds(tokens, 16)
    rig.cache.unlock(lock)
    rig.settle()
    rig.assert_nothing_held()
