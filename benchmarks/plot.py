"""Plots the time to first token, by backend and by turn, as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Run

# Okabe and Ito's colours, which colour-blind readers can distinguish. Each run has its own line style as well.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
_STYLES = ("-", "--", "-.", ":")


def plot_ttft(path: Path, runs: Sequence[Run], subtitle: str) -> None:
    """Plot the cumulative share of requests over TTFT, and beside it p50 by turn, with whiskers to p95."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    figure.suptitle(f"Time to first token (TTFT)\n{subtitle}", fontsize=10)
    _plot_shares(left, runs)
    _plot_turns(right, runs)
    figure.savefig(path, dpi=150, format="png")
    pyplot.close(figure)


def _plot_shares(axes: Any, runs: Sequence[Run]) -> None:
    for run, colour, style in zip(runs, _COLOURS, _STYLES, strict=False):
        values = sorted(record.answer.ttft_s * 1e3 for record in run.result.records if record.answer is not None)
        if values:
            shares = np.arange(1, len(values) + 1) / len(values)
            axes.step([values[0], *values], [0.0, *shares], style, where="post", color=colour, label=run.name, lw=2)
    axes.set(xlabel="TTFT (ms)", ylabel="share of requests", title="All requests", ylim=(0, 1.02))
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(title="backend", loc="lower right")


def _plot_turns(axes: Any, runs: Sequence[Run]) -> None:
    width = 0.8 / max(1, len(runs))
    turns = sorted({stats.turn for run in runs for stats in run.stats.by_turn})
    for i, (run, colour) in enumerate(zip(runs, _COLOURS, strict=False)):
        stats = [turn for turn in run.stats.by_turn if turn.ttft_s.p50 is not None]
        middles = np.array([turn.ttft_s.p50 or 0.0 for turn in stats]) * 1e3
        tops = np.array([turn.ttft_s.p95 or 0.0 for turn in stats]) * 1e3
        places = [turn.turn + (i - (len(runs) - 1) / 2) * width for turn in stats]
        axes.bar(
            places,
            middles,
            width,
            yerr=[np.zeros_like(middles), tops - middles],
            capsize=3,
            color=colour,
            label=run.name,
        )
    lengths = {stats.turn: stats.prompt_tokens for run in runs for stats in run.stats.by_turn}
    axes.set_xticks(turns, [f"{turn}\n({lengths[turn]} tokens)" for turn in turns])
    axes.set(xlabel="turn (mean prompt)", ylabel="TTFT (ms)", title="By turn: p50, whisker to p95")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
