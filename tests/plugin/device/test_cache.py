"""Tests that call the cache as SGLang's scheduler does, on SGLang's own tree and pool. tests/e2e has whole engines."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from array import array
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, EvictParams

from harness.metrics import own_metric
from harness.waiting import WAIT_S
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.metrics import DEVICE_REQUESTS
from sgl_kvfetch.plugin.device.fetch_state import State
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.rig import PAGE, Rig, prompt

pytestmark = pytest.mark.filterwarnings("ignore")


def test_computed_prefixes_are_fetched_again(rig: Rig) -> None:
    tokens = prompt(0)
    rig.stored(tokens)
    handle = rig.arrive(tokens)
    assert not rig.cache.check_prefetch_progress(handle)
    rig.await_over(handle)
    assert rig.cache.protected_size() == len(tokens)  # until the request has its own lock
    cached, loaded, lock = rig.admit(handle, tokens)
    assert (cached, loaded) == (32, 32)
    assert rig.holds(tokens, 32)
    rig.cache.unlock(lock)
    rig.assert_nothing_held()


def test_a_prefix_in_the_tree_is_not_fetched(rig: Rig) -> None:
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


def test_the_ends_of_requests_are_counted(rig: Rig) -> None:
    def counts() -> dict[str, float]:
        samples = next(iter(DEVICE_REQUESTS.collect())).samples
        return {s.labels["end"]: s.value for s in samples if s.name.endswith("_total")}

    before = counts()
    rig.stored(prompt(0))
    rig.store.reads.is_open = False
    handles = [rig.arrive(prompt(0))]
    rig.settle(lambda: rig.states() == [State.FILLING])
    handles += [rig.arrive(prompt(1)), rig.arrive(prompt(0))]
    rig.settle(lambda: rig.states() == [State.FILLING, State.FOLLOWING])
    rig.cache.step()
    assert own_metric("sgl_kvfetch_parked_requests") == 2
    assert own_metric("sgl_kvfetch_held_slots") == 32  # which were free when the fetch began
    rig.abort(handles[2])
    rig.store.reads.is_open = True
    rig.settle(lambda: rig.cache.check_prefetch_progress(handles[0]))
    rig.abort(handles[0])
    rig.cache.step()
    assert own_metric("sgl_kvfetch_parked_requests") == own_metric("sgl_kvfetch_held_slots") == 0
    new = {end: count - before.get(end, 0) for end, count in counts().items()}
    assert {end: count for end, count in new.items() if count} == {"landed": 1, "missed": 1, "aborted": 1}


def test_short_tails_are_not_looked_up(rig: Rig) -> None:
    handle = rig.arrive(prompt(0)[: PAGE - 1])
    assert rig.cache.check_prefetch_progress(handle)
    assert rig.store.num_lookups == 0


@pytest.mark.parametrize("moment", ["lookup", "transmit", "restore", "landed", "waiting"])
def test_an_abort_gives_everything_back(make: MakeRig, moment: str) -> None:
    rig = make(device={"pool_share": 0.15})  # of 256 slots: one prompt at a time
    tokens, other = prompt(0), prompt(1)
    rig.stored(tokens)
    rig.stored(other)
    rig.store.lookups.is_open = moment != "lookup"
    rig.store.reads.is_open = moment == "landed"
    rig.store.reads.num_let_through = int(moment == "restore")
    handle, second = rig.arrive(tokens), None
    match moment:
        case "lookup":
            rig.settle(lambda: rig.store.lookups.num_waiting > 0)
        case "transmit" | "waiting":
            rig.settle(lambda: rig.states() == [State.FILLING])
            if moment == "waiting":
                second = rig.arrive(other)
                rig.settle(lambda: rig.states() == [State.FILLING, State.WAITING])
            assert rig.num_available == rig.num_slots - 32  # it takes what is free
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
            rig.settle(lambda: rig.states() == [State.FILLING])
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
    rig.served.run(rig.service.client.writer.drain())
    assert all(bool(buffer.isnan().all()) for buffer in rig.pool.k_buffer)
    rig.assert_nothing_held()
    # The cache still works.
    assert rig.fetch(tokens) == (32, 32)


def test_decoded_values_are_not_written_after_a_reset(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt(0)
    rig.stored(tokens)
    decoding, reset, loop_is_free = threading.Semaphore(0), threading.Event(), threading.Event()
    dequantise = SegmentReader.dequantise_cell

    def dequantise_late(*args: Any) -> Any:
        decoding.release()
        assert reset.wait(WAIT_S)
        return dequantise(*args)

    async def keep_the_loop_busy() -> None:
        loop_is_free.wait(WAIT_S)  # so that the data plane cannot end the fetch itself

    monkeypatch.setattr(SegmentReader, "dequantise_cell", dequantise_late)
    rig.arrive(tokens)
    rig.settle(lambda: decoding.acquire(blocking=False))
    asyncio.run_coroutine_threadsafe(keep_the_loop_busy(), rig.served.loops[-1])
    rig.flush()
    reset.set()
    rig.service.client.fetcher.close()
    assert all(bool(buffer.isnan().all()) for buffer in rig.pool.k_buffer)
    loop_is_free.set()


def test_a_flush_leaves_no_bytes_behind(rig: Rig) -> None:
    """Bytes of a partly used span are kept for a request that continues there, but only until a flush."""
    tokens = prompt(0)
    rig.stored(tokens)
    reads = rig.store.data_reads
    assert rig.fetch(tokens[:20]) == (20, 20)
    first = list(reads)
    rig.flush()
    reads.clear()
    assert rig.fetch(tokens[:20]) == (20, 20)
    assert sorted(reads) == sorted(first)


def test_a_hanging_store_costs_the_deadline(make: MakeRig) -> None:
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


def test_nothing_lands_after_the_weights_changed(rig: Rig) -> None:
    tokens = prompt(0)
    rig.stored(tokens)
    rig.store.reads.is_open = False
    handle = rig.arrive(tokens)
    rig.settle(lambda: rig.states() == [State.FILLING])
    rig.backend.access.suspend("other weights")
    rig.store.reads.is_open = True
    rig.await_over(handle)
    assert rig.admit(handle, tokens)[:2] == (0, 0)
    rig.settle()
    rig.assert_nothing_held()
    rig.compute(tokens)
    assert not rig.cache.has_pending_cache_operations()
    assert rig.cache.check_prefetch_progress(rig.arrive(prompt(1)))


def test_prefixes_of_other_adapters_are_not_used(rig: Rig) -> None:
    """The namespace of SGLang's tree is part of the page hashes, as in host mode."""
    tokens = prompt(0)
    rig.stored(tokens)
    handle = CacheRequestHandle("adapter", 0)
    rig.cache.prefetch_from_storage(
        handle, rig.cache.root_node_handle(), array("q", tokens), None, None, extra_key="adapter"
    )
    rig.await_over(handle)
    assert rig.cache.pop_prefetch_loaded_span(handle) == (0, None)


@pytest.mark.slow
def test_aborts_at_random_moments(make: MakeRig) -> None:
    rig = make(num_slots=512, device={"pool_share": 0.5})
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
            rig.abort(handle)
            num_aborted += 1
        for handle in [h for h in alive if rig.cache.check_prefetch_progress(h)]:
            if rng.random() < 0.3:
                cached, _, lock = rig.admit(handle, alive.pop(handle))
                rig.cache.unlock(lock)
                num_admitted += cached > 0
        if rng.random() < 0.05:
            rig.cache.evict(EvictParams(num_tokens=256))
    for handle in alive:
        rig.abort(handle)
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


def test_requests_behind_a_hanging_store_wait_for_one_deadline_in_total(make: MakeRig) -> None:
    rig = make(fetch_timeout_s=2.0, device={"round_tokens": 32})
    prompts = [prompt(seed) for seed in range(60)]
    for tokens in prompts:
        rig.stored(tokens)
    rig.store.reads.is_open = False
    begin_s = time.monotonic()
    handles = [rig.arrive(tokens) for tokens in prompts]
    rig.settle(lambda: all(rig.cache.check_prefetch_progress(handle) for handle in handles))
    assert time.monotonic() - begin_s < 60  # half of a deadline each
    rig.settle()
    rig.assert_nothing_held()
