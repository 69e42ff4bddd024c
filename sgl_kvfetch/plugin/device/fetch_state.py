"""The state machine of a fetch: states, events and actions. It does no I/O and uses neither a clock nor the tree.

A fetch lasts from a request's arrival until its prefix is in the pool. ``FetchState.receive`` takes an event and
returns the actions that follow from it; the caller carries them out in that order. ``TRANSITIONS`` lists every event
that may come in every state. An event that comes after the fetch has ended does not change its state.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from typing import Any

from msgspec import Struct


class State(enum.Enum):
    LOOKUP = "lookup"  # a store lookup is under way
    WAITING = "waiting"  # waits for the link
    FOLLOWING = "following"  # waits for another fetch that brings the same pages
    FETCHING = "fetching"  # fetches round by round; the part of the prefix that is in the tree is locked
    STOPPING = "stopping"  # begins no further round; waits for the rounds that are being filled
    LANDED = "landed"  # is in the tree, locked until the request is admitted
    OVER = "over"


class Awaited(enum.Enum):
    """What the next round waits for."""

    BYTES = "bytes"  # its first bytes
    SLOTS = "slots"
    NOTHING = "nothing"  # there is no next round


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

    FOLLOWS = "follows"  # another fetch brings the next page
    LEADER_ENDED = "leader ended"  # no other fetch brings the next page any longer
    CERTAIN = "certain"  # all bytes are here, and the rest will be restored in time for the request's own computing
    STARTED = "started"  # the request is admitted, and takes the slots that are being filled
    BYTES_HERE = "bytes here"  # the first bytes of the next round have arrived
    TRANSMISSION_OVER = "transmission over"  # nothing more comes over the link
    ABANDONED = "abandoned"  # the request is gone; other fetches may still follow this one
    UNWANTED = "unwanted"  # the request and all followers are gone
    RELEASED = "released"  # the request has its own lock, or must do without one


class Found(Struct, frozen=True):
    """The store has the first ``num_pages`` pages, and they are to be fetched."""

    num_pages: int


class NothingToFetch(Struct, frozen=True):
    """Nothing will be fetched; ``end`` says why."""

    end: End


class Begun(Struct, frozen=True):
    """The link is free, and the tree is locked. ``round_ends``: pages, exclusive, ascending; last is ``num_pages``."""

    first_page: int
    round_ends: tuple[int, ...]


class SlotsGiven(Struct, frozen=True):
    """The next round has got ``slots``. `Land` and `Free` actions return them."""

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


Event = Sign | Found | NothingToFetch | Begun | SlotsGiven | RoundRefused | Restored | Dropped


class Do(enum.Enum):
    """An action without data."""

    CANCEL_LOOKUP = "cancel lookup"
    FORGET_FOUND = "forget found"  # the pages that the lookup found will not be fetched
    QUEUE = "queue"  # wait for the link
    LEAVE_QUEUE = "leave queue"
    ASK_FOR_SLOTS = "ask for slots"
    ASK_NO_MORE = "ask no more"  # withdraw the request for slots
    STOP = "stop"  # cancel what is still being transmitted or restored
    FETCH_NO_MORE = "fetch no more"  # this fetch brings no more pages; its followers look elsewhere
    LET_GO = "let go"  # release the lock on the tree


class Transmit(Struct, frozen=True):
    """Transmit all rounds, from ``first_page`` on."""

    first_page: int
    round_ends: tuple[int, ...]


class AwaitBytes(Struct, frozen=True):
    """Report when the first bytes of a round arrive. The round begins at ``first_page``."""

    round_index: int
    first_page: int


class Land(Struct, frozen=True):
    """Put the first ``num_pages`` pages of a round into the tree. A `Free` gives back the slots beyond them."""

    first_page: int
    num_pages: int
    slots: Any


class Free(Struct, frozen=True):
    """Give back a round's slots, except those of its first ``num_landed`` pages."""

    num_landed: int
    slots: Any


class Finish(Struct, frozen=True):
    """Let the request go on with the prefix that the tree has."""

    end: End


class HandOver(Struct, frozen=True):
    """Hand a round's slots over to the request, which starts while they are being filled."""

    slots: Any


Action = Do | Transmit | AwaitBytes | Land | Free | HandOver | Finish


class _Round(Struct, frozen=True):
    first_page: int
    end_page: int
    slots: Any


class FetchState:
    """The state of one fetch. Page numbers count from the first page that was looked up."""

    def __init__(self) -> None:
        self.state = State.LOOKUP
        self.awaited = Awaited.NOTHING
        self.num_pages = 0  # stored pages
        self.next_page = 0  # first page of the next round
        self.num_rounds = 0  # rounds that have got slots
        self.landed_pages = 0
        self.is_abandoned = False
        self._is_certain = False
        self._is_unwanted = False
        self._has_gap = False  # a round came short, so later rounds do not count
        self._round_ends: deque[int] = deque()  # of rounds without slots
        self._filling: deque[_Round] = deque()
        self._end = End.LANDED  # as far as known

    @property
    def round_end(self) -> int:
        """The page where the next round ends."""
        return self._round_ends[0]

    @property
    def filling(self) -> list[Any]:
        """The slots that are being filled."""
        return [each.slots for each in self._filling]

    @property
    def can_start(self) -> bool:
        """Return whether the request may start while its last pages are being restored."""
        is_filling = self.state is State.FETCHING and self.awaited is Awaited.NOTHING and bool(self._filling)
        return is_filling and self._is_certain and not self._has_gap

    def receive(self, event: Event) -> list[Action]:
        """Return the actions that follow from ``event``. Raises AssertionError if it cannot happen in this state."""
        transition = TRANSITIONS[self.state].get(event if isinstance(event, Sign) else type(event))
        assert transition is not None, f"{event} while {self.state}"
        self.state, do = transition
        actions = do(self, event) if callable(do) else do
        return [*actions, *self._end_if_through()]

    def _end_if_through(self) -> list[Action]:
        """End the fetch if no round is awaited or being filled: the only transition without an event."""
        if self.state not in (State.FETCHING, State.STOPPING) or self.awaited is not Awaited.NOTHING or self._filling:
            return []
        actions: list[Action] = [] if self._end is End.LANDED else [Do.STOP]
        actions.append(Do.FETCH_NO_MORE)
        if self.is_abandoned:
            self.state = State.OVER
            return [*actions, Do.LET_GO]
        if self.landed_pages:
            self.state = State.LANDED
            return [*actions, Finish(self._end)]
        self.state = State.OVER
        end = End.FAILED if self._end is End.PARTLY else self._end
        return [*actions, Do.LET_GO, Finish(end)]

    # Event handlers

    def _found(self, event: Found) -> list[Action]:
        self.num_pages = event.num_pages
        return [Do.QUEUE]

    def _has_nothing(self, event: NothingToFetch | Dropped) -> list[Action]:
        return [Do.FORGET_FOUND, Finish(event.end)]

    def _begin(self, event: Begun) -> list[Action]:
        self.next_page = event.first_page
        self._round_ends.extend(event.round_ends)
        return [Transmit(event.first_page, event.round_ends), self._await_bytes()]

    def _await_bytes(self) -> AwaitBytes:
        self.awaited = Awaited.BYTES
        return AwaitBytes(self.num_rounds, self.next_page)

    def _bytes_are_here(self, _: Event) -> list[Action]:
        self.awaited = Awaited.SLOTS
        return [Do.ASK_FOR_SLOTS]

    def _take_slots(self, event: SlotsGiven) -> list[Action]:
        assert self.awaited is Awaited.SLOTS
        end_page = self._round_ends.popleft()
        self._filling.append(_Round(self.next_page, end_page, event.slots))
        self.next_page = end_page
        self.num_rounds += 1
        self.awaited = Awaited.NOTHING
        return [Do.ASK_NO_MORE, *([self._await_bytes()] if self._round_ends else [])]

    def _take_pages(self, event: Restored) -> list[Action]:
        filled = self._filling.popleft()
        num_pages = 0 if self._has_gap or self._is_unwanted else event.num_pages
        self.landed_pages += num_pages
        actions: list[Action] = [Land(filled.first_page, num_pages, filled.slots)] if num_pages else []
        if num_pages < filled.end_page - filled.first_page:
            self._has_gap = True
            actions += [Free(num_pages, filled.slots), *self._want_no_more(End.PARTLY), Do.STOP]
        return actions

    def _want_no_more(self, end: End) -> list[Action]:
        self.state, self._end = State.STOPPING, end
        self.awaited = Awaited.NOTHING
        return [Do.ASK_NO_MORE]

    def _end_transmission(self, _: Event) -> list[Action]:
        """Stop if a round still waits for bytes or slots: none will come, after the deadline or after a failed read."""
        return [] if self.awaited is Awaited.NOTHING else self._want_no_more(End.PARTLY)

    def _be_certain(self, _: Event) -> list[Action]:
        self._is_certain = True
        return []

    def _start(self, _: Event) -> list[Action]:
        assert self._is_certain, "the rest may fail"
        actions: list[Action] = [HandOver(each.slots) for each in self._filling]
        self._filling.clear()
        return [*actions, Do.FETCH_NO_MORE, Finish(End.EARLY)]

    def _abandon(self, _: Event) -> list[Action]:
        self.is_abandoned = True
        return []

    def _end_unwanted(self, _: Event) -> list[Action]:
        self._is_unwanted = True
        return [*self._want_no_more(End.PARTLY), Do.STOP]

    def _drop(self, event: Dropped) -> list[Action]:
        actions: list[Action] = [Free(0, each.slots) for each in self._filling]
        self._filling.clear()
        actions += [*self._want_no_more(event.end), Do.STOP, Do.FETCH_NO_MORE, Do.LET_GO]
        self.state = State.OVER
        return actions if self.is_abandoned else [*actions, Finish(event.end)]


_S, _F = State, FetchState

# The state after each event, and its actions or the handler that returns them. A handler may set another state.
TRANSITIONS: dict[
    State, dict[Sign | type[Event], tuple[State, list[Action] | Callable[[FetchState, Any], list[Action]]]]
] = {
    _S.LOOKUP: {
        Found: (_S.WAITING, _F._found),
        NothingToFetch: (_S.OVER, _F._has_nothing),
        Sign.ABANDONED: (_S.OVER, [Do.CANCEL_LOOKUP]),
        Dropped: (_S.OVER, lambda fetch, event: [Do.CANCEL_LOOKUP, *fetch._has_nothing(event)]),
    },
    _S.WAITING: {
        Begun: (_S.FETCHING, _F._begin),
        Sign.FOLLOWS: (_S.FOLLOWING, []),
        NothingToFetch: (_S.OVER, _F._has_nothing),
        Sign.ABANDONED: (_S.OVER, [Do.LEAVE_QUEUE, Do.FORGET_FOUND]),
        Dropped: (_S.OVER, lambda fetch, event: [Do.LEAVE_QUEUE, *fetch._has_nothing(event)]),
    },
    _S.FOLLOWING: {
        Sign.FOLLOWS: (_S.FOLLOWING, []),
        Sign.LEADER_ENDED: (_S.WAITING, [Do.QUEUE]),
        NothingToFetch: (_S.OVER, _F._has_nothing),
        Sign.ABANDONED: (_S.OVER, [Do.FORGET_FOUND]),
        Dropped: (_S.OVER, _F._has_nothing),
    },
    _S.FETCHING: {
        Sign.BYTES_HERE: (_S.FETCHING, _F._bytes_are_here),
        SlotsGiven: (_S.FETCHING, _F._take_slots),
        Restored: (_S.FETCHING, _F._take_pages),
        RoundRefused: (_S.STOPPING, lambda fetch, event: fetch._want_no_more(event.end)),
        Sign.TRANSMISSION_OVER: (_S.FETCHING, _F._end_transmission),
        Sign.CERTAIN: (_S.FETCHING, _F._be_certain),
        Sign.STARTED: (_S.LANDED, _F._start),
        Sign.ABANDONED: (_S.FETCHING, _F._abandon),
        Sign.UNWANTED: (_S.STOPPING, _F._end_unwanted),
        Dropped: (_S.OVER, _F._drop),
    },
    _S.STOPPING: {
        Restored: (_S.STOPPING, _F._take_pages),
        Sign.ABANDONED: (_S.STOPPING, _F._abandon),
        Sign.UNWANTED: (_S.STOPPING, _F._end_unwanted),
        Dropped: (_S.OVER, _F._drop),
        **dict.fromkeys((Sign.BYTES_HERE, RoundRefused, Sign.TRANSMISSION_OVER, Sign.CERTAIN), (_S.STOPPING, [])),
    },
    _S.LANDED: {
        **dict.fromkeys((Sign.RELEASED, Sign.ABANDONED, Dropped), (_S.OVER, [Do.LET_GO])),
        **dict.fromkeys(
            (Sign.BYTES_HERE, RoundRefused, Restored, Sign.TRANSMISSION_OVER, Sign.CERTAIN), (_S.LANDED, [])
        ),
    },
    _S.OVER: {
        **dict.fromkeys((Found, NothingToFetch), (_S.OVER, [Do.FORGET_FOUND])),
        **dict.fromkeys((Sign.BYTES_HERE, RoundRefused, Restored, Sign.TRANSMISSION_OVER, Sign.CERTAIN), (_S.OVER, [])),
    },
}
