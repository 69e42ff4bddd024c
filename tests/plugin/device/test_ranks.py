"""Two ranks, each with a tree and a pool of its own, that only agree through the board."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sgl_kvfetch.errors import StoreError
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.rig import PAGE, Ranks, Rig

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 2000


def prompt(seed: int, num_pages: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(num_pages * PAGE)]


def test_random_delays_and_failures_on_one_of_two_ranks(make: MakeRig) -> None:
    ranks = Ranks(2)
    rigs = [make(num_slots=512, device_pool_share=0.4, rank=rank, agree=ranks.agree(rank)) for rank in range(2)]
    prompts = [prompt(seed % 2, 4) + prompt(10 + seed, 8) for seed in range(5)]
    histories: list[list[Any]] = [[], []]
    faults: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            histories[rank] = _schedule(rigs[rank], prompts, is_faulty=rank == 1)
        except BaseException as error:
            faults.append(error)
            ranks.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not faults, faults
    assert histories[0] == histories[1]
    assert sum(cached > 0 for cached in histories[0][-1]) > 10
    for rig in rigs:
        rig.assert_nothing_held()


def _schedule(rig: Rig, prompts: list[list[int]], is_faulty: bool) -> list[Any]:
    """What both ranks do alike; the store of one lets it down now and then. Returns what must be equal."""
    for tokens in prompts:
        rig.stored(tokens)
    alike, own = random.Random(0), random.Random(1)
    alive: dict[Any, list[int]] = {}
    history: list[Any] = []
    admitted: list[int] = []
    for _ in range(STEPS):
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
                admitted.append(cached)
        if alive and alike.random() < 0.1:
            handle = alike.choice(list(alive))
            del alive[handle]
            rig.abort(handle)
        if alike.random() < 0.05:
            rig.cache.evict(EvictParams(num_tokens=128))
        history.append((rig.phases(), rig.num_available, rig.cache.evictable_size(), rig.cache.protected_size()))
    rig.store.lookups.is_open = rig.store.reads.is_open = True
    for handle in alive:
        rig.abort(handle)
    rig.settle()
    return [*history, admitted]
