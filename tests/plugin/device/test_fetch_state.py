"""Tests a fetch's states in a simulated world that generates every possible event, in random order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random

import pytest

from sgl_kvfetch.plugin.device.fetch_state import (
    TRANSITIONS,
    Action,
    AwaitBytes,
    Awaited,
    Begun,
    Do,
    Dropped,
    End,
    Event,
    FetchState,
    Finish,
    Found,
    Free,
    HandOver,
    Land,
    NothingToFetch,
    Restored,
    RoundRefused,
    Sign,
    SlotsGiven,
    State,
    Transmit,
)

PAGES = 10
WALKS = 4000

Move = Callable[[], None]


class World:
    """Simulates the surroundings of a fetch: the store, the link, the tree, the allocator and the request."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.fetch = FetchState()
        self.seen: set[tuple[State, object]] = set()
        self.is_looking_up = True
        self.is_queued = False
        self.is_request_there = True
        self.has_found = False  # pages were found, which must be fetched or forgotten
        self.awaits_bytes = False
        self.is_transmitting = False
        self.is_asking = False
        self.is_certain = False  # all bytes are here, which is reported later
        self.num_locks = 0
        self.first_page = 0
        self.landed_end = 0  # page
        self.held: dict[str, tuple[int, int]] = {}  # pages of the rounds that have slots
        self.reports: deque[str] = deque()  # pending reports of their slots
        self.restored: dict[str, int] = {}  # pages
        self.is_useless = False  # pages still being restored are not wanted
        self.ends: list[End] = []

    def moves(self) -> dict[Move, float]:
        """Return all events that can happen now, with their weights. Each report comes once, and may come late."""
        state = self.fetch.state
        fetches = state in (State.FETCHING, State.STOPPING)
        possible: dict[Move, tuple[float, bool]] = {
            self.store_has_it: (8, self.is_looking_up),
            self.it_is_not_to_be_fetched: (1, self.is_looking_up),
            self.bytes_come: (8, self.awaits_bytes),
            self.no_more_bytes_come: (1, self.awaits_bytes),
            self.round_is_restored: (4, bool(self.reports)),
            self.transmission_ends: (1, self.is_transmitting),
            self.tree_has_changed: (1, state in (State.WAITING, State.FOLLOWING)),
            self.another_one_leads: (1, state in (State.WAITING, State.FOLLOWING)),
            self.leader_ends: (4, state is State.FOLLOWING),
            self.link_is_free: (8, self.is_queued),
            self.slots_are_given: (8, self.is_asking),
            self.slots_are_refused: (1, self.is_asking),
            self.request_goes: (0.5, self.is_request_there and state is not State.OVER),
            self.followers_go: (1, not self.is_request_there and fetches),
            self.all_is_flushed: (0.3, state is not State.OVER),
            self.rest_is_certain: (2, self.is_certain),
            self.request_starts_early: (2, self.fetch.can_start and self.is_request_there),
            self.request_is_admitted: (1, state is State.LANDED),
        }
        return {move: weight for move, (weight, is_possible) in possible.items() if is_possible}

    def walk(self) -> None:
        """Let events happen until none is possible."""
        while moves := self.moves():
            self.random.choices(list(moves), list(moves.values()))[0]()
            self.check()

    def receive(self, event: Event) -> None:
        self.seen.add((self.fetch.state, event if isinstance(event, Sign) else type(event)))
        for action in self.fetch.receive(event):
            self.act(action)

    def act(self, action: Action) -> None:
        match action:
            case Do.CANCEL_LOOKUP:
                assert self.is_looking_up
            case Do.FORGET_FOUND:
                self.has_found = False
            case Do.QUEUE:
                assert not self.is_queued
                self.is_queued = True
            case Do.LEAVE_QUEUE:
                assert self.is_queued
                self.is_queued = False
            case Transmit():
                assert self.has_found
                assert self.num_locks == 1
                self.has_found, self.is_transmitting = False, True
            case AwaitBytes(index, first_page):
                assert not self.awaits_bytes
                assert index == self.fetch.num_rounds
                assert first_page == self.fetch.next_page
                self.awaits_bytes = True
            case Do.ASK_FOR_SLOTS:
                self.is_asking = True
            case Do.ASK_NO_MORE:
                self.is_asking = False
            case Land(first_page, num_pages, slots):
                assert (first_page, num_pages) == (self.landed_end, self.restored[slots]), "a page that is not there"
                self.landed_end += num_pages
                begin, end = self.held.pop(slots)
                assert first_page == begin
                if begin + num_pages < end:
                    self.held[slots] = begin + num_pages, end
            case Free(num_landed, slots):
                begin, end = self.held.pop(slots)
                assert begin < end
                assert num_landed == (self.restored[slots] if begin == self.landed_end and num_landed else 0)
            case HandOver(slots):
                del self.held[slots]
            case Finish(end):
                assert self.is_request_there
                self.ends.append(end)
            case Do.STOP:
                assert self.is_useless or not self.held, "pages that would have counted are thrown away"
            case Do.LET_GO:
                self.num_locks -= 1

    # Reports

    def store_has_it(self) -> None:
        self.is_looking_up, self.has_found = False, True
        self.receive(Found(self.random.randint(1, PAGES)))

    def it_is_not_to_be_fetched(self) -> None:
        self.is_looking_up, self.has_found = False, self.random.random() < 0.5
        self.receive(NothingToFetch(End.RECOMPUTED if self.has_found else End.MISSED))

    def bytes_come(self) -> None:
        self.awaits_bytes = False
        self.receive(Sign.BYTES_HERE)

    def no_more_bytes_come(self) -> None:
        self.awaits_bytes = False
        self.receive(RoundRefused(self.random.choice([End.PARTLY, End.STOPPED])))

    def round_is_restored(self) -> None:
        slots = self.reports.popleft()
        begin, end = self.held.get(slots, (0, 1))
        self.restored[slots] = self.random.choice([end - begin, end - begin, self.random.randint(0, end - begin)])
        self.is_useless |= self.restored[slots] < end - begin
        self.receive(Restored(self.restored[slots]))

    def transmission_ends(self) -> None:
        self.is_transmitting = False
        self.receive(Sign.TRANSMISSION_OVER)

    def rest_is_certain(self) -> None:
        self.is_certain = False
        self.receive(Sign.CERTAIN)

    # Turns

    def tree_has_changed(self) -> None:
        self.is_queued = False
        self.receive(NothingToFetch(self.random.choice([End.KNOWN, End.LOST, End.SUSPENDED])))

    def another_one_leads(self) -> None:
        self.is_queued = False
        self.receive(Sign.FOLLOWS)

    def leader_ends(self) -> None:
        self.receive(Sign.LEADER_ENDED)

    def link_is_free(self) -> None:
        self.is_queued = False
        num_pages = self.fetch.num_pages
        self.first_page = self.landed_end = self.random.randrange(num_pages)
        inner = [page for page in range(self.first_page + 1, num_pages) if self.random.random() < 0.3]
        self.num_locks += 1
        self.receive(Begun(self.first_page, (*inner, num_pages)))

    def slots_are_given(self) -> None:
        slots = f"slots {self.fetch.num_rounds}"
        self.held[slots] = self.fetch.next_page, self.fetch.round_end
        self.reports.append(slots)
        self.receive(SlotsGiven(slots))
        self.is_certain = self.fetch.awaited is Awaited.NOTHING and self.random.random() < 0.5

    def slots_are_refused(self) -> None:
        self.receive(RoundRefused(self.random.choice([End.FULL_POOL, End.PARTLY])))

    # Ends

    def request_goes(self) -> None:
        self.is_request_there = False
        self.receive(Sign.ABANDONED)

    def followers_go(self) -> None:
        self.is_useless = True
        self.receive(Sign.UNWANTED)

    def all_is_flushed(self) -> None:
        self.receive(Dropped(End.FLUSHED))

    def request_starts_early(self) -> None:
        self.receive(Sign.STARTED)

    def request_is_admitted(self) -> None:
        self.receive(Sign.RELEASED)

    # Invariants

    def check(self) -> None:
        state = self.fetch.state
        is_filling = state in (State.FETCHING, State.STOPPING)
        assert self.num_locks == int(is_filling or state is State.LANDED)
        assert is_filling or not self.held
        assert is_filling or not self.is_asking
        assert self.is_queued == (state is State.WAITING)
        assert [slots for slots in self.reports if slots in self.held] == self.fetch.filling
        assert self.fetch.landed_pages == self.landed_end - self.first_page
        assert len(self.ends) <= 1
        if self.is_request_there:
            assert len(self.ends) == int(state in (State.LANDED, State.OVER))


def test_random_histories_free_everything_once_and_end_everything_begun() -> None:
    seen: set[tuple[State, object]] = set()
    ends: set[End] = set()
    for seed in range(WALKS):
        world = World(Random(seed))
        world.walk()
        assert world.fetch.state is State.OVER, seed
        assert not world.has_found, seed
        seen |= world.seen
        ends |= {*world.ends}
    assert seen == {(state, event) for state, events in TRANSITIONS.items() for event in events}
    assert ends == set(End)


def begun(*round_ends: int) -> FetchState:
    fetch = FetchState()
    assert fetch.receive(Found(round_ends[-1])) == [Do.QUEUE]
    assert fetch.receive(Begun(0, round_ends)) == [Transmit(0, round_ends), AwaitBytes(0, 0)]
    return fetch


def test_a_fetch_of_two_rounds() -> None:
    fetch = begun(4, 6)
    assert fetch.receive(Sign.BYTES_HERE) == [Do.ASK_FOR_SLOTS]
    assert fetch.receive(SlotsGiven("a")) == [Do.ASK_NO_MORE, AwaitBytes(1, 4)]
    assert fetch.receive(Restored(4)) == [Land(0, 4, "a")]
    assert fetch.receive(Sign.BYTES_HERE) == [Do.ASK_FOR_SLOTS]
    assert fetch.receive(SlotsGiven("b")) == [Do.ASK_NO_MORE]
    assert fetch.receive(Sign.TRANSMISSION_OVER) == []
    assert fetch.receive(Restored(2)) == [Land(4, 2, "b"), Do.FETCH_NO_MORE, Finish(End.LANDED)]
    assert fetch.state is State.LANDED
    assert fetch.receive(Sign.RELEASED) == [Do.LET_GO]


def test_a_request_starts_with_the_rounds_that_are_being_filled() -> None:
    fetch = begun(4, 6)
    for slots in ("a", "b"):
        fetch.receive(Sign.BYTES_HERE)
        fetch.receive(SlotsGiven(slots))
    assert fetch.receive(Restored(4)) == [Land(0, 4, "a")]
    assert not fetch.can_start
    assert fetch.receive(Sign.CERTAIN) == []
    assert fetch.can_start
    assert fetch.receive(Sign.STARTED) == [HandOver("b"), Do.FETCH_NO_MORE, Finish(End.EARLY)]
    assert fetch.receive(Restored(2)) == []
    assert fetch.receive(Sign.RELEASED) == [Do.LET_GO]


def test_no_request_starts_with_a_gap_or_without_slots_for_all_rounds() -> None:
    fetch = begun(2, 4)
    fetch.receive(Sign.BYTES_HERE)
    fetch.receive(SlotsGiven("a"))
    fetch.receive(Sign.CERTAIN)
    assert not fetch.can_start
    fetch.receive(Sign.BYTES_HERE)
    fetch.receive(SlotsGiven("b"))
    assert fetch.can_start
    fetch.receive(Restored(1))
    assert not fetch.can_start


def test_a_gap_ends_the_fetch_and_later_rounds_do_not_count() -> None:
    fetch = begun(2, 4, 6)
    for slots in ("a", "b"):
        fetch.receive(Sign.BYTES_HERE)
        fetch.receive(SlotsGiven(slots))
    assert fetch.receive(Restored(1)) == [Land(0, 1, "a"), Free(1, "a"), Do.ASK_NO_MORE, Do.STOP]
    actions = fetch.receive(Restored(2))
    assert actions == [Free(0, "b"), Do.ASK_NO_MORE, Do.STOP, Do.STOP, Do.FETCH_NO_MORE, Finish(End.PARTLY)]


def test_rounds_under_way_still_land_if_the_rest_is_computed() -> None:
    fetch = begun(2, 4)
    fetch.receive(Sign.BYTES_HERE)
    fetch.receive(SlotsGiven("a"))
    assert fetch.receive(RoundRefused(End.STOPPED)) == [Do.ASK_NO_MORE]
    assert fetch.receive(Restored(2)) == [Land(0, 2, "a"), Do.STOP, Do.FETCH_NO_MORE, Finish(End.STOPPED)]


def test_a_deadline_that_passes_while_waiting_for_slots() -> None:
    fetch = begun(2)
    fetch.receive(Sign.BYTES_HERE)
    ended = [Do.ASK_NO_MORE, Do.STOP, Do.FETCH_NO_MORE, Do.LET_GO, Finish(End.FAILED)]
    assert fetch.receive(Sign.TRANSMISSION_OVER) == ended


def test_impossible_events_raise() -> None:
    with pytest.raises(AssertionError, match=r"SlotsGiven.*while State\.LOOKUP"):
        FetchState().receive(SlotsGiven("a"))
