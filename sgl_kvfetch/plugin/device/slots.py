"""The slots of fetches: which fetch gets some next, and how they are allocated and put into the tree."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams

F = TypeVar("F", bound=Hashable)

_SERVED_A_STEP = 8  # limit for each kind, because serving takes the scheduler's time


@dataclass(slots=True)
class _Prefix:
    """A fetch's prefix, as far as it is in the tree."""

    key: Any  # SGLang's RadixKey of the whole prompt
    lock: Any  # SGLang's TreeLock
    landed: range  # the tokens that the fetch has put into the tree


class Slots(Generic[F]):
    """Allocates slots for fetches. Counts those that fetches hold: being filled, or locked in the tree."""

    def __init__(self, cache: Any, max_tokens: int) -> None:
        """``cache``: SGLang's ``UnifiedRadixCache``. ``max_tokens``: slots that all fetches together may hold, landed
        ones included. A fetch's own landed slots do not count when it asks for more."""
        self._cache = cache
        self._max_tokens = max_tokens
        self._prefixes: dict[F, _Prefix] = {}
        self.held_tokens = 0

    def lock(self, fetch: F, key: Any, begin: int, node: Any) -> None:
        """Lock the tree down to ``node`` for a fetch that will land the tokens of ``key`` from ``begin`` on."""
        self._prefixes[fetch] = _Prefix(key, self._cache.lock(node), range(begin, begin))

    def landed(self, fetch: F) -> range:
        """Return which tokens the fetch has put into the tree, where its lock keeps them."""
        prefix = self._prefixes.get(fetch)
        return range(0) if prefix is None else prefix.landed

    def allocate(
        self, fetch: F, num_tokens: int, reserved_tokens: int, *, may_evict: bool = True
    ) -> torch.Tensor | None:
        """Allocate slots, evicting unused ones if needed, as SGLang does. Return None if fetches would hold too many,
        or if too few are left beside ``reserved_tokens``, the slots that running requests will still need."""
        if self.held_tokens - len(self.landed(fetch)) + num_tokens > self._max_tokens:
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

    def land(self, fetch: F, slots: torch.Tensor) -> None:
        """Put the fetch's next slots into the tree, and extend its lock to them. Where the tree has got the same tokens
        in the meantime, it keeps its own slots and frees these."""
        cache, prefix = self._cache, self._prefixes[fetch]
        anchor, begin, end = prefix.lock, prefix.landed.stop, prefix.landed.stop + slots.numel()
        before = cache.path_device_indices(anchor.node)[:begin]
        result = cache.insert(
            InsertParams(
                key=prefix.key[:end],
                value=torch.cat([before, slots.to(before.dtype)]),
                prev_prefix_len=begin,
                inserted_len=end,  # the request's own insertion counts the hit
            )
        )
        prefix.lock = cache.lock(result.last_device_node)
        cache.unlock(anchor)
        prefix.landed = range(prefix.landed.start, end)

    def let_go(self, fetch: F) -> None:
        """Release the fetch's lock. The pages that it landed stay in the tree like any other prefix."""
        prefix = self._prefixes.pop(fetch)
        self.held_tokens -= len(prefix.landed)
        self._cache.unlock(prefix.lock)


class SlotTurns(Generic[F]):
    """Decides which fetch gets slots next. Fetches that hold slots come first, so that they finish and free them.

    Pure and without a clock, so that all ranks decide alike.
    """

    def __init__(self) -> None:
        self._first: dict[F, None] = {}  # fetches that want their first slots
        self._more: dict[F, None] = {}  # fetches that want more

    def __len__(self) -> int:
        return len(self._first) + len(self._more)

    def ask(self, fetch: F, *, has_slots: bool) -> None:
        (self._more if has_slots else self._first)[fetch] = None

    def withdraw(self, fetch: F) -> None:
        """Withdraw a fetch's request, if it has made one."""
        self._first.pop(fetch, None)
        self._more.pop(fetch, None)

    def serve(self, give: Callable[[F], bool]) -> bool:
        """Offer each fetch its turn. Return False if fetches that hold slots asked for more, and none got any.

        ``give`` returns whether there were slots for the fetch, and then calls ``withdraw``."""
        served = [give(fetch) for fetch in list(islice(self._more, _SERVED_A_STEP))]
        for fetch in list(islice(self._first, _SERVED_A_STEP)):
            if not give(fetch):
                break
        return not served or any(served)

    def last_of_several(self) -> F | None:
        """Return the last of several fetches that want more slots. None for a single one, which goes on waiting: its
        request could not be computed without slots either."""
        return next(reversed(self._more)) if len(self._more) > 1 else None
