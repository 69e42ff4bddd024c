"""Measures how many bits larger cells save, and how much memory and arithmetic they cost.

    python -m benchmarks.codec.spans --model PATH --text FILE [--part 0:0.5 --calibrate-part 0.5:1] [--json OUT]

A cell of ``klt`` is K and V of some layers and heads under one transform. Each span of layers and heads is calibrated
as ``kvfetch calibrate`` does it, and encoded with HEVC at several steps, on other text. All bytes count. Bits are
interpolated at equal KL divergence, between the two nearest steps. The table also shows the price: the profile's bytes,
and the restore kernel's multiply-adds per value. Both are also computed for larger models, under the assumption that
they keep the same share of coefficients.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.codec.kv_model import KVModel
from benchmarks.codec.measure import measure
from benchmarks.codec.segments import SegmentMethod
from benchmarks.codec.windows import windows_of
from benchmarks.machine import machine, versions
from benchmarks.report import make_parser, make_table, run_and_report, settings, whole_number
from sgl_kvfetch.codec.calibrate.fit import CalibrationOptions, calibrate_model, cell_grid
from sgl_kvfetch.codec.calibrate.layer_map import map_layers
from sgl_kvfetch.codec.calibrate.layers import LayeredModel
from sgl_kvfetch.codec.calibrate.text import calibration_windows, part_of
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.profile import Calibration, Profile
from sgl_kvfetch.prompts import read_texts
from sgl_kvfetch.types import CellGrid

KLS = (1e-3, 3e-3, 1e-2)
_STEPS = (1.0, 2.0, 4.0, 8.0, 16.0)
_WIDTH = 150


@dataclass(frozen=True, slots=True)
class Shape:
    """The properties of a model that determine a span's price."""

    name: str
    num_layers: int
    num_heads: int
    k_head_dim: int
    v_head_dim: int

    @classmethod
    def of(cls, model: KVModel) -> Shape:
        return cls(Path(model.path).name, model.num_layers, model.num_heads, model.k_head_dim, model.v_head_dim)

    def cell_channels(self, grid: CellGrid) -> list[int]:
        """Return how many channels each cell has."""
        width = grid.cell_heads * (self.k_head_dim + self.v_head_dim)
        return [len(grid.layers(group)) * width for group, _ in grid.cells()]


LARGER = (Shape("Llama-3.1-8B", 32, 8, 128, 128), Shape("Qwen3-32B", 64, 8, 128, 128))


@dataclass(frozen=True, slots=True)
class Span:
    """The layers and heads of a cell. ``heads``: None for all heads of a rank."""

    layers: int
    heads: int | None

    def __str__(self) -> str:
        heads = {None: "all heads", 1: "one head"}.get(self.heads, f"{self.heads} heads")
        return f"{self.layers} layer{'s' * (self.layers > 1)}, {heads}"

    def grid(self, shape: Shape) -> CellGrid:
        return CellGrid(shape.num_layers, shape.num_heads, self.layers, self.heads or shape.num_heads)


@dataclass(frozen=True, slots=True)
class Variant:
    span: Span
    is_chosen: bool = False
    sensitivity: bool = True
    sinks: bool = True

    def __str__(self) -> str:
        left_out = [f", without {name}" for name in ("sensitivity", "sinks") if not getattr(self, name)]
        return f"{self.span}{' (chosen)' * self.is_chosen}{''.join(left_out)}"


@dataclass(frozen=True, slots=True)
class Point:
    """The measured cost of a step. ``integers``: integers per token, relative to its number of values."""

    step: float
    kl: float
    bits: float
    integers: float


def variants_of(shape: Shape) -> list[Variant]:
    """Return the spans to compare, including the default one, and that one without each of its extras."""
    chosen = chosen_span(shape)
    one_head = [Span(3, 1)] if shape.num_heads > 1 else []
    spans = dict.fromkeys([Span(1, None), *one_head, Span(3, None), Span(6, None), chosen])
    return [
        *(Variant(span, is_chosen=span == chosen) for span in spans),
        Variant(chosen, sensitivity=False),
        Variant(chosen, sinks=False),
    ]


def chosen_span(shape: Shape) -> Span:
    """Return the span that ``kvfetch calibrate`` chooses by default for a model of this shape."""
    head_channels = shape.k_head_dim + shape.v_head_dim
    grid = cell_grid(shape.num_layers, shape.num_heads, head_channels, CalibrationOptions().max_channels, tp_size=1)
    return Span(grid.cell_layers, None if grid.cell_heads == shape.num_heads else grid.cell_heads)


def profile_bytes(shape: Shape, grid: CellGrid) -> int:
    """Return the number of bytes of the tensors in a profile with these cells."""
    total = 0
    for (group, _), channels in zip(grid.cells(), shape.cell_channels(grid), strict=True):
        layers = len(grid.layers(group))
        weights = layers * sum((grid.cell_heads * dim) ** 2 for dim in (shape.k_head_dim, shape.v_head_dim))
        sensitivity = channels + layers * 2 * grid.cell_heads + 1
        mean_spread_reach = 4 * channels
        total += 2 * channels**2 + 4 * (weights + mean_spread_reach + sensitivity)
    return total


def multiply_adds(shape: Shape, grid: CellGrid, integers: float) -> float:
    """Return the multiply-adds per restored value: one for each of a token's integers in the value's cell.

    ``integers``: integers per token, relative to its number of values.
    """
    channels = shape.cell_channels(grid)
    return integers * sum(c**2 for c in channels) / sum(channels)


def at_kl(points: Sequence[Point], kl: float) -> Point | None:
    """Interpolate the figures at a divergence, linearly in its logarithm. Return None outside the measured range."""
    for fine, coarse in pairwise(points):
        if fine.kl <= kl <= coarse.kl:
            part = log(kl / fine.kl) / log(coarse.kl / fine.kl)
            return Point(
                step=fine.step * (coarse.step / fine.step) ** part,
                kl=kl,
                bits=fine.bits + part * (coarse.bits - fine.bits),
                integers=fine.integers + part * (coarse.integers - fine.integers),
            )
    return None


def main(argv: Sequence[str] | None = None) -> int:
    return run_and_report(_run, _parse(argv), _WIDTH)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("benchmarks.codec.spans", __doc__)
    parser.add_argument("--model", required=True, help="any transformers path")
    parser.add_argument("--text", type=Path, required=True, help="text to encode: plain, or JSONL with `prompt`")
    parser.add_argument("--part", default="0:0.5", help="the part of it to encode")
    parser.add_argument("--windows", type=whole_number, default=10, help="windows of it")
    parser.add_argument("--calibrate-text", type=Path, help="text to calibrate on (default: --text)")
    parser.add_argument("--calibrate-part", default="0.5:1", help="the part of that to use")
    parser.add_argument("--calibrate-windows", type=whole_number, default=25, help="windows of that")
    parser.add_argument("--context", type=whole_number, default=1024, help="tokens")
    parser.add_argument("--continuation", type=whole_number, default=512, help="tokens")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    return parser.parse_args(argv)


def _run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    model, layered = KVModel(args.model), LayeredModel(args.model)
    shape = Shape.of(model)
    length = args.context + args.continuation
    coded = windows_of(model, read_texts(args.text), args.part, args.windows, length + 1)
    tokens = [part_of(model.tokenise(t), args.calibrate_part) for t in read_texts(args.calibrate_text or args.text)]
    fitted = calibration_windows(model.tokenizer, tokens, args.calibrate_windows, length)
    profiles: dict[tuple[Span, bool], Profile] = {}
    rows = []
    for variant in tqdm(variants_of(shape), unit="span", disable=not sys.stderr.isatty()):
        key = variant.span, variant.sensitivity
        if key not in profiles:
            options = CalibrationOptions(
                num_context=args.context, grid=variant.span.grid(shape), sensitivity=variant.sensitivity
            )
            profiles[key] = _calibrated(layered, fitted, options)
        profile = profiles[key] if variant.sinks else replace(profiles[key], num_sinks=0)
        rows.append(_row(variant, shape, _measured(model, coded, args.context, profile)))
    report: dict[str, Any] = {
        "benchmark": "codec.spans",
        "config": settings(args),
        "bits": "everything counted, HEVC",
        "machine": machine(),
        "versions": versions(),
        "rows": rows,
        "larger_models": {s.name: {"chosen": str(chosen_span(s)), **_price(s, chosen_span(s), 1.0)} for s in LARGER},
    }
    console.print(_table(report))
    for name, larger in report["larger_models"].items():
        price = _show_price(larger["profile_bytes"], larger["multiply_adds_a_value"])
        console.print(f"For {name}, kvfetch calibrate takes {larger['chosen']}: {price} if it keeps all coefficients.")
    return report


def _calibrated(model: LayeredModel, windows: Sequence[torch.Tensor], options: CalibrationOptions) -> Profile:
    describe = Calibration(model.path, "", "", len(windows), options.num_context, len(windows[0]) - options.num_context)
    return calibrate_model(model, windows, map_layers(model)[0], describe, options)


def _measured(model: KVModel, windows: Sequence[torch.Tensor], num_context: int, profile: Profile) -> list[Point]:
    quantisers = [KltQuantiser(profile, step=step) for step in _STEPS]
    methods = [SegmentMethod(f"{q.step:g}", "sgl_kvfetch", "klt", q, "hevc") for q in quantisers]
    rows = measure(model, windows, num_context, methods).rows
    return [
        Point(q.step, row.kl.mean, row.bits_per_value.mean, sum(q.coefficient_shares))
        for q, row in zip(quantisers, rows, strict=True)
    ]


def _row(variant: Variant, shape: Shape, points: Sequence[Point]) -> dict[str, Any]:
    """Return a row of the report. Multiply-adds are those at the finest divergence, where they are highest."""
    found = {f"{kl:g}": at_kl(points, kl) for kl in KLS}
    finest = found[f"{KLS[0]:g}"]
    integers = finest.integers if finest else None
    return {
        "name": str(variant),
        "layers": variant.span.layers,
        "heads": variant.span.heads or shape.num_heads,
        "sensitivity": variant.sensitivity,
        "sinks": variant.sinks,
        "is_chosen": variant.is_chosen,
        "bits_at_kl": {kl: point.bits if point else None for kl, point in found.items()},
        "integers_a_value": integers,
        "price": {s.name: _price(s, variant.span, integers) for s in (shape, *LARGER)},
        "points": [{"step": p.step, "kl": p.kl, "bits": p.bits, "integers_a_value": p.integers} for p in points],
    }


def _price(shape: Shape, span: Span, integers: float | None) -> dict[str, Any]:
    grid = span.grid(shape)
    return {
        "profile_bytes": profile_bytes(shape, grid),
        "multiply_adds_a_value": None if integers is None else multiply_adds(shape, grid, integers),
    }


def _table(report: dict[str, Any]) -> Table:
    rows = report["rows"]
    title = f"Bits a value at equal KL, {report['bits']}. Profile and multiply-adds a value at KL {KLS[0]:g}"
    columns = ("cells of K and V of", *(f"KL {kl:g}" for kl in KLS), *rows[0]["price"])
    return make_table(title, columns, map(_cells, rows))


def _cells(row: dict[str, Any]) -> list[str]:
    bits = ("out of range" if b is None else f"{b:.3f}" for b in row["bits_at_kl"].values())
    return [row["name"], *bits, *(_show_price(**price) for price in row["price"].values())]


def _show_price(profile_bytes: int, multiply_adds_a_value: float | None) -> str:
    adds = "?" if multiply_adds_a_value is None else f"{multiply_adds_a_value:,.0f}"
    return f"{profile_bytes / 1e6:,.1f} MB, {adds}"


if __name__ == "__main__":
    sys.exit(main())
