"""Encodes a context's KV cache with many methods, continues from the restored KV, and compares bits and accuracy.

python -m benchmarks.codec --model PATH --text FILE --json OUT
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from tqdm import tqdm

from benchmarks.codec.kv_model import KVModel, windows_of
from benchmarks.codec.measure import Estimate, Row, measure
from benchmarks.codec.methods import KV_DTYPE, PAGE_TOKENS, all_methods, select
from benchmarks.report import make_parser, make_table, no_traceback, output_file, settings, whole_number, write_json
from sgl_kvfetch.codec.calibrate.text import fractions_of
from sgl_kvfetch.codec.quant.profile import Profile, load_profile
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.prompts import read_texts, text_digest

_WIDTH = 120  # wide enough that no row wraps
_COLUMNS = ("method", "bits per value", "ratio", "KL (nats)", "change of NLL", "same top token")
_TITLE = "All bytes counted; ± is a 95% confidence interval over the windows"


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    console = Console(soft_wrap=True, highlight=False)
    console.width = max(console.width, _WIDTH)
    with no_traceback():
        _benchmark(args, console)
    return 0


def _benchmark(args: argparse.Namespace, console: Console) -> None:
    profile = load_profile(args.profile) if args.profile else None
    methods = select(all_methods(profile), args.methods)
    model = KVModel(args.model)
    if profile is not None:
        _require_profile_of(profile, model)
    length = args.context + args.continuation + 1  # the last is only predicted
    windows = windows_of(model, read_texts(args.text), args.part, args.windows, length)
    with tqdm(total=len(windows) * len(methods), unit="run", disable=not sys.stderr.isatty()) as bar:

        def on_step(name: str) -> None:
            bar.set_postfix_str(name)
            bar.update()

        nll, rows = measure(model, windows, args.context, methods, on_step)
    console.print(make_table(_TITLE, _COLUMNS, map(_cells, rows)))
    console.print(f"NLL after exact KV: {nll.mean:.4f} nats per token")
    if profile is not None and _was_calibrated_on(profile, args.text, args.part):
        note = f"{args.profile} was calibrated on text that is measured here, so klt looks too good; see --part"
        console.print(note, style="yellow", markup=False)
    if args.json:
        about = {"benchmark": "codec", "config": settings(args), "nll": nll.mean}
        write_json(args.json, {**about, "rows": [_row_json(row) for row in rows]})
        console.print(f"wrote {args.json}")


def _cells(row: Row) -> list[str]:
    figures = row.kl.show(".2e"), row.dnll.show("+.5f", ".5f"), row.top1.show(".2%")
    return [row.name, row.bits_per_value.show(".3f"), f"{_ratio(row):.2f}", *figures]


def _ratio(row: Row) -> float:
    return KV_DTYPE.itemsize * 8 / row.bits_per_value.mean


def _row_json(row: Row) -> dict[str, Any]:
    """Return the row as JSON. ``..._ci`` is ``[low, high]``, or null for a single window. ``samples``: its windows."""
    shown = {"name": row.name, "ratio": _ratio(row), "samples": [asdict(sample) for sample in row.samples]}
    for name, value in vars(row).items():
        if isinstance(value, Estimate):
            shown |= {name: value.mean, f"{name.removesuffix('_per_value')}_ci": value.interval}
    return shown


def _require_profile_of(profile: Profile, model: KVModel) -> None:
    found = (profile.grid.num_layers, profile.grid.num_heads, profile.k_head_dim, profile.v_head_dim)
    expected = (model.num_layers, model.num_heads, model.k_head_dim, model.v_head_dim)
    if found != expected:
        raise ConfigError(
            f"the profile is for a model of {found[0]} layers, {found[1]} heads of {found[2]} (K) and {found[3]} (V); "
            f"{model.path} has {expected[0]}, {expected[1]}, {expected[2]} and {expected[3]}"
        )


def _was_calibrated_on(profile: Profile, text: Path, part: str) -> bool:
    """Return whether the profile was calibrated on this part of the text, judged by the file's content."""
    (first, end), (other_first, other_end) = fractions_of(part), fractions_of(profile.calibration.part or "0:1")
    return text_digest(text) in profile.calibration.text and first < other_end and other_first < end


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("benchmarks.codec", __doc__)
    parser.add_argument(
        "--model", required=True, metavar="PATH", help="a model for transformers, which runs in float32"
    )
    parser.add_argument(
        "--text", required=True, type=Path, metavar="FILE", help=".jsonl: lines with 'prompt'; any other: plain text"
    )
    parser.add_argument(
        "--part",
        default="0:1",
        metavar="FROM:TO",
        help="of each text, in fractions; avoid the calibration's",
    )
    parser.add_argument("--windows", type=whole_number, default=10, metavar="N", help="how many")
    parser.add_argument(
        "--context", type=whole_number, default=1024, metavar="TOKENS", help=f"encoded; a multiple of {PAGE_TOKENS}"
    )
    parser.add_argument(
        "--continuation", type=whole_number, default=512, metavar="TOKENS", help="that follow, and are predicted"
    )
    parser.add_argument("--methods", metavar="LIST", help="names or patterns such as 'cachegen*,exact/*'; else all")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="the model's, by kvfetch calibrate; klt needs it")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="where to write all figures")
    args = parser.parse_args(argv)
    if args.context % PAGE_TOKENS:
        parser.error(f"--context is {args.context}; expected a multiple of {PAGE_TOKENS}, the page size")
    args.methods = args.methods.split(",") if args.methods else []
    return args


if __name__ == "__main__":
    sys.exit(main())
