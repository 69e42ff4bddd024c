"""Runs all policies on a scenario, and reports groups of scenarios as a table and as JSON."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.table import Table

from benchmarks.adaptive.oracle import Plan, best_plan
from benchmarks.adaptive.policies import Fixed, MinimalBubble
from benchmarks.adaptive.scenarios import CHUNK_TOKENS, Group
from benchmarks.adaptive.simulator import Outcome, Scenario, simulate
from benchmarks.report import make_table
from sgl_kvfetch.plane.adapt.decode_profile import DecodeProfile
from sgl_kvfetch.plane.adapt.policy import LookAhead

FORMAT = 1
_WORST = 10
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


def summarise(judged: Sequence[Judged]) -> dict[str, float]:
    """Return a group's ratios of times. In ``a_to_b``, below 1 means that ``a`` is faster.

    ``..._saves``: mean share of the fixed baseline's time. ``over_2_percent``: the number of scenarios in which ours
    takes over 2% longer than the best fixed. ``oracle_proven``: share of scenarios whose oracle is proven optimal.
    """
    to_best = [j.ours.end_s / j.best_fixed_s for j in judged]
    to_oracle = [j.ours.end_s / j.oracle.finish_s for j in judged]
    mean = statistics.fmean
    return {
        "scenarios": len(judged),
        "algorithm1_saves": mean(1 - j.algorithm1.end_s / j.baseline_s for j in judged),
        "ours_saves": mean(1 - j.ours.end_s / j.baseline_s for j in judged),
        "ours_to_oracle": mean(to_oracle),
        "ours_to_oracle_max": max(to_oracle),
        "algorithm1_to_oracle": mean(j.algorithm1.end_s / j.oracle.finish_s for j in judged),
        "ours_to_best_fixed_max": max(to_best),
        "over_2_percent": sum(ratio > 1.02 for ratio in to_best),
        "oracle_proven": mean(float(j.oracle.is_optimal) for j in judged),
        "oracle_to_bound": mean(j.oracle.finish_s / j.oracle.bound_s for j in judged),
        "ours_to_bound": mean(j.ours.end_s / j.oracle.bound_s for j in judged),
    }


# The table's columns, after the group's: a title, a key of `summarise`, and its form.
_COLUMNS = (
    ("n", "scenarios", ""),
    ("algorithm 1 saves", "algorithm1_saves", ".1%"),
    ("ours saves", "ours_saves", ".1%"),
    ("ours / oracle", "ours_to_oracle", ".3f"),
    ("worst", "ours_to_oracle_max", ".3f"),
    ("alg. 1 / oracle", "algorithm1_to_oracle", ".3f"),
    ("ours / best fixed, worst", "ours_to_best_fixed_max", ".3f"),
    ("over 1.02", "over_2_percent", ""),
    ("oracle proven", "oracle_proven", ".0%"),
    ("oracle / bound", "oracle_to_bound", ".3f"),
)


def summary_table(judged: Sequence[tuple[Group, Sequence[Judged]]]) -> Table:
    """Return a table with one row per group."""
    titles = ("scenarios", *(title for title, _, _ in _COLUMNS))
    rows = []
    for group, found in judged:
        summary = summarise(found)
        rows.append((group.description, *(f"{summary[field]:{form}}" for _, field, form in _COLUMNS)))
    table = make_table("Simulated", titles, rows)
    table.caption = "savings: mean share of the time of fixed 1080p (or of the largest variant); else ratios of times"
    return table


def make_report(judged: Sequence[tuple[Group, Sequence[Judged]]], profiles: Sequence[DecodeProfile]) -> dict[str, Any]:
    return {
        "benchmark": "adaptive",
        "format": FORMAT,
        "simulated": True,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "chunk_tokens": CHUNK_TOKENS,
        "profiles": [msgspec.to_builtins(profile) for profile in profiles],
        "groups": [_group_json(group, found) for group, found in judged],
        "scenarios": [_scenario_json(group, j) for group, found in judged for j in found],
    }


def _group_json(group: Group, found: Sequence[Judged]) -> dict[str, Any]:
    worst = sorted(found, key=lambda j: j.best_fixed_s / j.ours.end_s)[:_WORST]
    return {
        "name": group.name,
        "description": group.description,
        **summarise(found),
        "worst_against_best_fixed": [j.scenario.name for j in worst],
    }


def _scenario_json(group: Group, j: Judged) -> dict[str, Any]:
    names = [v.name for v in j.scenario.profile.variants]
    outcomes = {**j.fixed, "algorithm1": j.algorithm1, "ours": j.ours}
    return {
        "name": j.scenario.name,
        "group": group.name,
        "device": j.scenario.profile.device,
        "sessions": j.scenario.num_sessions,
        "chunks": j.scenario.num_chunks,
        "fixed_s": {name: outcome.end_s for name, outcome in j.fixed.items()},
        "algorithm1_s": j.algorithm1.end_s,
        "ours_s": j.ours.end_s,
        "oracle_s": j.oracle.finish_s,
        "oracle_bound_s": j.oracle.bound_s,
        "mean_fetch_s": {name: outcome.mean_fetch_s for name, outcome in outcomes.items()},
        "algorithm1_variants": [names[v] for v in j.algorithm1.variants],
        "ours_variants": [names[v] for v in j.ours.variants],
        "oracle_variants": [names[v] for v in j.oracle.variants],
    }
