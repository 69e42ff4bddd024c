"""Reports the simulated results, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.adaptive.judge import Judged, Summary, summarise
from benchmarks.adaptive.options import Options
from benchmarks.adaptive.scenarios import CHUNK_TOKENS, Group
from sgl_kvfetch.adapt.decode_profile import DecodeProfile

FORMAT = 1
_WORST = 10


def print_summaries(judged: Sequence[tuple[Group, Sequence[Judged]]], console: Console) -> None:
    """Print a table with one row per group."""
    caption = "savings: mean share of the time of fixed 1080p (or of the largest variant); the rest: ratios of times"
    table = Table(title="Simulated", caption=caption)
    table.add_column("scenarios", overflow="fold")
    for name in (
        "n",
        "algorithm 1 saves",
        "ours saves",
        "ours / oracle",
        "worst",
        "alg. 1 / oracle",
        "ours / best fixed, worst",
        "over 1.02",
        "oracle proven",
        "oracle / bound",
    ):
        table.add_column(name, justify="right")
    for group, found in judged:
        s = summarise(found)
        table.add_row(
            group.description,
            str(s.scenarios),
            f"{s.algorithm1_saves:.1%}",
            f"{s.ours_saves:.1%}",
            f"{s.ours_to_oracle:.3f}",
            f"{s.ours_to_oracle_max:.3f}",
            f"{s.algorithm1_to_oracle:.3f}",
            f"{s.ours_to_best_fixed_max:.3f}",
            str(s.over_2_percent),
            f"{s.oracle_proven:.0%}",
            f"{s.oracle_to_bound:.3f}",
        )
    console.print(table)


def to_json(
    judged: Sequence[tuple[Group, Sequence[Judged]]],
    profiles: Sequence[DecodeProfile],
    options: Options,
    duration_s: float,
) -> dict[str, Any]:
    return {
        "benchmark": "adaptive",
        "format": FORMAT,
        "simulated": True,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "duration_s": duration_s,
        "trace": None if options.trace is None else str(options.trace),
        "seed": options.seed,
        "chunk_tokens": CHUNK_TOKENS,
        "profiles": [msgspec.to_builtins(profile) for profile in profiles],
        "groups": [_group_json(group, found) for group, found in judged],
        "scenarios": [_scenario_json(group, j) for group, found in judged for j in found],
    }


def _group_json(group: Group, found: Sequence[Judged]) -> dict[str, Any]:
    summary: Summary = summarise(found)
    worst = sorted(found, key=lambda j: j.best_fixed_s / j.ours.end_s)[:_WORST]
    return {
        "name": group.name,
        "description": group.description,
        **dataclasses.asdict(summary),
        "worst_against_best_fixed": [j.scenario.name for j in worst],
    }


def _scenario_json(group: Group, j: Judged) -> dict[str, Any]:
    names = [v.name for v in j.scenario.profile.variants]
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
        "mean_fetch_s": {
            **{name: outcome.mean_fetch_s for name, outcome in j.fixed.items()},
            "algorithm1": j.algorithm1.mean_fetch_s,
            "ours": j.ours.mean_fetch_s,
        },
        "algorithm1_variants": [names[v] for v in j.algorithm1.variants],
        "ours_variants": [names[v] for v in j.ours.variants],
        "oracle_variants": [names[v] for v in j.oracle.variants],
    }
