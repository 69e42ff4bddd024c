"""The fetches of all waiting requests. Runs only on the scheduler's thread.

This module connects the states of ``fetch_state.py`` with SGLang's tree, the data plane and the link. Every rank runs
the same steps on the same requests. Results that depend on time or on I/O come through the board, which gives all ranks
equal values. So trees and allocators stay equal on all ranks.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

from sgl_kvfetch import metrics, timeline
from sgl_kvfetch.plane import Claim, FetchCall, KVFetchConfig, LinkQueue
from sgl_kvfetch.plugin.device.backend import (
    Certainty,
    DeviceBackend,
    Filling,
    Finding,
    LookupWork,
    RoundStart,
    RoundStarts,
)
from sgl_kvfetch.plugin.device.board import Board, Done, PageCount, Ticket
from sgl_kvfetch.plugin.device.fetch_state import (
    Action,
    AwaitBytes,
    Begun,
    Do,
    Dropped,
    End,
    Event,
    Finish,
    FreeSlots,
    HandOver,
    Land,
    NothingToFetch,
    Restored,
    RoundRefused,
    Sign,
    SlotsGiven,
    State,
    StateMachine,
    Transmit,
)
from sgl_kvfetch.plugin.device.known import KnownPages, Sharing
from sgl_kvfetch.plugin.device.slots import Slots, SlotTurns
from sgl_kvfetch.plugin.page_hashes import hash_tail

# After so many consecutive steps in which requests were tried and none was admitted, prefixes locked for waiting
# requests are released: they may be what keeps another request out.
_PATIENCE_STEPS = 64
# A limit on the fetches that begin in one step, because beginning one takes the scheduler's time.
_BEGINS_A_STEP = 8


@dataclass(eq=False)
class PrefixFetch:
    """A request's fetch. Page numbers count from token ``start``: so many tokens the tree had when it arrived.

    Only this module writes to it. What the link queue, the sharing and the slots know of a fetch, they keep themselves.
    """

    handle: Any  # SGLang's CacheRequestHandle
    key: Any  # SGLang's RadixKey of the whole prompt, as far as it may be cached, in whole pages
    start: int
    arrival: int  # serial number, in order of arrival
    arrived_s: float  # for the timeline
    starts_early: bool  # if its last pages will be restored in time
    request: timeline.Request
    urgency: int = 0
    machine: StateMachine = field(default_factory=StateMachine)
    lookup: LookupWork = field(default_factory=LookupWork)
    num_pages: int = 0  # stored pages that the lookup found
    call: FetchCall = field(init=False)  # once it has begun

    @property
    def state(self) -> State:
        return self.machine.state

    @property
    def filling_tokens(self) -> int:
        """How many of its slots are being filled."""
        return sum(filling.slots.numel() for filling in self.machine.filling)


class Fetches:
    """Manages each request's fetch from the request's arrival until its admission."""

    def __init__(
        self,
        cache: Any,
        backend: DeviceBackend,
        board: Board,
        known: KnownPages,
        config: KVFetchConfig,
        *,
        pool_tokens: int,
        threshold_tokens: int,
    ) -> None:
        """``cache``: SGLang's ``UnifiedRadixCache``. ``pool_tokens``: the pool's slots. ``threshold_tokens``: the
        smallest number of tokens that is worth a lookup."""
        max_tokens = int(pool_tokens * config.device.pool_share)
        self._starts_early = config.device.early_start
        self._cache = cache
        self._backend = backend
        self._board = board
        self._known = known
        self._page_size: int = cache.page_size
        self._threshold_tokens = threshold_tokens
        # A power of two, like the length of a span: so no span lies in two rounds and is read twice.
        round_tokens = min(config.device.round_tokens, max_tokens)
        self._round_pages = 1 << (max(1, round_tokens // self._page_size).bit_length() - 1)
        self._slots: Slots[PrefixFetch] = Slots(cache, max(1, max_tokens // self._page_size) * self._page_size)
        self._turns: SlotTurns[PrefixFetch] = SlotTurns()
        self._link: LinkQueue[PrefixFetch] = LinkQueue(config.device.fetch_order, shared_pages=self._round_pages)
        self._sharing: Sharing[PrefixFetch] = Sharing()
        self._fetches: dict[Any, PrefixFetch] = {}  # by handle; only of requests that are not gone
        self._fetching: dict[PrefixFetch, None] = {}  # in order of their start; also of requests that are gone
        self._landed: dict[PrefixFetch, None] = {}
        self._changed: list[Any] = []  # handles of fetches that began or ended
        self._num_arrived = 0
        self._num_seen = 0  # pages that finished lookups chose to fetch
        self._was_offered = False
        self._fruitless_steps = 0
        self._reported = (0, 0)  # parked requests, held slots

    @property
    def is_idle(self) -> bool:
        return not self._fetches and not self._fetching

    @property
    def held_tokens(self) -> int:
        """Slots that fetches keep from others: those being filled, and those locked for their requests."""
        return self._slots.held_tokens

    # Calls from the scheduler

    def arrive(self, handle: Any, key: Any, start: int, last_hash: str | None, *, may_start_early: bool = True) -> None:
        """Look up the pages of ``key`` from token ``start`` on. ``last_hash``: the hash of the page before them."""
        if handle in self._fetches or not self._backend.access.reads or len(key) - start < self._threshold_tokens:
            return
        self._num_arrived += 1
        starts_early, request = self._starts_early and may_start_early, timeline.arrived(handle.rid)
        fetch = PrefixFetch(handle, key, start, self._num_arrived, time.monotonic(), starts_early, request)
        self._fetches[handle] = fetch
        self._changed.append(handle)
        ticket = self._board.open_ticket(partial(self._looked_up, fetch))
        hash_pages = partial(hash_tail, key, start, last_hash, self._page_size)
        position = start // self._page_size
        self._backend.look_up(fetch.request, fetch.lookup, ticket, hash_pages, self._num_ahead, position)

    def queued(self, handle: Any, urgency: int, span: Any) -> None:
        """Note that the request is in the waiting queue. If the order is by priority, higher ``urgency`` goes first.
        ``span``: the OpenTelemetry ``SpanContext`` of SGLang's span of the request, or None."""
        fetch = self._fetches.get(handle)
        if fetch is not None and fetch.state is State.LOOKUP:
            fetch.urgency = urgency
            if span is not None:
                fetch.request.belongs_to(span)

    def is_over(self, handle: Any) -> bool:
        """Return whether the fetch allows a request to be admitted. The scheduler asks this when it tries a request."""
        if self.is_parked(handle):
            return False
        self._was_offered = True
        return True

    def is_parked(self, handle: Any) -> bool:
        fetch = self._fetches.get(handle)
        return fetch is not None and fetch.state is not State.LANDED and not self._may_start(fetch)

    def _may_start(self, fetch: PrefixFetch) -> bool:
        # Followers get the pages sooner from the tree than from a request that computes.
        return fetch.state is State.CERTAIN and not self._sharing.has_followers(fetch) and self._backend.access.reads

    def early_tokens(self, handle: Any, begin: int) -> int:
        """Return how many tokens a request may start with beyond ``begin``, where the tree's prefix ends: those whose
        slots are still being filled. 0 if it must wait for them."""
        fetch = self._fetches.get(handle)
        if fetch is None or not self._may_start(fetch) or begin != self._slots.landed(fetch).stop:
            return 0
        return fetch.filling_tokens

    def start_early(self, handle: Any) -> tuple[list[Filling], range]:
        """Hand over the slots that `early_tokens` has counted: from now on they are the request's. Return them, and
        which of its tokens are from the store."""
        fetch = self._fetches[handle]
        fillings, landed = fetch.machine.filling, self._slots.landed(fetch)
        stored = range(landed.start, landed.stop + fetch.filling_tokens)
        self._receive(fetch, Sign.STARTED)
        return fillings, stored

    def take_changed(self) -> list[Any]:
        """Return the handles of requests that may have been parked or unparked since the last call."""
        changed, self._changed = self._changed, []
        return changed

    def admitted(self, handle: Any) -> None:
        """Release the fetch of a request that was admitted: it has locked its prefix itself."""
        self._fruitless_steps = 0
        self._was_offered = False
        fetch = self._fetches.get(handle)
        if fetch is not None and fetch.state is State.LANDED:
            self._release(fetch)

    def abandon(self, handle: Any) -> None:
        """Handle a request that is gone. Its fetch goes on only while other fetches follow it."""
        fetch = self._fetches.get(handle)
        if fetch is None:
            return
        if fetch.state is State.LANDED:
            self._release(fetch)
            return
        del self._fetches[handle]
        self._changed.append(handle)
        self._count(fetch, "aborted")
        for each in (fetch, self._sharing.leader_of(fetch)):
            if each is not None and not self._is_there(each) and not self._sharing.has_followers(each):
                self._receive(each, Sign.UNWANTED)

    def _is_there(self, fetch: PrefixFetch) -> bool:
        """Return whether the fetch's own request is not gone."""
        return self._fetches.get(fetch.handle) is fetch

    def step(self, reserved_tokens: Callable[[], int]) -> None:
        """Give slots to the rounds that wait for them, and begin fetches; a few of each. A step costs no more when more
        requests wait.

        ``reserved_tokens`` returns the slots that running requests will still need. It is called once at most, and only
        if slots are wanted."""
        reserved_tokens = functools.cache(reserved_tokens)
        if self._was_offered:
            self._was_offered = False
            self._fruitless_steps += 1
            if self._fruitless_steps >= _PATIENCE_STEPS:
                self._fruitless_steps = 0
                for fetch in list(self._landed):
                    self._release(fetch)
        self._give_slots(reserved_tokens)
        for fetch in self._sharing.take_resumed(_BEGINS_A_STEP):
            if not self._begin(fetch, reserved_tokens, may_fetch=False):
                self._receive(fetch, Sign.LEADER_ENDED)
        for _ in range(min(len(self._link), _BEGINS_A_STEP)):
            first = self._link.first()
            if first is None:
                break
            # Also tried if the link has no room: there may be nothing left to fetch.
            if not self._begin(first, reserved_tokens, may_fetch=self._link.has_room(first)):
                self._link.put_off(first)
                break
        self._report()

    def _report(self) -> None:
        counts = len(self._fetches) - len(self._landed), self.held_tokens
        if counts != self._reported:
            self._reported = counts
            metrics.PARKED_REQUESTS.set(counts[0])
            metrics.HELD_SLOTS.set(counts[1])

    def give_way(self, num_tokens: int) -> bool:
        """Give up slots because running requests lack ``num_tokens``: first unlock landed prefixes for eviction, then
        drop fetches under way, always the latest first. Return whether anything was given up."""
        given = 0
        for fetch in reversed(list(self._landed)):
            if given < num_tokens:
                given += len(self._slots.landed(fetch))
                self._release(fetch)
        for fetch in reversed(list(self._fetching)):
            held = len(self._slots.landed(fetch)) + fetch.filling_tokens
            if given < num_tokens and held:
                given += held
                self._drop([fetch], End.FULL_POOL)
        return given > 0

    def drop_all(self) -> None:
        """End all fetches before the pool is emptied or the store detached. Nothing writes to the pool afterwards."""
        self._changed += self._fetches
        # In the same order on all ranks: it determines the order in which the allocator hands the slots out again.
        self._drop(dict.fromkeys((*self._fetches.values(), *self._fetching)), End.FLUSHED)
        self._fetches.clear()
        self._landed.clear()
        self._link.clear()
        self._sharing.clear()
        self._num_seen = self._backend.num_chosen  # lookups under way will not report any more
        self._report()

    def _drop(self, fetches: Iterable[PrefixFetch], end: End) -> None:
        for fetch in fetches:
            for filling in fetch.machine.filling:
                filling.close()
                filling.publish()
        for fetch in fetches:
            self._receive(fetch, Dropped(end))

    def _release(self, fetch: PrefixFetch) -> None:
        """Unlock a landed prefix, which stays in the tree like any other."""
        del self._landed[fetch]
        self._changed.append(fetch.handle)
        self._fetches.pop(fetch.handle)
        self._receive(fetch, Sign.RELEASED)

    def _num_ahead(self) -> int:
        """Estimate how many pages will be fetched before those that a lookup has just found: pages of fetches that wait
        or are under way, and pages of lookups whose results the ranks have not agreed on yet."""
        return self._link.expected_pages + self._backend.num_chosen - self._num_seen

    # Reports that all ranks agree on

    def _looked_up(self, fetch: PrefixFetch, finding: Finding) -> None:
        work, num_pages = fetch.lookup, finding.num_pages
        self._num_seen += work.num_chosen
        if fetch.state is State.LOOKUP:
            self._known.add_hashes(work.hashes[:num_pages])
            self._known.remove_hashes(work.hashes[num_pages:])
        if num_pages and finding.is_fetched:
            fetch.num_pages = num_pages
            self._receive(fetch, Sign.FOUND)
        else:
            self._receive(fetch, NothingToFetch(End.RECOMPUTED if num_pages else End.MISSED))

    def _round_starts(self, fetch: PrefixFetch, message: RoundStarts) -> None:
        event: dict[int, Event] = {
            RoundStart.ENDED: RoundRefused(End.PARTLY),
            RoundStart.STOP: RoundRefused(End.STOPPED),
            RoundStart.WANTED: Sign.BYTES_HERE,
        }
        self._receive(fetch, event[message.start])

    def _round_ended(self, fetch: PrefixFetch, restored: PageCount) -> None:
        if fetch in self._fetching:
            fetch.machine.filling[0].publish()
        self._receive(fetch, Restored(restored.num_pages if self._backend.access.reads else 0))

    # Turns

    def _begin(self, fetch: PrefixFetch, reserved_tokens: Callable[[], int], *, may_fetch: bool) -> bool:
        """Begin to fetch, follow another fetch, or end because nothing is left to fetch. Return False if the fetch must
        wait: it has pages to fetch, and ``may_fetch`` is False."""
        if not self._backend.access.reads:
            self._receive(fetch, NothingToFetch(End.SUSPENDED))
            return True
        matched = self._cache.match_prefix(MatchPrefixParams(key=fetch.key))
        begin = matched.device_prefix_len
        end = fetch.start + fetch.num_pages * self._page_size
        # If the tree has less than when the request arrived, SGLang will ask again.
        if not fetch.start <= begin < end:
            self._receive(fetch, NothingToFetch(End.KNOWN if begin >= end else End.LOST))
            return True
        first_page = (begin - fetch.start) // self._page_size
        if self._sharing.follow(fetch, fetch.lookup.hashes[first_page]):
            self._link.expect(fetch, 0)
            self._receive(fetch, Sign.FOLLOWS)
            return True
        self._link.expect(fetch, fetch.num_pages - first_page)
        if not may_fetch:
            return False
        self._slots.lock(fetch, fetch.key, begin, matched.last_device_node)
        round_ends = self._round_ends(fetch, first_page)
        filling = self._free_slots(fetch, round_ends[0] - first_page, reserved_tokens)
        self._receive(fetch, Begun(first_page, round_ends, filling))
        return True

    def _free_slots(self, fetch: PrefixFetch, num_pages: int, reserved_tokens: Callable[[], int]) -> Filling | None:
        """Return slots for the first round if so many are free and no other fetch waits for slots. Then its bytes need
        not wait for slots when they come."""
        if self._turns:
            return None
        slots = self._slots.allocate(fetch, num_pages * self._page_size, reserved_tokens(), may_evict=False)
        return None if slots is None else Filling(self._backend.pages, slots)

    def _round_ends(self, fetch: PrefixFetch, first_page: int) -> tuple[int, ...]:
        """Return where rounds end: at multiples of their length, counted from the sequence's start, as spans do."""
        before = fetch.start // self._page_size
        next_end = (before + first_page) // self._round_pages * self._round_pages + self._round_pages - before
        return *range(next_end, fetch.num_pages, self._round_pages), fetch.num_pages

    def _give_slots(self, reserved_tokens: Callable[[], int]) -> None:
        give = partial(self._give_slots_to, reserved_tokens=reserved_tokens)
        if self._turns.serve(give) or self._landed or any(fetch.machine.filling for fetch in self._fetching):
            return
        # No fetch that holds slots will give them back by itself, so the last one has to.
        if last := self._turns.last_of_several():
            self._receive(last, RoundRefused(End.FULL_POOL))

    def _give_slots_to(self, fetch: PrefixFetch, *, reserved_tokens: Callable[[], int]) -> bool:
        """Give the next round its slots. Return False if there are not enough. Refuse the round if reads are off."""
        if not self._backend.access.reads:
            self._receive(fetch, RoundRefused(End.PARTLY))
            return True
        num_tokens = len(fetch.machine.next_round) * self._page_size
        slots = self._slots.allocate(fetch, num_tokens, reserved_tokens())
        if slots is None:
            return False
        filling = Filling(self._backend.pages, slots)
        self._restore_round(fetch, fetch.machine.num_rounds, filling)
        self._receive(fetch, SlotsGiven(filling))
        return True

    def _restore_round(self, fetch: PrefixFetch, index: int, filling: Filling) -> None:
        ticket = self._board.open_ticket(partial(self._round_ended, fetch))
        self._backend.restore_round(ticket, fetch.call, index, filling)

    # Actions

    def _receive(self, fetch: PrefixFetch, event: Event) -> None:
        before = fetch.state
        for action in fetch.machine.receive(event):
            self._act(fetch, action)
        if (fetch.state is State.CERTAIN) != (before is State.CERTAIN):
            self._changed.append(fetch.handle)

    def _act(self, fetch: PrefixFetch, action: Action) -> None:
        match action:
            case Do.CANCEL_LOOKUP:
                self._backend.cancel_lookup(fetch.lookup)
            case Do.FORGET_FOUND:
                self._backend.forget_found(fetch.lookup)
                self._link.expect(fetch, 0)
            case Do.QUEUE:
                self._link.wait(fetch, Claim(fetch.num_pages, fetch.arrival, fetch.urgency))
            case Do.LEAVE_QUEUE:
                self._link.leave(fetch)
            case Do.FOLLOW_NO_MORE:
                self._sharing.stop_following(fetch)
            case Transmit():
                self._transmit(fetch, action)
            case AwaitBytes(index, first_page):
                ticket = self._board.open_ticket(partial(self._round_starts, fetch))
                self._backend.await_round(ticket, fetch.call, index, num_left=fetch.num_pages - first_page)
            case Do.ASK_FOR_SLOTS:
                self._turns.ask(fetch, has_slots=fetch.machine.num_rounds > 0)
                over: Ticket[Done] = self._board.open_ticket(lambda _: self._receive(fetch, Sign.TRANSMISSION_OVER))
                self._backend.await_end(over, fetch.call)
            case Do.ASK_NO_MORE:
                self._turns.withdraw(fetch)
            case Land():
                self._land(fetch, action)
            case HandOver(filling):
                self._slots.hand_over(filling.slots)
            case FreeSlots(num_landed, filling):
                self._slots.free(filling.slots[num_landed * self._page_size :])
            case Do.STOP:
                self._backend.plane.cancel(fetch.call.work, reason="")
            case Do.FETCH_NO_MORE:
                del self._fetching[fetch]
                self._link.changed()
                self._link.expect(fetch, 0)
                self._sharing.ended(fetch, fetch.lookup.hashes[: fetch.num_pages])
            case Do.LET_GO:
                self._slots.let_go(fetch)
            case Finish(end):
                self._finish(fetch, end)

    def _transmit(self, fetch: PrefixFetch, action: Transmit) -> None:
        pages = range(action.first_page, fetch.num_pages)
        self._fetching[fetch] = None
        self._sharing.lead(fetch, fetch.lookup.hashes[pages.start : pages.stop])
        self._link.occupy(fetch, len(pages))
        fetch.call = self._backend.fetch(
            fetch.request,
            fetch.lookup,
            pages,
            action.round_ends,
            link_ticket=self._board.open_ticket(lambda _: self._link.give_back(fetch)),
            early_ticket=self._board.open_ticket(partial(self._certain, fetch)) if fetch.starts_early else None,
            num_left=len(fetch.key) - fetch.start - fetch.num_pages * self._page_size + 1,
            first=action.slots,
        )
        if action.slots is not None:
            self._restore_round(fetch, 0, action.slots)

    def _certain(self, fetch: PrefixFetch, certainty: Certainty) -> None:
        if certainty.is_certain:
            self._receive(fetch, Sign.CERTAIN)

    def _land(self, fetch: PrefixFetch, action: Land) -> None:
        end_page = action.first_page + action.num_pages
        self._slots.land(fetch, action.slots.slots[: action.num_pages * self._page_size])
        self._link.changed()
        self._link.expect(fetch, fetch.num_pages - end_page)
        # Their followers may now find enough in the tree.
        self._sharing.ended(fetch, fetch.lookup.hashes[action.first_page : end_page])

    def _finish(self, fetch: PrefixFetch, end: End) -> None:
        if self._is_there(fetch):
            reads = self._backend.access.reads
            self._changed.append(fetch.handle)
            self._count(fetch, (end if reads else End.SUSPENDED).value)
            if fetch.state is State.LANDED and reads:
                self._landed[fetch] = None
                if end is not End.EARLY:  # if so, SGLang has already asked
                    landed = self._slots.landed(fetch)
                    self._cache.prefetch_loaded_tokens_by_reqid[fetch.handle] = len(landed)
                    self._cache.prefetch_loaded_storage_start_by_reqid[fetch.handle] = landed.start
                return
            del self._fetches[fetch.handle]
        if fetch.state is State.LANDED:
            self._receive(fetch, Sign.RELEASED)

    def _count(self, fetch: PrefixFetch, end: str) -> None:
        """Count a request that is no longer parked, and record how long it was."""
        metrics.DEVICE_REQUESTS.labels(end).inc()
        tokens = len(self._slots.landed(fetch))
        timeline.add(fetch.request, "parked", fetch.arrived_s, time.monotonic(), end=end, tokens=tokens)
