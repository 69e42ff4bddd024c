"""Tests of two ranks, each with its own tree and pool, that agree only through the board."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sgl_kvfetch.errors import StoreError
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.rig import Ranks, Rig, prompt

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 1000
MIN_HITS = 10  # requests admitted with a prefix: how many, in so many steps, is the machine's business


@pytest.mark.slow
def test_random_delays_and_failures_on_one_of_two_ranks(make: MakeRig) -> None:
    ranks = Ranks(2)
    rigs = [make(num_slots=512, rank=rank, agree=ranks.agree(rank), device={"pool_share": 0.4}) for rank in range(2)]
    prompts = [prompt(seed % 2, 4) + prompt(10 + seed, 8) for seed in range(5)]
    histories = ranks.run(lambda rank, history: _schedule(rigs[rank], prompts, rank == 1, history))
    assert len(histories[0]) >= STEPS
    assert histories[0] == histories[1]
    for rig in rigs:
        rig.assert_nothing_held()


def _schedule(rig: Rig, prompts: list[list[int]], is_faulty: bool, history: list[Any]) -> None:
    """Run the same requests on both ranks; one rank's store sometimes fails. ``history`` gets what must be equal."""
    for tokens in prompts:
        rig.stored(tokens)
    alike, own = random.Random(0), random.Random(1)
    alive: dict[Any, list[int]] = {}
    num_hits = 0
    while len(history) < STEPS or num_hits <= MIN_HITS:
        assert len(history) < 20 * STEPS, f"{num_hits} requests admitted with a prefix"
        if len(alive) < 6 and alike.random() < 0.3:
            tokens = alike.choice(prompts)
            alive[rig.arrive(tokens)] = tokens
        if is_faulty:
            rig.store.lookups.is_open, rig.store.reads.is_open = own.random() < 0.8, own.random() < 0.6
            rig.store.reads.error = StoreError("missing", "gone") if own.random() < 0.3 else None
        time.sleep(0.001)  # the other threads' turn
        rig.cache.step()
        for handle in [h for h in alive if rig.cache.check_prefetch_progress(h)]:
            if alike.random() < 0.2:
                cached, _, lock = rig.admit(handle, alive.pop(handle))
                rig.cache.unlock(lock)
                num_hits += cached > 0
        if alive and alike.random() < 0.1:
            handle = alike.choice(list(alive))
            del alive[handle]
            rig.abort(handle)
        if alike.random() < 0.05:
            rig.cache.evict(EvictParams(num_tokens=128))
        sizes = rig.num_available, rig.cache.evictable_size(), rig.cache.protected_size()
        history.append((rig.states(), num_hits, *sizes))
    rig.store.lookups.is_open = rig.store.reads.is_open = True
    for handle in alive:
        rig.abort(handle)
    rig.settle()
