"""Runs all policies on one scenario, and summarises groups of scenarios."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.adaptive.oracle import Plan, best_plan
from benchmarks.adaptive.policies import Fixed, MinimalBubble
from benchmarks.adaptive.simulator import Outcome, Scenario, simulate
from sgl_kvfetch.adapt.policy import LookAhead

BASELINE = "1080p"  # the paper's baseline; a profile without it uses its largest variant instead


@dataclass(frozen=True)
class Judged:
    """``fixed`` is by variant. The oracle's plan is the best one found; see ``Plan.bound_s``."""

    scenario: Scenario
    fixed: Mapping[str, Outcome]
    algorithm1: Outcome
    ours: Outcome
    oracle: Plan

    @property
    def best_fixed_s(self) -> float:
        return min(outcome.end_s for outcome in self.fixed.values())

    @property
    def baseline(self) -> str:
        return BASELINE if BASELINE in self.fixed else list(self.fixed)[-1]

    @property
    def baseline_s(self) -> float:
        return self.fixed[self.baseline].end_s


def judge(scenario: Scenario, *, max_nodes: int) -> Judged:
    fixed = {v.name: simulate(scenario, Fixed(i, v.name)) for i, v in enumerate(scenario.profile.variants)}
    algorithm1 = simulate(scenario, MinimalBubble())
    ours = simulate(scenario, LookAhead())
    oracle = best_plan(scenario, [algorithm1.variants, ours.variants], max_nodes=max_nodes)
    return Judged(scenario, fixed, algorithm1, ours, oracle)


@dataclass(frozen=True)
class Summary:
    """A group's ratios of times. In ``a_to_b``, below 1 means that ``a`` is faster."""

    scenarios: int
    algorithm1_saves: float  # mean share of the fixed baseline's time
    ours_saves: float
    ours_to_oracle: float  # mean
    ours_to_oracle_max: float
    algorithm1_to_oracle: float
    ours_to_best_fixed_max: float
    over_2_percent: int  # scenarios in which ours takes over 2% longer than the best fixed
    oracle_proven: float  # share of scenarios whose oracle is proven optimal
    oracle_to_bound: float  # mean
    ours_to_bound: float  # mean; ours is at most this far from the optimum


def summarise(judged: Sequence[Judged]) -> Summary:
    to_best = [j.ours.end_s / j.best_fixed_s for j in judged]
    to_oracle = [j.ours.end_s / j.oracle.finish_s for j in judged]
    mean = statistics.fmean
    return Summary(
        scenarios=len(judged),
        algorithm1_saves=mean(1 - j.algorithm1.end_s / j.baseline_s for j in judged),
        ours_saves=mean(1 - j.ours.end_s / j.baseline_s for j in judged),
        ours_to_oracle=mean(to_oracle),
        ours_to_oracle_max=max(to_oracle),
        algorithm1_to_oracle=mean(j.algorithm1.end_s / j.oracle.finish_s for j in judged),
        ours_to_best_fixed_max=max(to_best),
        over_2_percent=sum(ratio > 1.02 for ratio in to_best),
        oracle_proven=mean(float(j.oracle.is_optimal) for j in judged),
        oracle_to_bound=mean(j.oracle.finish_s / j.oracle.bound_s for j in judged),
        ours_to_bound=mean(j.ours.end_s / j.oracle.bound_s for j in judged),
    )
