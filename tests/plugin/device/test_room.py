"""Tests of fetches and the pool: rounds, the fetches' share, and which requests give up slots."""

from __future__ import annotations

import time

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from harness.metrics import own_metric
from harness.waiting import LoopClock, wait_until
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.plugin.device.fetch_state import State
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.rig import Rig, prompt

pytestmark = pytest.mark.filterwarnings("ignore")


def test_fetches_keep_to_their_share(make: MakeRig) -> None:
    rig = make(device={"pool_share": 0.2})  # 51 slots: 48 in whole pages
    first, second = prompt(0), prompt(1)
    rig.stored(first)
    rig.stored(second)
    one = rig.arrive(first)
    rig.await_over(one)
    two = rig.arrive(second)
    rig.settle(lambda: rig.states() == [State.LANDED, State.AWAITING_SLOTS])
    for _ in range(100):
        rig.cache.step()
    assert not rig.cache.check_prefetch_progress(two)
    assert rig.parts.fetches.held_tokens == 32
    rig.cache.unlock(rig.admit(one, first)[2])
    rig.await_over(two)
    assert rig.admit(two, second)[:2] == (32, 32)


def test_a_prefix_longer_than_the_share_is_fetched_in_rounds(make: MakeRig) -> None:
    rig = make(device={"pool_share": 0.1})  # 25 slots: 24 in whole pages
    tokens = prompt(0, 16)
    rig.stored(tokens)
    handle = rig.arrive(tokens)
    most_being_filled = 0

    def is_over() -> bool:
        nonlocal most_being_filled
        cache = rig.cache
        being_filled = rig.num_slots - rig.num_available - cache.evictable_size() - cache.protected_size()
        most_being_filled = max(most_being_filled, being_filled)
        return rig.cache.check_prefetch_progress(handle)

    rig.settle(is_over)
    assert most_being_filled <= 24
    cached, loaded, lock = rig.admit(handle, tokens)
    assert (cached, loaded) == (64, 64)
    assert rig.holds(tokens, 64)
    rig.cache.unlock(lock)
    rig.assert_nothing_held()


def test_the_smallest_share_is_a_page(make: MakeRig) -> None:
    rig = make(device={"pool_share": 0.001})
    rig.stored(prompt(0, 3))
    assert rig.fetch(prompt(0, 3)) == (12, 12)


async def pass_deadline() -> None:
    """On the data plane's event loop."""
    await LoopClock().advance(600)


@pytest.mark.parametrize("is_in_time", [True, False])
def test_a_round_waits_for_slots_until_the_deadline(make: MakeRig, is_in_time: bool) -> None:
    rig = make(num_slots=64, mode="read_only", device={"pool_share": 0.4})
    writer = make(num_slots=256)
    tokens = prompt(0, 16)
    writer.stored(tokens)
    busy = rig.cache.lock(rig.compute(prompt(1, 8)))
    handle = rig.arrive(tokens)
    # 16 slots are a round; the deadline counts from when the data plane has begun.
    rig.settle(lambda: rig.cache.protected_size() == 32 + 2 * 16 and len(rig.store.data_reads) > 0)
    assert not rig.cache.check_prefetch_progress(handle)
    if is_in_time:
        rig.cache.unlock(busy)
    else:
        rig.served.run(pass_deadline())
    rig.await_over(handle)
    cached, loaded, lock = rig.admit(handle, tokens)
    assert (cached, loaded) == ((64, 64) if is_in_time else (32, 32))
    assert rig.holds(tokens, cached)
    rig.cache.unlock(lock)
    if not is_in_time:
        rig.cache.unlock(busy)
    rig.settle()
    rig.assert_nothing_held()


def test_fetches_do_not_deadlock_over_slots(make: MakeRig) -> None:
    """Each fetch has landed a round, and the pool has no slots for another. The later fetch gives up its rest."""
    rig = make(num_slots=64, mode="read_only", device={"pool_share": 1.0, "round_tokens": 16})
    writer = make(num_slots=256)
    prompts = [prompt(0, 12), prompt(1, 12)]
    for tokens in prompts:
        writer.stored(tokens)
    before = own_metric("sgl_kvfetch_device_requests_total", end="full_pool")
    link = rig.service.client.fetcher.link  # so fast that there is room for both
    link.started(1 << 30)
    link.ended(1 << 30, time.monotonic() - 1e-3, is_whole=True)
    rig.store.reads.is_open = False
    handles = [rig.arrive(tokens) for tokens in prompts]
    rig.settle(lambda: len(set(rig.store.data_reads)) >= 2 * 6)  # spans
    starts = {name: sorted(s for n, s in rig.store.data_reads if n == name) for name, _ in rig.store.data_reads}
    rig.store.reads.lets_through = lambda name, start: len(starts[name]) == 4  # the first two rounds' segment
    rig.settle(lambda: rig.cache.protected_size() == 2 * 32)
    rig.store.reads.is_open = True
    rig.settle(lambda: any(rig.cache.check_prefetch_progress(h) for h in handles))
    second = max(handles, key=rig.cache.check_prefetch_progress)
    assert rig.admit(second, prompts[handles.index(second)])[:2] == (32, 32)
    rig.cache.reset()
    assert own_metric("sgl_kvfetch_device_requests_total", end="full_pool") == before + 1


@pytest.mark.parametrize("moment", [0, 24, 48])
def test_an_abort_between_rounds(make: MakeRig, moment: int) -> None:
    rig = make(device={"pool_share": 0.1})
    tokens = prompt(0, 16)
    rig.stored(tokens)
    rig.store.reads.is_open = bool(moment)
    handle = rig.arrive(tokens)
    rig.settle(lambda: rig.states() != [State.LOOKUP] and rig.cache.protected_size() >= moment)
    rig.abort(handle)
    rig.settle()
    rig.assert_nothing_held()


def test_a_fetch_evicts_unused_prefixes(make: MakeRig) -> None:
    rig = make(num_slots=96, mode="read_write")
    tokens = prompt(0, 6)
    rig.stored(tokens)
    rig.compute(prompt(1, 24))
    rig.settle()
    assert rig.num_available == 0
    assert rig.fetch(tokens) == (24, 24)
    assert rig.holds(tokens, 24)


def test_a_fetch_waits_while_the_pool_is_full(make: MakeRig) -> None:
    rig = make(num_slots=96)
    tokens = prompt(0, 6)
    rig.stored(tokens)
    busy = rig.cache.lock(rig.compute(prompt(1, 24)))
    handle = rig.arrive(tokens)
    rig.settle(lambda: rig.states() == [State.AWAITING_SLOTS])
    for _ in range(100):
        rig.cache.step()
    assert not rig.cache.check_prefetch_progress(handle)
    rig.cache.unlock(busy)
    rig.await_over(handle)
    assert rig.holds(tokens, 24)


def test_landed_prefixes_make_way_when_nobody_is_admitted(rig: Rig) -> None:
    tokens = prompt(0)
    rig.stored(tokens)
    landed = rig.arrive(tokens)
    rig.await_over(landed)
    for _ in range(200):  # the scheduler tries requests, and none fits
        rig.cache.check_prefetch_progress(landed)
        rig.cache.step()
    assert rig.cache.protected_size() == 0
    rig.cache.evict(EvictParams(num_tokens=32))
    assert rig.cache.check_prefetch_progress(landed)
    rig.abort(landed)
    rig.assert_nothing_held()


def test_running_requests_get_slots_held_for_waiting_ones(make: MakeRig) -> None:
    rig = make(num_slots=144, mode="read_only", device={"pool_share": 1.0})
    writer = make(num_slots=256)
    landed, fetched = prompt(0), prompt(1)
    for tokens in (landed, fetched):
        writer.stored(tokens)
    one = rig.arrive(landed)
    rig.await_over(one)
    rig.store.reads.is_open = False
    rig.store.reads.num_let_through = 1
    two = rig.arrive(fetched)
    rig.settle(lambda: rig.num_available == 144 - 64)
    allocator = rig.cache.token_to_kv_pool_allocator
    allocator.evict_to_free_tokens(rig.cache, 144 - 40)  # the landed one gives way first
    assert allocator.available_size() == 144 - 32
    assert rig.cache.check_prefetch_progress(one)
    assert not rig.cache.check_prefetch_progress(two)
    allocator.evict_to_free_tokens(rig.cache, 144)
    assert allocator.available_size() == 144
    rig.store.reads.is_open = True
    assert rig.cache.check_prefetch_progress(two)
    rig.settle()
    rig.assert_nothing_held()
    assert rig.admit(two, fetched)[:2] == (0, 0)


def test_fetches_leave_the_slots_that_running_requests_will_need(make: MakeRig) -> None:
    rig = make(num_slots=96)
    tokens = prompt(0, 6)
    rig.stored(tokens)
    handle = rig.arrive(tokens)
    wanting = 0

    def reserved() -> int:
        """What running requests are expected to need; asked for by a fetch that wants slots."""
        nonlocal wanting
        wanting += 1
        return 96 - 10

    def is_refused() -> bool:
        rig.cache.step(reserved)
        return wanting >= 10

    wait_until(is_refused, poll_s=0.001)
    assert not rig.cache.check_prefetch_progress(handle)
    assert rig.num_available == 96
    rig.await_over(handle)
    assert rig.holds(tokens, 24)


def num_transmitted() -> float:
    return own_metric("sgl_kvfetch_stage_seconds_count", stage="transmit")


def num_misses() -> float:
    return own_metric("sgl_kvfetch_misses_total", stage="fetch", reason="server")


def test_a_fetch_that_has_ended_gets_no_slots(make: MakeRig) -> None:
    """Even if the bytes and the end are reported in the same step, in a full pool."""
    rig = make(num_slots=96, mode="read_only")
    writer = make(num_slots=256)
    tokens = prompt(0, 16)
    writer.stored(tokens)
    busy = rig.cache.lock(rig.compute(prompt(1, 24)))
    rig.store.reads.is_open = False
    handle = rig.arrive(tokens)
    rig.settle(lambda: len(set(rig.store.data_reads)) >= 4)
    num_read, num_failed = num_transmitted(), num_misses()
    rig.store.reads.lets_through = lambda name, start: start > 0
    wait_until(lambda: num_transmitted() > num_read)  # bytes are here,
    rig.store.reads.error = StoreError("server", "no")
    rig.store.reads.is_open = True
    wait_until(lambda: num_misses() > num_failed)  # and it is over,
    rig.hear_plane()  # which is reported
    rig.await_over(handle)
    assert rig.admit(handle, tokens)[:2] == (0, 0)
    rig.cache.unlock(busy)
    rig.settle()
    rig.assert_nothing_held()
