"""Draws heat maps of the speed-up, and timelines of link and decoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.adaptive.judge import Judged
from benchmarks.adaptive.simulator import Outcome, Scenario

# Okabe and Ito's colours, which colour-blind readers can distinguish; the smallest variant has the first.
_COLOURS = ("#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#009E73", "#CC79A7", "#F0E442", "#999999")
_IDLE = "#dddddd"
_DPI = 85


def plot_speedup(path: Path, grids: Mapping[str, Sequence[Judged]]) -> None:
    """Draw heat maps of our speed-up, one column per device in ``grids``. The upper row compares with fixed 1080p (or
    the largest variant), the lower row with algorithm 1."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(
        2, len(grids), figsize=(3.9 * len(grids) + 0.8, 5.6), layout="constrained", squeeze=False, sharey=True
    )
    for column, (device, judged) in enumerate(grids.items()):
        against = (f"fixed {judged[0].baseline}", _against_baseline), ("algorithm 1", _against_algorithm1)
        for row, (title, of) in enumerate(against):
            image = _heat_map(axes[row][column], judged, of)
            axes[row][column].set_title(f"{device}: ours against {title}", fontsize=9)
        axes[1][column].set_xlabel("link (Gbps)", fontsize=8)
    for row in range(2):
        axes[row][0].set_ylabel("chunks", fontsize=8)
    figure.colorbar(image, ax=axes, shrink=0.8).set_label("speed-up (times)", fontsize=8)
    figure.suptitle("Simulated: time until the last chunk is decoded, steady links", fontsize=9)
    figure.savefig(path, dpi=_DPI, format="png")
    pyplot.close(figure)


def _against_baseline(j: Judged) -> float:
    return j.baseline_s / j.ours.end_s


def _against_algorithm1(j: Judged) -> float:
    return j.algorithm1.end_s / j.ours.end_s


def _heat_map(axes: Any, judged: Sequence[Judged], of: Any) -> Any:
    links = sorted({j.scenario.bandwidth_bps[0] for j in judged})
    lengths = sorted({j.scenario.num_chunks for j in judged})
    values = np.zeros((len(lengths), len(links)))
    for j in judged:
        values[lengths.index(j.scenario.num_chunks), links.index(j.scenario.bandwidth_bps[0])] = of(j)
    image = axes.imshow(values, origin="lower", aspect="auto", cmap="PuOr_r", vmin=0.55, vmax=1.45)
    axes.set_xticks(range(len(links)), [f"{bps / 1e9:g}" for bps in links], fontsize=8)
    axes.set_yticks(range(len(lengths)), [str(n) for n in lengths], fontsize=8)
    for (row, column), value in np.ndenumerate(values):
        colour = "white" if abs(value - 1) > 0.28 else "black"
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
    return image


def plot_timelines(path: Path, judged: Sequence[Judged]) -> None:
    """Draw when link and sessions are busy: one column per scenario, one row per policy. Grey is idle time."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(
        3, len(judged), figsize=(5.4 * len(judged), 6.0), layout="constrained", squeeze=False, sharex="col"
    )
    for column, j in enumerate(judged):
        rows = ((f"fixed {j.baseline}", j.fixed[j.baseline]), ("algorithm 1", j.algorithm1), ("ours", j.ours))
        for row, (title, outcome) in enumerate(rows):
            _timeline(axes[row][column], j.scenario, outcome, title)
        axes[0][column].text(0, 1.22, j.scenario.name, transform=axes[0][column].transAxes, fontsize=9, weight="bold")
        axes[2][column].set_xlabel("seconds", fontsize=8)
    names = [v.name for v in judged[0].scenario.profile.variants]
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=_COLOURS[i]) for i in range(len(names))]
    handles.append(pyplot.Rectangle((0, 0), 1, 1, color=_IDLE))
    figure.legend(handles, [*names, "bubble"], loc="outside lower center", ncols=len(names) + 1, fontsize=8)
    figure.savefig(path, dpi=_DPI, format="png")
    pyplot.close(figure)


def _timeline(axes: Any, scenario: Scenario, outcome: Outcome, title: str) -> None:
    lanes = ["link", *(f"session {i + 1}" for i in range(max(d.session for d in outcome.decoded) + 1))]
    for lane in range(len(lanes)):
        axes.barh(lane, outcome.end_s, left=0, height=0.72, color=_IDLE)
    for t in outcome.transmitted:
        _bar(axes, 0, t.variant, t.start_s, t.end_s)
    for d in outcome.decoded:
        _bar(axes, d.session + 1, d.variant, d.start_s, d.end_s)
    axes.set_yticks(range(len(lanes)), lanes, fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.invert_yaxis()
    axes.set_title(f"{title}: {outcome.end_s:.2f} s, {_bubbles(outcome)}", fontsize=8, loc="left")


def _bar(axes: Any, lane: int, variant: int, start_s: float, end_s: float) -> None:
    axes.barh(
        lane, end_s - start_s, left=start_s, height=0.72, color=_COLOURS[variant], edgecolor="white", linewidth=0.4
    )


def _bubbles(outcome: Outcome) -> str:
    link_idle_s = outcome.end_s - sum(t.end_s - t.start_s for t in outcome.transmitted)
    pool_idle_s, busy_until_s = 0.0, 0.0
    for d in sorted(outcome.decoded, key=lambda d: d.start_s):
        pool_idle_s += max(0.0, d.start_s - busy_until_s)
        busy_until_s = max(busy_until_s, d.end_s)
    return f"link idle {link_idle_s:.2f} s, all decoders idle {pool_idle_s:.2f} s"


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
