"""When to ask a second time, and whom: the pure part."""

from __future__ import annotations

import pytest

from sgl_kvfetch.stores.hedging import (
    SILENT_TICKS,
    Progress,
    RaceBudget,
    ReplicaHealth,
    Usual,
    Verdict,
    judge,
    next_replica,
    ranked,
)


def progress(*bytes_by_tick: int) -> Progress:
    made = Progress()
    for num_bytes in bytes_by_tick:
        made.num_bytes += num_bytes
        made.tick()
    return made


SILENT = (0,) * SILENT_TICKS


def test_usual_is_a_multiple_of_what_was_measured_in_bounds() -> None:
    usual = Usual(4.0, 0.9, least=0.2, most=2.0, at_first=0.5)
    assert usual.limit == 0.5
    for _ in range(64):
        usual.note(0.001)
    assert usual.limit == 0.2
    for _ in range(64):
        usual.note(0.1)
    assert usual.limit == pytest.approx(0.4)
    for _ in range(6):
        usual.note(5.0)  # less than a tenth of the last 64
    assert usual.limit == pytest.approx(0.4)
    for _ in range(64):
        usual.note(5.0)
    assert usual.limit == 2.0


@pytest.mark.parametrize(
    ("first", "second", "is_late", "verdict"),
    [
        (progress(*SILENT[1:]), None, False, Verdict.WAIT),
        (progress(*SILENT), None, False, Verdict.ASK_AGAIN),
        (progress(100, *SILENT), None, False, Verdict.ASK_AGAIN),
        (progress(*SILENT, 100), None, False, Verdict.WAIT),
        (progress(1, 1, 1, 1), None, True, Verdict.ASK_AGAIN),
        (progress(*SILENT), progress(0), False, Verdict.WAIT),
        (progress(*SILENT, 100), progress(0), False, Verdict.END_SECOND),  # the first goes on
        (progress(*SILENT, 100), progress(50), False, Verdict.WAIT),  # both do
        (progress(1, 1), progress(0), True, Verdict.WAIT),  # it trickles as before
        (progress(*SILENT), progress(*SILENT), False, Verdict.WAIT),
        (progress(*SILENT), progress(50, *SILENT, *SILENT), False, Verdict.END_SECOND),
    ],
)
def test_verdicts(first: Progress, second: Progress | None, is_late: bool, verdict: Verdict) -> None:
    assert judge(first, second, is_late) == verdict


def test_a_few_races_at_once() -> None:
    budget = RaceBudget(2)
    assert [budget.try_begin() for _ in range(3)] == [True, True, False]
    budget.end(was_worth_it=True)
    assert [budget.try_begin() for _ in range(2)] == [True, False]


def test_races_that_were_not_worth_it_are_a_tenth_of_the_requests() -> None:
    budget = RaceBudget(4)
    num_begun = 0
    for _ in range(1000):
        if budget.try_begin():
            num_begun += 1
            budget.end(was_worth_it=False)
        budget.request_ended()
    assert 100 <= num_begun <= 105


def test_races_that_were_worth_it_cost_nothing() -> None:
    budget = RaceBudget(4)
    for _ in range(1000):
        assert budget.try_begin()
        budget.end(was_worth_it=True)


def test_no_races() -> None:
    budget = RaceBudget(0)
    for _ in range(100):
        budget.request_ended()
    assert not budget.try_begin()


def test_the_replica_that_answers_sooner_is_preferred() -> None:
    far, near = ReplicaHealth(1), ReplicaHealth(1)
    assert ranked([far, near], 0.0) == [0, 1]
    for health, answers_in_s in ((far, 0.040), (near, 0.002)):
        health.asked(0.0)
        health.answered(answers_in_s)
    assert ranked([far, near], 1.0) == [1, 0]
    near.asked(70.0)
    assert ranked([far, near], 70.0) == [0, 1]  # nothing was heard of it for long: one request goes to see
    far.asked(70.0)
    assert ranked([far, near], 70.0) == [1, 0]


def test_about_as_soon_is_equally_good() -> None:
    first, second = ReplicaHealth(1), ReplicaHealth(1)
    for health, answers_in_s in ((first, 0.0024), (second, 0.0019)):
        health.asked(0.0)
        health.answered(answers_in_s)
    assert ranked([first, second], 1.0) == [0, 1]


def test_a_replica_that_fails_is_left_alone_for_longer_and_longer() -> None:
    health = ReplicaHealth(1)
    for asked_s, pause_s in ((0.0, 1.0), (10.0, 2.0), (20.0, 4.0), (30.0, 8.0), (40.0, 16.0), (60.0, 30.0), (95, 30.0)):
        health.failed(asked_s + 0.5, asked_s)
        assert health.is_open(asked_s + 0.5 + pause_s - 0.1)
        assert not health.is_open(asked_s + 0.5 + pause_s)
    health.answered(0.001)
    health.failed(200.0, 200.0)
    assert not health.is_open(201.0)


def test_requests_that_failed_together_are_one_failure() -> None:
    health = ReplicaHealth(1)
    for _ in range(16):
        health.failed(0.5, 0.0)
    assert not health.is_open(1.5)
    patient = ReplicaHealth(3)
    for failed_s in (1.0, 2.0, 3.0):
        assert not patient.is_open(failed_s)
        patient.failed(failed_s, failed_s)
    assert patient.is_open(3.5)


@pytest.mark.parametrize(
    ("tried", "failed", "left_alone", "expected"),
    [
        ([], {}, {}, 2),
        ([2], {}, {}, 0),
        ([2, 0], {}, {}, 1),
        ([2, 0, 1], {}, {}, 2),
        ([2], {2}, {}, 0),
        ([2], {}, {0}, 1),
        ([2], {}, {0, 1}, 2),  # again, on another connection
        ([2], {2}, {0, 1}, 0),
        ([2, 0, 1], {0, 1, 2}, {}, None),
    ],
)
def test_the_next_replica(tried: list[int], failed: set[int], left_alone: set[int], expected: int | None) -> None:
    assert next_replica([2, 0, 1], tried, frozenset(failed), frozenset(left_alone)) == expected
