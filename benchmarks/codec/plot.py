"""Plots KL against bits as a PNG, one curve per family."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from benchmarks.codec.measure import Row

# Okabe and Ito's colours, which colour-blind readers can distinguish. Each family has its own marker as well.
_COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#999999", "#D55E00", "#8C510A", "#6A51A3", "#000000")
_MARKERS = "sD^vPX<>p"
_OURS = "#0072B2"
_OUR_LOOKS = (("o", "-"), ("v", "--"))
_LOSSLESS_KL = 1e-9
_FONT_SIZE = 8
_DPI = 150
_WHISKER_ALPHA = 0.35


def plot_rates(path: Path, rows: Sequence[Row], subtitle: str) -> None:
    """Plot KL against bits; lower left is better. Whiskers are 95% confidence intervals. Lossless methods, with a KL of
    0, are marks on the lower edge."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9.5, 6), dpi=_DPI, layout="constrained")
    figure.suptitle(f"KV cache: accuracy against size\n{subtitle}", fontsize=10)
    axes.set_yscale("log")
    axes.set(xlabel="bits a value, everything counted", ylabel="KL to exact KV (nats a token)")
    axes.grid(alpha=0.25, which="major")
    lossy = [row for row in rows if row.kl.mean > _LOSSLESS_KL]
    curves = {
        family: sorted(group, key=lambda row: row.bits_per_value.mean)
        for family, group in groupby(sorted(lossy, key=lambda row: row.family), key=lambda row: row.family)
    }
    looks = iter(_OUR_LOOKS * len(curves))
    others = (look for look in zip(_COLOURS * 3, _MARKERS * 3, strict=True))
    labels = []
    for family, curve in curves.items():
        if "(ours)" in family:
            marker, style = next(looks)
            _draw(axes, curve, 2.4, color=_OURS, marker=marker, linestyle=style, markersize=6, zorder=3)
            labels.append((family, curve, _OURS))
        else:
            colour, marker = next(others)
            _draw(axes, curve, 1.3, color=colour, marker=marker, markersize=5, zorder=2)
            labels.append((family, curve, colour))
    lossless = [row for row in rows if row.kl.mean <= _LOSSLESS_KL]
    _mark_lossless(axes, lossless)
    axes.set_ylim(bottom=axes.get_ylim()[0] / (1 + len(lossless)))  # room for their names
    axes.set_xlim(left=0)
    figure.draw_without_rendering()
    _label(axes, labels)
    figure.savefig(path, dpi=_DPI, format="png")
    pyplot.close(figure)


def _draw(axes: Any, curve: Sequence[Row], width: float, **look: Any) -> None:
    kls = [row.kl.mean for row in curve]
    # A logarithmic axis cannot show an interval that reaches below zero: cut it at a tenth of the mean.
    below = [min(row.kl.margin or 0.0, 0.9 * row.kl.mean) for row in curve]
    above = [row.kl.margin or 0.0 for row in curve]
    bits = [row.bits_per_value.mean for row in curve]
    whiskers = {"elinewidth": 0.8, "alpha": _WHISKER_ALPHA, "color": look["color"], "zorder": look["zorder"]}
    axes.errorbar(bits, kls, yerr=[below, above], fmt="none", **whiskers)
    axes.plot(bits, kls, lw=width, **look)


def _mark_lossless(axes: Any, rows: Sequence[Row]) -> None:
    at_edge = axes.get_xaxis_transform()
    for row in rows:
        bits = row.bits_per_value.mean
        axes.plot([bits], [0], "|", color="#444444", markersize=22, transform=at_edge, clip_on=False)
    for height, row in enumerate(sorted(rows, key=lambda row: row.bits_per_value.mean)):
        axes.annotate(
            f"{row.name}, no loss",
            (row.bits_per_value.mean, 0.0),
            xycoords=at_edge,
            xytext=(-3, 4 + 11 * height),
            textcoords="offset points",
            ha="right",
            fontsize=_FONT_SIZE,
            color="#444444",
        )


def _label(axes: Any, curves: Sequence[tuple[str, Sequence[Row], str]]) -> None:
    """Write each curve's name beside one of its points, where it covers the fewest points, and no other name."""
    points_per_pixel = 72 / axes.figure.dpi
    every = [_pixels(axes, row) for _, curve, _ in curves for row in curve]
    lines = [p for _, curve, _ in curves for p in _along([_pixels(axes, row) for row in curve])]
    box = axes.get_window_extent()
    taken: list[tuple[float, float, float, float]] = []
    for family, curve, colour in curves:
        width = len(family) * _FONT_SIZE * 0.56 / points_per_pixel
        height = _FONT_SIZE * 1.25 / points_per_pixel
        best: tuple[float, tuple[float, float, float, float]] | None = None
        for index, row in enumerate(curve):
            x, y = _pixels(axes, row)
            for step in (1, 2, 3):
                for dx, dy in ((1, 0), (1, 1), (1, -1), (-1, 0), (-1, 1), (-1, -1), (0, 1), (0, -1)):
                    left = x + dx * 10 * step - width * (0.5 - 0.5 * dx)
                    bottom = y + dy * 9 * step - height / 2
                    spot = (left, bottom, left + width, bottom + height)
                    cost = 100.0 * sum(_overlap(spot, other) for other in taken)
                    cost += 8.0 * sum(_inside(spot, p, 4) for p in every)
                    cost += 1.0 * sum(_inside(spot, p, 1) for p in lines)
                    cost += 0.6 * step + 0.2 * index
                    cost += 500.0 * (left < box.x0 + 2 or spot[2] > box.x1 - 2 or bottom < box.y0 or spot[3] > box.y1)
                    if best is None or cost < best[0]:
                        best = (cost, spot)
        assert best is not None
        spot = best[1]
        taken.append(spot)
        axes.annotate(
            family,
            (spot[0], (spot[1] + spot[3]) / 2),
            xycoords="figure pixels",
            va="center",
            fontsize=_FONT_SIZE,
            color=colour,
            fontweight="bold" if colour == _OURS else "normal",
        )


def _pixels(axes: Any, row: Row) -> tuple[float, float]:
    x, y = axes.transData.transform((row.bits_per_value.mean, row.kl.mean))
    return float(x), float(y)


def _along(points: Sequence[tuple[float, float]], every: float = 6.0) -> list[tuple[float, float]]:
    """Return evenly spaced points on the lines between ``points``."""
    found = []
    for (x0, y0), (x1, y1) in pairwise(points):
        count = max(1, math.ceil(math.hypot(x1 - x0, y1 - y0) / every))
        found += [(x0 + (x1 - x0) * i / count, y0 + (y1 - y0) * i / count) for i in range(count + 1)]
    return found


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _inside(spot: tuple[float, float, float, float], point: tuple[float, float], margin: float) -> bool:
    x, y = point
    return spot[0] - margin < x < spot[2] + margin and spot[1] - margin < y < spot[3] + margin
