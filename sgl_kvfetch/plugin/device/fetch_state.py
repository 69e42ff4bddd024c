"""The state machine of a fetch: states, events and actions. It does no I/O and uses neither a clock nor the tree.

A fetch lasts from a request's arrival until its prefix is in the pool. ``StateMachine.receive`` takes an event and
returns the actions that follow from it; the caller carries them out in that order. ``TABLE``, at the end of this
module, is the whole truth: it lists every event that may come in every state, and every other event is refused.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

from msgspec import Struct


class State(enum.Enum):
    LOOKUP = "lookup"  # a store lookup is under way
    CANCELLED = "cancelled"  # the lookup is cancelled, and its answer is still to come
    WAITING = "waiting"  # waits for the link
    FOLLOWING = "following"  # waits for another fetch that brings the same pages
    # From here on, pages are fetched round by round, and the part of the prefix that is in the tree is locked.
    AWAITING_BYTES = "awaiting bytes"  # the next round waits for its first bytes
    AWAITING_SLOTS = "awaiting slots"  # the next round waits for slots
    FILLING = "filling"  # all rounds have got slots
    CERTAIN = "certain"  # as FILLING, and the rest comes in time: the request may start
    STOPPING = "stopping"  # no further round begins; those that are being filled still count
    DISCARDING = "discarding"  # no further round begins; those that are being filled do not count
    LANDED = "landed"  # is in the tree, locked until the request is admitted
    OVER = "over"
    NOT_FETCHED = "not fetched"  # is over, and had not begun to fetch


class End(enum.Enum):
    """How a fetch ended, unless its request was aborted."""

    LANDED = "landed"  # all stored pages landed
    EARLY = "early"  # the request started while its last pages were being restored
    PARTLY = "partly"  # some pages landed, the rest failed
    FAILED = "failed"  # all pages failed
    STOPPED = "stopped"  # the rest is computed, because that has become faster
    RECOMPUTED = "recomputed"  # all pages are computed, because that is faster
    FULL_POOL = "full_pool"  # the pool had no room for the rest
    MISSED = "missed"  # the pages are not stored, or the lookup failed
    KNOWN = "known"  # the tree already had the pages
    LOST = "lost"  # the tree had lost the pages before them
    SUSPENDED = "suspended"  # the weights changed
    FLUSHED = "flushed"  # the tree was emptied, or the store was detached


class Sign(enum.Enum):
    """An event without data."""

    FOUND = "found"  # the store has pages, and they are to be fetched
    FOLLOWS = "follows"  # another fetch brings the next page
    LEADER_ENDED = "leader ended"  # no other fetch brings the next page any longer
    BYTES_HERE = "bytes here"  # the first bytes of the next round have arrived
    CERTAIN = "certain"  # all bytes are here, and the rest will be restored in time for the request's own computing
    STARTED = "started"  # the request is admitted, and takes the slots that are being filled
    TRANSMISSION_OVER = "transmission over"  # nothing more comes over the link
    UNWANTED = "unwanted"  # the request is gone, and no other fetch follows this one
    RELEASED = "released"  # the request has its own lock, or must do without one


class Own(enum.Enum):
    """An event that the machine sends to itself, after any other one, if the new state has a row for it."""

    NONE_FILLING = "none filling"  # no round is being filled


class NothingToFetch(Struct, frozen=True):
    """Nothing will be fetched; ``end`` says why."""

    end: End


class Begun(Struct, frozen=True):
    """The link is free, and the tree is locked. ``round_ends``: pages, exclusive, ascending; at least one. ``slots``:
    the first round's, as in `SlotsGiven`, if there are any already."""

    first_page: int
    round_ends: tuple[int, ...]
    slots: Any = None


class SlotsGiven(Struct, frozen=True):
    """The next round has got ``slots``. `Land`, `FreeSlots` and `HandOver` actions return them."""

    slots: Any


class RoundRefused(Struct, frozen=True):
    """The next round and all later ones are given up; ``end`` says why."""

    end: End


class Restored(Struct, frozen=True):
    """The oldest round with slots is over: its first ``num_pages`` pages are restored. Nothing writes to its slots."""

    num_pages: int


class Dropped(Struct, frozen=True):
    """The fetch must end at once. Nothing writes to its slots any more."""

    end: End


Event = Sign | NothingToFetch | Begun | SlotsGiven | RoundRefused | Restored | Dropped


class Do(enum.Enum):
    """An action without data."""

    CANCEL_LOOKUP = "cancel lookup"
    FORGET_FOUND = "forget found"  # the pages that the lookup found will not be fetched
    QUEUE = "queue"  # wait for the link
    LEAVE_QUEUE = "leave queue"
    FOLLOW_NO_MORE = "follow no more"
    ASK_FOR_SLOTS = "ask for slots"
    ASK_NO_MORE = "ask no more"  # withdraw the request for slots
    STOP = "stop"  # cancel what is still being transmitted or restored
    FETCH_NO_MORE = "fetch no more"  # this fetch brings no more pages; its followers look elsewhere
    LET_GO = "let go"  # release the lock on the tree


class Transmit(Struct, frozen=True):
    """Transmit all rounds, from ``first_page`` on. ``slots``: the first round's, or None."""

    first_page: int
    round_ends: tuple[int, ...]
    slots: Any = None


class AwaitBytes(Struct, frozen=True):
    """Report when the first bytes of a round arrive. The round begins at ``first_page``."""

    round_index: int
    first_page: int


class Land(Struct, frozen=True):
    """Put the first ``num_pages`` pages of a round into the tree. A `FreeSlots` gives back the slots beyond them."""

    first_page: int
    num_pages: int
    slots: Any


class FreeSlots(Struct, frozen=True):
    """Give back a round's slots, except those of its first ``num_landed`` pages."""

    num_landed: int
    slots: Any


class HandOver(Struct, frozen=True):
    """Hand a round's slots over to the request, which starts while they are being filled."""

    slots: Any


class Finish(Struct, frozen=True):
    """Let the request, if it is still there, go on with the prefix that the tree has."""

    end: End


Action = Do | Transmit | AwaitBytes | Land | FreeSlots | HandOver | Finish


class _Round(NamedTuple):
    pages: range
    slots: Any


class StateMachine:
    """The state of one fetch. Page numbers count from the first page that was looked up.

    ``TABLE`` decides; the methods below are its guards and steps. A guard only reads. A step returns actions, keeps
    account of rounds and pages, and never sets the state."""

    def __init__(self) -> None:
        self.state = State.LOOKUP
        self.num_rounds = 0  # rounds that have got slots
        self.landed_pages = 0
        self._left: deque[range] = deque()  # pages of the rounds without slots
        self._filling: deque[_Round] = deque()
        self._num_parted = 0  # rounds whose slots were freed or handed over before they were restored
        self._end = End.PARTLY  # why it is stopping

    @property
    def next_round(self) -> range:
        """The pages of the first round without slots."""
        return self._left[0]

    @property
    def filling(self) -> list[Any]:
        """The slots that are being filled."""
        return [each.slots for each in self._filling]

    def receive(self, event: Event) -> list[Action]:
        """Return the actions that follow from ``event``. Raises AssertionError if it cannot happen in this state, which
        then stays as it is."""
        row = self.find_row(event)
        assert row is not None, f"{event} while {self.state}"
        actions = self._follow(row, event)
        if not self._filling and (row := self.find_row(Own.NONE_FILLING)) is not None:
            actions += self._follow(row, Own.NONE_FILLING)
        return actions

    def find_row(self, event: Event | Own) -> Row | None:
        """Return the first row of the table for this state and event whose guard holds."""
        kind = event if isinstance(event, enum.Enum) else type(event)
        rows = (row for row in TABLE[self.state] if row.event is kind)
        return next((row for row in rows if row.guard is None or row.guard(self, event)), None)

    def _follow(self, row: Row, event: Event | Own) -> list[Action]:
        self.state = row.state
        actions: list[Action] = []
        for step in row.steps:
            actions += step(self, event) if callable(step) else [step]
        return actions

    # Guards

    def has_further_round(self, _: SlotsGiven) -> bool:
        """Return whether a round comes after the next one."""
        return len(self._left) > 1

    def brings_slots(self, event: Begun) -> bool:
        """Return whether there are slots for the first round already."""
        return event.slots is not None

    def brings_all_slots(self, event: Begun) -> bool:
        """Return whether there are slots for the first round already, and no other round."""
        return event.slots is not None and len(event.round_ends) == 1

    def fits(self, event: Restored) -> bool:
        """Return whether a round is being filled, and the oldest one has that many pages."""
        return bool(self._filling) and event.num_pages <= len(self._filling[0].pages)

    def is_whole(self, event: Restored) -> bool:
        """Return whether a round is being filled, and all pages of the oldest one are restored."""
        return bool(self._filling) and event.num_pages == len(self._filling[0].pages)

    def has_parted(self, _: Restored) -> bool:
        """Return whether a round without slots is still to be reported."""
        return self._num_parted > 0

    def has_landed(self, _: Own) -> bool:
        return self.landed_pages > 0

    # Steps

    def begin(self, event: Begun) -> list[Action]:
        self._left.extend(range(*ends) for ends in pairwise((event.first_page, *event.round_ends)))
        return [Transmit(event.first_page, event.round_ends, event.slots)]

    def await_bytes(self, _: Event) -> list[Action]:
        return [AwaitBytes(self.num_rounds, self.next_round.start)]

    def take_slots(self, event: Begun | SlotsGiven) -> list[Action]:
        self._filling.append(_Round(self._left.popleft(), event.slots))
        self.num_rounds += 1
        return []

    def land(self, event: Restored) -> list[Action]:
        """Take the oldest round with slots: put the pages that are restored into the tree, and free the others."""
        (pages, slots), num_pages = self._filling.popleft(), event.num_pages
        self.landed_pages += num_pages
        landed: list[Action] = [Land(pages.start, num_pages, slots)] if num_pages else []
        return landed if num_pages == len(pages) else [*landed, FreeSlots(num_pages, slots)]

    def free(self, _: Restored) -> list[Action]:
        return [FreeSlots(0, self._filling.popleft().slots)]

    def free_all(self, _: Dropped) -> list[Action]:
        return [FreeSlots(0, slots) for slots in self._part()]

    def hand_over(self, _: Event) -> list[Action]:
        return [HandOver(slots) for slots in self._part()]

    def _part(self) -> list[Any]:
        parted = self.filling
        self._num_parted += len(parted)
        self._filling.clear()
        return parted

    def forget_parted(self, _: Restored) -> list[Action]:
        self._num_parted -= 1
        return []

    def note_end(self, event: RoundRefused) -> list[Action]:
        self._end = event.end
        return []

    def finish(self, event: NothingToFetch | Dropped) -> list[Action]:
        return [Finish(event.end)]

    def finish_stopped(self, _: Own) -> list[Action]:
        has_failed = self._end is End.PARTLY and not self.landed_pages
        return [Finish(End.FAILED if has_failed else self._end)]


Guard = Callable[[StateMachine, Any], bool]
Step = Do | Finish | Callable[[StateMachine, Any], list[Action]]


class Row(NamedTuple):
    """What follows from an event if the guard holds: the next state, and actions or the steps that return them."""

    event: Sign | Own | type[Event]
    guard: Guard | None
    state: State
    steps: tuple[Step, ...]


def _on(event: Sign | Own | type[Event], state: State, *steps: Step, when: Guard | None = None) -> Row:
    return Row(event, when, state, steps)


_S, _M = State, StateMachine


def _filling_rows(state: State, *withdraw: Do) -> list[Row]:
    """Return the rows of a state in which rounds that are being filled count."""
    return [
        _on(Restored, state, _M.land, when=_M.is_whole),
        _on(Restored, _S.DISCARDING, *withdraw, _M.land, Do.STOP, when=_M.fits),
        _on(Sign.UNWANTED, _S.DISCARDING, *withdraw, Do.STOP),
        _on(Dropped, _S.OVER, *withdraw, _M.free_all, Do.STOP, Do.FETCH_NO_MORE, Do.LET_GO, _M.finish),
    ]


def _late_rows(state: State, *events: Sign | type[Event]) -> list[Row]:
    """Return rows for reports of the data plane that come too late to matter."""
    return [_on(event, state) for event in events]


# The rows of each state: an event, the next state, what to do, and perhaps a guard. The first row that fits counts.
TABLE: dict[State, list[Row]] = {
    _S.LOOKUP: [
        _on(Sign.FOUND, _S.WAITING, Do.QUEUE),
        _on(NothingToFetch, _S.NOT_FETCHED, Do.FORGET_FOUND, _M.finish),
        _on(Sign.UNWANTED, _S.CANCELLED, Do.CANCEL_LOOKUP),
        _on(Dropped, _S.NOT_FETCHED, Do.CANCEL_LOOKUP, Do.FORGET_FOUND, _M.finish),
    ],
    _S.CANCELLED: [
        _on(Sign.FOUND, _S.NOT_FETCHED, Do.FORGET_FOUND),
        _on(NothingToFetch, _S.NOT_FETCHED, Do.FORGET_FOUND),
    ],
    _S.WAITING: [
        _on(Begun, _S.FILLING, Do.LEAVE_QUEUE, _M.begin, _M.take_slots, when=_M.brings_all_slots),
        _on(Begun, _S.AWAITING_BYTES, Do.LEAVE_QUEUE, _M.begin, _M.take_slots, _M.await_bytes, when=_M.brings_slots),
        _on(Begun, _S.AWAITING_BYTES, Do.LEAVE_QUEUE, _M.begin, _M.await_bytes),
        _on(Sign.FOLLOWS, _S.FOLLOWING, Do.LEAVE_QUEUE),
        _on(NothingToFetch, _S.NOT_FETCHED, Do.LEAVE_QUEUE, Do.FORGET_FOUND, _M.finish),
        _on(Sign.UNWANTED, _S.NOT_FETCHED, Do.LEAVE_QUEUE, Do.FORGET_FOUND),
        _on(Dropped, _S.NOT_FETCHED, Do.LEAVE_QUEUE, Do.FORGET_FOUND, _M.finish),
    ],
    _S.FOLLOWING: [
        _on(Sign.FOLLOWS, _S.FOLLOWING),
        _on(Sign.LEADER_ENDED, _S.WAITING, Do.QUEUE),
        _on(NothingToFetch, _S.NOT_FETCHED, Do.FORGET_FOUND, _M.finish),
        _on(Sign.UNWANTED, _S.NOT_FETCHED, Do.FOLLOW_NO_MORE, Do.FORGET_FOUND),
        _on(Dropped, _S.NOT_FETCHED, Do.FOLLOW_NO_MORE, Do.FORGET_FOUND, _M.finish),
    ],
    _S.AWAITING_BYTES: [
        _on(Sign.BYTES_HERE, _S.AWAITING_SLOTS, Do.ASK_FOR_SLOTS),
        _on(RoundRefused, _S.STOPPING, _M.note_end),
        _on(Sign.TRANSMISSION_OVER, _S.STOPPING),
        *_filling_rows(_S.AWAITING_BYTES),
    ],
    _S.AWAITING_SLOTS: [
        _on(SlotsGiven, _S.AWAITING_BYTES, Do.ASK_NO_MORE, _M.take_slots, _M.await_bytes, when=_M.has_further_round),
        _on(SlotsGiven, _S.FILLING, Do.ASK_NO_MORE, _M.take_slots),
        _on(RoundRefused, _S.STOPPING, Do.ASK_NO_MORE, _M.note_end),
        _on(Sign.TRANSMISSION_OVER, _S.STOPPING, Do.ASK_NO_MORE),
        *_filling_rows(_S.AWAITING_SLOTS, Do.ASK_NO_MORE),
    ],
    _S.FILLING: [
        _on(Sign.CERTAIN, _S.CERTAIN),
        _on(Sign.TRANSMISSION_OVER, _S.FILLING),
        *_filling_rows(_S.FILLING),
        _on(Own.NONE_FILLING, _S.LANDED, Do.FETCH_NO_MORE, Finish(End.LANDED)),
    ],
    _S.CERTAIN: [
        _on(Sign.STARTED, _S.LANDED, _M.hand_over, Do.FETCH_NO_MORE, Finish(End.EARLY)),
        _on(Sign.TRANSMISSION_OVER, _S.CERTAIN),
        *_filling_rows(_S.CERTAIN),
        _on(Own.NONE_FILLING, _S.LANDED, Do.FETCH_NO_MORE, Finish(End.LANDED)),
    ],
    _S.STOPPING: [
        *_filling_rows(_S.STOPPING),
        _on(Own.NONE_FILLING, _S.LANDED, Do.STOP, Do.FETCH_NO_MORE, _M.finish_stopped, when=_M.has_landed),
        _on(Own.NONE_FILLING, _S.OVER, Do.STOP, Do.FETCH_NO_MORE, Do.LET_GO, _M.finish_stopped),
        *_late_rows(_S.STOPPING, Sign.BYTES_HERE, RoundRefused, Sign.TRANSMISSION_OVER),
    ],
    _S.DISCARDING: [
        _on(Restored, _S.DISCARDING, _M.free, when=_M.fits),
        _on(Sign.UNWANTED, _S.DISCARDING),
        _on(Dropped, _S.OVER, _M.free_all, Do.FETCH_NO_MORE, Do.LET_GO, _M.finish),
        _on(Own.NONE_FILLING, _S.LANDED, Do.FETCH_NO_MORE, Finish(End.PARTLY), when=_M.has_landed),
        _on(Own.NONE_FILLING, _S.OVER, Do.FETCH_NO_MORE, Do.LET_GO, Finish(End.FAILED)),
        *_late_rows(_S.DISCARDING, Sign.BYTES_HERE, RoundRefused, Sign.TRANSMISSION_OVER, Sign.CERTAIN),
    ],
    _S.LANDED: [
        _on(Sign.RELEASED, _S.OVER, Do.LET_GO),
        _on(Dropped, _S.OVER, Do.LET_GO),
        _on(Restored, _S.LANDED, _M.forget_parted, when=_M.has_parted),
        *_late_rows(_S.LANDED, Sign.BYTES_HERE, RoundRefused, Sign.TRANSMISSION_OVER, Sign.CERTAIN),
    ],
    _S.OVER: [
        _on(Restored, _S.OVER, _M.forget_parted, when=_M.has_parted),
        *_late_rows(_S.OVER, Sign.BYTES_HERE, RoundRefused, Sign.TRANSMISSION_OVER, Sign.CERTAIN),
    ],
    _S.NOT_FETCHED: [],
}
