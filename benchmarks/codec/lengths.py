"""Measures a method's divergence by the length of the context. The continuations are the same at every length.

python -m benchmarks.codec.lengths --model PATH --text FILE --profile FILE
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from tqdm import tqdm

from benchmarks.codec.method import KV_DTYPE, KVShape, Method
from benchmarks.codec.methods import all_methods, select
from benchmarks.codec.segments import PAGE_TOKENS
from benchmarks.codec.windows import windows_of
from benchmarks.report import (
    make_parser,
    make_table,
    no_traceback,
    output_file,
    settings,
    whole_number,
    whole_numbers,
    write_json,
)
from benchmarks.stats import Estimate, estimate
from sgl_kvfetch.codec.calibrate.model import KVModel
from sgl_kvfetch.codec.quant.profile import load_profile
from sgl_kvfetch.prompts import read_texts

_FIRST = 16  # tokens of a continuation


@dataclass(frozen=True)
class Row:
    """A method at one length. ``kl`` and ``first_kl``: nats a token, in all of a continuation and in its first tokens.
    ``worst``: the largest mean of a window."""

    name: str
    context_tokens: int
    bits_per_value: Estimate
    kl: Estimate
    first_kl: Estimate
    worst: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("benchmarks.codec.lengths", __doc__)
    parser.add_argument("--model", required=True, metavar="PATH", help="a model for transformers, run in float32")
    parser.add_argument("--text", required=True, type=Path, metavar="FILE", help="plain text, or JSONL with 'prompt'")
    parser.add_argument("--part", default="0:0.5", metavar="FROM:TO", help="the part of the text to use")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="the model's, by kvfetch calibrate; klt needs it")
    parser.add_argument("--methods", default="klt/zstd", metavar="LIST", help="names or patterns")
    parser.add_argument("--windows", type=whole_number, default=6, metavar="N", help="how many")
    parser.add_argument("--lengths", type=whole_numbers, default="1024,2048,4096", help="tokens of context")
    parser.add_argument("--continuation", type=whole_number, default=256, metavar="TOKENS", help="after each context")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="where to write the figures")
    args = parser.parse_args(argv)
    if any(length % PAGE_TOKENS for length in args.lengths):
        parser.error(f"--lengths: expected multiples of {PAGE_TOKENS}, the page size")
    with no_traceback():
        profile = load_profile(args.profile) if args.profile else None
        methods = select(all_methods(profile), args.methods.split(","))
        model = KVModel(args.model)
        most = max(args.lengths)
        windows = windows_of(model, read_texts(args.text), args.part, args.windows, most + args.continuation)
        rows = measure_lengths(model, windows, most, args.lengths, methods)
    Console(soft_wrap=True, highlight=False).print(_table(rows))
    if args.json:
        write_json(args.json, {"config": settings(args), "rows": [asdict(row) for row in rows]})
    return 0


@torch.no_grad()
def measure_lengths(
    model: KVModel, windows: Sequence[torch.Tensor], most: int, lengths: Sequence[int], methods: Sequence[Method]
) -> list[Row]:
    """Measure methods on contexts that end at token ``most`` of each window, whose other tokens follow."""
    rows = []
    for length in tqdm(lengths, unit="length", disable=not sys.stderr.isatty()):
        bits: dict[str, list[float]] = {method.name: [] for method in methods}
        kls: dict[str, list[torch.Tensor]] = {method.name: [] for method in methods}
        for window in windows:
            context = torch.cat((model.start, window[most - length + len(model.start) : most]))
            k, v = (x.to(KV_DTYPE).cpu() for x in model.kv(context))
            exact = model.log_probabilities(k, v, window[most:])
            for method in methods:
                coded = method.code(k, v)
                restored = model.log_probabilities(coded.k, coded.v, window[most:])
                bits[method.name].append(coded.num_bytes * 8 / KVShape.of(k, v).num_values)
                kls[method.name].append((exact.exp() * (exact - restored)).sum(-1))
        rows += [_row(name, length, bits[name], kls[name]) for name in bits]
    return rows


def _row(name: str, length: int, bits: Sequence[float], kls: Sequence[torch.Tensor]) -> Row:
    means = [float(kl.mean()) for kl in kls]
    first = [float(kl[:_FIRST].mean()) for kl in kls]
    return Row(name, length, estimate(bits), estimate(means), estimate(first), max(means))


def _table(rows: Sequence[Row]) -> object:
    columns = ("method", "context", "bits a value", "KL", f"KL of the first {_FIRST} tokens", "worst window")
    return make_table(
        "KL in nats a token, over the continuation",
        columns,
        [
            (
                row.name,
                f"{row.context_tokens:,}",
                f"{row.bits_per_value.mean:.2f}",
                f"{row.kl.mean:.2e}",
                f"{row.first_kl.mean:.2e}",
                f"{row.worst:.2e}",
            )
            for row in rows
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
