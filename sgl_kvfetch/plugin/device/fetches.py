"""From a request's arrival until it is admitted: looked up, parked, fetched, landed. On the scheduler's thread alone.

Every rank runs the same steps on the same requests. Whatever depends on time or on I/O comes through the board, which
all ranks read alike, so that trees and allocators stay the same everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

from sgl_kvfetch import metrics, timeline
from sgl_kvfetch.plugin.device.backend import DeviceBackend
from sgl_kvfetch.plugin.device.board import Board
from sgl_kvfetch.plugin.device.flow import End, Flow, Phase
from sgl_kvfetch.plugin.device.known import KnownPages
from sgl_kvfetch.plugin.device.link_queue import LinkQueue
from sgl_kvfetch.plugin.device.lookups import Found, LookupWork
from sgl_kvfetch.plugin.device.order import OrderName
from sgl_kvfetch.plugin.device.sharing import Sharing
from sgl_kvfetch.plugin.device.slot_rounds import Rounds
from sgl_kvfetch.plugin.device.slots import Slots
from sgl_kvfetch.plugin.page_hashes import hash_tail

# Steps in a row in which requests were tried and none admitted. Then prefixes that wait for their requests may be what
# keeps another one out.
_PATIENCE_STEPS = 64
# So many may begin in one step: it is the scheduler's time.
_BEGINS_A_STEP = 8


class Fetches:
    """The fetches of all waiting requests."""

    def __init__(
        self,
        cache: Any,
        backend: DeviceBackend,
        board: Board,
        known: KnownPages,
        *,
        max_tokens: int,
        round_tokens: int,
        threshold_tokens: int,
        order: OrderName,
    ) -> None:
        """``cache``: SGLang's ``UnifiedRadixCache``. ``max_tokens``: slots that all fetches may hold. ``round_tokens``:
        slots that one takes at a time."""
        self._cache = cache
        self._backend = backend
        self._board = board
        self._known = known
        self._page_size: int = cache.page_size
        self._threshold_tokens = threshold_tokens
        # A power of two, as spans are, so that none lies in two rounds and is read twice.
        round_pages = 1 << (max(1, min(round_tokens, max_tokens) // self._page_size).bit_length() - 1)
        self._slots = Slots(cache, max(1, max_tokens // self._page_size) * self._page_size)
        self._link: LinkQueue[Flow] = LinkQueue(order, shared_pages=round_pages)
        self._sharing = Sharing()
        self._rounds = Rounds(
            backend,
            board,
            self._slots,
            self._link,
            self._sharing,
            self._fetch_is_over,
            page_size=self._page_size,
            round_pages=round_pages,
        )
        self._flows: dict[Any, Flow] = {}  # by handle
        self._landed: dict[Flow, None] = {}
        self._changed: list[Any] = []  # handles of those that began or ended
        self._num_arrived = 0
        self._num_seen = 0  # pages that lookups chose to fetch, as far as we have heard of them
        self._was_offered = False
        self._fruitless_steps = 0
        self._reported = (0, 0)  # parked requests, held slots

    @property
    def is_idle(self) -> bool:
        return not self._flows and self._rounds.is_idle

    @property
    def held_tokens(self) -> int:
        """Slots that fetches keep from others: those being filled, and those locked for their requests."""
        return self._slots.held_tokens

    # What the scheduler says

    def arrive(self, handle: Any, key: Any, start: int, last_hash: str | None) -> None:
        """Look up the pages of ``key`` from token ``start`` on; ``last_hash`` is that of the page before."""
        if handle in self._flows or not self._backend.access.reads or len(key) - start < self._threshold_tokens:
            return
        self._num_arrived += 1
        flow = Flow(handle, key, start, self._num_arrived, time.monotonic())
        self._flows[handle] = flow
        self._changed.append(handle)
        ticket = self._board.open(partial(self._lookup_ended, flow))
        hash_pages = partial(hash_tail, key, start, last_hash, self._page_size)
        flow.lookup = self._backend.lookups.begin(ticket, hash_pages, self._num_ahead)

    def queued(self, handle: Any, urgency: int) -> None:
        """The request is in the waiting queue now. The more urgent go first, where the order is by priority."""
        flow = self._flows.get(handle)
        if flow is not None and flow.phase is Phase.LOOKUP:
            flow.urgency = urgency

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
            metrics.DEVICE_REQUESTS.labels("aborted").inc()
        match flow.phase:
            case Phase.LANDED:
                self._release(flow)
            case Phase.WAITING:
                self._backend.lookups.forget(_lookup_of(flow))
                self._link.leave(flow)
                self._link.expect(flow, 0)
                self._rounds.cancel_if_unwanted(flow.leader)
            case Phase.LOOKUP:
                self._backend.lookups.cancel(_lookup_of(flow))
            case Phase.FETCHING:
                self._rounds.cancel_if_unwanted(flow)

    def step(self, reserved_tokens: Callable[[], int]) -> None:
        """Begin what can begin, a few at a time. Costs the same however many wait.

        ``reserved_tokens``: slots that requests which run will need yet. Asked at most once, if slots are wanted."""
        if self._was_offered:
            self._was_offered = False
            self._fruitless_steps += 1
            if self._fruitless_steps >= _PATIENCE_STEPS:
                self._fruitless_steps = 0
                for flow in list(self._landed):
                    self._release(flow)
        self._rounds.step(reserved_tokens, others_hold_slots=bool(self._landed))
        for flow in self._sharing.take_resumed(_BEGINS_A_STEP):
            if not self._begin(flow, may_fetch=False):
                self._link.wait(flow)
        for _ in range(min(len(self._link), _BEGINS_A_STEP)):
            first = self._link.first()
            if first is None:
                break
            # Where the link has no room it may have nothing to fetch all the same.
            if not self._begin(first, may_fetch=self._link.has_room(first)):
                self._link.put_off(first)
                break
            self._link.leave(first)
        self._report()

    def _report(self) -> None:
        counts = len(self._flows) - len(self._landed), self.held_tokens
        if counts != self._reported:
            self._reported = counts
            metrics.PARKED_REQUESTS.set(counts[0])
            metrics.HELD_SLOTS.set(counts[1])

    def give_way(self, num_tokens: int) -> bool:
        """Requests that run lack so many slots. Have what we keep for requests that wait be evicted. Whether there was
        any."""
        given = 0
        for flow in reversed(list(self._landed)):
            if given < num_tokens:
                given += flow.landed_tokens
                self._release(flow)
        return given + self._rounds.give_way(num_tokens - given) > 0

    def drop_all(self, *, keeps_tree: bool = False) -> None:
        """The pool is about to be emptied, or the store to be given up: nothing is written to the pool from here on.
        The tree's locks go with the tree, unless that is kept."""
        # In an order that all ranks share: the allocator hands out again what it gets back in it.
        fetching = self._rounds.drop_all()
        for flow in dict.fromkeys((*self._flows.values(), *fetching)):
            if flow.phase is Phase.LOOKUP:
                self._backend.lookups.cancel(_lookup_of(flow))
            self._backend.lookups.forget(_lookup_of(flow))
            if keeps_tree:
                self._slots.let_go(flow)
        self._changed += self._flows
        self._flows.clear()
        self._landed.clear()
        self._slots.clear()
        self._link.clear()
        self._sharing.clear()
        self._num_seen = self._backend.lookups.num_chosen  # those under way are not heard of any more
        self._report()

    # What has ended

    def _lookup_ended(self, flow: Flow, found: Found) -> None:
        work = _lookup_of(flow)
        self._num_seen += work.num_chosen
        if flow.cancelled:
            self._backend.lookups.forget(work)
            return
        num_pages = found.num_pages
        self._known.add(work.hashes[:num_pages])
        self._known.remove(work.hashes[num_pages:])
        if not num_pages or not found.is_fetched:
            self._finish(flow, End.RECOMPUTED if num_pages else End.MISSED)
            return
        flow.hashes = work.hashes[:num_pages]
        flow.deadline_s = work.deadline_s
        flow.phase = Phase.WAITING
        self._link.expect(flow, num_pages)
        self._link.wait(flow)

    def _fetch_is_over(self, flow: Flow) -> None:
        if flow.cancelled:
            self._link.expect(flow, 0)
            self._slots.let_go(flow)
        else:
            self._finish(flow, flow.end if flow.landed_tokens or flow.end is not End.PARTLY else End.FAILED)

    def _finish(self, flow: Flow, end: End) -> None:
        """No more is fetched. The request goes on with what the tree has."""
        self._backend.lookups.forget(_lookup_of(flow))
        self._changed.append(flow.handle)
        self._link.expect(flow, 0)
        reads = self._backend.access.reads
        metrics.DEVICE_REQUESTS.labels((end if reads else End.SUSPENDED).value).inc()
        timeline.add(flow.handle.rid, "parked", flow.arrived_s, time.monotonic())
        if not flow.landed_tokens or not reads:
            self._slots.let_go(flow)
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
        self._slots.let_go(flow)
        self._flows.pop(flow.handle, None)

    def _num_ahead(self) -> int:
        """Pages that are to be fetched before what is looked up now. From any thread; about right."""
        return self._link.expected_pages + self._backend.lookups.num_chosen - self._num_seen

    # Beginning

    def _begin(self, flow: Flow, *, may_fetch: bool) -> bool:
        """Fetch, or follow another one, or see that there is nothing to fetch. False: there is, and it must wait."""
        if not self._backend.access.reads:
            self._finish(flow, End.SUSPENDED)
            return True
        matched = self._cache.match_prefix(MatchPrefixParams(key=flow.key))
        begin = matched.device_prefix_len
        end = flow.start + flow.num_pages * self._page_size
        # Where the tree has less than at the arrival, SGLang asks again.
        if not flow.start <= begin < end:
            self._finish(flow, End.KNOWN if begin >= end else End.LOST)
            return True
        first_page = (begin - flow.start) // self._page_size
        if self._sharing.follow(flow, flow.hashes[first_page]):
            self._link.expect(flow, 0)
            return True
        self._link.expect(flow, flow.num_pages - first_page)
        if not may_fetch:
            return False
        flow.phase, flow.loaded_start = Phase.FETCHING, begin
        flow.lock = self._cache.lock(matched.last_device_node)
        self._rounds.begin(flow, first_page)
        return True


def _lookup_of(flow: Flow) -> LookupWork:
    assert flow.lookup is not None
    return flow.lookup
