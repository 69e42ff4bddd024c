from __future__ import annotations

import pytest

from sgl_kvfetch.plane.messages import Cost
from sgl_kvfetch.plugin.device.recompute import MARGIN, Decision, FetchOrRecompute


@pytest.mark.parametrize(
    ("cost", "recompute_s", "expected"),
    [
        (Cost(None, 5.0), 1.0, Decision(True, "unmeasured")),
        (Cost(5.0, None), None, Decision(True, "unmeasured")),
        (Cost(0.9, 0.5), 1.0, Decision(True, "faster")),
        (Cost(1.2, 0.5), 1.0, Decision(True, "faster")),  # not by the margin
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
