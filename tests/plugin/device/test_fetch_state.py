"""Tests a fetch's states: every event in every state, and random orders of the events that a world can generate."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from sgl_kvfetch.plugin.device.fetch_state import (
    TABLE,
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
    Own,
    Restored,
    RoundRefused,
    Sign,
    SlotsGiven,
    State,
    StateMachine,
    Transmit,
)

S = State
PAGES = 10

# Every event in every state, legal or not.

BEGUN, SLOTS, REFUSED = Begun(0, (2, 4, 6)), SlotsGiven("s"), RoundRefused(End.STOPPED)
BEGUN_FILLING, BEGUN_WITH_ALL = Begun(0, (2, 4, 6), "s"), Begun(0, (6,), "s")
NOTHING, DROPPED = NothingToFetch(End.KNOWN), Dropped(End.FLUSHED)
WHOLE, SHORT, NONE, TOO_MANY = Restored(2), Restored(1), Restored(0), Restored(3)
BYTES, OVER = Sign.BYTES_HERE, Sign.TRANSMISSION_OVER
EVENTS: list[Event] = [
    *Sign,
    NOTHING,
    BEGUN,
    BEGUN_FILLING,
    BEGUN_WITH_ALL,
    SLOTS,
    REFUSED,
    WHOLE,
    SHORT,
    NONE,
    TOO_MANY,
    DROPPED,
]

WAITING: list[Event] = [Sign.FOUND]
TRANSMITTING = [*WAITING, BEGUN]
ONE_FILLING = [*TRANSMITTING, BYTES, SLOTS]
TWO_FILLING = [*ONE_FILLING, BYTES, SLOTS]
ALL_FILLING = [*TWO_FILLING, BYTES, SLOTS]
LAST_FILLING = [*ALL_FILLING, WHOLE, WHOLE]


def into(state: State, *events: Event) -> dict[Event, State]:
    return dict.fromkeys(events, state)


def late(state: State, *events: Event) -> dict[Event, State]:
    return into(state, BYTES, REFUSED, OVER, *events)


# Events that lead to a state, and the state after each event that may come then. All others must be refused.
SITUATIONS: dict[str, tuple[State, list[Event], dict[Event, State]]] = {
    "looked up": (
        S.LOOKUP,
        [],
        into(S.WAITING, Sign.FOUND) | into(S.CANCELLED, Sign.UNWANTED) | into(S.NOT_FETCHED, NOTHING, DROPPED),
    ),
    "lookup cancelled": (S.CANCELLED, [Sign.UNWANTED], into(S.NOT_FETCHED, Sign.FOUND, NOTHING)),
    "waits": (
        S.WAITING,
        WAITING,
        into(S.AWAITING_BYTES, BEGUN, BEGUN_FILLING)
        | into(S.FILLING, BEGUN_WITH_ALL)
        | into(S.FOLLOWING, Sign.FOLLOWS)
        | into(S.NOT_FETCHED, NOTHING, Sign.UNWANTED, DROPPED),
    ),
    "follows": (
        S.FOLLOWING,
        [*WAITING, Sign.FOLLOWS],
        into(S.FOLLOWING, Sign.FOLLOWS)
        | into(S.WAITING, Sign.LEADER_ENDED)
        | into(S.NOT_FETCHED, NOTHING, Sign.UNWANTED, DROPPED),
    ),
    "no bytes": (
        S.AWAITING_BYTES,
        TRANSMITTING,
        into(S.AWAITING_SLOTS, BYTES) | into(S.OVER, REFUSED, OVER, Sign.UNWANTED, DROPPED),
    ),
    "no bytes, one filling": (
        S.AWAITING_BYTES,
        ONE_FILLING,
        into(S.AWAITING_SLOTS, BYTES)
        | into(S.STOPPING, REFUSED, OVER)
        | into(S.AWAITING_BYTES, WHOLE)
        | into(S.DISCARDING, Sign.UNWANTED)
        | into(S.LANDED, SHORT)
        | into(S.OVER, NONE, DROPPED),
    ),
    "no bytes, one landed": (
        S.AWAITING_BYTES,
        [*ONE_FILLING, WHOLE],
        into(S.AWAITING_SLOTS, BYTES) | into(S.LANDED, REFUSED, OVER, Sign.UNWANTED) | into(S.OVER, DROPPED),
    ),
    "no slots": (
        S.AWAITING_SLOTS,
        [*TRANSMITTING, BYTES],
        into(S.AWAITING_BYTES, SLOTS) | into(S.OVER, REFUSED, OVER, Sign.UNWANTED, DROPPED),
    ),
    "no slots for the last round, two filling": (
        S.AWAITING_SLOTS,
        [*TWO_FILLING, BYTES],
        into(S.FILLING, SLOTS)
        | into(S.STOPPING, REFUSED, OVER)
        | into(S.AWAITING_SLOTS, WHOLE)
        | into(S.DISCARDING, SHORT, NONE, Sign.UNWANTED)
        | into(S.OVER, DROPPED),
    ),
    "all filling": (
        S.FILLING,
        ALL_FILLING,
        into(S.CERTAIN, Sign.CERTAIN)
        | into(S.FILLING, OVER, WHOLE)
        | into(S.DISCARDING, SHORT, NONE, Sign.UNWANTED)
        | into(S.OVER, DROPPED),
    ),
    "last one filling": (
        S.FILLING,
        LAST_FILLING,
        into(S.CERTAIN, Sign.CERTAIN)
        | into(S.FILLING, OVER)
        | into(S.LANDED, WHOLE, SHORT, NONE)
        | into(S.DISCARDING, Sign.UNWANTED)
        | into(S.OVER, DROPPED),
    ),
    "certain, all filling": (
        S.CERTAIN,
        [*ALL_FILLING, Sign.CERTAIN],
        into(S.CERTAIN, OVER, WHOLE)
        | into(S.LANDED, Sign.STARTED)
        | into(S.DISCARDING, SHORT, NONE, Sign.UNWANTED)
        | into(S.OVER, DROPPED),
    ),
    "certain, last one filling": (
        S.CERTAIN,
        [*LAST_FILLING, Sign.CERTAIN],
        into(S.CERTAIN, OVER)
        | into(S.LANDED, Sign.STARTED, WHOLE, SHORT, NONE)
        | into(S.DISCARDING, Sign.UNWANTED)
        | into(S.OVER, DROPPED),
    ),
    "stopping, two filling": (
        S.STOPPING,
        [*TWO_FILLING, REFUSED],
        late(S.STOPPING, WHOLE) | into(S.DISCARDING, SHORT, NONE, Sign.UNWANTED) | into(S.OVER, DROPPED),
    ),
    "stopping, one filling": (
        S.STOPPING,
        [*ONE_FILLING, OVER],
        late(S.STOPPING)
        | into(S.LANDED, WHOLE, SHORT)
        | into(S.DISCARDING, Sign.UNWANTED)
        | into(S.OVER, NONE, DROPPED),
    ),
    "discarding, nothing landed": (
        S.DISCARDING,
        [*TWO_FILLING, NONE],
        late(S.DISCARDING, Sign.CERTAIN, Sign.UNWANTED) | into(S.OVER, WHOLE, SHORT, NONE, DROPPED),
    ),
    "discarding, two filling": (
        S.DISCARDING,
        [*ALL_FILLING, SHORT],
        late(S.DISCARDING, Sign.CERTAIN, Sign.UNWANTED, WHOLE, SHORT, NONE) | into(S.OVER, DROPPED),
    ),
    "discarding, one filling": (
        S.DISCARDING,
        [*ALL_FILLING, SHORT, WHOLE],
        late(S.DISCARDING, Sign.CERTAIN, Sign.UNWANTED) | into(S.LANDED, WHOLE, SHORT, NONE) | into(S.OVER, DROPPED),
    ),
    "landed": (
        S.LANDED,
        [*LAST_FILLING, WHOLE],
        late(S.LANDED, Sign.CERTAIN) | into(S.OVER, Sign.RELEASED, DROPPED),
    ),
    "started early": (
        S.LANDED,
        [*LAST_FILLING, Sign.CERTAIN, Sign.STARTED],
        late(S.LANDED, Sign.CERTAIN, WHOLE, SHORT, NONE, TOO_MANY) | into(S.OVER, Sign.RELEASED, DROPPED),
    ),
    "started early, all reported": (
        S.LANDED,
        [*LAST_FILLING, Sign.CERTAIN, Sign.STARTED, WHOLE],
        late(S.LANDED, Sign.CERTAIN) | into(S.OVER, Sign.RELEASED, DROPPED),
    ),
    "over": (S.OVER, [*LAST_FILLING, WHOLE, Sign.RELEASED], late(S.OVER, Sign.CERTAIN)),
    "dropped": (S.OVER, [*ONE_FILLING, DROPPED], late(S.OVER, Sign.CERTAIN, WHOLE, SHORT, NONE, TOO_MANY)),
    "dropped, all reported": (S.OVER, [*ONE_FILLING, DROPPED, WHOLE], late(S.OVER, Sign.CERTAIN)),
    "not fetched": (S.NOT_FETCHED, [NOTHING], {}),
}


def after(events: list[Event]) -> StateMachine:
    machine = StateMachine()
    for event in events:
        machine.receive(event)
    return machine


@pytest.mark.parametrize("event", EVENTS, ids=str)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_every_event_in_every_state(situation: str, event: Event) -> None:
    state, events, legal = SITUATIONS[situation]
    machine = after(events)
    assert machine.state is state
    if event in legal:
        actions = machine.receive(event)
        assert machine.state is legal[event]
        done = [action for action in actions if isinstance(action, Do | Finish)]
        assert len(done) == len(set(done))
        if state in (S.OVER, S.NOT_FETCHED):
            assert not actions
        return
    before = copy.deepcopy(vars(machine))
    with pytest.raises(AssertionError, match=f"while {state}"):
        machine.receive(event)
    assert vars(machine) == before


def test_the_situations_reach_every_row_of_the_table() -> None:
    assert {state for state, _, _ in SITUATIONS.values()} == set(State) == set(TABLE)
    reached: set[int] = set()
    for _, events, legal in SITUATIONS.values():
        for event in legal:
            machine = after(events)
            reached.add(id(machine.find_row(event)))
            machine.receive(event)
    rows = {id(row): (state, row) for state, rows in TABLE.items() for row in rows if not isinstance(row.event, Own)}
    assert not [row for key, row in rows.items() if key not in reached]


# Single histories, with their actions.


def history(*events: Event) -> list[list[Action]]:
    machine = StateMachine()
    return [machine.receive(event) for event in events]


def begun(*round_ends: int) -> StateMachine:
    machine = StateMachine()
    assert machine.receive(Sign.FOUND) == [Do.QUEUE]
    assert machine.receive(Begun(0, round_ends)) == [Do.LEAVE_QUEUE, Transmit(0, round_ends), AwaitBytes(0, 0)]
    return machine


def filling(*round_ends: int, num_filling: int) -> StateMachine:
    """Return a fetch of which some rounds have got slots, named from "a" on."""
    machine = begun(*round_ends)
    for slots in "abc"[:num_filling]:
        machine.receive(Sign.BYTES_HERE)
        machine.receive(SlotsGiven(slots))
    return machine


def test_a_fetch_of_two_rounds() -> None:
    fetch = begun(4, 6)
    assert fetch.receive(Sign.BYTES_HERE) == [Do.ASK_FOR_SLOTS]
    assert fetch.receive(SlotsGiven("a")) == [Do.ASK_NO_MORE, AwaitBytes(1, 4)]
    assert fetch.receive(Restored(4)) == [Land(0, 4, "a")]
    assert fetch.receive(Sign.BYTES_HERE) == [Do.ASK_FOR_SLOTS]
    assert fetch.receive(SlotsGiven("b")) == [Do.ASK_NO_MORE]
    assert fetch.receive(Sign.TRANSMISSION_OVER) == []
    assert fetch.receive(Restored(2)) == [Land(4, 2, "b"), Do.FETCH_NO_MORE, Finish(End.LANDED)]
    assert fetch.receive(Sign.RELEASED) == [Do.LET_GO]


def test_a_request_starts_with_the_rounds_that_are_being_filled() -> None:
    fetch = filling(4, 6, num_filling=2)
    assert fetch.receive(Restored(4)) == [Land(0, 4, "a")]
    assert fetch.receive(Sign.CERTAIN) == []
    assert fetch.receive(Sign.STARTED) == [HandOver("b"), Do.FETCH_NO_MORE, Finish(End.EARLY)]
    assert fetch.receive(Restored(2)) == []
    assert fetch.receive(Sign.RELEASED) == [Do.LET_GO]


def test_a_gap_ends_the_fetch_and_later_rounds_do_not_count() -> None:
    fetch = filling(2, 4, 6, num_filling=2)
    assert fetch.receive(Restored(1)) == [Land(0, 1, "a"), FreeSlots(1, "a"), Do.STOP]
    assert fetch.receive(Restored(2)) == [FreeSlots(0, "b"), Do.FETCH_NO_MORE, Finish(End.PARTLY)]


def test_rounds_under_way_still_land_if_the_rest_is_computed() -> None:
    fetch = filling(2, 4, num_filling=1)
    assert fetch.receive(RoundRefused(End.STOPPED)) == []
    assert fetch.receive(Restored(2)) == [Land(0, 2, "a"), Do.STOP, Do.FETCH_NO_MORE, Finish(End.STOPPED)]


def test_a_deadline_that_passes_while_waiting_for_slots() -> None:
    fetch = begun(2)
    fetch.receive(Sign.BYTES_HERE)
    ended = [Do.ASK_NO_MORE, Do.STOP, Do.FETCH_NO_MORE, Do.LET_GO, Finish(End.FAILED)]
    assert fetch.receive(Sign.TRANSMISSION_OVER) == ended


def test_a_full_pool_is_the_reason_that_is_given() -> None:
    fetch = begun(2)
    fetch.receive(Sign.BYTES_HERE)
    assert fetch.receive(RoundRefused(End.FULL_POOL))[-1] == Finish(End.FULL_POOL)


def test_unwanted_rounds_are_cancelled_once_and_freed_when_nothing_writes_to_them() -> None:
    fetch = filling(2, 4, num_filling=1)
    assert fetch.receive(Sign.UNWANTED) == [Do.STOP]
    assert fetch.receive(Sign.UNWANTED) == []  # another follower came and went
    assert fetch.receive(Restored(2)) == [FreeSlots(0, "a"), Do.FETCH_NO_MORE, Do.LET_GO, Finish(End.FAILED)]


def test_a_lookup_that_is_cancelled_forgets_what_it_finds() -> None:
    assert history(Sign.UNWANTED, Sign.FOUND) == [[Do.CANCEL_LOOKUP], [Do.FORGET_FOUND]]


# Random orders.

FETCHING = {S.AWAITING_BYTES, S.AWAITING_SLOTS, S.FILLING, S.CERTAIN, S.STOPPING, S.DISCARDING}


class World:
    """Simulates the surroundings of a fetch: the store, the link, the tree, the allocator and the request. Each report
    comes once, and may come late."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.fetch = StateMachine()
        self.done: Counter[str] = Counter()  # actions
        self.is_looking_up = True
        self.is_queued = False
        self.is_following = False
        self.has_found = False  # pages were found, which must be fetched or forgotten
        self.is_request_there = True
        self.awaits_bytes = False
        self.is_transmitting = False
        self.is_asking = False
        self.certainty_is_due = False
        self.is_locked = False
        self.first_page = 0
        self.landed_end = 0  # page
        self.held: dict[str, range] = {}  # pages of the rounds that have slots
        self.reports: list[str] = []  # the slots of rounds whose reports are to come
        self.restored: dict[str, int] = {}  # pages
        self.is_useless = False  # pages still being restored are not wanted
        self.ends: list[End] = []

    def moves(self) -> dict[Callable[[], None], float]:
        """Return all events that can happen now, with their weights."""
        state = self.state
        may_go = self.is_request_there and not self.is_over and state is not S.LANDED
        possible: dict[Callable[[], None], tuple[float, bool]] = {
            self.store_has_it: (8, self.is_looking_up),
            self.it_is_not_to_be_fetched: (0.5, self.is_looking_up),
            self.bytes_come: (8, self.awaits_bytes),
            self.no_more_bytes_come: (1, self.awaits_bytes),
            self.round_is_restored: (3, bool(self.reports)),
            self.transmission_ends: (1, self.is_transmitting),
            self.rest_is_certain: (3, self.certainty_is_due),
            self.tree_has_changed: (0.5, state in (S.WAITING, S.FOLLOWING)),
            self.another_one_leads: (1, state in (S.WAITING, S.FOLLOWING)),
            self.leader_ends: (4, self.is_following),
            self.link_is_free: (8, self.is_queued),
            self.slots_are_given: (8, self.is_asking),
            self.slots_are_refused: (1, self.is_asking),
            self.request_goes: (0.5, may_go),
            self.followers_go: (1, not self.is_request_there and state in FETCHING),
            self.all_is_flushed: (0.3, not self.is_over and state is not S.CANCELLED),
            self.request_starts_early: (2, state is S.CERTAIN and self.is_request_there),
            self.request_is_admitted: (1, state is S.LANDED),
        }
        return {move: weight for move, (weight, is_possible) in possible.items() if is_possible}

    @property
    def state(self) -> State:
        return self.fetch.state

    @property
    def is_over(self) -> bool:
        return self.state in (S.OVER, S.NOT_FETCHED)

    def receive(self, event: Event) -> None:
        was_over = self.is_over
        actions = self.fetch.receive(event)
        assert not (was_over and actions)
        for action in actions:
            self.done[action.name if isinstance(action, Do) else type(action).__name__] += 1
            self.act(action)

    def act(self, action: Action) -> None:
        match action:
            case Do.CANCEL_LOOKUP:
                assert self.is_looking_up
            case Do.FORGET_FOUND:
                self.has_found = False
            case Do.QUEUE:
                assert not self.is_queued
                self.is_queued, self.is_following = True, False
            case Do.LEAVE_QUEUE:
                assert self.is_queued
                self.is_queued = False
            case Do.FOLLOW_NO_MORE:
                assert self.is_following
                self.is_following = False
            case Transmit():
                assert self.has_found
                assert self.is_locked
                self.has_found, self.is_transmitting = False, True
            case AwaitBytes(index, first_page):
                assert not self.awaits_bytes
                assert (index, first_page) == (self.fetch.num_rounds, self.fetch.next_round.start)
                self.awaits_bytes = True
            case Do.ASK_FOR_SLOTS:
                assert not self.is_asking
                self.is_asking = True
            case Do.ASK_NO_MORE:
                assert self.is_asking
                self.is_asking = False
            case Land(first_page, num_pages, slots):
                assert (first_page, num_pages) == (self.landed_end, self.restored[slots]), "a page that is not there"
                self.landed_end += num_pages
                pages = self.held.pop(slots)
                assert first_page == pages.start
                if num_pages < len(pages):
                    self.held[slots] = pages[num_pages:]
            case FreeSlots(num_landed, slots):
                pages = self.held.pop(slots)
                assert pages
                assert pages.start == self.landed_end or not num_landed
            case HandOver(slots):
                assert self.is_request_there
                del self.held[slots]
            case Finish(end):
                self.ends.append(end)
            case Do.STOP:
                assert self.is_useless or not self.held, "pages that would have counted are thrown away"
            case Do.LET_GO:
                assert self.is_locked
                self.is_locked = False

    # Reports

    def store_has_it(self) -> None:
        self.is_looking_up, self.has_found = False, True
        self.receive(Sign.FOUND)

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
        slots = self.reports.pop(0)
        num_pages = len(self.held.get(slots, "?"))
        self.restored[slots] = self.random.choice([num_pages, num_pages, self.random.randint(0, num_pages)])
        self.is_useless |= self.restored[slots] < num_pages
        self.receive(Restored(self.restored[slots]))

    def transmission_ends(self) -> None:
        self.is_transmitting = False
        self.receive(Sign.TRANSMISSION_OVER)

    def rest_is_certain(self) -> None:
        self.certainty_is_due = False
        self.receive(Sign.CERTAIN)

    # Turns

    def tree_has_changed(self) -> None:
        self.is_following = False
        self.receive(NothingToFetch(self.random.choice([End.KNOWN, End.LOST, End.SUSPENDED])))

    def another_one_leads(self) -> None:
        self.is_following = True
        self.receive(Sign.FOLLOWS)

    def leader_ends(self) -> None:
        self.receive(Sign.LEADER_ENDED)

    def link_is_free(self) -> None:
        num_rounds = self.random.choice([1, 2, 3, 4])
        self.first_page, *round_ends = sorted(self.random.sample(range(PAGES + 1), num_rounds + 1))
        self.landed_end, self.is_locked = self.first_page, True
        self.receive(Begun(self.first_page, tuple(round_ends)))

    def slots_are_given(self) -> None:
        slots = f"slots {self.fetch.num_rounds}"
        self.held[slots] = self.fetch.next_round
        self.reports.append(slots)
        self.receive(SlotsGiven(slots))
        self.certainty_is_due = self.state is S.FILLING

    def slots_are_refused(self) -> None:
        self.receive(RoundRefused(self.random.choice([End.FULL_POOL, End.PARTLY])))

    # Ends

    def request_goes(self) -> None:
        self.is_request_there = False
        if self.state not in FETCHING or self.random.random() < 0.5:  # no other fetch follows
            self.is_useless = True
            self.receive(Sign.UNWANTED)

    def followers_go(self) -> None:
        self.is_useless = True
        self.receive(Sign.UNWANTED)

    def all_is_flushed(self) -> None:
        self.is_useless = True
        self.receive(Dropped(End.FLUSHED))
        if self.is_looking_up:
            self.is_looking_up = False
            assert self.done["CANCEL_LOOKUP"]
            assert self.done["FORGET_FOUND"]

    def request_starts_early(self) -> None:
        self.receive(Sign.STARTED)

    def request_is_admitted(self) -> None:
        self.receive(Sign.RELEASED)

    # Invariants

    def everything_is_held_as_long_as_needed(self) -> None:
        assert self.is_locked == (self.state in FETCHING or self.state is S.LANDED)
        assert self.is_queued == (self.state is S.WAITING)
        assert self.is_following == (self.state is S.FOLLOWING)
        assert self.is_asking == (self.state is S.AWAITING_SLOTS)
        assert not self.held or self.state in FETCHING
        assert [slots for slots in self.reports if slots in self.held] == self.fetch.filling
        assert self.fetch.landed_pages == self.landed_end - self.first_page
        assert not (self.is_over and self.has_found)

    def nothing_is_done_twice(self) -> None:
        once = ("CANCEL_LOOKUP", "FORGET_FOUND", "Transmit", "STOP", "FETCH_NO_MORE", "LET_GO", "Finish")
        assert all(self.done[action] <= 1 for action in once)
        assert self.done["FETCH_NO_MORE"] == (self.done["Transmit"] and self.state not in FETCHING)
        if self.done["Transmit"] and self.ends:
            assert self.done["STOP"] == (self.ends[0] not in (End.LANDED, End.EARLY))
        assert self.done["STOP"] or self.state is not S.DISCARDING
        if self.is_request_there:
            assert self.done["Finish"] == (self.is_over or self.state is S.LANDED)


@settings(max_examples=2000, deadline=None)
@given(st.randoms(use_true_random=True))
def test_random_orders(random: Random) -> None:
    world = World(random)
    while moves := world.moves():
        random.choices([*moves], [*moves.values()])[0]()
        world.everything_is_held_as_long_as_needed()
        world.nothing_is_done_twice()
    assert world.is_over
