"""What each idea in ``klt`` brings: bits a value at the KL divergence that CacheGen has, idea by idea.

    python -m benchmarks.codec.ablation --model PATH --text FILE [--part 0:0.5 --calibrate-part 0.5:1] [--json OUT]

Every variant is calibrated in the same way, coded with HEVC at several steps, and read off, between the two steps
around it, at the divergence of CacheGen with 32, 16 and 8 bins. All bytes count. Each variant has all that those above
it have.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.codec.measure import Row, measure
from benchmarks.codec.methods import all_methods, select
from benchmarks.codec.segments import SegmentMethod
from benchmarks.machine import machine, versions
from benchmarks.report import write_json
from sgl_kvfetch.calibrate.fit import Options, calibrate
from sgl_kvfetch.calibrate.model import KVModel, cut_windows, part_of, read_text
from sgl_kvfetch.errors import KVFetchError
from sgl_kvfetch.layout.choose import default_layout
from sgl_kvfetch.layout.frames import FrameLayout
from sgl_kvfetch.quant.klt import KltQuantiser
from sgl_kvfetch.quant.profile import Calibration, Profile
from sgl_kvfetch.quant.rope import Rope, rope_of_config
from sgl_kvfetch.types import TensorName

REFERENCES = ("cachegen-32/2048", "cachegen-16/2048", "cachegen-8/2048")
_STEPS = (0.3, 0.6, 1.2, 2.4, 4.8, 9.6)


class _TokenTiles(KltQuantiser):
    """The same integers, a tile a token, as the paper lays out values."""

    def layout(
        self, tensor: TensorName, num_heads: int, head_dim: int, span_tokens: int, resolution: str
    ) -> FrameLayout:
        return default_layout(num_heads, head_dim, span_tokens, resolution)


@dataclass(frozen=True)
class _Variant:
    name: str
    calibration: Options
    turns_back: bool = True
    quantiser: type[KltQuantiser] = _TokenTiles


def _variants(num_context: int, head_dim: int) -> list[_Variant]:
    def options(**changes: object) -> Options:
        return Options(**{"num_context": num_context, "max_block_channels": head_dim, **changes})  # type: ignore[arg-type]

    one_step = options(weights="none", decorrelate=False)
    return [
        _Variant("one step for all, centred, channels by spread", one_step, turns_back=False),
        _Variant("+ RoPE removed from K", one_step),
        _Variant("+ steps by layer", options(weights="layer", decorrelate=False)),
        _Variant("+ steps by channel", options(weights="channel", decorrelate=False)),
        _Variant("+ decorrelated within heads", options(weights="channel")),
        _Variant("+ weights of directions", options(weights="matrix")),
        _Variant("+ decorrelated across heads", Options(num_context=num_context)),
        _Variant("+ a picture region a coefficient (klt)", Options(num_context=num_context), quantiser=KltQuantiser),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    console = Console(highlight=False)
    try:
        report = _run(args, console)
    except KVFetchError as e:
        console.print(f"error: {e}", style="red", markup=False)
        return 2
    if args.json:
        write_json(args.json, report)
        console.print(f"wrote {args.json}")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="any transformers path")
    parser.add_argument("--text", type=Path, required=True, help="what is coded: plain text, or JSONL with `prompt`")
    parser.add_argument("--part", default="0:0.5", help="the part of it to code (default: %(default)s)")
    parser.add_argument("--calibrate-text", type=Path, help="what to calibrate on (default: --text)")
    parser.add_argument("--calibrate-part", default="0.5:1", help="the part of that to use (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=10, help="(default: %(default)s)")
    parser.add_argument("--context", type=int, default=1024, help="(default: %(default)s)")
    parser.add_argument("--continuation", type=int, default=512, help="(default: %(default)s)")
    parser.add_argument("--only", help="variants whose names contain this")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    return parser.parse_args(argv)


def _run(args: argparse.Namespace, console: Console) -> dict[str, object]:
    model = KVModel(args.model)
    rope = rope_of_config(model.config)
    length = args.context + args.continuation
    coded = _windows(model, args.text, args.part, args.windows, length + 1)
    fitted = _windows(model, args.calibrate_text or args.text, args.calibrate_part, 25, length)
    variants = [v for v in _variants(args.context, model.k_head_dim) if (args.only or "") in v.name]
    references = measure(model, coded, args.context, select(all_methods(None), REFERENCES)).rows
    found: dict[str, Sequence[Row]] = {}
    for variant in tqdm(variants, unit="variant", disable=not sys.stderr.isatty()):
        profile = _calibrated(model, fitted, rope, variant)
        methods = [
            SegmentMethod(f"{step:g}", "ablation", variant.name, variant.quantiser(profile, step=step), "hevc")
            for step in _STEPS
        ]
        found[variant.name] = measure(model, coded, args.context, methods).rows
    rows = [
        {
            "name": name,
            "bits_at_reference_kl": {r.name: bits_at(points, r.kl.mean) for r in references},
            "points": [{"step": float(p.name), "kl": p.kl.mean, "bits": p.bits_per_value.mean} for p in points],
        }
        for name, points in found.items()
    ]
    console.print(_table(references, found))
    return {
        **{key: str(value) for key, value in vars(args).items()},
        "references": {r.name: {"kl": r.kl.mean, "bits": r.bits_per_value.mean} for r in references},
        "rows": rows,
        "machine": machine(),
        "versions": versions(),
    }


def _windows(model: KVModel, text: Path, part: str, count: int, length: int) -> list[torch.Tensor]:
    return cut_windows([part_of(model.tokenise(t), part) for t in read_text(text)], count, length, model.start)


def _calibrated(model: KVModel, windows: Sequence[torch.Tensor], rope: Rope, variant: _Variant) -> Profile:
    describe = Calibration(model.path, "", variant.name, len(windows), variant.calibration.num_context, 0)
    return calibrate(model, windows, rope if variant.turns_back else None, describe, variant.calibration)


def bits_at(points: Sequence[Row], kl: float) -> float | None:
    """Bits a value at a divergence, on the line between the logarithms of its neighbours'; None outside of them."""
    for fine, coarse in pairwise(points):
        if fine.kl.mean <= kl <= coarse.kl.mean:
            part = log(kl / fine.kl.mean) / log(coarse.kl.mean / fine.kl.mean)
            return fine.bits_per_value.mean + part * (coarse.bits_per_value.mean - fine.bits_per_value.mean)
    return None


def _table(references: Sequence[Row], found: dict[str, Sequence[Row]]) -> Table:
    table = Table(title="bits a value at CacheGen's KL divergence, and as a share of CacheGen's")
    table.add_column("")
    for reference in references:
        table.add_column(f"{reference.name}\nKL {reference.kl.mean:.2g}", justify="right", no_wrap=True)
    table.add_row("CacheGen", *(f"{r.bits_per_value.mean:.2f} 1.00x" for r in references))
    for name, points in found.items():
        bits = [(bits_at(points, r.kl.mean), r.bits_per_value.mean) for r in references]
        table.add_row(name, *("out of range" if b is None else f"{b:.2f} {b / c:.2f}x" for b, c in bits))
    return table


if __name__ == "__main__":
    sys.exit(main())
