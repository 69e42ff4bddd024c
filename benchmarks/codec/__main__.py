"""Encodes a context's KV cache with many methods, continues from the restored KV, and compares bits and accuracy.

python -m benchmarks.codec --model PATH --text FILE --json OUT
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from tqdm import tqdm

from benchmarks.codec.kv_model import KVModel, windows_of
from benchmarks.codec.measure import Measured, measure
from benchmarks.codec.method import Method
from benchmarks.codec.methods import all_methods, select
from benchmarks.codec.report import make_report, plot_rates, print_report
from benchmarks.codec.segments import PAGE_TOKENS
from benchmarks.report import (
    make_parser,
    no_traceback,
    output_file,
    settings,
    whole_number,
    write_json,
)
from sgl_kvfetch.codec.calibrate.text import fractions_of
from sgl_kvfetch.codec.quant.profile import Profile, load_profile
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.prompts import read_texts, text_digest

_WIDTH = 140  # wide enough that no row wraps


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    console = Console(soft_wrap=True, highlight=False)
    console.width = max(console.width, _WIDTH)
    with no_traceback():
        _benchmark(args, console)
    return 0


def _benchmark(args: argparse.Namespace, console: Console) -> None:
    started_s = time.monotonic()
    profile = load_profile(args.profile) if args.profile else None
    methods = select(all_methods(profile), args.methods)
    texts = read_texts(args.text)
    model = KVModel(args.model, device=_device(args.device))
    if profile is not None:
        _require_profile_of(profile, model)
    length = args.context + args.continuation + 1  # the last is only predicted
    windows = windows_of(model, texts, args.part, args.windows, length)
    measured = _measure(model, windows, methods, args.context)
    if not measured.rows:
        raise ConfigError(f"nothing was measured: {'; '.join(map(': '.join, measured.left_out.items()))}")
    print_report(measured, console)
    if profile is not None and _was_calibrated_on(profile, args.text, args.part):
        note = f"{args.profile} was calibrated on text that is measured here, so klt looks too good; see --part"
        console.print(note, style="yellow", markup=False)
    if args.json:
        write_json(args.json, make_report(measured, settings(args), model.device, time.monotonic() - started_s))
        console.print(f"wrote {args.json}")
    if args.plot:
        subtitle = (
            f"{Path(args.model).name} on {args.text.name}: {args.windows} windows, "
            f"{args.context:,} tokens of context, {args.continuation:,} of continuation"
        )
        plot_rates(args.plot, measured.rows, subtitle)
        console.print(f"wrote {args.plot}")


def _measure(
    model: KVModel,
    windows: Sequence[torch.Tensor],
    methods: Sequence[Method],
    context: int,
) -> Measured:
    with tqdm(total=len(windows) * len(methods), unit="run", disable=not sys.stderr.isatty()) as bar:

        def on_step(name: str) -> None:
            bar.set_postfix_str(name)
            bar.update()

        return measure(model, windows, context, methods, on_step)


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


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as e:
        raise ConfigError(f"--device {name}: {str(e).splitlines()[0]}") from e
    return name


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("benchmarks.codec", __doc__)
    data = parser.add_argument_group("what to encode")
    data.add_argument("--model", required=True, metavar="PATH", help="a model for transformers, which runs in float32")
    data.add_argument(
        "--text", required=True, type=Path, metavar="FILE", help=".jsonl: lines with 'prompt'; any other: plain text"
    )
    data.add_argument(
        "--part",
        default="0:1",
        metavar="FROM:TO",
        help="the part of each text to use, in fractions; avoid the part used for calibration",
    )
    data.add_argument("--windows", type=whole_number, default=10, metavar="N", help="how many")
    data.add_argument(
        "--context", type=whole_number, default=1024, metavar="TOKENS", help=f"encoded; a multiple of {PAGE_TOKENS}"
    )
    data.add_argument(
        "--continuation",
        type=whole_number,
        default=512,
        metavar="TOKENS",
        help="following tokens, for which distributions are compared",
    )
    data.add_argument("--device", default="auto", help="for the model: cpu, cuda, ...")
    how = parser.add_argument_group("how to encode it")
    how.add_argument("--methods", metavar="LIST", help="names or patterns such as 'cachegen*,exact/*'; else all")
    how.add_argument("--profile", type=Path, metavar="FILE", help="the model's, by kvfetch calibrate; klt needs it")
    out = parser.add_argument_group("output")
    out.add_argument("--json", type=output_file, metavar="FILE", help="where to write all figures")
    out.add_argument("--plot", type=output_file, metavar="FILE", help="where to write the PNG; else beside --json")
    args = parser.parse_args(argv)
    if args.context % PAGE_TOKENS:
        parser.error(f"--context is {args.context}; expected a multiple of {PAGE_TOKENS}, the page size")
    args.methods = args.methods.split(",") if args.methods else []
    args.plot = args.plot or (args.json.with_suffix(".png") if args.json else None)
    return args


if __name__ == "__main__":
    sys.exit(main())
