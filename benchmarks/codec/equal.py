"""Prints the table of bits at equal divergence, from one or more reports of `benchmarks.codec`.

    python -m benchmarks.codec.equal REPORT... [--ours 'klt*/ans'] [--plot PNG]

Reports of one model, text, context and continuation may have different methods or different windows. Their results for
the same window are joined, so a long run can be split. Each method is compared with ours on the windows that both have:
how many bits ours takes at the method's divergence, interpolated between our two nearest rows (linear in logarithms).
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.codec.report import SAMPLED, plot_rates
from benchmarks.report import make_parser, make_table, no_traceback, output_file
from benchmarks.stats import Estimate, estimate
from sgl_kvfetch.errors import ConfigError

_SAME = ("model", "text", "context_tokens", "continuation_tokens")
_COLUMNS = ("method", "windows", "bits a value", "KL", "same top token", "ours", "share", "of windows")
_WIDTH = 150
Window = tuple[str, int, int]  # the part of the text, how many windows were cut from it, and which one it is


@dataclass(frozen=True)
class Point:
    """A method on one window, as in `measure.Sample`."""

    bits_per_value: float
    kl: float
    dnll: float
    top1: float


@dataclass
class Curve:
    """A method's points. ``family``: as in `measure.Row`."""

    name: str
    family: str
    points: dict[Window, Point] = field(default_factory=dict)

    def of(self, figure: str, windows: Iterable[Window]) -> Estimate:
        return estimate([getattr(self.points[window], figure) for window in windows])

    # As `report.plot_rates` needs them.
    @property
    def bits_per_value(self) -> Estimate:
        return self.of("bits_per_value", self.points)

    @property
    def kl(self) -> Estimate:
        return self.of("kl", self.points)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("benchmarks.codec.equal", __doc__)
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT", help="JSON that benchmarks.codec wrote")
    parser.add_argument("--ours", default="klt*/ans", help="a pattern of names: the rows to compare with")
    parser.add_argument("--plot", type=output_file, metavar="FILE", help="where to write a PNG")
    args = parser.parse_args(argv)
    console = Console(highlight=False)
    console.width = max(console.width, _WIDTH)
    with no_traceback():
        reports = [_read(path) for path in args.reports]
        curves = join(args.reports, reports)
        ours = [curve for name, curve in curves.items() if fnmatchcase(name, args.ours)]
        console.print(make_table(_title(reports[0]), _COLUMNS, [_cells(curve, ours) for curve in curves.values()]))
        if args.plot:
            plot_rates(args.plot, list(curves.values()), _title(reports[0]))
            console.print(f"wrote {args.plot}")
    return 0


def _read(path: Path) -> Mapping[str, Any]:
    try:
        report = json.loads(path.read_bytes())
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}: {e}") from e
    if not isinstance(report, dict) or report.get("benchmark") != "codec":
        raise ConfigError(f"{path}: expected a report that benchmarks.codec wrote with --json")
    return report


def join(paths: Sequence[Path], reports: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    """Return each method's points from all reports. Raises ConfigError for reports that do not fit together."""
    curves: dict[str, Curve] = {}
    for path, report in zip(paths, reports, strict=True):
        for key in _SAME:
            if report[key] != reports[0][key]:
                raise ConfigError(f"{path}: {key} is {report[key]}, and {reports[0][key]} in {paths[0]}")
        for row in report["rows"]:
            curve = curves.setdefault(row["name"], Curve(row["name"], row["family"]))
            for index, sample in enumerate(row["samples"]):
                window = (report["part"], report["windows"], index)
                if window in curve.points:
                    raise ConfigError(f"{path}: {row['name']} on this window is in another report, too")
                curve.points[window] = Point(**{name: sample[name] for name in SAMPLED})
    return curves


def points_of(ours: Sequence[Curve], windows: Sequence[Window]) -> list[tuple[float, float]]:
    """Return divergence and bits of ``ours`` over these windows, in ascending order of divergence."""
    rows = [curve for curve in ours if all(window in curve.points for window in windows)]
    return sorted((c.of("kl", windows).mean, c.of("bits_per_value", windows).mean) for c in rows)


def bits_at(kl: float, ours: Sequence[Curve], windows: Sequence[Window]) -> float | None:
    """Return the bits of ``ours`` at a divergence, over these windows; None beyond what was measured."""
    points = points_of(ours, windows)
    if kl <= 0 or not points or not points[0][0] <= kl <= points[-1][0]:
        return None
    kls, bits = (np.log([point[i] for point in points]) for i in range(2))
    return math.exp(float(np.interp(math.log(kl), kls, bits)))


def _cells(curve: Curve, ours: Sequence[Curve]) -> list[str]:
    windows = list(curve.points)
    bits, kl, top1 = (curve.of(figure, windows) for figure in ("bits_per_value", "kl", "top1"))
    margin = "" if top1.margin is None else f" ±{top1.margin:.1%}"
    cells = [curve.name, str(len(windows)), bits.show(".3f"), kl.show(".1e", ".0e"), f"{top1.mean:.1%}{margin}"]
    at_equal = None if curve in ours else bits_at(kl.mean, ours, windows)
    if at_equal is None:
        points = [] if curve in ours else points_of(ours, windows)
        if not points or kl.mean <= points[-1][0]:
            return [*cells, "", "", ""]
        least = points[-1][1]  # even our coarsest row is closer to the exact KV cache
        return [*cells, f"< {least:.2f}", f"< {least / bits.mean:.2f}x", ""]
    shares = defaultdict(list)
    for window in windows:
        point = curve.points[window]
        own = bits_at(point.kl, ours, [window])
        shares["known" if own else "unknown"].append((own or 0.0) / point.bits_per_value)
    known = shares["known"]
    spread = f"{min(known):.2f}x to {max(known):.2f}x" if known else ""
    return [*cells, f"{at_equal:.2f}", f"{at_equal / bits.mean:.2f}x", spread]


def _title(report: Mapping[str, Any]) -> str:
    model, text = (Path(report[key]).name for key in ("model", "text"))
    context, continuation = report["context_tokens"], report["continuation_tokens"]
    return f"{model} on {text}: {context:,} tokens of context, {continuation:,} of continuation"


if __name__ == "__main__":
    sys.exit(main())
