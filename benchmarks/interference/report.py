"""Reports percentiles, ratios to the runs without fetches, and their confidence intervals."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from benchmarks import report
from benchmarks.interference.load import Run
from benchmarks.interference.spans import fetch_seconds

_NUM_RESAMPLES = 2000
_CONFIDENCE = (2.5, 97.5)
_LEAST_REQUESTS = 5

METHOD = (
    "Percentiles are over all short requests of a mode. For a ratio, each round's p50 is divided by the p50 of 'none' "
    "in the same round; the ratio is the median over rounds. Its 95% interval is from a bootstrap that draws rounds "
    "with replacement, and in each round prompts, the same for both modes. Two servers of one kind may differ by a "
    "fifth. So the last columns compare requests of the same server: the p50 of those sent during a fetch, divided by "
    "the p50 of the others, as the median over rounds."
)


def make_rows(runs: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """Return a row per mode. ``runs``: for each mode, one run per round; the mode ``none`` is required."""
    return [_row(mode, of_mode, runs["none"]) for mode, of_mode in runs.items()]


def _row(mode: str, runs: Sequence[Run], none: Sequence[Run]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": mode, "rounds": len(runs), "num_short": sum(len(run.short) for run in runs)}
    for name in ("ttft", "tpot"):
        ours, base = (np.array([[getattr(r, f"{name}_s") for r in run.short] for run in of]) for of in (runs, none))
        row[f"{name}_s"] = {f"p{p}": float(np.percentile(ours, p)) for p in (50, 95)}
        ratios = np.median(ours, axis=1) / np.median(base, axis=1)
        row[f"ratio_{name}_p50"] = float(np.median(ratios))
        row[f"ratio_{name}_p50_ci95"] = confidence_interval(ours, base)
        row[f"ratios_{name}_p50"] = ratios.tolist()
        row[f"within_ratios_{name}_p50"] = [ratio for run in runs if (ratio := _within(run, name)) is not None]
    long = [request for run in runs for request in run.long]
    row["share_during_fetch"] = statistics.mean(run.share_during_fetch for run in runs)
    row["long_ttft_s"] = statistics.median(r.ttft_s for r in long) if long else None
    row["long_storage_tokens"] = [r.storage_tokens for r in long]
    fetches = [seconds for run in runs for seconds in fetch_seconds(run.spans).values()]
    row["fetch_s"] = statistics.median(fetches) if fetches else None
    row["other_cores"] = [run.other_cores for run in runs]
    return row


def _within(run: Run, name: str) -> float | None:
    """Return the p50 of the short requests that were sent during a fetch, divided by the p50 of the same server's
    others. None if there were too few of either."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for request, is_during in zip(run.short, run.is_during_fetch, strict=True):
        times[is_during].append(getattr(request, f"{name}_s"))
    if min(map(len, times.values())) < _LEAST_REQUESTS:
        return None
    return statistics.median(times[True]) / statistics.median(times[False])


def confidence_interval(ours: NDArray[Any], base: NDArray[Any], seed: int = 0) -> list[float]:
    """Return the interval of the median over rounds of the ratio of medians, by a paired bootstrap of two levels.
    ``ours`` and ``base``: (rounds, prompts), with the same prompts at the same indices."""
    rng = np.random.default_rng(seed)
    num_rounds, num_prompts = ours.shape
    rounds = rng.integers(num_rounds, size=(_NUM_RESAMPLES, num_rounds, 1))
    prompts = rng.integers(num_prompts, size=(_NUM_RESAMPLES, num_rounds, num_prompts))
    ratios = np.median(ours[rounds, prompts], axis=2) / np.median(base[rounds, prompts], axis=2)
    return [float(bound) for bound in np.percentile(np.median(ratios, axis=1), _CONFIDENCE)]


def make_table(rows: Sequence[Mapping[str, Any]], pinned: bool) -> Table:
    where = "the scheduler on a core of its own" if pinned else "on all cores"
    title = f"short requests while long prompts are fetched, {where}: p50 / p95"
    columns = ("", "TTFT, ms", "p50 to none (95%)", "TPOT, ms", "p50 to none (95%)", "TTFT of long, s", "fetch, s")
    return report.make_table(title, (*columns, "tokens from store", "TTFT within", "TPOT within"), map(_cells, rows))


def _cells(row: Mapping[str, Any]) -> list[str]:
    cells = [row["name"]]
    for name in ("ttft", "tpot"):
        cells.append(" / ".join(f"{row[name + '_s'][p] * 1e3:.1f}" for p in ("p50", "p95")))
        low, high = row[f"ratio_{name}_p50_ci95"]
        cells.append(f"{row[f'ratio_{name}_p50']:.2f} ({low:.2f}-{high:.2f})")
    stored = row["long_storage_tokens"]
    cells.append(f"{row['long_ttft_s']:.2f}" if stored else "")
    cells.append(f"{row['fetch_s']:.2f}" if row["fetch_s"] is not None else "")
    cells.append(f"{statistics.mean(stored):.0f}" if stored else "")
    for name in ("ttft", "tpot"):
        within = row[f"within_ratios_{name}_p50"]
        cells.append(f"{statistics.median(within):.2f}" if within else "")
    return cells
