"""Draws heat maps of the speed-up, and timelines of link and decoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.patches import Patch

from benchmarks.adaptive.judge import Judged
from benchmarks.adaptive.simulator import Outcome
from benchmarks.report import figure

# Okabe and Ito's colours, which colour-blind readers can distinguish; the smallest variant has the first.
_COLOURS = ("#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#009E73", "#CC79A7", "#F0E442", "#999999")
_IDLE = "#dddddd"
_DPI = 85


def plot_speedup(path: Path, grids: Mapping[str, Sequence[Judged]]) -> None:
    """Draw heat maps of our speed-up, one column per device in ``grids``. The upper row compares with fixed 1080p (or
    the largest variant), the lower row with algorithm 1."""
    title = "Simulated: time until the last chunk is decoded, steady links"
    look = {"figsize": (3.9 * len(grids) + 0.8, 5.6), "sharey": True, "dpi": _DPI}
    with figure(path, title, 2, len(grids), **look) as (drawn, axes):
        for (upper, lower), (device, judged) in zip(axes.T, grids.items(), strict=True):
            _heat_map(upper, judged, [j.baseline_s / j.ours.end_s for j in judged])
            image = _heat_map(lower, judged, [j.algorithm1.end_s / j.ours.end_s for j in judged])
            upper.set_title(f"{device}: ours against fixed {judged[0].baseline}", fontsize=9)
            lower.set_title(f"{device}: ours against algorithm 1", fontsize=9)
            lower.set_xlabel("link (Gbps)", fontsize=8)
        for first in axes[:, 0]:
            first.set_ylabel("chunks", fontsize=8)
        drawn.colorbar(image, ax=axes, shrink=0.8).set_label("speed-up (times)", fontsize=8)


def _heat_map(axes: Any, judged: Sequence[Judged], speedups: Sequence[float]) -> Any:
    links = sorted({j.scenario.bandwidth_bps[0] for j in judged})
    lengths = sorted({j.scenario.num_chunks for j in judged})
    values = np.zeros((len(lengths), len(links)))
    for j, speedup in zip(judged, speedups, strict=True):
        values[lengths.index(j.scenario.num_chunks), links.index(j.scenario.bandwidth_bps[0])] = speedup
    image = axes.imshow(values, origin="lower", aspect="auto", cmap="PuOr_r", vmin=0.55, vmax=1.45)
    axes.set_xticks(range(len(links)), [f"{bps / 1e9:g}" for bps in links], fontsize=8)
    axes.set_yticks(range(len(lengths)), [str(n) for n in lengths], fontsize=8)
    for (row, column), value in np.ndenumerate(values):
        colour = "white" if abs(value - 1) > 0.28 else "black"
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
    return image


def plot_timelines(path: Path, judged: Sequence[Judged]) -> None:
    """Draw when link and sessions are busy: one column per scenario, one row per policy. Grey is idle time."""
    names = [v.name for v in judged[0].scenario.profile.variants]
    look = {"figsize": (5.4 * len(judged), 6.0), "sharex": "col", "dpi": _DPI}
    with figure(path, "Simulated: link and decode sessions", 3, len(judged), **look) as (drawn, axes):
        for column, j in zip(axes.T, judged, strict=True):
            rows = ((f"fixed {j.baseline}", j.fixed[j.baseline]), ("algorithm 1", j.algorithm1), ("ours", j.ours))
            for each, (title, outcome) in zip(column, rows, strict=True):
                _timeline(each, outcome, title)
            column[0].text(0, 1.22, j.scenario.name, transform=column[0].transAxes, fontsize=9, weight="bold")
            column[-1].set_xlabel("seconds", fontsize=8)
        handles = [Patch(color=colour) for colour in (*_COLOURS[: len(names)], _IDLE)]
        drawn.legend(handles, [*names, "bubble"], loc="outside lower center", ncols=len(names) + 1, fontsize=8)


def _timeline(axes: Any, outcome: Outcome, title: str) -> None:
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
