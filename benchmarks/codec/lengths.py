"""Measures a method's divergence by the length of the context. The continuations are the same at every length.

Contexts are computed as servers do, in bfloat16 if the machine is fast at it; their continuations in float32.

python -m benchmarks.codec.lengths --model PATH --text FILE --profile FILE
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.codec.kv_model import KVModel
from benchmarks.codec.method import KV_DTYPE, Method
from benchmarks.codec.methods import all_methods, select
from benchmarks.codec.segments import PAGE_TOKENS
from benchmarks.machine import fast_dtype
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
from sgl_kvfetch.codec.calibrate.text import part_of
from sgl_kvfetch.codec.quant.profile import load_profile
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.prompts import read_texts

_FIRST = 16  # tokens of a continuation


@dataclass(frozen=True)
class Row:
    """A method at one length. ``kl`` and ``first_kl``: nats a token, over a whole continuation and over its first
    tokens. ``worst``: the largest mean KL of one window."""

    name: str
    context_tokens: int
    bits_per_value: Estimate
    kl: Estimate
    first_kl: Estimate
    worst: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("benchmarks.codec.lengths", __doc__)
    parser.add_argument("--model", required=True, metavar="PATH", help="a model for transformers")
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
        models = KVModel(args.model, dtype=getattr(torch, fast_dtype())), KVModel(args.model)
        most = max(args.lengths)
        texts = [part_of(models[0].tokenise(text), args.part) for text in read_texts(args.text)]
        windows = spread_windows(torch.cat(texts), args.windows, most, args.continuation)
        rows = measure_lengths(*models, windows, most, args.lengths, methods)
    Console(soft_wrap=True, highlight=False).print(_table(rows))
    if args.json:
        write_json(args.json, {"config": settings(args), "rows": [asdict(row) for row in rows]})
    return 0


def spread_windows(text: torch.Tensor, count: int, most: int, continuation: int) -> list[torch.Tensor]:
    """Cut ``count`` windows of ``most + continuation`` tokens, spread evenly. Only their contexts may overlap.

    Raises ConfigError if the text is too short.
    """
    room = len(text) - most - continuation
    if room < (count - 1) * continuation:
        raise ConfigError(f"the text has {len(text)} tokens, too few for {count} windows of {most} + {continuation}")
    firsts = [i * room // max(1, count - 1) for i in range(count)]
    return [text[first : first + most + continuation] for first in firsts]


@torch.no_grad()
def measure_lengths(
    server: KVModel,
    model: KVModel,
    windows: Sequence[torch.Tensor],
    most: int,
    lengths: Sequence[int],
    methods: Sequence[Method],
) -> list[Row]:
    """Measure methods on contexts that end at token ``most`` of each window, whose other tokens follow.

    ``server`` computes the contexts, and ``model`` their continuations.
    """
    bits: dict[tuple[int, str], list[float]] = defaultdict(list)
    kls: dict[tuple[int, str], list[torch.Tensor]] = defaultdict(list)
    for number, window in enumerate(windows, 1):
        for length in lengths:
            context = torch.cat((model.start, window[most - length + len(model.start) : most]))
            k, v = (x.to(KV_DTYPE).cpu() for x in server.kv(context))
            exact = model.log_probabilities(k, v, window[most:])
            for method in methods:
                coded = method.code(k, v)
                restored = model.log_probabilities(coded.k, coded.v, window[most:])
                kl = (exact.exp() * (exact - restored)).sum(-1)
                bits[length, method.name].append(coded.bits_per_value)
                kls[length, method.name].append(kl)
                print(
                    f"window {number}, {length} tokens, {method.name}: KL {kl.mean():.2e}", file=sys.stderr, flush=True
                )
    return [_row(name, length, bits[length, name], kls[length, name]) for length, name in bits]


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
                row.kl.show(".2e", ".0e"),
                f"{row.first_kl.mean:.2e}",
                f"{row.worst:.2e}",
            )
            for row in rows
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
