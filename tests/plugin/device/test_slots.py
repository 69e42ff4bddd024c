"""Tests of slots on SGLang's own tree and allocator."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

from sgl_kvfetch.plugin.device.fetch import Fetch
from sgl_kvfetch.plugin.device.slots import Slots
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.rig import Rig

pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = list(range(64))


@pytest.fixture
def rig(make: MakeRig) -> Rig:
    return make(num_slots=96, mode="read_only")


def fetch(rig: Rig) -> Fetch:
    """Return a fetch that begins at the tree's root, with a lock there."""
    made = Fetch(handle=0, key=rig.key(TOKENS), start=0, arrival=0, arrived_s=0.0)
    made.lock = rig.cache.lock(rig.cache.match_prefix(MatchPrefixParams(key=made.key)).last_device_node)
    return made


def taken(slots: Slots, item: Fetch, num_tokens: int, reserved_tokens: int = 0) -> torch.Tensor:
    found = slots.allocate(item, num_tokens, reserved_tokens)
    assert found is not None
    return found


def test_fetches_keep_to_their_share_but_their_own_landed_slots_do_not_count(rig: Rig) -> None:
    slots, one, other = Slots(rig.cache, max_tokens=32), fetch(rig), fetch(rig)
    first = taken(slots, one, 32)
    assert slots.allocate(other, 4, 0) is None
    assert slots.allocate(one, 4, 0) is None
    slots.land(one, 0, first)
    assert slots.held_tokens == one.landed_tokens == 32
    assert slots.allocate(other, 4, 0) is None
    rest = taken(slots, one, 32)
    assert slots.held_tokens == 64
    slots.free(rest)
    slots.let_go(one)
    assert slots.held_tokens == 0
    assert rig.num_available + rig.cache.evictable_size() == 96


def test_landed_slots_are_locked_and_extend_the_prefix(rig: Rig) -> None:
    slots, one = Slots(rig.cache, max_tokens=96), fetch(rig)
    both = [taken(slots, one, 16) for _ in range(2)]
    for begin, piece in zip((0, 16), both, strict=True):
        slots.land(one, begin, piece)
    assert rig.cache.protected_size() == 32
    matched = rig.cache.match_prefix(MatchPrefixParams(key=rig.key(TOKENS)))
    assert matched.device_prefix_len == 32
    found = rig.cache.path_device_indices(matched.last_device_node)
    assert found.tolist() == torch.cat(both).tolist()
    slots.let_go(one)
    assert rig.cache.protected_size() == 0


def test_unused_slots_are_evicted_except_reserved_ones(rig: Rig) -> None:
    rig.compute(list(range(100, 100 + 80)))
    slots, one = Slots(rig.cache, max_tokens=96), fetch(rig)
    assert rig.num_available == 16
    assert slots.allocate(one, 32, reserved_tokens=96) is None
    assert rig.num_available == 16  # and nothing was evicted for it
    found = taken(slots, one, 32, reserved_tokens=64)
    assert found.numel() == 32
    slots.free(found)
    slots.let_go(one)
    rig.assert_nothing_held()
