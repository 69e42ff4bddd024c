"""From a request's arrival to its prefix in the tree: decides, allocates, inserts. On the scheduler's thread alone.

Every rank runs the same steps on the same requests. Whatever depends on time or on I/O comes through the board, which
all ranks read alike, so that trees and allocators stay the same everywhere.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.utils import get_storage_hash_str

from sgl_kvfetch import timeline
from sgl_kvfetch.plugin.device.backend import STOP, WANTED, DeviceBackend, FetchWork, read_lookup_report
from sgl_kvfetch.plugin.device.board import Board, Ticket
from sgl_kvfetch.plugin.device.counts import FLOWS, HELD_SLOTS, PARKED
from sgl_kvfetch.plugin.device.flow import End, FillingRound, Flow, Phase
from sgl_kvfetch.plugin.device.known import KnownPages
from sgl_kvfetch.plugin.device.order import OrderName, Turns

# Steps in a row in which requests were tried and none admitted. Then prefixes that wait for their requests may be what
# keeps another one out.
_PATIENCE_STEPS = 64
# So many may begin, or get slots, in one step: it is the scheduler's time.
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
        round_tokens: int,
        threshold_tokens: int,
        order: OrderName,
    ) -> None:
        """``cache``: SGLang's ``UnifiedRadixCache``. ``ends``: where to leave what happens when a ticket is up.
        ``max_tokens``: slots that all fetches may hold, landed ones included; what a single one has landed does not
        keep it from going on. ``round_tokens``: slots that it takes at a time."""
        self._cache = cache
        self._backend = backend
        self._board = board
        self._ends = ends
        self._known = known
        self._page_size: int = cache.page_size
        self._max_tokens = max(1, max_tokens // self._page_size) * self._page_size
        # A power of two, as spans are, so that none lies in two rounds and is read twice.
        self._round_pages = 1 << (max(1, min(round_tokens, max_tokens) // self._page_size).bit_length() - 1)
        self._threshold_tokens = threshold_tokens
        self._flows: dict[Any, Flow] = {}  # by handle
        self._changed: list[Any] = []  # handles of those that began or ended
        self._num_arrived = 0
        self._num_expected = 0  # pages that are to be fetched, and are not here yet
        self._num_seen = 0  # pages that lookups chose to fetch, as far as we have heard of them
        self._waiting: Turns[Flow] = Turns(order)
        self._on_link: dict[Flow, int] = {}  # pages of those that leave the link no room for another
        self._link_pages = 0  # of all of them
        self._active: dict[Flow, None] = {}  # those that fetch, cancelled ones included
        self._wanting: dict[Flow, None] = {}  # those of them that want their first slots, in their order
        self._continuing: dict[Flow, None] = {}  # those that want more
        self._resumed: deque[Flow] = deque()  # what they waited for from another one has landed
        self._num_changes = 0  # of the tree, and of what is fetched, by us
        self._blocked: tuple[Flow, int] | None = None  # the first that waits, as of which change
        self._num_filling = 0  # rounds
        self._fetching: dict[str, Flow] = {}  # by page hash
        self._landed: dict[Flow, None] = {}
        self._held_tokens = 0
        self._was_offered = False
        self._fruitless_steps = 0
        self._reported = (0, 0)  # parked requests, held slots

    @property
    def is_idle(self) -> bool:
        return not self._flows and not self._active

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
        flow = Flow(handle, key, start, self._num_arrived, time.monotonic())
        self._flows[handle] = flow
        self._changed.append(handle)
        ticket = self._open(partial(self._lookup_ended, flow))
        hash_pages = partial(hash_tail, key, start, last_hash, self._page_size)
        flow.lookup = self._backend.begin_lookup(ticket, hash_pages, self._num_ahead, self._prefill_s)

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
            FLOWS.labels("aborted").inc()
        match flow.phase:
            case Phase.LANDED:
                self._release(flow)
            case Phase.WAITING:
                self._waiting.discard(flow)
                self._expect(flow, 0)
                self._cancel_if_unwanted(flow.leader)
            case Phase.LOOKUP:
                assert flow.lookup is not None
                self._backend.cancel(flow.lookup)
            case Phase.FETCHING:
                self._cancel_if_unwanted(flow)

    def _cancel_if_unwanted(self, flow: Flow | None) -> None:
        if flow is not None and flow.cancelled and flow in self._active and not flow.live_followers:
            assert flow.fetch is not None
            self._backend.cancel(flow.fetch)
            self._want_no_more(flow)

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
        if self._wanting or self._continuing:
            self._give_slots_in_turn(reserved_tokens())
        for _ in range(min(len(self._resumed), _BEGINS_A_STEP)):
            flow = self._resumed.popleft()
            if not flow.cancelled and not self._begin(flow, may_fetch=False):
                self._waiting.add(flow)
        for _ in range(min(len(self._waiting), _BEGINS_A_STEP)):
            head = self._waiting.first()
            if head is None:
                break
            may_fetch = self._has_link_for(head)
            # It may have nothing to fetch; but that is looked at again only when something has changed.
            if not may_fetch and self._blocked == (head, self._num_changes):
                break
            if not self._begin(head, may_fetch=may_fetch):
                self._blocked = head, self._num_changes
                break
            self._waiting.discard(head)
        self._report()

    def _report(self) -> None:
        counts = len(self._flows) - len(self._landed), self._held_tokens
        if counts != self._reported:
            self._reported = counts
            PARKED.set(counts[0])
            HELD_SLOTS.set(counts[1])

    def _give_slots_in_turn(self, reserved_tokens: int) -> None:
        """First come, first served; but who holds slots already goes first, so as to be done with them."""
        served = [self._give_slots(flow, reserved_tokens) for flow in list(islice(self._continuing, _BEGINS_A_STEP))]
        if served and not any(served):
            self._make_way()
        for flow in list(islice(self._wanting, _BEGINS_A_STEP)):
            if not self._give_slots(flow, reserved_tokens):
                break

    def give_way(self, num_tokens: int) -> bool:
        """Requests that run lack so many slots. Have what we keep for requests that wait be evicted. Whether there was
        any."""
        given = 0
        for flow in reversed(list(self._landed)):
            if given < num_tokens:
                given += flow.landed_tokens
                self._release(flow)
        for flow in reversed(list(self._active)):
            if given < num_tokens and (flow.landed_tokens or flow.filling):
                given += flow.landed_tokens + sum(filling.slots.numel() for filling in flow.filling)
                self._drop(flow)
        return given > 0

    def _drop(self, flow: Flow) -> None:
        """Its fetch ends now, and it keeps nothing from others."""
        for filling in flow.filling:
            filling.work.sink.close()
        self._backend.publish()
        for filling in flow.filling:
            self._num_filling -= 1
            self._held_tokens -= filling.slots.numel()
            self._free(filling.slots)
        flow.filling.clear()
        self._let_go(flow)
        self._stop_wanting(flow)
        flow.end = End.FULL_POOL
        self._end_if_over(flow)

    def drop_all(self, *, keeps_tree: bool = False) -> None:
        """The pool is about to be emptied, or the store to be given up: nothing is written to the pool from here on.
        The tree's locks go with the tree, unless that is kept."""
        # In an order that all ranks share: the allocator hands out again what it gets back in it.
        flows = dict.fromkeys((*self._flows.values(), *self._active))
        for filling in (filling for flow in flows for filling in flow.filling):
            filling.work.sink.close()
        self._backend.publish()
        for flow in flows:
            if flow.phase is Phase.LOOKUP:
                assert flow.lookup is not None
                self._backend.cancel(flow.lookup)
            if flow.fetch is not None and flow in self._active:
                self._backend.cancel(flow.fetch)
            for filling in flow.filling:
                self._free(filling.slots)
            if keeps_tree:
                self._cache.unlock(flow.lock)
                flow.lock = None
        self._changed += self._flows
        self._flows.clear()
        self._waiting.clear()
        self._on_link.clear()
        self._active.clear()
        self._wanting.clear()
        self._continuing.clear()
        self._resumed.clear()
        self._fetching.clear()
        self._landed.clear()
        self._held_tokens = self._num_filling = self._num_expected = self._link_pages = 0
        self._num_seen = self._backend.num_chosen  # lookups that are still under way are not heard of any more
        self._report()

    # What has ended

    def _open(self, on_end: OnEnd) -> Ticket:
        ticket = self._board.open()
        self._ends[ticket] = on_end
        return ticket

    def _lookup_ended(self, flow: Flow, value: int) -> None:
        work = flow.lookup
        assert work is not None
        self._num_seen += work.num_chosen
        if flow.cancelled:
            return
        num_pages, is_fetched = read_lookup_report(value)
        self._known.add(work.hashes[:num_pages])
        self._known.remove(work.hashes[num_pages:])
        if not num_pages or not is_fetched:
            self._finish(flow, End.RECOMPUTED if num_pages else End.MISSED)
            return
        flow.hashes, flow.sources = work.hashes[:num_pages], work.sources[:num_pages]
        flow.phase = Phase.WAITING
        self._expect(flow, num_pages)
        self._waiting.add(flow)

    def _link_has_room(self, flow: Flow, _: int) -> None:
        self._link_pages -= self._on_link.pop(flow, 0)

    def _round_is_here(self, flow: Flow, answer: int) -> None:
        """Bytes of the flow's next round are, or none will be."""
        if flow not in self._active:
            return
        if answer == WANTED and flow.end is End.LANDED and not flow.is_fetch_over:
            (self._continuing if flow.num_rounds else self._wanting)[flow] = None
            return
        if flow.end is End.LANDED:
            # Ended on one rank at least: so on all.
            flow.end = End.STOPPED if answer == STOP else End.PARTLY
        flow.is_wanting = False
        self._end_if_over(flow)

    def _round_ended(self, flow: Flow, num_pages: int) -> None:
        if flow not in self._active:
            return
        self._backend.publish()
        filling = flow.filling.popleft()
        self._num_filling -= 1
        size = filling.slots.numel()
        self._held_tokens -= size
        if not self._backend.reads or flow.has_gap or (flow.cancelled and not flow.live_followers):
            num_pages = 0
        num_tokens = num_pages * self._page_size
        if num_tokens:
            anchor, flow.lock = flow.lock, self._insert(flow, filling, num_tokens)
            self._cache.unlock(anchor)
            flow.landed_tokens += num_tokens
            self._held_tokens += num_tokens
            self._landed_pages(flow, filling.first_page, num_pages)
        self._free(filling.slots[num_tokens:])
        if num_tokens < size:
            flow.has_gap = True
            self._backend.stop_fetch(fetch_of(flow))
            self._want_no_more(flow)
        else:
            self._end_if_over(flow)

    def _landed_pages(self, flow: Flow, first_page: int, num_pages: int) -> None:
        """They are in the tree now, where those who wait for them may find enough."""
        self._num_changes += 1
        self._expect(flow, max(0, flow.expected_pages - num_pages))
        for page_hash in flow.hashes[first_page : first_page + num_pages]:
            if self._fetching.get(page_hash) is flow:
                del self._fetching[page_hash]
        self._resume_followers(flow)

    def _resume_followers(self, flow: Flow) -> None:
        for follower in flow.live_followers:
            follower.leader = None
            self._resumed.append(follower)
        flow.followers.clear()

    def _fetch_ended(self, flow: Flow, _: int) -> None:
        """Where the flow still waits for slots, its deadline is over."""
        flow.is_fetch_over = True
        if flow in self._wanting or flow in self._continuing:
            self._want_no_more(flow)

    def _want_no_more(self, flow: Flow) -> None:
        """The next rounds cannot be had."""
        flow.end = End.PARTLY
        self._stop_wanting(flow)
        self._end_if_over(flow)

    def _stop_wanting(self, flow: Flow) -> None:
        """It waits for slots no more. Where it waits for bytes it goes on to, until that ticket is up."""
        for flows in (self._wanting, self._continuing):
            if flow in flows:
                del flows[flow]
                flow.is_wanting = False

    def _end_if_over(self, flow: Flow) -> None:
        """Nothing more comes, or is asked for."""
        if (flow.is_wanting and flow.end is not End.FULL_POOL) or flow.filling:
            return
        if flow.end is not End.LANDED:
            self._backend.stop_fetch(fetch_of(flow))
        del self._active[flow]
        self._num_changes += 1
        for page_hash in flow.hashes:
            if self._fetching.get(page_hash) is flow:
                del self._fetching[page_hash]
        if flow.cancelled:
            self._expect(flow, 0)
            self._let_go(flow)
        else:
            self._finish(flow, flow.end if flow.landed_tokens or flow.end is not End.PARTLY else End.FAILED)
        self._resume_followers(flow)

    def _insert(self, flow: Flow, filling: FillingRound, num_tokens: int) -> Any:
        """Put the first of the slots into the tree. Returns a lock on them. What the tree has got meanwhile it keeps,
        and frees ours."""
        cache, begin = self._cache, flow.start + filling.first_page * self._page_size
        before = cache.path_device_indices(flow.lock.node)[:begin]
        end = begin + num_tokens
        result = cache.insert(
            InsertParams(
                key=flow.key[:end],
                value=torch.cat([before, filling.slots[:num_tokens].to(before.dtype)]),
                prev_prefix_len=begin,
                inserted_len=end,  # the request's own insertion counts the hit
            )
        )
        return cache.lock(result.last_device_node)

    def _finish(self, flow: Flow, end: End) -> None:
        """No more is fetched. The request goes on with what the tree has."""
        self._changed.append(flow.handle)
        self._expect(flow, 0)
        FLOWS.labels((end if self._backend.reads else End.SUSPENDED).value).inc()
        timeline.add(flow.handle.rid, "parked", flow.arrived_s, time.monotonic())
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

    def _expect(self, flow: Flow, num_pages: int) -> None:
        """So many pages of it are still to be fetched."""
        self._num_expected += num_pages - flow.expected_pages
        flow.expected_pages = num_pages

    def _num_ahead(self) -> int:
        """Pages that are to be fetched before what is looked up now. From any thread; about right."""
        return self._num_expected + self._backend.num_chosen - self._num_seen

    # Beginning

    def _has_link_for(self, flow: Flow) -> bool:
        """One has the link alone if it fills it, as KVFetcher has it (section 3.3.1): even shares would only make both
        late. Short ones share it, since it would idle between them."""
        return not self._on_link or self._link_pages + flow.num_pages <= self._round_pages

    def _begin(self, flow: Flow, *, may_fetch: bool) -> bool:
        """Fetch, or follow another one, or see that there is nothing to fetch. False: there is, and it must wait."""
        if not self._backend.reads:
            self._finish(flow, End.SUSPENDED)
            return True
        cache, size = self._cache, self._page_size
        matched = cache.match_prefix(MatchPrefixParams(key=flow.key))
        begin = matched.device_prefix_len
        end = flow.start + flow.num_pages * size
        # Where the tree has less than at the arrival, SGLang asks again.
        if not flow.start <= begin < end:
            self._finish(flow, End.KNOWN if begin >= end else End.LOST)
            return True
        first_page = (begin - flow.start) // size
        leader = self._fetching.get(flow.hashes[first_page])
        if leader is not None:
            leader.followers.append(flow)
            flow.leader = leader
            self._expect(flow, 0)
            return True
        self._expect(flow, flow.num_pages - first_page)
        if not may_fetch:
            return False
        flow.phase, flow.next_page, flow.loaded_start = Phase.FETCHING, first_page, begin
        flow.lock = cache.lock(matched.last_device_node)
        flow.round_ends = deque(self._round_ends(flow, first_page))
        self._active[flow] = None
        hashes = flow.hashes[first_page:]
        self._fetching.update(dict.fromkeys(hashes, flow))
        self._on_link[flow] = len(hashes)
        self._link_pages += len(hashes)
        assert flow.lookup is not None
        flow.fetch = self._backend.begin_fetch(
            self._open(partial(self._link_has_room, flow)),
            self._open(partial(self._fetch_ended, flow)),
            flow.handle.rid,
            flow.lookup.deadline_s,
            hashes,
            flow.sources[first_page:],
            [page - first_page for page in flow.round_ends],
        )
        self._await_round(flow)
        return True

    def _round_ends(self, flow: Flow, first_page: int) -> list[int]:
        """Rounds end at multiples of their length, counted from the sequence's start, as spans do."""
        before = flow.start // self._page_size
        next_end = (before + first_page) // self._round_pages * self._round_pages + self._round_pages - before
        return [*range(next_end, flow.num_pages, self._round_pages), flow.num_pages]

    def _await_round(self, flow: Flow) -> None:
        """Have the flow ask for slots when bytes of its next round are here."""
        flow.is_wanting = True
        ticket = self._open(partial(self._round_is_here, flow))
        rest = flow.sources[flow.next_page :]
        self._backend.await_round(ticket, fetch_of(flow), flow.num_rounds, rest, self._prefill_s)

    def _give_slots(self, flow: Flow, reserved_tokens: int) -> bool:
        """Slots for the next round, if there are any for it."""
        if not self._backend.reads:
            self._want_no_more(flow)
            return True
        end = flow.round_ends[0]
        slots = self._allocate(flow, (end - flow.next_page) * self._page_size, reserved_tokens)
        if slots is None:
            return False
        ticket = self._open(partial(self._round_ended, flow))
        work = self._backend.restore_round(ticket, fetch_of(flow), flow.num_rounds, slots)
        flow.filling.append(FillingRound(flow.next_page, slots, work))
        self._num_filling += 1
        self._held_tokens += slots.numel()
        flow.next_page = flow.round_ends.popleft()
        flow.num_rounds += 1
        self._stop_wanting(flow)
        if flow.round_ends:
            self._await_round(flow)
        return True

    def _make_way(self) -> None:
        """Nobody who holds slots gets more. Where several hold some, and none of them will give them back by itself,
        the last of those does without its rest.

        A single one waits: its request could not be computed without slots either.
        """
        if not self._num_filling and not self._landed and len(self._continuing) > 1:
            last = next(reversed(self._continuing))
            self._stop_wanting(last)
            last.end = End.FULL_POOL
            self._end_if_over(last)

    def _allocate(self, flow: Flow, num_tokens: int, reserved_tokens: int) -> torch.Tensor | None:
        if self._held_tokens - flow.landed_tokens + num_tokens > self._max_tokens:
            return None
        allocator = self._cache.token_to_kv_pool_allocator
        lacking = num_tokens - allocator.available_size()
        if lacking + reserved_tokens > self._cache.evictable_size():
            return None
        if lacking > 0:
            self._cache.evict(EvictParams(num_tokens=lacking))
        slots: torch.Tensor | None = allocator.alloc(num_tokens)
        return slots

    def _free(self, slots: torch.Tensor) -> None:
        if slots.numel():
            self._cache.token_to_kv_pool_allocator.free(slots)

    def _prefill_s(self, num_tokens: int) -> float | None:
        """From any thread. Of this rank; only what all ranks agree on may depend on it."""
        seconds: float | None = self._cache.prefill_speed.seconds_for(num_tokens)
        return seconds


def fetch_of(flow: Flow) -> FetchWork:
    assert flow.fetch is not None
    return flow.fetch


def hash_tail(key: Any, start: int, last_hash: str | None, page_size: int) -> list[str]:
    """SGLang's hashes of the pages from ``start`` on, as host mode has them."""
    if start and last_hash is None:
        return hash_tail(key, 0, None, page_size)[start // page_size :]
    hashes: list[str] = get_storage_hash_str(key[start:], last_hash, page_size=page_size)
    return hashes
