"""Reports the runs as a table, as JSON and as a plot."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import machine, versions
from benchmarks.report import COLOURS, figure
from benchmarks.sharegpt.load import Result, StreamedAnswer
from benchmarks.sharegpt.workload import Run
from benchmarks.stats import distribution
from sgl_kvfetch.tools.sglang_server import TIERS

FORMAT = 1
TIMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "whole request"}


def make_report(runs: Sequence[Run], **about: Any) -> dict[str, Any]:
    """Return everything as JSON. ``about``: more keys."""
    return {
        "benchmark": "sharegpt",
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        **about,
        "runs": [_run_json(run, runs[0].result) for run in runs],
    }


def _run_json(run: Run, first: Result) -> dict[str, Any]:
    records = run.result.records
    answers = [record.answer for record in records if record.answer is not None]
    errors = Counter(record.error for record in records if record.error is not None)
    output_tokens = sum(len(answer.output_ids) for answer in answers)
    tpots = [tpot for answer in answers if (tpot := answer.tpot_s) is not None]
    return {
        "name": run.name,
        "description": run.description,
        "requests": len(records),
        "failures": errors.total(),
        "errors": errors,
        "duration_s": run.result.duration_s,
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "output_tokens": output_tokens,
        "cached_tokens": {tier: sum(answer.cached[tier] for answer in answers) for tier in TIERS},
        "ttft_s": asdict(distribution([answer.ttft_s for answer in answers])),
        "tpot_s": asdict(distribution(tpots)),
        "itl_s": asdict(distribution([gap for answer in answers for gap in answer.itl_s])),
        "e2e_s": asdict(distribution([answer.e2e_s for answer in answers])),
        "requests_per_s": len(answers) / run.result.duration_s,
        "output_tokens_per_s": output_tokens / run.result.duration_s,
        "by_turn": [_turn_json(turn, of_turn) for turn, of_turn in _by_turn(run.result).items()],
        "wire_bytes": run.traffic.wire_bytes,
        "raw_bytes": run.traffic.raw_bytes,
        "same_answers_as_first_run": _same_answers(run.result, first),
        "other_cores": run.other_cores,
        "prompts_digest": run.result.prompts_digest,
        "fill": run.fill,
        "records": [asdict(record) for record in records],
    }


def _by_turn(result: Result) -> dict[int, list[StreamedAnswer]]:
    turns: dict[int, list[StreamedAnswer]] = {}
    for record in sorted(result.records, key=lambda record: record.turn):
        if record.answer is not None:
            turns.setdefault(record.turn + 1, []).append(record.answer)
    return turns


def _turn_json(turn: int, answers: Sequence[StreamedAnswer]) -> dict[str, Any]:
    return {
        "turn": turn,
        "requests": len(answers),
        "prompt_tokens": round(sum(answer.prompt_tokens for answer in answers) / len(answers)),
        "ttft_s": asdict(distribution([answer.ttft_s for answer in answers])),
    }


def _same_answers(result: Result, first: Result) -> int:
    """Return how many requests got the same tokens in both runs."""
    expected = {(r.conversation, r.turn): r.answer.output_ids for r in first.records if r.answer is not None}
    return sum(
        record.answer is not None and record.answer.output_ids == expected.get((record.conversation, record.turn))
        for record in result.records
    )


def table_rows(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the table's rows, with a cell per run of ``make_report``. Rows of which no run knows anything are left
    out."""
    fills = [run["fill"] or {} for run in runs]
    rows = [
        ("requests", [run["requests"] for run in runs]),
        ("failures", [run["failures"] for run in runs]),
        ("answers as in the first run", [run["same_answers_as_first_run"] for run in runs]),
    ]
    for key, title in TIMES.items():
        for percentile in ("p50", "p95", "p99", "mean"):
            rows.append((f"{title} (ms), {percentile}", [_times(run[key][percentile], 1e3, ".1f") for run in runs]))
    rows += [
        ("requests/s", [f"{run['requests_per_s']:.2f}" for run in runs]),
        ("output tokens/s", [f"{run['output_tokens_per_s']:.1f}" for run in runs]),
        ("prompt tokens", [run["prompt_tokens"] for run in runs]),
        *((f"cached, from {tier}", [run["cached_tokens"][tier] for run in runs]) for tier in TIERS),
        ("read, on the wire (MB)", [_times(run["wire_bytes"], 1e-6, ".2f") for run in runs]),
        ("read, raw (MB)", [_times(run["raw_bytes"], 1e-6, ".2f") for run in runs]),
        ("stored before, on the wire (MB)", [_times(fill.get("wire_bytes"), 1e-6, ".2f") for fill in fills]),
        ("stored before, raw (MB)", [_times(fill.get("raw_bytes"), 1e-6, ".2f") for fill in fills]),
        ("cores that others used", [_times(run["other_cores"], 1, ".1f") for run in runs]),
    ]
    return [[title, *map(str, cells)] for title, cells in rows if any(cell != "" for cell in cells)]


def _times(value: float | None, factor: float, form: str) -> str:
    return "" if value is None else f"{value * factor:{form}}"


def plot_ttft(path: Path, runs: Sequence[Run], subtitle: str) -> None:
    """Plot the cumulative share of requests over TTFT, and beside it p50 by turn, with whiskers to p95."""
    with figure(path, f"Time to first token (TTFT)\n{subtitle}", columns=2, figsize=(11, 4.5)) as (_, ((left, right),)):
        for number, (run, colour) in enumerate(zip(runs, COLOURS, strict=False)):
            turns = _by_turn(run.result)
            by_turn = [np.array([answer.ttft_s for answer in of_turn]) * 1e3 for of_turn in turns.values()]
            if not by_turn:
                continue
            left.ecdf(np.concatenate(by_turn), color=colour, label=run.name, lw=2)
            middles, tops = (np.array([np.percentile(times, p) for times in by_turn]) for p in (50, 95))
            places = np.array(list(turns)) + (number - (len(runs) - 1) / 2) * 0.8 / len(runs)
            whiskers = [np.zeros_like(middles), tops - middles]
            right.bar(places, middles, 0.8 / len(runs), yerr=whiskers, capsize=3, color=colour)
            right.set_xticks(list(turns))
        left.set(xlabel="TTFT (ms)", ylabel="share of requests", title="All requests", xlim=(0, None))
        left.legend(title="backend", loc="lower right")
        right.set(xlabel="turn", ylabel="TTFT (ms)", title="By turn: p50, whisker to p95")
