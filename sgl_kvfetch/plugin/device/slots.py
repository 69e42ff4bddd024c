"""The slots of fetches: taken from the allocator, within a share of the pool, and put into the tree."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams

from sgl_kvfetch.plugin.device.fetch import Fetch


class Slots:
    """Allocates slots for fetches. Counts those that fetches hold: being filled, or locked in the tree."""

    def __init__(self, cache: Any, max_tokens: int) -> None:
        """``cache``: SGLang's ``UnifiedRadixCache``. ``max_tokens``: slots that all fetches together may hold, landed
        ones included. A fetch's own landed slots do not count when it asks for more."""
        self._cache = cache
        self._max_tokens = max_tokens
        self.held_tokens = 0

    def allocate(
        self, fetch: Fetch, num_tokens: int, reserved_tokens: int, *, may_evict: bool = True
    ) -> torch.Tensor | None:
        """Allocate slots, evicting unused ones if needed, as SGLang does. Return None if fetches would hold too many,
        or if too few are left beside ``reserved_tokens``, the slots that running requests will still need."""
        if self.held_tokens - fetch.landed_tokens + num_tokens > self._max_tokens:
            return None
        allocator = self._cache.token_to_kv_pool_allocator
        lacking = num_tokens - allocator.available_size()
        if lacking + reserved_tokens > (self._cache.evictable_size() if may_evict else 0):
            return None
        if lacking > 0:
            self._cache.evict(EvictParams(num_tokens=lacking))
        slots: torch.Tensor | None = allocator.alloc(num_tokens)
        if slots is not None:
            self.held_tokens += slots.numel()
        return slots

    def free(self, slots: torch.Tensor) -> None:
        if slots.numel():
            self.held_tokens -= slots.numel()
            self._cache.token_to_kv_pool_allocator.free(slots)

    def hand_over(self, slots: torch.Tensor) -> None:
        """Note that the slots belong to a request now."""
        self.held_tokens -= slots.numel()

    def land(self, fetch: Fetch, begin: int, slots: torch.Tensor) -> None:
        """Put slots into the tree, from token ``begin`` on, and extend the fetch's lock to them. Where the tree has got
        the same tokens in the meantime, it keeps its own slots and frees these."""
        cache, anchor = self._cache, fetch.lock
        before = cache.path_device_indices(anchor.node)[:begin]
        end = begin + slots.numel()
        result = cache.insert(
            InsertParams(
                key=fetch.key[:end],
                value=torch.cat([before, slots.to(before.dtype)]),
                prev_prefix_len=begin,
                inserted_len=end,  # the request's own insertion counts the hit
            )
        )
        fetch.lock = cache.lock(result.last_device_node)
        cache.unlock(anchor)
        fetch.landed_tokens += slots.numel()

    def let_go(self, fetch: Fetch) -> None:
        """Release the fetch's lock. The pages that it landed stay in the tree like any other prefix."""
        self.held_tokens -= fetch.landed_tokens
        fetch.landed_tokens = 0
        self._cache.unlock(fetch.lock)
        fetch.lock = None
