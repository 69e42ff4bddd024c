"""Slots for what is fetched: from the allocator, within a share of the pool, into the tree."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams

from sgl_kvfetch.plugin.device.fetch import Fetch


class Slots:
    """Counts those that fetches keep from others: being filled, or locked in the tree for their requests."""

    def __init__(self, cache: Any, max_tokens: int) -> None:
        """``cache``: SGLang's ``UnifiedRadixCache``. ``max_tokens``: slots that all fetches may hold, landed ones
        included; what a single one has landed does not keep it from going on."""
        self._cache = cache
        self._max_tokens = max_tokens
        self.held_tokens = 0

    def allocate(self, fetch: Fetch, num_tokens: int, reserved_tokens: int) -> torch.Tensor | None:
        """As SGLang does: what nobody uses is evicted. None if there are not so many beside those that requests which
        run will need yet, ``reserved_tokens``."""
        if self.held_tokens - fetch.landed_tokens + num_tokens > self._max_tokens:
            return None
        allocator = self._cache.token_to_kv_pool_allocator
        lacking = num_tokens - allocator.available_size()
        if lacking + reserved_tokens > self._cache.evictable_size():
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

    def land(self, fetch: Fetch, begin: int, slots: torch.Tensor) -> None:
        """Put slots into the tree, from token ``begin`` of the fetch on, and have its lock keep them there. What the
        tree has got meanwhile it keeps, and frees ours."""
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
        """What it landed stays in the tree like any other prefix."""
        self.held_tokens -= fetch.landed_tokens
        fetch.landed_tokens = 0
        self._cache.unlock(fetch.lock)
        fetch.lock = None
