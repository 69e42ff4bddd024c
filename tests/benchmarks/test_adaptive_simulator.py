"""Whole fetches, simulated, and the oracle that judges them."""

from __future__ import annotations

import itertools
import random
from functools import partial

import pytest

from benchmarks.adaptive.oracle import best_plan
from benchmarks.adaptive.policies import Fixed
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


def scenario(*gbps: float, device: str = "H20", sessions: int = 7) -> Scenario:
    """A fetch of a chunk a sample."""
    return Scenario("test", PUBLISHED[device], tuple(g * 1e9 for g in gbps), ((0.0, len(gbps)),), sessions)


def test_a_slow_link_by_hand() -> None:
    """1.44 Gb a chunk at 1 Gbps, the link never waits; then the last one's decoding, with the switch if it is first."""
    outcome = simulate(scenario(1, 1), Fixed(0, "240p"))
    assert outcome.end_s == pytest.approx(2 * 1.44 + 0.21)
    assert outcome.fetch_s == (outcome.end_s,)
    assert simulate(scenario(1), Fixed(0, "240p")).end_s == pytest.approx(1.44 + 0.08 + 0.21)


def test_policies_are_told_what_was_and_not_what_will_be() -> None:
    script = Script((3, 0, 0))
    simulate(scenario(8, 4, 2), script)
    assert [t.goodput_bps for t in script.situations[2].transfers] == pytest.approx([8e9, 4e9])
    # A changed future changes nothing before it.
    other = Script((3, 0, 0))
    simulate(scenario(8, 4, 0.1), other)
    assert other.situations == script.situations


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


@pytest.mark.parametrize("device", sorted(PUBLISHED))
def test_on_a_link_that_is_known_ours_is_as_good_as_the_best_fixed_one(device: str) -> None:
    """What it loses on steady links it loses before it has seen them."""
    profile = PUBLISHED[device]
    for gbps, chunks in itertools.product((2.0, 10.0, 20.0, 40.0), (3, 10, 25)):
        case = Scenario("steady", profile, (gbps * 1e9,), ((0.0, chunks),), profile.num_sessions)
        best_s = min(simulate(case, policy).end_s for policy in FIXED)
        known = LookAhead(outlook=partial(robust, prior=LinkOutlook(gbps * 1e9, 0.1)))
        assert simulate(case, known).end_s <= best_s * 1.01
