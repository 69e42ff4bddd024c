"""Flows that fetch, a round at a time: slots are taken when bytes are here, filled, and put into the tree."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import islice

from sgl_kvfetch.dataplane.plane import FetchCall
from sgl_kvfetch.plugin.device.backend import DeviceBackend
from sgl_kvfetch.plugin.device.board import Board, Done, PageCount
from sgl_kvfetch.plugin.device.flow import End, FillingRound, Flow
from sgl_kvfetch.plugin.device.link_queue import LinkQueue
from sgl_kvfetch.plugin.device.reads import FetchRequest, RoundStart, RoundStarts
from sgl_kvfetch.plugin.device.sharing import Sharing
from sgl_kvfetch.plugin.device.slots import Slots

_GIVEN_A_STEP = 8  # so many get slots in one step: it is the scheduler's time


class Rounds:
    """From a flow's ``begin`` until no more of it comes. On the scheduler's thread alone."""

    def __init__(
        self,
        backend: DeviceBackend,
        board: Board,
        slots: Slots,
        link: LinkQueue[Flow],
        sharing: Sharing,
        on_over: Callable[[Flow], None],
        *,
        page_size: int,
        round_pages: int,
    ) -> None:
        """``on_over``: told of each flow that is through, with its ``end``. ``round_pages``: a power of two, as spans
        are, so that none lies in two rounds and is read twice."""
        self._backend = backend
        self._board = board
        self._slots = slots
        self._link = link
        self._sharing = sharing
        self._on_over = on_over
        self._page_size = page_size
        self._round_pages = round_pages
        self._active: dict[Flow, None] = {}  # in their order, cancelled ones included
        self._wanting: dict[Flow, None] = {}  # those of them that want their first slots
        self._continuing: dict[Flow, None] = {}  # those that want more
        self._num_filling = 0  # rounds

    @property
    def is_idle(self) -> bool:
        return not self._active

    # What others ask for

    def begin(self, flow: Flow, first_page: int) -> None:
        """Fetch what the flow's lookup found from this page on. The tree has what is before, and the flow a lock on
        it."""
        flow.next_page = first_page
        flow.round_ends = deque(self._round_ends(flow, first_page))
        self._active[flow] = None
        hashes = flow.hashes[first_page:]
        self._sharing.lead(flow, hashes)
        self._link.take(flow, len(hashes))
        lookup = flow.lookup
        assert lookup is not None
        assert lookup.number is not None
        flow.fetch = self._backend.reads.begin(
            FetchRequest(
                request_id=flow.handle.rid,
                deadline_s=flow.deadline_s,
                lookup=lookup.number,
                first_page=first_page,
                page_hashes=lookup.page_hashes[first_page : flow.num_pages],
                round_ends=[page - first_page for page in flow.round_ends],
                link_ticket=self._board.open(partial(self._link_has_room, flow)),
                end_ticket=self._board.open(partial(self._fetch_ended, flow)),
            )
        )
        self._await(flow)

    def cancel_if_unwanted(self, flow: Flow | None) -> None:
        """A request that waited for its pages is gone."""
        if flow is not None and flow in self._active and not flow.is_wanted:
            self._backend.reads.cancel(_fetch_of(flow))
            self._want_no_more(flow)

    def step(self, reserved_tokens: Callable[[], int], *, others_hold_slots: bool) -> None:
        """Give slots. First come, first served; but who holds some already goes first, so as to be done with them.

        ``reserved_tokens``: slots that requests which run will need yet. Asked at most once, if slots are wanted.
        ``others_hold_slots``: flows that are through will give some back."""
        if not self._wanting and not self._continuing:
            return
        reserved = reserved_tokens()
        served = [self._give_slots(flow, reserved) for flow in list(islice(self._continuing, _GIVEN_A_STEP))]
        if served and not any(served) and not others_hold_slots:
            self._make_way()
        for flow in list(islice(self._wanting, _GIVEN_A_STEP)):
            if not self._give_slots(flow, reserved):
                break

    def give_way(self, num_tokens: int) -> int:
        """End fetches, the last ones first, until so many slots may be evicted, or are free. Returns how many are."""
        given = 0
        for flow in reversed(list(self._active)):
            if given < num_tokens and (flow.landed_tokens or flow.filling):
                given += flow.landed_tokens + sum(filling.slots.numel() for filling in flow.filling)
                self._drop(flow)
        return given

    def drop_all(self) -> list[Flow]:
        """Nothing is written to the pool from here on, and nobody is told. Returns the flows that were fetching; those
        have their locks yet."""
        for flow in self._active:
            _close(flow)
        self._backend.reads.publish()
        for flow in self._active:
            self._backend.reads.cancel(_fetch_of(flow))
            self._free(flow)
        dropped = list(self._active)
        self._active.clear()
        self._wanting.clear()
        self._continuing.clear()
        return dropped

    # What has ended

    def _link_has_room(self, flow: Flow, _: Done) -> None:
        self._link.give_back(flow)

    def _round_is_here(self, flow: Flow, message: RoundStarts) -> None:
        """Bytes of the flow's next round are, or none will be."""
        if flow not in self._active:
            return
        if message.start == RoundStart.WANTED and flow.end is End.LANDED and not flow.is_fetch_over:
            (self._continuing if flow.num_rounds else self._wanting)[flow] = None
            return
        if flow.end is End.LANDED:
            # Ended on one rank at least: so on all.
            flow.end = End.STOPPED if message.start == RoundStart.STOP else End.PARTLY
        flow.is_wanting = False
        self._end_if_over(flow)

    def _round_ended(self, flow: Flow, restored: PageCount) -> None:
        if flow not in self._active:
            return
        self._backend.reads.publish()
        filling = flow.filling.popleft()
        self._num_filling -= 1
        is_of_use = self._backend.access.reads and not flow.has_gap and flow.is_wanted
        num_pages = restored.num_pages if is_of_use else 0
        num_tokens = num_pages * self._page_size
        if num_tokens:
            self._slots.land(flow, flow.start + filling.first_page * self._page_size, filling.slots[:num_tokens])
            self._link.changed()
            self._link.expect(flow, max(0, flow.expected_pages - num_pages))
            # Those who wait for them may find enough.
            self._sharing.ended(flow, flow.hashes[filling.first_page : filling.first_page + num_pages])
        self._slots.free(filling.slots[num_tokens:])
        if num_tokens < filling.slots.numel():
            flow.has_gap = True
            self._backend.reads.stop(_fetch_of(flow))
            self._want_no_more(flow)
        else:
            self._end_if_over(flow)

    def _fetch_ended(self, flow: Flow, _: Done) -> None:
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
            self._backend.reads.stop(_fetch_of(flow))
        del self._active[flow]
        self._link.changed()
        self._sharing.ended(flow, flow.hashes)
        self._on_over(flow)

    # Slots for rounds

    def _await(self, flow: Flow) -> None:
        """Have the flow ask for slots when bytes of its next round are here."""
        flow.is_wanting = True
        ticket = self._board.open(partial(self._round_is_here, flow))
        self._backend.reads.await_round(ticket, _fetch_of(flow), flow.num_rounds, flow.num_pages - flow.next_page)

    def _give_slots(self, flow: Flow, reserved_tokens: int) -> bool:
        """Slots for the next round, if there are any for it."""
        if not self._backend.access.reads:
            self._want_no_more(flow)
            return True
        num_tokens = (flow.round_ends[0] - flow.next_page) * self._page_size
        slots = self._slots.allocate(flow, num_tokens, reserved_tokens)
        if slots is None:
            return False
        ticket = self._board.open(partial(self._round_ended, flow))
        sink = self._backend.reads.restore_round(ticket, _fetch_of(flow), flow.num_rounds, slots)
        flow.filling.append(FillingRound(flow.next_page, slots, sink))
        self._num_filling += 1
        flow.next_page = flow.round_ends.popleft()
        flow.num_rounds += 1
        self._stop_wanting(flow)
        if flow.round_ends:
            self._await(flow)
        return True

    def _make_way(self) -> None:
        """Where several hold slots, and none of them will give them back by itself, the last of those does without its
        rest.

        A single one waits: its request could not be computed without slots either.
        """
        if not self._num_filling and len(self._continuing) > 1:
            last = next(reversed(self._continuing))
            self._stop_wanting(last)
            last.end = End.FULL_POOL
            self._end_if_over(last)

    def _drop(self, flow: Flow) -> None:
        """Its fetch ends now, and it keeps nothing from others."""
        _close(flow)
        self._backend.reads.publish()
        self._free(flow)
        self._slots.let_go(flow)
        self._stop_wanting(flow)
        flow.end = End.FULL_POOL
        self._end_if_over(flow)

    def _free(self, flow: Flow) -> None:
        for filling in flow.filling:
            self._num_filling -= 1
            self._slots.free(filling.slots)
        flow.filling.clear()

    def _round_ends(self, flow: Flow, first_page: int) -> list[int]:
        """Rounds end at multiples of their length, counted from the sequence's start, as spans do."""
        before = flow.start // self._page_size
        next_end = (before + first_page) // self._round_pages * self._round_pages + self._round_pages - before
        return [*range(next_end, flow.num_pages, self._round_pages), flow.num_pages]


def _fetch_of(flow: Flow) -> FetchCall:
    assert flow.fetch is not None
    return flow.fetch


def _close(flow: Flow) -> None:
    """Nothing is written to its slots from here on."""
    for filling in flow.filling:
        filling.sink.close()
