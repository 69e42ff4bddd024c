"""Two ranks, each with its own tree and pool, that agree through the board and through SGLang's own collectives."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sgl_kvfetch.errors import StoreError
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.rig import Ranks, Request, Rig, prompt

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS, MIN_HITS = 400, 10


@pytest.mark.slow
def test_random_delays_and_failures_on_one_of_two_ranks(make: MakeRig) -> None:
    ranks = Ranks(2)
    rigs = [make(num_slots=512, rank=rank, agree=ranks.agree(rank), device={"pool_share": 0.4}) for rank in range(2)]
    prompts = [prompt(seed % 2, 4) + prompt(10 + seed, 8) for seed in range(5)]
    histories = ranks.run(lambda rank, history: _schedule(rigs[rank], prompts, rank == 1, history))
    assert histories[0] == histories[1]
    for rig in rigs:
        rig.assert_no_memory_held()


def _schedule(rig: Rig, prompts: list[list[int]], is_faulty: bool, history: list[Any]) -> None:
    """Run the same requests on both ranks; one rank's store sometimes fails. ``history`` gets what must be equal."""
    for tokens in prompts:
        rig.stored_by_all(tokens)
    alike, own = random.Random(0), random.Random(1)
    alive: list[Request] = []
    num_hits = 0
    while len(history) < STEPS or num_hits <= MIN_HITS:
        assert len(history) < 12 * STEPS, f"{num_hits} requests admitted with a prefix"
        if len(alive) < 6 and alike.random() < 0.3:
            alive.append(rig.arrive(alike.choice(prompts)))
        if is_faulty:
            rig.store.lookups.is_open, rig.store.reads.is_open = own.random() < 0.8, own.random() < 0.6
            rig.store.reads.error = StoreError("missing", "gone") if own.random() < 0.3 else None
        # The other threads' turn. On a slow machine they need longer ones: requests would leave before they are ready.
        time.sleep(min(0.001 * 2 ** (len(history) // STEPS), 0.1))
        rig.step()
        for request in [each for each in alive if not rig.is_parked(each)]:
            if alike.random() < 0.2:
                alive.remove(request)
                num_hits += rig.admit(request) != [0]
                if alike.random() < 0.2:  # it is retracted
                    rig.linker.arrive(request, rig.cache)
                    alive.append(request)
        if alive and alike.random() < 0.1:
            request = alive.pop(alike.randrange(len(alive)))
            rig.linker.leave(request)
        if alike.random() < 0.05:
            rig.cache.evict(EvictParams(num_tokens=128))
        if alike.random() < 0.01:
            rig.flush()
        parked = [rig.is_parked(request) for request in alive]
        available = rig.cache.token_to_kv_pool_allocator.available_size()
        history.append((parked, num_hits, available, rig.cache.evictable_size()))
    rig.store.lookups.is_open = rig.store.reads.is_open = True
    rig.store.reads.error = None
    for request in alive:
        rig.linker.leave(request)
