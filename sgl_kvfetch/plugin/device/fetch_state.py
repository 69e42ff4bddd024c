"""What a fetch is waiting for, what may happen to it, and what has to be done then. Neither I/O nor clock nor tree.

A fetch is a request's way from its arrival to a prefix in the pool. ``FetchState.receive`` takes an event and returns
the actions that follow from it; whoever calls it carries them out, in their order. ``TRANSITIONS`` has every event that
may come in every state: what is reported late, after the fetch has ended, changes nothing.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class State(enum.Enum):
    LOOKUP = "lookup"  # the store is being asked
    WAITING = "waiting"  # for the link
    FOLLOWING = "following"  # another fetch brings the same pages
    FETCHING = "fetching"  # round by round, with a lock on what the tree has of the prefix
    STOPPING = "stopping"  # no further round is wanted; those that are being filled are waited for
    LANDED = "landed"  # in the tree, locked until the request is admitted
    OVER = "over"


class Awaited(enum.Enum):
    """What the next round waits for."""

    BYTES = "bytes"  # the first ones
    SLOTS = "slots"
    NOTHING = "nothing"  # there is no next round


class End(enum.Enum):
    """How a fetch ended, if not by an abort."""

    LANDED = "landed"  # all that the store had
    PARTLY = "partly"  # the rest failed
    FAILED = "failed"  # all of it did
    STOPPED = "stopped"  # the rest is computed, since that has become faster
    RECOMPUTED = "recomputed"  # all is computed, since that is faster
    FULL_POOL = "full_pool"  # the rest found no room
    MISSED = "missed"  # not stored, or the lookup failed
    KNOWN = "known"  # the tree had got it
    LOST = "lost"  # the tree had lost what came before it
    SUSPENDED = "suspended"  # the weights changed
    FLUSHED = "flushed"  # the tree was emptied, or the store detached


class Sign(enum.Enum):
    """An event that needs no more words."""

    FOLLOWS = "follows"  # another fetch brings the next page
    LEADER_ENDED = "leader ended"  # nobody else brings the next page any more
    BYTES_HERE = "bytes here"  # the first of the next round
    TRANSMISSION_OVER = "transmission over"  # nothing more comes over the link
    ABANDONED = "abandoned"  # the request is gone; others may follow
    UNWANTED = "unwanted"  # those that followed are gone, too
    RELEASED = "released"  # the request has its own lock, or has to do without


@dataclass(frozen=True, slots=True)
class Found:
    """The store has so many pages, from the first on, and they are to be fetched."""

    num_pages: int


@dataclass(frozen=True, slots=True)
class NothingToFetch:
    """The store has nothing, or the tree has it all, or it is to be computed."""

    end: End


@dataclass(frozen=True, slots=True)
class Begun:
    """The link is free, and the tree is locked. ``round_ends``: pages, ascending; the last one is ``num_pages``."""

    first_page: int
    round_ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SlotsGiven:
    """To the next round. ``slots``: returned when they are to land or to be freed."""

    slots: Any


@dataclass(frozen=True, slots=True)
class RoundRefused:
    """The next round, and those after it, are not to be had."""

    end: End


@dataclass(frozen=True, slots=True)
class Restored:
    """So many pages of the oldest round that has slots, from its first on. Nothing is written to it any more."""

    num_pages: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """It has to end at once. Nothing is written to its slots any more."""

    end: End


Event = Sign | Found | NothingToFetch | Begun | SlotsGiven | RoundRefused | Restored | Dropped


class Do(enum.Enum):
    """An action that needs no more words."""

    CANCEL_LOOKUP = "cancel lookup"
    FORGET_FOUND = "forget found"  # what the lookup found is not going to be fetched
    QUEUE = "queue"  # for the link
    LEAVE_QUEUE = "leave queue"
    ASK_FOR_SLOTS = "ask for slots"
    ASK_NO_MORE = "ask no more"  # for slots
    STOP = "stop"  # what is still on its way is not wanted, nor what is being restored
    FETCH_NO_MORE = "fetch no more"  # followers look elsewhere
    LET_GO = "let go"  # of the tree's lock


@dataclass(frozen=True, slots=True)
class Transmit:
    """All rounds, from ``first_page`` on."""

    first_page: int
    round_ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AwaitBytes:
    """Of a round, which begins at ``first_page``."""

    round_index: int
    first_page: int


@dataclass(frozen=True, slots=True)
class Land:
    """Put the first pages of a round into the tree. The slots beyond them are freed by a `Free`."""

    first_page: int
    num_pages: int
    slots: Any


@dataclass(frozen=True, slots=True)
class Free:
    """Give a round's slots back, but for those of its first ``num_landed`` pages."""

    num_landed: int
    slots: Any


@dataclass(frozen=True, slots=True)
class Finish:
    """The request goes on with what the tree has."""

    end: End


Action = Do | Transmit | AwaitBytes | Land | Free | Finish


@dataclass(frozen=True, slots=True)
class _Round:
    first_page: int
    end_page: int
    slots: Any


class FetchState:
    """Pages are counted from the first one that was looked up."""

    def __init__(self) -> None:
        self.state = State.LOOKUP
        self.awaited = Awaited.NOTHING
        self.num_pages = 0  # that the store has
        self.next_page = 0  # where the next round begins
        self.num_rounds = 0  # that have got slots
        self.landed_pages = 0
        self.is_abandoned = False
        self._is_unwanted = False
        self._has_gap = False  # a round came short: those after it do not count
        self._round_ends: deque[int] = deque()  # of those that have no slots yet
        self._filling: deque[_Round] = deque()
        self._end = End.LANDED  # as far as is known

    @property
    def round_end(self) -> int:
        """The page where the next round ends."""
        return self._round_ends[0]

    @property
    def filling(self) -> list[Any]:
        """The slots that are being filled."""
        return [each.slots for each in self._filling]

    def receive(self, event: Event) -> list[Action]:
        """Raises AssertionError if it cannot happen in this state."""
        transition = TRANSITIONS[self.state].get(event if isinstance(event, Sign) else type(event))
        assert transition is not None, f"{event} while {self.state}"
        self.state, do = transition
        actions = do(self, event) if callable(do) else do
        return [*actions, *self._end_if_through()]

    def _end_if_through(self) -> list[Action]:
        """The one transition without an event: nothing more comes, or is asked for."""
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

    # What follows from an event

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

    def _refuse(self, event: RoundRefused) -> list[Action]:
        return self._want_no_more(event.end)

    def _end_transmission(self, _: Event) -> list[Action]:
        """Whoever waits for bytes or slots now waits in vain: the deadline is over, or a read failed."""
        return [] if self.awaited is Awaited.NOTHING else self._want_no_more(End.PARTLY)

    def _abandon(self, _: Event) -> list[Action]:
        self.is_abandoned = True
        return []

    def _end_unwanted(self, _: Event) -> list[Action]:
        self._is_unwanted = True
        return [*self._want_no_more(End.PARTLY), Do.STOP]

    def _drop_lookup(self, event: Dropped) -> list[Action]:
        return [Do.CANCEL_LOOKUP, *self._has_nothing(event)]

    def _drop_wait(self, event: Dropped) -> list[Action]:
        return [Do.LEAVE_QUEUE, *self._has_nothing(event)]

    def _drop(self, event: Dropped) -> list[Action]:
        actions: list[Action] = [Free(0, each.slots) for each in self._filling]
        self._filling.clear()
        actions += [*self._want_no_more(event.end), Do.STOP, Do.FETCH_NO_MORE, Do.LET_GO]
        self.state = State.OVER
        return actions if self.is_abandoned else [*actions, Finish(event.end)]


_S, _F = State, FetchState

# The state after an event, unless the method finds that nothing more is to come, and what to do.
TRANSITIONS: dict[
    State, dict[Sign | type[Event], tuple[State, list[Action] | Callable[[FetchState, Any], list[Action]]]]
] = {
    _S.LOOKUP: {
        Found: (_S.WAITING, _F._found),
        NothingToFetch: (_S.OVER, _F._has_nothing),
        Sign.ABANDONED: (_S.OVER, [Do.CANCEL_LOOKUP]),
        Dropped: (_S.OVER, _F._drop_lookup),
    },
    _S.WAITING: {
        Begun: (_S.FETCHING, _F._begin),
        Sign.FOLLOWS: (_S.FOLLOWING, []),
        NothingToFetch: (_S.OVER, _F._has_nothing),
        Sign.ABANDONED: (_S.OVER, [Do.LEAVE_QUEUE, Do.FORGET_FOUND]),
        Dropped: (_S.OVER, _F._drop_wait),
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
        RoundRefused: (_S.STOPPING, _F._refuse),
        Sign.TRANSMISSION_OVER: (_S.FETCHING, _F._end_transmission),
        Sign.ABANDONED: (_S.FETCHING, _F._abandon),
        Sign.UNWANTED: (_S.STOPPING, _F._end_unwanted),
        Dropped: (_S.OVER, _F._drop),
    },
    _S.STOPPING: {
        Restored: (_S.STOPPING, _F._take_pages),
        Sign.ABANDONED: (_S.STOPPING, _F._abandon),
        Sign.UNWANTED: (_S.STOPPING, _F._end_unwanted),
        Dropped: (_S.OVER, _F._drop),
        **dict.fromkeys((Sign.BYTES_HERE, RoundRefused, Sign.TRANSMISSION_OVER), (_S.STOPPING, [])),
    },
    _S.LANDED: {
        **dict.fromkeys((Sign.RELEASED, Sign.ABANDONED, Dropped), (_S.OVER, [Do.LET_GO])),
        **dict.fromkeys((Sign.BYTES_HERE, RoundRefused, Sign.TRANSMISSION_OVER), (_S.LANDED, [])),
    },
    _S.OVER: {
        **dict.fromkeys((Found, NothingToFetch), (_S.OVER, [Do.FORGET_FOUND])),
        **dict.fromkeys((Sign.BYTES_HERE, RoundRefused, Restored, Sign.TRANSMISSION_OVER), (_S.OVER, [])),
    },
}
