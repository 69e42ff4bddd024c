"""Whether stored prefixes are fetched or computed. tests/e2e/test_faults.py has whole engines."""

from __future__ import annotations

import math

import pytest

from sgl_kvfetch.plane.choice import (
    FIRST_S,
    LAG_COUNTS_S,
    MARGIN,
    NO_TURN,
    Cost,
    Decision,
    FetchOrder,
    FetchOrRecompute,
    Turn,
)
from tests.segments import page_hashes

PAGE_TOKENS, PAGES = 16, 64


@pytest.mark.parametrize(
    ("cost", "recompute_s", "expected"),
    [
        (Cost(None, 5.0), 1.0, Decision(True, "unmeasured")),
        (Cost(5.0, None), None, Decision(True, "unmeasured")),
        (Cost(1.04, 0.5), 1.0, Decision(True, "faster")),  # not by the margin
        (Cost(1.1, 0.5), 1.0, Decision(False, "link")),
        (Cost(0.5, 1.3), 1.0, Decision(False, "decoder")),
    ],
)
def test_the_faster_way_is_chosen(cost: Cost, recompute_s: float | None, expected: Decision) -> None:
    assert FetchOrRecompute().decide(1000, cost, recompute_s) == expected


def test_decisions_do_not_alternate_near_the_limit() -> None:
    choice = FetchOrRecompute()
    assert all(choice.decide(1000, Cost(s, 0.0), 1.0).is_fetched for s in (1.0, MARGIN - 0.01))
    assert not choice.decide(1000, Cost(MARGIN + 0.01, 0.0), 1.0).is_fetched
    assert choice.decide(100_000, Cost(MARGIN - 0.01, 0.0), 1.0).is_fetched  # of another length
    assert not any(choice.decide(1000, Cost(s, 0.0), 1.0).is_fetched for s in (1.01, MARGIN - 0.01))
    assert choice.decide(1000, Cost(1.0, 0.0), 1.0).is_fetched


class Order:
    """What host mode asks, about prompts of 1,024 tokens, each of which takes the engine 1.024 s."""

    def __init__(self, *, is_measured: bool = True, may_compute: bool = True) -> None:
        """``is_measured``: whether the engine has computed anything yet."""
        self._order = FetchOrder(PAGE_TOKENS, may_compute=may_compute)
        self.engine = self._order.engine
        self._is_measured = is_measured
        self.ended = self._order.ended

    def ask(
        self, seed: str, transmit_s: float | None, now_s: float = 100.0, num_pages: int = PAGES, found: bool = True
    ) -> bool:
        saved_s = [(num_pages, num_pages * PAGE_TOKENS * 0.001)] if self._is_measured else []
        hashes = page_hashes(num_pages, seed)
        return self._order.looked_up(hashes, num_pages * found, Cost(transmit_s, None), saved_s, now_s)

    def begin(self, seed: str, now_s: float, first_page: int = 0) -> Turn:
        return self._order.turn_of(page_hashes(PAGES, seed)[first_page:], now_s, is_first=True)


def test_everything_is_fetched_if_the_config_says_so() -> None:
    order = Order(may_compute=False)
    assert order.ask("a", 1000.0)
    turn = order.begin("a", 100.0)
    assert (turn.compute_s, turn.end_s) == (math.inf, math.inf)


def test_a_prefix_waits_for_those_before_it() -> None:
    """Each takes 0.4 s, and the engine takes one after another, too."""
    order = Order()
    assert [order.ask(seed, 0.4) for seed in "abc"] == [True, True, False]
    assert order.ask("d", 0.4)  # 1.2 s, or behind the one that is computed
    assert order.ask("e", 0.4, now_s=101.6)


def test_prompts_that_are_not_stored_keep_the_engine_busy_until_it_is_idle() -> None:
    order = Order()
    assert not order.ask("x", None, found=False)
    assert order.ask("a", 1.5)
    order = Order()
    assert not order.ask("x", None, found=False)
    order.engine.clear()
    assert not order.ask("a", 1.5)


def test_the_first_fetch_measures_the_link_and_gives_up_after_what_computing_would_take() -> None:
    order = Order()
    assert order.ask("a", None)
    turn = order.begin("a", 100.0)
    assert [turn.compute_s, turn.end_s] == pytest.approx([1.024, 101.024])
    assert not order.ask("b", None)  # and others do not wait for that


def test_with_neither_link_nor_engine_measured_only_the_timeout_ends_a_fetch() -> None:
    """A busy machine took 63 s to compute what a guess of 2 s had not waited for."""
    order = Order(is_measured=False)
    assert order.ask("a", None)
    assert not order.ask("b", None)  # it is computed, which measures the engine
    turn = order.begin("a", 100.0)
    assert (turn.compute_s, turn.end_s) == (math.inf, math.inf)
    assert not order.ask("c", None, now_s=100.1)
    order.ended(130.0, is_whole=False)
    assert order.ask("d", 0.9 * FIRST_S, now_s=130.0)


def test_an_engine_that_was_not_measured_is_not_waited_for_long() -> None:
    assert Order(is_measured=False).ask("a", 0.9 * FIRST_S)
    assert not Order(is_measured=False).ask("a", 1.2 * FIRST_S)
    assert Order(is_measured=False).ask("a", 3 * FIRST_S, num_pages=4096)  # a GPU takes 8 s for it


def test_a_fetch_goes_on_while_the_engine_is_busy_with_others() -> None:
    order = Order()
    for seed in "xyz":
        assert not order.ask(seed, None, found=False)
    assert order.ask("a", 3.0)
    assert order.begin("a", 101.0).compute_s == pytest.approx(3 * 1.024 - 1 + 1.024)


@pytest.mark.parametrize(
    ("now_s", "num_pages", "is_fetched"), [(101.2, PAGES, False), (101.2, 3 * PAGES, True), (106.0, PAGES, True)]
)
def test_a_link_that_could_not_be_measured_is_tried_again_later_or_for_longer(
    now_s: float, num_pages: int, is_fetched: bool
) -> None:
    order = Order()
    assert order.ask("a", None)
    order.begin("a", 100.0)
    order.ended(101.1, is_whole=False)
    assert order.ask("b", None, now_s=now_s, num_pages=num_pages) is is_fetched


def test_a_fetch_that_ends_frees_the_link_and_those_that_sglang_dropped_are_forgotten() -> None:
    order = Order()
    assert order.ask("a", 0.3)
    assert order.ask("b", 0.3)
    assert order.ask("c", 0.3)
    assert not order.ask("d", 0.3)
    order.begin("c", 100.0, first_page=3)  # the head is on the device by now
    order.ended(100.1, is_whole=True)
    assert order.ask("e", 0.9, now_s=100.1)
    assert order.begin("a", 100.0) is NO_TURN


def test_how_late_fetches_end_counts_for_a_minute() -> None:
    order = Order()
    assert order.ask("a", 0.6)
    order.begin("a", 100.0)
    order.ended(101.2, is_whole=True)  # 0.6 s late
    assert not order.ask("b", 0.6, now_s=102.0)
    assert order.ask("c", 0.6, now_s=101.2 + LAG_COUNTS_S)
