"""Prints the table of bits at equal divergence, as Markdown, from one or more reports of `benchmarks.codec`.

    python -m benchmarks.codec.equal REPORT... [--plot PNG]

Reports of one model, text, context and continuation may have different methods or different windows. Their results for
the same window are joined, so a long run can be split. Each method is compared with ours, `klt` with `ans`, on the
windows that both have: how many bits ours takes at the method's divergence, interpolated between our two nearest rows
(linear in logarithms). Below the table is what ours takes at round divergences.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.codec.report import SAMPLED, plot_rates
from benchmarks.report import make_parser, no_traceback, output_file
from benchmarks.stats import Estimate, estimate
from sgl_kvfetch.errors import ConfigError

_SAME = ("model", "text", "context_tokens", "continuation_tokens")
_HEAD = "| | bits a value | KL | same top token | ours | share |\n|---|---|---|---|---|---|"
_OURS = "klt*/ans"
_ROUND_KLS = (1e-3, 3e-3, 1e-2)
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
    parser.add_argument("--plot", type=output_file, metavar="FILE", help="where to write a PNG")
    args = parser.parse_args(argv)
    with no_traceback():
        reports = [_read(path) for path in args.reports]
        curves = join(args.reports, reports)
        ours = [curve for name, curve in curves.items() if fnmatchcase(name, _OURS)]
        others = [curve for curve in curves.values() if curve not in ours]
        print(f"{_title(reports[0])}\n\n{_HEAD}")
        for curve in (*sorted(ours, key=lambda curve: curve.kl.mean), *others):
            print(_row(curve, ours))
        for kl in _ROUND_KLS:
            print(_say_bits(kl, ours))
        if args.plot:
            plot_rates(args.plot, list(curves.values()), _title(reports[0]))
            print(f"wrote {args.plot}")
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


def _row(curve: Curve, ours: Sequence[Curve]) -> str:
    """Return a line of the table. The share is followed by the smallest and the largest of single windows."""
    windows = list(curve.points)
    bits, kl, top1 = (curve.of(figure, windows) for figure in ("bits_per_value", "kl", "top1"))
    row = f"| {curve.name} | {bits.show('.2f')} | {kl.show('.1e', '.0e')} | {top1.show('.1%')} |"
    if curve in ours:
        return f"{row} | |"
    at_equal = bits_at(kl.mean, ours, windows)
    if at_equal is None:
        points = points_of(ours, windows)
        if not points or kl.mean <= points[-1][0]:
            return f"{row} | |"
        least = points[-1][1]  # even our coarsest row is closer to the exact KV cache
        return f"{row} < {least:.2f} | **< {least / bits.mean:.2f}x** |"
    own = {window: bits_at(curve.points[window].kl, ours, [window]) for window in windows}
    known = [each / curve.points[window].bits_per_value for window, each in own.items() if each is not None]
    spread = f" [{min(known):.2f}, {max(known):.2f}]" if known else ""
    return f"{row} {at_equal:.2f} | **{at_equal / bits.mean:.2f}x**{spread} |"


def _say_bits(kl: float, ours: Sequence[Curve]) -> str:
    """Return what ours takes where its mean divergence is ``kl``, and where those of single windows are."""
    windows = list(dict.fromkeys(window for curve in ours for window in curve.points))
    bits = bits_at(kl, ours, windows)
    if bits is None:
        return f"ours at {kl:.0e}: not measured"
    single = [found for window in windows if (found := bits_at(kl, ours, [window])) is not None]
    spread = f", {min(single):.2f} to {max(single):.2f} in {len(single)} single windows" if single else ""
    return f"ours at {kl:.0e}: {bits:.2f} bits a value{spread}"


def _title(report: Mapping[str, Any]) -> str:
    model, text = (Path(report[key]).name for key in ("model", "text"))
    context, continuation = report["context_tokens"], report["continuation_tokens"]
    return f"{model} on {text}: {context:,} tokens of context, {continuation:,} of continuation"


if __name__ == "__main__":
    sys.exit(main())
