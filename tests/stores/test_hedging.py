"""The pure decisions of hedging: when to make a second request."""

from __future__ import annotations

import pytest

from sgl_kvfetch.stores.hedged import SILENT_TICKS, HedgeBudget, Progress, Usual, Verdict, judge


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
    budget = HedgeBudget(2)
    assert [budget.try_begin() for _ in range(3)] == [True, True, False]
    budget.end(was_worth_it=True)
    assert [budget.try_begin() for _ in range(2)] == [True, False]


def test_useless_second_requests_are_limited_to_a_tenth() -> None:
    budget = HedgeBudget(4)
    num_begun = 0
    for _ in range(1000):
        if budget.try_begin():
            num_begun += 1
            budget.end(was_worth_it=False)
        budget.request_ended()
    assert 100 <= num_begun <= 105


def test_useful_second_requests_do_not_count() -> None:
    budget = HedgeBudget(4)
    for _ in range(1000):
        assert budget.try_begin()
        budget.end(was_worth_it=True)


def test_a_budget_of_zero_allows_no_second_requests() -> None:
    budget = HedgeBudget(0)
    for _ in range(100):
        budget.request_ended()
    assert not budget.try_begin()
