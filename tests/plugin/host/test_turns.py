"""Which stored prefixes are fetched in host mode. tests/e2e/test_sooner.py has whole engines."""

from __future__ import annotations

import math

import pytest

from harness.metrics import own_metric
from sgl_kvfetch.plane import Cost, Found
from sgl_kvfetch.plugin.host.turns import FIRST_S, NO_TURN, Turns
from sgl_kvfetch.plugin.prefill import MIN_BATCHES, PrefillMeter
from tests.plugin.backends import keys

PAGE_TOKENS, PAGES = 16, 64


def make_turns(token_s: float | None = 0.001, *, may_compute: bool = True) -> Turns:
    """``token_s``: what the engine takes for a token; None if it has computed nothing yet."""
    meter = PrefillMeter()
    if token_s is not None:
        for size in (512, 1024) * MIN_BATCHES:
            meter.speed.add_batch(size, size * token_s)
    return Turns(meter, PAGE_TOKENS, may_compute=may_compute)


def found(transmit_s: float | None, num_pages: int = PAGES) -> Found:
    return Found(1, num_pages, Cost(transmit_s, None))


def ask(turns: Turns, seed: str, transmit_s: float | None, now_s: float = 100.0) -> bool:
    """Look up a prompt of 1,024 tokens, which takes 1.024 s to compute."""
    return turns.looked_up(keys(PAGES, seed), found(transmit_s), now_s)


@pytest.mark.parametrize(("transmit_s", "is_fetched"), [(0.5, True), (1.0, True), (1.2, False), (10.0, False)])
def test_a_prefix_is_fetched_if_that_is_sooner(transmit_s: float, is_fetched: bool) -> None:
    before = own_metric("sgl_kvfetch_recomputed_tokens_total")
    assert ask(make_turns(), "a", transmit_s) is is_fetched
    assert own_metric("sgl_kvfetch_recomputed_tokens_total") - before == (0 if is_fetched else PAGES * PAGE_TOKENS)


def test_everything_is_fetched_if_the_config_says_so() -> None:
    turns = make_turns(may_compute=False)
    assert ask(turns, "a", 1000.0)
    turn = turns.begin(keys(PAGES, "a"), 100.0)
    assert (turn.compute_s, turn.within_s) == (math.inf, math.inf)


def test_a_prefix_waits_for_those_before_it() -> None:
    """Each takes 0.4 s, and the engine takes one after another, too."""
    turns = make_turns()
    assert [ask(turns, seed, 0.4) for seed in "abc"] == [True, True, False]
    assert ask(turns, "d", 0.4)  # 1.2 s, or behind the one that is computed
    assert ask(turns, "e", 0.4, now_s=101.6)


def test_prompts_that_are_not_stored_keep_the_engine_busy_until_it_is_idle() -> None:
    turns = make_turns()
    assert not turns.looked_up(keys(PAGES, "x"), found(None, 0), 100.0)
    assert ask(turns, "a", 1.5)
    turns = make_turns()
    assert not turns.looked_up(keys(PAGES, "x"), found(None, 0), 100.0)
    turns._engine.clear()
    assert not ask(turns, "a", 1.5)


def test_the_first_fetch_measures_the_link_and_gives_up_after_what_computing_would_take() -> None:
    turns = make_turns()
    assert ask(turns, "a", None)
    turn = turns.begin(keys(PAGES, "a"), 100.0)
    assert turn.within_s == turn.compute_s == pytest.approx(1.024)
    assert not ask(turns, "b", None)  # and others do not wait for that


def test_with_neither_link_nor_engine_measured_only_the_timeout_ends_a_fetch() -> None:
    """A busy machine took 63 s to compute what a guess of 2 s had not waited for."""
    turns = make_turns(None)
    assert ask(turns, "a", None)
    assert not ask(turns, "b", None)  # it is computed, which measures the engine
    turn = turns.begin(keys(PAGES, "a"), 100.0)
    assert (turn.compute_s, turn.within_s) == (math.inf, math.inf)
    assert not ask(turns, "c", None, now_s=100.1)
    turns.end(turn, 130.0, is_whole=False)
    assert ask(turns, "d", 0.9 * FIRST_S, now_s=130.0)


def test_an_engine_that_was_not_measured_is_not_waited_for_long() -> None:
    assert ask(make_turns(None), "a", 0.9 * FIRST_S)
    assert not ask(make_turns(None), "a", 1.2 * FIRST_S)
    long = keys(4096)
    assert make_turns(None).looked_up(long, found(3 * FIRST_S, len(long)), 100.0)  # a GPU takes 8 s for it


def test_a_fetch_goes_on_while_the_engine_is_busy_with_others() -> None:
    turns = make_turns()
    for seed in "xyz":
        assert not turns.looked_up(keys(PAGES, seed), found(None, 0), 100.0)
    assert ask(turns, "a", 3.0)
    assert turns.begin(keys(PAGES, "a"), 101.0).compute_s == pytest.approx(3 * 1.024 - 1 + 1.024)


def test_a_link_that_could_not_be_measured_is_tried_again_later_or_for_longer() -> None:
    turns = make_turns()
    assert ask(turns, "a", None)
    turns.end(turns.begin(keys(PAGES, "a"), 100.0), 101.1, is_whole=False)
    assert not ask(turns, "b", None, now_s=101.2)
    long = keys(3 * PAGES)
    assert turns.looked_up(long, found(None, len(long)), 101.2)
    turns = make_turns()
    assert ask(turns, "a", None)
    turns.end(turns.begin(keys(PAGES, "a"), 100.0), 101.1, is_whole=False)
    assert ask(turns, "b", None, now_s=106.0)


def test_a_link_that_was_measured_needs_no_deadline() -> None:
    turns = make_turns()
    assert ask(turns, "a", 0.5)
    turn = turns.begin(keys(PAGES, "a"), 100.0)
    assert turn.within_s == math.inf
    assert turn.compute_s == pytest.approx(1.024)


def test_a_fetch_that_ends_frees_the_link_and_those_that_sglang_dropped_are_forgotten() -> None:
    turns = make_turns()
    assert ask(turns, "a", 0.3)
    assert ask(turns, "b", 0.3)
    assert ask(turns, "c", 0.3)
    assert not ask(turns, "d", 0.3)
    turn = turns.begin(keys(PAGES, "c")[3:], 100.0)  # the head is on the device by now
    turns.end(turn, 100.1, is_whole=True)
    assert ask(turns, "e", 0.9, now_s=100.1)
    assert turns.begin(keys(PAGES, "a"), 100.0) is NO_TURN


def test_how_late_fetches_end_counts() -> None:
    turns = make_turns()
    assert ask(turns, "a", 0.6)
    turns.end(turns.begin(keys(PAGES, "a"), 100.0), 101.2, is_whole=True)  # 0.6 s late
    assert not ask(turns, "b", 0.6, now_s=102.0)
