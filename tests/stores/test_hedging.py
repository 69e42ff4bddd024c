"""The pure decisions of hedging: when to make a second request, and to which replica."""

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


def test_usual_is_a_multiple_of_measurements_within_bounds() -> None:
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


def test_concurrent_second_requests_are_limited() -> None:
    budget = RaceBudget(2)
    assert [budget.try_begin() for _ in range(3)] == [True, True, False]
    budget.end(was_worth_it=True)
    assert [budget.try_begin() for _ in range(2)] == [True, False]


def test_useless_second_requests_are_limited_to_a_tenth() -> None:
    budget = RaceBudget(4)
    num_begun = 0
    for _ in range(1000):
        if budget.try_begin():
            num_begun += 1
            budget.end(was_worth_it=False)
        budget.request_ended()
    assert 100 <= num_begun <= 105


def test_useful_second_requests_do_not_count() -> None:
    budget = RaceBudget(4)
    for _ in range(1000):
        assert budget.try_begin()
        budget.end(was_worth_it=True)


def test_a_budget_of_zero_allows_no_second_requests() -> None:
    budget = RaceBudget(0)
    for _ in range(100):
        budget.request_ended()
    assert not budget.try_begin()


def test_the_faster_replica_is_preferred() -> None:
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


def test_similar_response_times_rank_equal() -> None:
    first, second = ReplicaHealth(1), ReplicaHealth(1)
    for health, answers_in_s in ((first, 0.0024), (second, 0.0019)):
        health.asked(0.0)
        health.answered(answers_in_s)
    assert ranked([first, second], 1.0) == [0, 1]


def test_a_failing_replica_is_skipped_for_longer_each_time() -> None:
    health = ReplicaHealth(1)
    for asked_s, pause_s in ((0.0, 1.0), (10.0, 2.0), (20.0, 4.0), (30.0, 8.0), (40.0, 16.0), (60.0, 30.0), (95, 30.0)):
        health.failed(asked_s + 0.5, asked_s)
        assert health.is_open(asked_s + 0.5 + pause_s - 0.1)
        assert not health.is_open(asked_s + 0.5 + pause_s)
    health.answered(0.001)
    health.failed(200.0, 200.0)
    assert not health.is_open(201.0)


def test_concurrent_failures_count_once() -> None:
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
