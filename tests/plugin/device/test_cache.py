"""The cache driven as SGLang's scheduler drives it, on SGLang's own tree and pool. Whole engines are in tests/e2e."""

from __future__ import annotations

import random
import threading
import time
from array import array
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, EvictParams

from sgl_kvfetch.container.segment import SegmentReader
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.plugin.device.counts import DECISIONS, FLOWS, HELD_SLOTS, PARKED
from sgl_kvfetch.plugin.device.flow import Phase
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.rig import PAGE, WAIT_S, Rig, prompt

pytestmark = pytest.mark.filterwarnings("ignore")


def test_what_was_computed_comes_back(rig: Rig) -> None:
    tokens = prompt(0)
    rig.stored(tokens)
    handle = rig.arrive(tokens)
    assert not rig.cache.check_prefetch_progress(handle)
    rig.await_over(handle)
    assert rig.cache.protected_size() == len(tokens)  # until the request has it
    cached, loaded, lock = rig.admit(handle, tokens)
    assert (cached, loaded) == (32, 32)
    assert rig.holds(tokens, 32)
    rig.cache.unlock(lock)
    rig.assert_nothing_held()


def test_what_is_in_the_tree_is_not_fetched(rig: Rig) -> None:
    tokens = prompt(0)
    rig.stored(tokens)
    rig.compute(tokens[:16])
    assert rig.fetch(tokens) == (32, 16)
    assert rig.holds(tokens, 32)
    rig.settle()
    rig.assert_nothing_held()


def test_a_prompt_whose_first_half_is_stored(rig: Rig) -> None:
    stored, asked = prompt(0), prompt(0)[:16] + prompt(1)[:16]
    rig.stored(stored)
    assert rig.fetch(asked) == (16, 16)
    assert rig.holds(asked, 16)
    rig.assert_nothing_held()


def test_nothing_stored(rig: Rig) -> None:
    handle = rig.arrive(prompt(0))
    rig.await_over(handle)
    cached, loaded, _ = rig.admit(handle, prompt(0))
    assert (cached, loaded) == (0, 0)
    rig.assert_nothing_held()


def test_how_requests_end_is_counted(rig: Rig) -> None:
    def counts() -> dict[str, float]:
        samples = FLOWS.collect()[0].samples
        return {s.labels["end"]: s.value for s in samples if s.name.endswith("_total")}

    before = counts()
    rig.stored(prompt(0))
    rig.store.reads.is_open = False
    handles = [rig.arrive(prompt(0)), rig.arrive(prompt(1)), rig.arrive(prompt(0))]
    rig.settle(lambda: rig.phases() == [Phase.FETCHING, Phase.WAITING])
    rig.cache.step()
    assert PARKED._value.get() == 2
    assert HELD_SLOTS._value.get() == 0  # no bytes are here yet
    rig.abort(handles[2])
    rig.store.reads.is_open = True
    rig.settle(lambda: rig.cache.check_prefetch_progress(handles[0]))
    rig.abort(handles[0])
    rig.cache.step()
    assert PARKED._value.get() == HELD_SLOTS._value.get() == 0
    new = {end: count - before.get(end, 0) for end, count in counts().items()}
    assert {end: count for end, count in new.items() if count} == {"landed": 1, "missed": 1, "aborted": 1}


def test_short_tails_are_not_looked_up(rig: Rig) -> None:
    handle = rig.arrive(prompt(0)[: PAGE - 1])
    assert rig.cache.check_prefetch_progress(handle)
    assert rig.store.num_lookups == 0


def test_pages_are_fetched_once_for_requests_that_share_them(make: MakeRig) -> None:
    rig = make(device_pool_share=0.5)  # 32 pages: so many may be on the link together
    tokens, other = prompt(0, 12), prompt(1, 4)
    rig.stored(tokens)
    rig.stored(other)
    rig.store.reads.is_open = False
    first = rig.arrive(tokens[:32])
    rig.settle(lambda: rig.store.reads.num_waiting > 0)
    second, third = rig.arrive(tokens[:32]), rig.arrive(tokens)
    rig.settle(lambda: rig.phases() == [Phase.FETCHING, Phase.WAITING, Phase.WAITING])
    fourth = rig.arrive(other)  # which none of the others keeps waiting
    rig.settle(lambda: rig.phases() == [Phase.FETCHING, Phase.WAITING, Phase.WAITING, Phase.FETCHING])
    assert not any(rig.cache.check_prefetch_progress(h) for h in (first, second, third))
    rig.store.reads.is_open = True
    locks = []
    for handle, asked, expected in ((first, tokens[:32], 32), (second, tokens[:32], 0), (third, tokens, 16)):
        rig.await_over(handle)
        cached, loaded, lock = rig.admit(handle, asked)
        assert (cached, loaded) == (len(asked), expected)
        locks.append(lock)
    assert rig.holds(tokens, 48)
    rig.await_over(fourth)
    rig.abort(fourth)
    assert len(rig.store.data_reads) == len(set(rig.store.data_reads))
    for lock in locks:
        rig.cache.unlock(lock)
    rig.assert_nothing_held()


def test_a_follower_gets_what_its_aborted_leader_fetches(rig: Rig) -> None:
    tokens = prompt(0)
    rig.stored(tokens)
    rig.store.reads.is_open = False
    leader = rig.arrive(tokens)
    rig.settle(lambda: rig.phases() == [Phase.FETCHING])
    follower = rig.arrive(tokens)
    rig.settle(lambda: rig.phases() == [Phase.FETCHING, Phase.WAITING])
    rig.abort(leader)
    rig.store.reads.is_open = True
    rig.await_over(follower)
    cached, _, lock = rig.admit(follower, tokens)
    assert cached == 32
    assert rig.holds(tokens, 32)
    rig.cache.unlock(lock)
    rig.assert_nothing_held()


@pytest.mark.parametrize("moment", ["lookup", "transmit", "restore", "landed", "waiting"])
def test_an_abort_gives_everything_back(make: MakeRig, moment: str) -> None:
    rig = make(device_pool_share=0.15)  # of 256 slots: one prompt at a time
    tokens, other = prompt(0), prompt(1)
    rig.stored(tokens)
    rig.stored(other)
    rig.store.lookups.is_open = moment != "lookup"
    rig.store.reads.is_open = moment == "landed"
    rig.store.reads.num_let_through = int(moment == "restore")
    handle = rig.arrive(tokens)
    second = rig.arrive(other) if moment == "waiting" else None
    match moment:
        case "lookup":
            rig.settle(lambda: rig.store.lookups.num_waiting > 0)
        case "transmit" | "waiting":
            rig.settle(lambda: rig.phases() == [Phase.FETCHING, Phase.WAITING][: 2 if second else 1])
            assert rig.num_available == rig.num_slots
        case "restore":
            rig.settle(lambda: rig.num_available == rig.num_slots - 32)
        case "landed":
            rig.await_over(handle)
            assert rig.cache.protected_size() == 32
    if second is not None:
        rig.abort(second)
    rig.abort(handle)
    rig.settle()
    rig.assert_nothing_held()


@pytest.mark.parametrize("moment", ["lookup", "transmit", "restore", "landed"])
def test_a_reset_gives_everything_back_and_nothing_is_written_after(rig: Rig, moment: str) -> None:
    tokens = prompt(0)
    rig.stored(tokens)
    rig.store.lookups.is_open = moment != "lookup"
    rig.store.reads.is_open = moment == "landed"
    rig.store.reads.num_let_through = int(moment == "restore")
    handle = rig.arrive(tokens)
    match moment:
        case "lookup":
            rig.settle(lambda: rig.store.lookups.num_waiting > 0)
        case "transmit":
            rig.settle(lambda: rig.phases() == [Phase.FETCHING])
        case "restore":
            rig.settle(lambda: rig.num_available == rig.num_slots - 32)
        case "landed":
            rig.await_over(handle)
    rig.cache.reset()
    assert rig.num_available == rig.num_slots or moment == "landed"
    rig.flush()
    rig.store.lookups.is_open = rig.store.reads.is_open = True
    assert rig.cache.check_prefetch_progress(handle)
    rig.settle()
    rig.backend._loop.run(rig.backend._client.writer.drain(), 5)
    assert all(bool(buffer.isnan().all()) for buffer in rig.pool.k_buffer)
    rig.assert_nothing_held()
    # And it works on.
    assert rig.fetch(tokens) == (32, 32)


def test_nothing_is_written_after_a_reset_even_if_it_is_decoded_already(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(0)
    rig.stored(tokens)
    decoding, reset, loop_is_free = threading.Semaphore(0), threading.Event(), threading.Event()
    dequantise = SegmentReader.dequantise_cell

    def dequantise_late(*args: Any) -> Any:
        decoding.release()
        assert reset.wait(WAIT_S)
        return dequantise(*args)

    async def keep_the_loop_busy() -> None:
        loop_is_free.wait(WAIT_S)  # so that it cannot end the fetch itself

    monkeypatch.setattr(SegmentReader, "dequantise_cell", dequantise_late)
    rig.arrive(tokens)
    rig.settle(lambda: decoding.acquire(blocking=False))
    rig.backend._loop.submit(keep_the_loop_busy())
    rig.flush()
    reset.set()
    rig.backend._fetcher.close()
    assert all(bool(buffer.isnan().all()) for buffer in rig.pool.k_buffer)
    loop_is_free.set()


def test_a_store_that_hangs_costs_its_deadline(make: MakeRig) -> None:
    rig = make(fetch_timeout_s=0.2, lookup_timeout_s=0.2)
    tokens = prompt(0)
    rig.stored(tokens)
    rig.store.reads.is_open = False
    assert rig.fetch(tokens) == (0, 0)
    rig.settle()
    rig.assert_nothing_held()
    rig.store.lookups.is_open = False
    assert rig.fetch(tokens) == (0, 0)
    rig.assert_nothing_held()


def test_a_store_that_fails(rig: Rig) -> None:
    tokens = prompt(0)
    rig.stored(tokens)
    rig.store.reads.error = StoreError("server", "no")
    assert rig.fetch(tokens) == (0, 0)
    rig.assert_nothing_held()


def test_fetches_keep_to_their_share(make: MakeRig) -> None:
    rig = make(device_pool_share=0.2)  # 51 slots: 48 in whole pages
    first, second = prompt(0), prompt(1)
    rig.stored(first)
    rig.stored(second)
    one = rig.arrive(first)
    rig.await_over(one)
    two = rig.arrive(second)
    rig.settle(lambda: rig.phases() == [Phase.LANDED, Phase.FETCHING])
    for _ in range(100):
        rig.cache.step()
    assert not rig.cache.check_prefetch_progress(two)
    assert rig.cache._parts is not None
    assert rig.cache._parts.fetches.held_tokens == 32
    rig.cache.unlock(rig.admit(one, first)[2])
    rig.await_over(two)
    assert rig.admit(two, second)[:2] == (32, 32)


def test_a_prefix_longer_than_the_share_is_fetched_in_rounds(make: MakeRig) -> None:
    rig = make(device_pool_share=0.1)  # 25 slots: 24 in whole pages
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
    rig = make(device_pool_share=0.001)
    rig.stored(prompt(0, 3))
    assert rig.fetch(prompt(0, 3)) == (12, 12)


@pytest.mark.parametrize("is_in_time", [True, False])
def test_a_round_that_finds_no_room_waits_as_long_as_the_deadline_allows(make: MakeRig, is_in_time: bool) -> None:
    rig = make(num_slots=64, device_pool_share=0.4, mode="read_only", fetch_timeout_s=20.0 if is_in_time else 0.5)
    writer = make(num_slots=256)
    tokens = prompt(0, 16)
    writer.stored(tokens)
    busy = rig.cache.lock(rig.compute(prompt(1, 8)))
    handle = rig.arrive(tokens)
    rig.settle(lambda: rig.cache.protected_size() == 32 + 2 * 16)  # 16 slots are a round
    assert not rig.cache.check_prefetch_progress(handle)
    if is_in_time:
        rig.cache.unlock(busy)
    rig.await_over(handle)
    cached, loaded, lock = rig.admit(handle, tokens)
    assert (cached, loaded) == ((64, 64) if is_in_time else (32, 32))
    assert rig.holds(tokens, cached)
    rig.cache.unlock(lock)
    if not is_in_time:
        rig.cache.unlock(busy)
    rig.settle()
    rig.assert_nothing_held()


def test_fetches_that_keep_each_other_from_their_slots(make: MakeRig) -> None:
    """Each has landed a round, and the pool has none for either. The later one does without its rest."""
    rig = make(num_slots=64, device_pool_share=1.0, round_tokens=16, mode="read_only")
    writer = make(num_slots=256)
    prompts = [prompt(0, 12), prompt(1, 12)]
    for tokens in prompts:
        writer.stored(tokens)
    before = FLOWS.labels("full_pool")._value.get()
    link = rig.backend._client.fetcher.link  # so fast that there is room for both
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
    assert FLOWS.labels("full_pool")._value.get() == before + 1


@pytest.mark.parametrize("moment", [0, 24, 48])
def test_an_abort_between_rounds(make: MakeRig, moment: int) -> None:
    rig = make(device_pool_share=0.1)
    tokens = prompt(0, 16)
    rig.stored(tokens)
    rig.store.reads.is_open = bool(moment)
    handle = rig.arrive(tokens)
    rig.settle(lambda: rig.phases() == [Phase.FETCHING] and rig.cache.protected_size() >= moment)
    rig.abort(handle)
    rig.settle()
    rig.assert_nothing_held()


def test_a_fetch_evicts_what_nobody_uses(make: MakeRig) -> None:
    rig = make(num_slots=96, mode="read_write")
    tokens = prompt(0, 6)
    rig.stored(tokens)
    rig.compute(prompt(1, 24))
    rig.settle()
    assert rig.num_available == 0
    assert rig.fetch(tokens) == (24, 24)
    assert rig.holds(tokens, 24)


def test_a_full_pool_makes_it_wait(make: MakeRig) -> None:
    rig = make(num_slots=96)
    tokens = prompt(0, 6)
    rig.stored(tokens)
    busy = rig.cache.lock(rig.compute(prompt(1, 24)))
    handle = rig.arrive(tokens)
    rig.settle(lambda: rig.phases() == [Phase.FETCHING])
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


def test_nothing_lands_after_the_weights_changed(rig: Rig) -> None:
    tokens = prompt(0)
    rig.stored(tokens)
    rig.store.reads.is_open = False
    handle = rig.arrive(tokens)
    rig.settle(lambda: rig.phases() == [Phase.FETCHING])
    rig.backend.access.suspend("other weights")
    rig.store.reads.is_open = True
    rig.await_over(handle)
    assert rig.admit(handle, tokens)[:2] == (0, 0)
    rig.settle()
    rig.assert_nothing_held()
    rig.compute(tokens)
    assert not rig.cache.has_pending_cache_operations()
    assert rig.cache.check_prefetch_progress(rig.arrive(prompt(1)))


def test_pages_that_are_written_once_are_not_written_again(rig: Rig) -> None:
    tokens = prompt(0, 12)
    rig.compute(tokens[:32])
    rig.settle()
    assert rig.cache._parts is not None
    copies = rig.cache._parts.writes._copies
    rig.cache._parts.writes.inserted("again", rig.compute(tokens[:32]))
    assert not copies
    rig.compute(tokens)
    assert len(copies) == 1
    rig.settle()


def test_pages_that_were_dropped_are_written_when_they_come_again(make: MakeRig) -> None:
    rig = make(write_queue_bytes=1 << 20)
    tokens = prompt(0)
    assert rig.backend._client.writer.reserve(1 << 20, 0)
    rig.compute(tokens)
    rig.settle()
    rig.backend._client.writer.release(1 << 20)
    rig.assert_nothing_held()
    rig.stored(tokens)
    assert rig.fetch(tokens) == (32, 32)


def test_pages_that_the_store_lost_are_written_again(rig: Rig) -> None:
    tokens = prompt(0)
    rig.stored(tokens)
    rig.backend.clear()
    assert rig.fetch(tokens) == (0, 0)
    rig.stored(tokens)
    assert rig.fetch(tokens) == (32, 32)


def test_what_other_adapters_computed_is_not_ours(rig: Rig) -> None:
    """The namespace of SGLang's tree is part of the page hashes, as in host mode."""
    tokens = prompt(0)
    rig.stored(tokens)
    handle = CacheRequestHandle("adapter", 0)
    rig.cache.prefetch_from_storage(
        handle, rig.cache.root_node_handle(), array("q", tokens), None, None, extra_key="adapter"
    )
    rig.await_over(handle)
    assert rig.cache.pop_prefetch_loaded_span(handle) == (0, None)


def test_aborts_at_random_moments(make: MakeRig) -> None:
    rig = make(num_slots=512, device_pool_share=0.5)
    rng = random.Random(0)
    prompts = [prompt(seed % 3)[:16] + prompt(seed, 12) for seed in range(6)]
    for tokens in prompts:
        rig.stored(tokens)
    alive: dict[object, list[int]] = {}
    num_aborted = num_admitted = 0
    while num_aborted < 500:
        if len(alive) < 8 and rng.random() < 0.5:
            tokens = rng.choice(prompts)
            alive[rig.arrive(tokens)] = tokens
        rig.store.reads.is_open = rng.random() < 0.7
        rig.store.lookups.is_open = rng.random() < 0.8
        for _ in range(rng.randrange(4)):
            time.sleep(0.001)
            rig.cache.step()
        if alive and rng.random() < 0.4:
            handle = rng.choice(list(alive))
            del alive[handle]
            rig.abort(handle)  # type: ignore[arg-type]
            num_aborted += 1
        for handle in [h for h in alive if rig.cache.check_prefetch_progress(h)]:
            if rng.random() < 0.3:
                cached, _, lock = rig.admit(handle, alive.pop(handle))  # type: ignore[arg-type]
                rig.cache.unlock(lock)
                num_admitted += cached > 0
        if rng.random() < 0.05:
            rig.cache.evict(EvictParams(num_tokens=256))
    for handle in alive:
        rig.abort(handle)  # type: ignore[arg-type]
    rig.store.reads.is_open = rig.store.lookups.is_open = True
    rig.settle()
    rig.assert_nothing_held()
    assert num_admitted > 0
    for tokens in prompts:
        handle = rig.arrive(tokens)
        rig.await_over(handle)
        cached, _, lock = rig.admit(handle, tokens)
        assert cached == len(tokens)
        assert rig.holds(tokens, cached)
        rig.cache.unlock(lock)


def test_what_is_computed_faster_is_not_fetched(make: MakeRig) -> None:
    rig = make(recompute="auto")
    tokens = prompt(0)
    rig.stored(tokens)
    assert rig.cache.prefill_speed.seconds_for(32) is None
    assert rig.fetch(tokens) == (32, 32)
    rig.flush()
    for num_tokens in (10_000, 20_000, 30_000, 40_000):
        rig.cache.prefill_speed.add(num_tokens, num_tokens * 1e-9)
    before = FLOWS.labels("recomputed")._value.get()
    assert rig.fetch(tokens) == (0, 0)
    assert FLOWS.labels("recomputed")._value.get() == before + 1
    assert DECISIONS.labels("recompute", "decoder")._value.get() > 0
    # And what the store has is not written again.
    assert rig.cache._parts is not None
    rig.compute(tokens)
    assert not rig.cache._parts.writes._copies
    rig.settle()
    for num_tokens in range(10_000, 40_000, 1000):
        rig.cache.prefill_speed.add(num_tokens, num_tokens * 1.0)
    rig.flush()
    assert rig.fetch(tokens) == (32, 32)


def test_the_rest_is_computed_where_that_has_become_faster(make: MakeRig) -> None:
    rig = make(recompute="auto", round_tokens=16)
    tokens = prompt(0)
    rig.stored(tokens)
    warm = rig.arrive(tokens[:16])
    rig.await_over(warm)
    rig.abort(warm)
    rig.flush()
    rig.store.reads.is_open = False
    rig.store.reads.lets_through = lambda name, start: start == 0
    handle = rig.arrive(tokens)
    rig.settle(lambda: rig.phases() == [Phase.FETCHING])
    for num_tokens in (10_000, 20_000, 30_000, 40_000):
        rig.cache.prefill_speed.add(num_tokens, num_tokens * 1e-9)
    rig.store.reads.is_open = True
    rig.await_over(handle)
    cached, loaded, lock = rig.admit(handle, tokens)
    assert (cached, loaded) == (16, 16)
    assert rig.holds(tokens, 16)
    rig.cache.unlock(lock)
    rig.settle()
    rig.assert_nothing_held()


def test_requests_that_run_get_what_is_kept_for_those_that_wait(make: MakeRig) -> None:
    rig = make(num_slots=144, mode="read_only", device_pool_share=1.0)
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


def test_fetches_leave_what_requests_that_run_will_need(make: MakeRig) -> None:
    rig = make(num_slots=96)
    tokens = prompt(0, 6)
    rig.stored(tokens)
    handle = rig.arrive(tokens)
    deadline_s = time.monotonic() + 0.5
    while time.monotonic() < deadline_s:
        rig.cache.step(lambda: 96 - 10)
        time.sleep(0.001)
    assert not rig.cache.check_prefetch_progress(handle)
    assert rig.num_available == 96
    rig.await_over(handle)
    assert rig.holds(tokens, 24)


def test_requests_behind_a_store_that_hangs_wait_one_deadline_not_one_each(make: MakeRig) -> None:
    rig = make(fetch_timeout_s=1.0, round_tokens=32)
    prompts = [prompt(seed) for seed in range(6)]
    for tokens in prompts:
        rig.stored(tokens)
    rig.store.reads.is_open = False
    begin_s = time.monotonic()
    handles = [rig.arrive(tokens) for tokens in prompts]
    rig.settle(lambda: all(rig.cache.check_prefetch_progress(handle) for handle in handles))
    assert time.monotonic() - begin_s < 3
    rig.settle()
    rig.assert_nothing_held()


def test_a_fetch_that_ended_wants_no_slots(make: MakeRig) -> None:
    """Even if both are heard of in one step, in a full pool."""
    rig = make(num_slots=96, mode="read_only")
    writer = make(num_slots=256)
    tokens = prompt(0, 16)
    writer.stored(tokens)
    busy = rig.cache.lock(rig.compute(prompt(1, 24)))
    rig.store.reads.is_open = False
    handle = rig.arrive(tokens)
    rig.settle(lambda: len(set(rig.store.data_reads)) >= 4)
    rig.store.reads.lets_through = lambda name, start: start > 0
    time.sleep(0.2)  # bytes are here
    rig.store.reads.error = StoreError("server", "no")
    rig.store.reads.is_open = True
    time.sleep(0.2)  # and it is over
    rig.await_over(handle)
    assert rig.admit(handle, tokens)[:2] == (0, 0)
    rig.cache.unlock(busy)
    rig.settle()
    rig.assert_nothing_held()


def test_a_follower_goes_on_as_soon_as_its_own_pages_have_landed(make: MakeRig) -> None:
    rig = make(round_tokens=16)
    tokens = prompt(0, 16)
    rig.stored(tokens)
    rig.store.reads.is_open = False
    leader = rig.arrive(tokens)
    rig.settle(lambda: len(set(rig.store.data_reads)) >= 4)
    starts = sorted({start for _, start in rig.store.data_reads})
    follower = rig.arrive(tokens[:8])
    rig.settle(lambda: rig.phases() == [Phase.FETCHING, Phase.WAITING])
    rig.store.reads.lets_through = lambda name, start: start in starts[:2]
    rig.await_over(follower)
    assert not rig.cache.check_prefetch_progress(leader)
    cached, _, lock = rig.admit(follower, tokens[:8])
    assert cached == 8
    rig.cache.unlock(lock)
    rig.store.reads.is_open = True
    rig.await_over(leader)
    assert rig.admit(leader, tokens)[0] == 64
