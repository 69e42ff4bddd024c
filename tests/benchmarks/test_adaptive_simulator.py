"""Whole fetches, simulated, and the oracle that judges them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial

import pytest

from benchmarks.adaptive import oracle
from benchmarks.adaptive.oracle import best_plan
from benchmarks.adaptive.policies import Fixed, MinimalBubble
from benchmarks.adaptive.published import PUBLISHED
from benchmarks.adaptive.simulator import Scenario, simulate
from sgl_kvfetch.plane.adapt.estimate import LinkOutlook, robust
from sgl_kvfetch.plane.adapt.policy import LookAhead, Situation

H20 = PUBLISHED["H20"]
FIXED = [Fixed(i, v.name) for i, v in enumerate(H20.variants)]


class Script:
    """Plays a plan."""

    name = "script"

    def __init__(self, variants: tuple[int, ...]) -> None:
        self._variants = list(variants)
        self.situations: list[Situation] = []

    def choose(self, situation: Situation) -> int:
        self.situations.append(situation)
        return self._variants.pop(0)


def scenario(*gbps: float, device: str = "H20", sessions: int = 7, arrivals: tuple[float, ...] = (0.0,)) -> Scenario:
    """A chunk a sample for each of the fetches."""
    fetches = tuple((arrival_s, len(gbps)) for arrival_s in arrivals)
    return Scenario("test", PUBLISHED[device], tuple(g * 1e9 for g in gbps), fetches, sessions)


def test_a_slow_link_by_hand() -> None:
    """1.44 Gb a chunk at 1 Gbps, the link never waits; then the last one's decoding, with the switch if it is first."""
    outcome = simulate(scenario(1, 1), Fixed(0, "240p"))
    assert outcome.end_s == pytest.approx(2 * 1.44 + 0.21)
    assert outcome.fetch_s == (outcome.end_s,)
    assert simulate(scenario(1), Fixed(0, "240p")).end_s == pytest.approx(1.44 + 0.08 + 0.21)


def test_slow_decoders_by_hand() -> None:
    """All but at once there: three after each other through the one session."""
    outcome = simulate(scenario(1e6, 1e6, 1e6, sessions=1), Fixed(3, "1080p"))
    assert outcome.end_s == pytest.approx(3 * 0.19, abs=1e-4)


def test_the_trace_is_a_sample_a_chunk_and_repeats() -> None:
    longer = replace(scenario(1, 2), fetches=((0.0, 3),))
    times = [t.end_s - t.start_s for t in simulate(longer, Fixed(0, "240p")).transmitted]
    assert times == pytest.approx([1.44, 0.72, 1.44])


def test_policies_are_told_what_was_and_not_what_will_be() -> None:
    script = Script((3, 0, 0))
    simulate(scenario(8, 4, 2), script)
    first, second, third = script.situations
    assert first.transfers == ()
    assert first.previous is None
    assert [s.remaining for s in script.situations] == [3, 2, 1]
    assert [t.goodput_bps for t in third.transfers] == pytest.approx([8e9, 4e9])
    assert second.previous == 3
    assert second.pool.num_busy == 1
    # A changed future changes nothing before it.
    other = Script((3, 0, 0))
    simulate(scenario(8, 4, 0.1), other)
    assert other.situations == script.situations


def test_fetches_take_turns() -> None:
    outcome = simulate(scenario(1, 1, arrivals=(0.0, 0.0)), Fixed(0, "240p"))
    assert [t.fetch for t in outcome.transmitted] == [0, 1, 0, 1]
    assert outcome.fetch_s[0] < outcome.fetch_s[1] == outcome.end_s


def test_a_fetch_that_comes_later_waits_for_its_chunk_only() -> None:
    outcome = simulate(scenario(1, arrivals=(0.0, 5.0)), Fixed(0, "240p"))
    assert outcome.transmitted[1].start_s == 5.0
    assert outcome.fetch_s == pytest.approx((1.73, 1.65))


def test_all_decoding_stays_within_the_pool() -> None:
    rng = random.Random(3)
    for _ in range(20):
        case = scenario(*(rng.uniform(2, 60) for _ in range(12)), sessions=3)
        decoded = simulate(case, LookAhead()).decoded
        assert len(decoded) == 12
        by_session = itertools.groupby(sorted(decoded, key=lambda d: (d.session, d.start_s)), key=lambda d: d.session)
        for session, records in by_session:
            assert session < 3
            for before, after in itertools.pairwise(records):
                assert after.start_s >= before.end_s - 1e-9


def test_decoders_slower_than_believed_are_noticed() -> None:
    slow = H20.corrected(dict.fromkeys(range(4), 3.0))
    script = Script((3,) * 10)
    simulate(replace(scenario(*[10.0] * 10), profile=slow, believed=H20), script)
    assert script.situations[0].profile == H20
    assert script.situations[-1].profile.decode_time_s(3, 1) > 2 * H20.decode_time_s(3, 1)


@pytest.mark.parametrize("device", sorted(PUBLISHED))
def test_the_oracle_is_optimal_where_all_plans_can_be_tried(device: str) -> None:
    rng = random.Random(device)
    for _ in range(12):
        gbps = [rng.uniform(1, 60) for _ in range(rng.randint(1, 5))]
        case = scenario(*gbps, device=device, sessions=rng.randint(1, 3))
        plans = itertools.product(range(4), repeat=len(gbps))
        best_s = min(simulate(case, Script(plan)).end_s for plan in plans)
        found = best_plan(case, max_nodes=10_000)
        assert found.finish_s == pytest.approx(best_s, rel=1e-9)
        assert found.bound_s <= best_s * (1 + 1e-9)
        assert found.is_optimal
        assert simulate(case, Script(found.variants)).end_s == pytest.approx(found.finish_s, rel=1e-9)


def test_the_bound_holds_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "_BEAM", 1)
    rng = random.Random(5)
    for _ in range(20):
        case = scenario(*(rng.uniform(5, 60) for _ in range(4)), sessions=rng.randint(1, 7))
        best_s = min(simulate(case, Script(plan)).end_s for plan in itertools.product(range(4), repeat=4))
        assert best_plan(case, max_nodes=0).bound_s <= best_s * (1 + 1e-9)


def test_the_oracle_knows_several_fetches() -> None:
    case = scenario(20, 20, arrivals=(0.0, 0.6))
    plans = itertools.product(range(4), repeat=4)
    best_s = min(simulate(case, Script(plan)).end_s for plan in plans)
    assert best_plan(case, max_nodes=10_000).finish_s == pytest.approx(best_s, rel=1e-9)


def test_the_oracle_is_never_worse_than_what_it_is_told_of() -> None:
    rng = random.Random(6)
    for _ in range(5):
        case = scenario(*(rng.uniform(10, 40) for _ in range(10)))
        outcomes = [simulate(case, policy) for policy in (*FIXED, MinimalBubble(), LookAhead())]
        found = best_plan(case, [outcome.variants for outcome in outcomes], max_nodes=10)
        assert found.finish_s <= min(outcome.end_s for outcome in outcomes) * (1 + 1e-9)


@pytest.mark.parametrize("device", sorted(PUBLISHED))
def test_on_a_link_that_is_known_ours_is_as_good_as_the_best_fixed_one(device: str) -> None:
    """What it loses on steady links it loses before it has seen them."""
    profile = PUBLISHED[device]
    for gbps, chunks in itertools.product((2.0, 10.0, 20.0, 40.0), (3, 10, 25)):
        case = Scenario("steady", profile, (gbps * 1e9,), ((0.0, chunks),), profile.num_sessions)
        best_s = min(simulate(case, policy).end_s for policy in FIXED)
        known = LookAhead(outlook=partial(robust, prior=LinkOutlook(gbps * 1e9, 0.1)))
        assert simulate(case, known).end_s <= best_s * 1.01
