"""From a request's arrival to its prefix in the tree: decides, allocates, inserts. On the scheduler's thread alone.

Every rank runs the same steps on the same requests. Whatever depends on time or on I/O comes through the board, which
all ranks read alike, so that trees and allocators stay the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.utils import get_storage_hash_str

from sgl_kvfetch.plugin.device.backend import DeviceBackend, FetchWork, LookupWork
from sgl_kvfetch.plugin.device.board import Board, Ticket
from sgl_kvfetch.plugin.device.counts import FLOWS, HELD_SLOTS, PARKED
from sgl_kvfetch.plugin.device.flow import Flow, Phase
from sgl_kvfetch.plugin.device.known import KnownPages
from sgl_kvfetch.plugin.device.order import Turns

# Steps in a row in which requests were tried and none admitted. Then prefixes that wait for their requests may be what
# keeps another one out.
_PATIENCE_STEPS = 64
# So many may begin in one step: it is the scheduler's time.
_BEGINS_A_STEP = 8

OnEnd = Callable[[int], None]


class Fetches:
    """The fetches of all waiting requests."""

    def __init__(
        self,
        cache: Any,
        backend: DeviceBackend,
        board: Board,
        ends: dict[Ticket, OnEnd],
        known: KnownPages,
        *,
        max_tokens: int,
        threshold_tokens: int,
    ) -> None:
        """``cache``: SGLang's ``UnifiedRadixCache``. ``ends``: where to leave what happens when a ticket is up.
        ``max_tokens``: slots that all fetches may hold, landed ones included; a single one may go on in further
        rounds of so many."""
        self._cache = cache
        self._backend = backend
        self._board = board
        self._ends = ends
        self._known = known
        self._page_size: int = cache.page_size
        self._max_tokens = max(1, max_tokens // self._page_size) * self._page_size
        self._threshold_tokens = threshold_tokens
        self._flows: dict[Any, Flow] = {}  # by handle
        self._changed: list[Any] = []  # handles of those that began or ended
        self._num_arrived = 0
        self._waiting: Turns[Flow] = Turns()
        self._found: list[Flow] = []  # by lookups, since the last step
        self._active: dict[Flow, None] = {}  # those that fetch, cancelled ones included
        self._fetching: dict[str, Flow] = {}  # by page hash
        self._landed: dict[Flow, None] = {}
        self._held_tokens = 0
        self._was_offered = False
        self._fruitless_steps = 0

    @property
    def is_idle(self) -> bool:
        return not self._flows and not self._waiting and not self._active

    @property
    def held_tokens(self) -> int:
        """Slots that fetches keep from others: those being filled, and those locked for their requests."""
        return self._held_tokens

    # What the scheduler says

    def arrive(self, handle: Any, key: Any, start: int, last_hash: str | None) -> None:
        """Look up the pages of ``key`` from token ``start`` on; ``last_hash`` is that of the page before."""
        if handle in self._flows or not self._backend.reads or len(key) - start < self._threshold_tokens:
            return
        self._num_arrived += 1
        flow = Flow(handle, key, start, self._num_arrived)
        self._flows[handle] = flow
        self._changed.append(handle)
        ticket = self._open(partial(self._lookup_ended, flow))
        flow.work = self._backend.begin_lookup(ticket, partial(hash_tail, key, start, last_hash, self._page_size))

    def is_over(self, handle: Any) -> bool:
        """Whether a request that the scheduler tries may be admitted, as far as its fetch goes."""
        if self.is_parked(handle):
            return False
        self._was_offered = True
        return True

    def is_parked(self, handle: Any) -> bool:
        flow = self._flows.get(handle)
        return flow is not None and flow.phase is not Phase.LANDED

    def take_changed(self) -> list[Any]:
        """Handles of the requests that may have been parked or unparked since the last call."""
        if not self._changed:
            return []
        changed, self._changed = self._changed, []
        PARKED.set(len(self._flows) - len(self._landed))
        HELD_SLOTS.set(self._held_tokens)
        return changed

    def admitted(self, handle: Any) -> None:
        """The request has locked its prefix itself."""
        self._fruitless_steps = 0
        self._was_offered = False
        flow = self._flows.get(handle)
        if flow is not None and flow.phase is Phase.LANDED:
            self._release(flow)

    def abandon(self, handle: Any) -> None:
        """The request is gone."""
        flow = self._flows.pop(handle, None)
        if flow is None:
            return
        flow.cancelled = True
        self._changed.append(handle)
        if flow.phase is not Phase.LANDED:
            FLOWS.labels("aborted").inc()
        match flow.phase:
            case Phase.LANDED:
                self._release(flow)
            case Phase.WAITING:
                self._waiting.discard(flow)
                self._let_go(flow)
            case Phase.LOOKUP | Phase.FETCHING:
                if not any(not follower.cancelled for follower in flow.followers):
                    assert flow.work is not None
                    self._backend.cancel(flow.work)

    def step(self) -> None:
        """Begin what can begin, a few at a time. Costs the same however many wait."""
        if self._was_offered:
            self._was_offered = False
            self._fruitless_steps += 1
            if self._fruitless_steps >= _PATIENCE_STEPS:
                self._fruitless_steps = 0
                for flow in list(self._landed):
                    self._release(flow)
        for _ in range(min(len(self._waiting), _BEGINS_A_STEP)):
            head = self._waiting.first()
            if head is None or not self._begin(head):
                break
            self._waiting.discard(head)
        for flow in self._found:
            if flow in self._waiting:
                self._read_ahead(flow)
        self._found.clear()

    def drop_all(self) -> None:
        """The pool is about to be emptied: nothing is written to it from here on. The tree's locks go with the tree."""
        for flow in {*self._flows.values(), *self._active}:
            if isinstance(flow.work, FetchWork):
                flow.work.sink.close()
            if flow.phase in (Phase.LOOKUP, Phase.FETCHING):
                assert flow.work is not None
                self._backend.cancel(flow.work)
            if flow.phase is Phase.FETCHING:
                assert flow.slots is not None
                self._cache.token_to_kv_pool_allocator.free(flow.slots)
        self._changed += self._flows
        self._flows.clear()
        self._waiting.clear()
        self._found.clear()
        self._active.clear()
        self._fetching.clear()
        self._landed.clear()
        self._held_tokens = 0

    # What has ended

    def _open(self, on_end: OnEnd) -> Ticket:
        ticket = self._board.open()
        self._ends[ticket] = on_end
        return ticket

    def _lookup_ended(self, flow: Flow, num_pages: int) -> None:
        work = flow.work
        assert isinstance(work, LookupWork)
        if flow.cancelled:
            return
        self._known.add(work.hashes[:num_pages])
        self._known.remove(work.hashes[num_pages:])
        if not num_pages:
            self._finish(flow, "missed")
            return
        flow.hashes, flow.sources = work.hashes[:num_pages], work.sources[:num_pages]
        flow.phase = Phase.WAITING
        self._waiting.add(flow)
        self._found.append(flow)

    def _fetch_ended(self, flow: Flow, num_pages: int) -> None:
        assert flow.slots is not None
        del self._active[flow]
        for page_hash in flow.fetched_hashes(self._page_size):
            if self._fetching.get(page_hash) is flow:
                del self._fetching[page_hash]
        self._held_tokens -= flow.slots.numel()
        followers = [follower for follower in flow.followers if not follower.cancelled]
        flow.followers.clear()
        if not self._backend.reads or (flow.cancelled and not followers):
            num_pages = 0
        num_tokens = num_pages * self._page_size
        is_whole = num_tokens == flow.slots.numel()
        if num_tokens:
            anchor, flow.lock = flow.lock, self._insert(flow, num_tokens)
            self._cache.unlock(anchor)
            flow.landed_tokens += num_tokens
            self._held_tokens += num_tokens
        self._free(flow.slots[num_tokens:])
        flow.slots = None
        if flow.cancelled:
            self._let_go(flow)
        elif is_whole and flow.first_page + num_pages < flow.num_pages:
            flow.phase, flow.need_tokens = Phase.WAITING, 0
            self._waiting.add(flow, is_next=True)
        else:
            self._finish(flow, "landed" if is_whole else "partly" if flow.landed_tokens else "failed")
        for follower in followers:
            self._waiting.add(follower)

    def _insert(self, flow: Flow, num_tokens: int) -> Any:
        """Put the first of the slots into the tree. Returns a lock on them. What the tree has got meanwhile it keeps,
        and frees ours."""
        assert flow.slots is not None
        cache, begin = self._cache, flow.start + flow.first_page * self._page_size
        before = cache.path_device_indices(flow.lock.node)[:begin]
        end = begin + num_tokens
        result = cache.insert(
            InsertParams(
                key=flow.key[:end],
                value=torch.cat([before, flow.slots[:num_tokens].to(before.dtype)]),
                prev_prefix_len=begin,
                inserted_len=end,  # the request's own insertion counts the hit
            )
        )
        return cache.lock(result.last_device_node)

    def _finish(self, flow: Flow, end: str) -> None:
        """No more is fetched. The request goes on with what the tree has."""
        self._changed.append(flow.handle)
        FLOWS.labels(end if self._backend.reads else "suspended").inc()
        if not flow.landed_tokens or not self._backend.reads:
            self._let_go(flow)
            self._flows.pop(flow.handle, None)
            return
        flow.phase = Phase.LANDED
        self._landed[flow] = None
        self._cache.prefetch_loaded_tokens_by_reqid[flow.handle] = flow.landed_tokens
        self._cache.prefetch_loaded_storage_start_by_reqid[flow.handle] = flow.loaded_start

    def _release(self, flow: Flow) -> None:
        """The prefix stays in the tree like any other."""
        del self._landed[flow]
        self._changed.append(flow.handle)
        self._let_go(flow)
        self._flows.pop(flow.handle, None)

    def _let_go(self, flow: Flow) -> None:
        self._held_tokens -= flow.landed_tokens
        flow.landed_tokens = 0
        self._cache.unlock(flow.lock)
        flow.lock = None

    # Beginning

    def _begin(self, flow: Flow) -> bool:
        """Whether the flow need not wait at the head any longer: it fetches, follows another one, or gave up."""
        if not self._backend.reads:
            self._finish(flow, "suspended")
            return True
        if not self._fits(flow):
            return self._cannot_begin(flow)
        cache, size = self._cache, self._page_size
        matched = cache.match_prefix(MatchPrefixParams(key=flow.key))
        begin = matched.device_prefix_len
        end = flow.start + flow.num_pages * size
        # Where the tree has less than at the arrival, SGLang asks again.
        if not flow.start <= begin < end:
            self._finish(flow, "known" if begin >= end else "lost")
            return True
        first_page = (begin - flow.start) // size
        leader = self._fetching.get(flow.hashes[first_page])
        if leader is not None:
            leader.followers.append(flow)
            return True
        flow.need_tokens = min(end - begin, self._max_tokens)
        lock = cache.lock(matched.last_device_node)
        # What is locked can no longer be evicted.
        slots = self._allocate(flow.need_tokens) if self._fits(flow) else None
        if slots is None:
            cache.unlock(lock)
            return self._cannot_begin(flow)
        cache.unlock(flow.lock)
        if not flow.landed_tokens:
            flow.loaded_start = begin
        flow.first_page, flow.slots, flow.lock, flow.phase = first_page, slots, lock, Phase.FETCHING
        self._active[flow] = None
        self._held_tokens += flow.need_tokens
        hashes = flow.fetched_hashes(size)
        self._fetching.update(dict.fromkeys(hashes, flow))
        ticket = self._open(partial(self._fetch_ended, flow))
        sources = flow.sources[first_page : first_page + len(hashes)]
        flow.work = self._backend.begin_fetch(ticket, hashes, sources, slots)
        return True

    def _read_ahead(self, flow: Flow) -> None:
        """Have the bytes come while the flow waits for slots, but for pages that come for another request."""
        own = (i for i, page_hash in enumerate(flow.hashes) if page_hash not in self._fetching)
        self._backend.read_ahead(flow.sources[next(own, len(flow.sources)) :])

    def _cannot_begin(self, flow: Flow) -> bool:
        """Wait for slots; or, with a part of the prefix landed, which others may wait for, do without the rest."""
        if flow.landed_tokens:
            self._finish(flow, "full_pool")
        return flow.phase is Phase.LANDED

    def _fits(self, flow: Flow) -> bool:
        if self._held_tokens - flow.landed_tokens + flow.need_tokens > self._max_tokens:
            return False
        free: int = self._cache.token_to_kv_pool_allocator.available_size() + self._cache.evictable_size()
        return flow.need_tokens <= free

    def _allocate(self, num_tokens: int) -> torch.Tensor | None:
        allocator = self._cache.token_to_kv_pool_allocator
        lacking = num_tokens - allocator.available_size()
        if lacking > 0:
            self._cache.evict(EvictParams(num_tokens=lacking))
        slots: torch.Tensor | None = allocator.alloc(num_tokens)
        return slots

    def _free(self, slots: torch.Tensor) -> None:
        if slots.numel():
            self._cache.token_to_kv_pool_allocator.free(slots)


def hash_tail(key: Any, start: int, last_hash: str | None, page_size: int) -> list[str]:
    """SGLang's hashes of the pages from ``start`` on, as host mode has them."""
    if start and last_hash is None:
        return hash_tail(key, 0, None, page_size)[start // page_size :]
    hashes: list[str] = get_storage_hash_str(key[start:], last_hash, page_size=page_size)
    return hashes
