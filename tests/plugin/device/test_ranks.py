"""The board, and two ranks, each with its own tree and pool, that agree through it and SGLang's own collectives."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.engine.process import Peer
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.plane import service
from sgl_kvfetch.plugin.auto_profile import AutoProfile
from sgl_kvfetch.plugin.device.parking import Board
from sgl_kvfetch.protocol.messages import Start
from sgl_kvfetch.protocol.quantiser import config_quantiser
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.rig import Ranks, Request, Rig, prompt
from tests.plugin.planes import start_by_uint8

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("end", ["closed", "cleared"])
def test_a_report_on_a_ticket_that_is_gone_does_not_reach_its_successor(end: str) -> None:
    heard: list[int] = []
    board = Board(None)
    reported, old = board.open_ticket(heard.append), board.open_ticket(heard.append)
    if end == "cleared":
        board.report(reported, 1)
        board.clear()
    else:
        board.close_ticket(reported)
        board.close_ticket(old)
    assert not board._open
    new = board.open_ticket(heard.append)
    board.report(old, 3)
    board.step()
    assert not heard
    board.report(new, 4)
    board.step()
    assert heard == [4]


def test_no_collective_while_nothing_is_open() -> None:
    calls: list[Any] = []
    board = Board(calls.append)
    board.step()
    board.close_ticket(board.open_ticket(calls.append))
    board.step()
    assert not calls


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
        rig.stored(tokens)
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
            rig.linker.prefixes.leave(request.rid)
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
        rig.linker.prefixes.leave(request.rid)


def test_ranks_do_alike_while_they_switch(make: MakeRig) -> None:
    """Rank 0 finds the profile. Rank 1 has its data plane later, and until then, both compute."""
    ranks = Ranks(2)
    rigs = [make(num_slots=512, rank=rank, agree=ranks.agree(rank)) for rank in range(2)]
    histories = ranks.run(lambda rank, history: _switch(rigs[rank], rank, ranks.agree(rank), history))
    assert histories[0] == histories[1]
    hits = [num_tokens for num_tokens, _ in histories[0]]
    assert max(hits[: hits.index(0)], default=0) == max(hits[hits.index(0) :]) == 32
    for rig in rigs:
        assert rig.parts.plane._start.namespace.quantiser == make_quantiser("uint8").identity
        rig.assert_no_memory_held()


def _switch(rig: Rig, rank: int, agree: Callable[[torch.Tensor], None], history: list[Any]) -> None:
    """Serve one prompt again and again. ``history``: how many tokens were loaded, and how many slots were free."""
    plane, tokens, is_late = rig.parts.plane, prompt(0), rank == 1
    rig.stored(tokens)
    service.__dict__["config_quantiser"] = config_quantiser
    start = start_by_uint8(plane)

    def follow(digest: str, launched: Peer) -> Start:
        nonlocal is_late
        if is_late:
            is_late = False
            raise StoreError("refused", "no profile for now")
        return start

    def all_reduce(values: torch.Tensor, op: Any) -> None:
        values.neg_()  # the rig's collective is the minimum
        agree(values)
        values.neg_()

    auto = AutoProfile(plane, rank, 2, follow, pauses=False)
    scheduler = SimpleNamespace(tree_cache=SimpleNamespace(_all_reduce_attn_groups=all_reduce), last_batch=None)
    is_over = torch.zeros(1)
    while not is_over.item():
        if len(history) == 2 and rank == 0:
            plane._peer.found_profile = "0" * 31 + "1"
        if plane._make is None and plane._start is not start:
            auto.step(scheduler)
        request = rig.arrive(tokens)
        while rig.is_parked(request):
            rig.step()
        (num_tokens,) = rig.admit(request)
        while rig.cache.linker.pending_offloads:
            rig.step()
        history.append((num_tokens, rig.cache.token_to_kv_pool_allocator.available_size()))
        rig.flush()
        is_over = torch.tensor([float(plane._start is start and num_tokens > 0)])
        agree(is_over)
        time.sleep(0.01)
