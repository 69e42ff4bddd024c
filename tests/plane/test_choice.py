from __future__ import annotations

import pytest

from sgl_kvfetch.plane import Cost
from sgl_kvfetch.plane.choice import LAG_COUNTS_S, MARGIN, Decision, FetchLag, FetchOrRecompute
from tests.plugin.test_prefill import MEASURED, fed_as_measured


@pytest.mark.parametrize(("gbps", "expected"), [(0.02, False), (0.1, True), (1.0, True)])
def test_the_faster_way_is_chosen_for_each_length(gbps: float, expected: bool) -> None:
    """By the bytes and the times of the same table, before any fetch has been measured."""
    speed, choice = fed_as_measured(), FetchOrRecompute()
    for size in MEASURED:
        cost = Cost(1.77e6 * size / 1024 * 8 / (gbps * 1e9), 0.0)
        assert choice.decide(size, cost, speed.seconds_saved(size)).is_fetched == expected


@pytest.mark.parametrize(
    ("cost", "recompute_s", "expected"),
    [
        (Cost(None, 5.0), 1.0, Decision(True, "unmeasured")),
        (Cost(5.0, None), None, Decision(True, "unmeasured")),
        (Cost(0.9, 0.5), 1.0, Decision(True, "faster")),
        (Cost(1.04, 0.5), 1.0, Decision(True, "faster")),  # not by the margin
        (Cost(1.1, 0.5), 1.0, Decision(False, "link")),
        (Cost(1.3, 0.5), 1.0, Decision(False, "link")),
        (Cost(0.5, 1.3), 1.0, Decision(False, "decoder")),
    ],
)
def test_the_faster_way_is_chosen(cost: Cost, recompute_s: float | None, expected: Decision) -> None:
    assert FetchOrRecompute().decide(1000, cost, recompute_s) == expected


def test_decisions_do_not_alternate_near_the_limit() -> None:
    choice = FetchOrRecompute()
    around = [1.0, MARGIN - 0.01] * 5
    assert all(choice.decide(1000, Cost(s, 0.0), 1.0).is_fetched for s in around)
    assert not choice.decide(1000, Cost(MARGIN + 0.01, 0.0), 1.0).is_fetched
    assert not any(choice.decide(1000, Cost(s, 0.0), 1.0).is_fetched for s in (1.01, MARGIN - 0.01) * 5)
    assert choice.decide(1000, Cost(1.0, 0.0), 1.0).is_fetched


def test_short_and_long_prompts_have_separate_decisions() -> None:
    choice = FetchOrRecompute()
    assert not choice.decide(1000, Cost(2.0, 0.0), 1.0).is_fetched
    assert choice.decide(100_000, Cost(0.5, 0.0), 1.0).is_fetched
    assert not choice.decide(1000, Cost(1.1, 0.0), 1.0).is_fetched


def test_how_late_fetches_end_counts_for_a_minute() -> None:
    lag = FetchLag()
    assert lag.seconds(0.0) == 0.0
    for ended_s, expected_s in ((10.0, 9.8), (11.0, 10.7), (12.0, 2.0), (13.0, 14.0), (14.0, 13.6)):
        lag.ended(ended_s, expected_s)
    assert lag.seconds(14.0) == pytest.approx(0.3)  # one that was early counts as being in time
    assert lag.seconds(12.0 + LAG_COUNTS_S) == pytest.approx(0.2)
    assert lag.seconds(14.0 + LAG_COUNTS_S) == 0.0
