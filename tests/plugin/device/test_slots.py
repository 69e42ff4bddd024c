"""Tests of slots on SGLang's own tree and allocator."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

from sgl_kvfetch.plugin.device.slots import Slots
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.rig import Rig

pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = list(range(64))


@pytest.fixture
def rig(make: MakeRig) -> Rig:
    return make(num_slots=96, mode="read_only")


def make_slots(rig: Rig, max_tokens: int, *fetches: str) -> Slots[str]:
    """Return slots for fetches that begin at the tree's root."""
    slots: Slots[str] = Slots(rig.cache, max_tokens)
    key = rig.key(TOKENS)
    for fetch in fetches:
        slots.lock(fetch, key, 0, rig.cache.match_prefix(MatchPrefixParams(key=key)).last_device_node)
    return slots


def taken(slots: Slots[str], fetch: str, num_tokens: int, reserved_tokens: int = 0) -> torch.Tensor:
    found = slots.allocate(fetch, num_tokens, reserved_tokens)
    assert found is not None
    return found


def test_fetches_keep_to_their_share_but_their_own_landed_slots_do_not_count(rig: Rig) -> None:
    slots = make_slots(rig, 32, "one", "other")
    first = taken(slots, "one", 32)
    assert slots.allocate("other", 4, 0) is None
    assert slots.allocate("one", 4, 0) is None
    slots.land("one", first)
    assert slots.held_tokens == len(slots.landed("one")) == 32
    assert slots.allocate("other", 4, 0) is None
    rest = taken(slots, "one", 32)
    assert slots.held_tokens == 64
    slots.free(rest)
    slots.let_go("one")
    assert slots.held_tokens == 0
    assert rig.num_available + rig.cache.evictable_size() == 96


def test_landed_slots_are_locked_and_extend_the_prefix(rig: Rig) -> None:
    slots = make_slots(rig, 96, "one")
    both = [taken(slots, "one", 16) for _ in range(2)]
    for piece in both:
        slots.land("one", piece)
    assert slots.landed("one") == range(32)
    assert rig.cache.protected_size() == 32
    matched = rig.cache.match_prefix(MatchPrefixParams(key=rig.key(TOKENS)))
    assert matched.device_prefix_len == 32
    found = rig.cache.path_device_indices(matched.last_device_node)
    assert found.tolist() == torch.cat(both).tolist()
    slots.let_go("one")
    assert rig.cache.protected_size() == 0


def test_unused_slots_are_evicted_except_reserved_ones(rig: Rig) -> None:
    rig.compute(list(range(100, 100 + 80)))
    slots = make_slots(rig, 96, "one")
    assert rig.num_available == 16
    assert slots.allocate("one", 32, reserved_tokens=96) is None
    assert rig.num_available == 16  # and nothing was evicted for it
    found = taken(slots, "one", 32, reserved_tokens=64)
    assert found.numel() == 32
    slots.free(found)
    slots.let_go("one")
    rig.assert_nothing_held()
