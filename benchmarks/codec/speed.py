"""Measures what coding klt's coefficients costs one thread of a CPU, by codec, in one run.

    python -m benchmarks.codec.speed --model MODEL --profile FILE --text FILE

All speeds are in MB/s of raw bfloat16 KV: coding alone, and with quantising before or restoring after. They are
measured in CPU time, so that other work on the machine matters little.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.codec.kv_model import KVModel, windows_of
from benchmarks.codec.methods import in_range
from benchmarks.report import make_parser, make_table, no_traceback, settings, whole_number, write_json
from sgl_kvfetch.codec.bitstream.ans import AnsCodec
from sgl_kvfetch.codec.bitstream.base import Codec
from sgl_kvfetch.codec.bitstream.registry import get_codec, resolution_for
from sgl_kvfetch.codec.layout.frames import region_layout
from sgl_kvfetch.codec.quant.base import CellPlace, CellValues, Quantised
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.profile import load_profile
from sgl_kvfetch.plane.store import RESOLUTION
from sgl_kvfetch.prompts import read_texts

TARGET_KLS = (None, 3e-3, 1e-2, 3e-2)
CODECS = {"ans": get_codec("ans"), "ans, portable": AnsCodec(is_portable=True)} | {
    name: get_codec(name) for name in ("zstd", "hevc")
}


@dataclass(frozen=True)
class Row:
    """Bits a value of the coefficients alone, and MB/s of raw KV."""

    target_kl: float | None
    codec: str
    bits: float
    decode_mb_s: float
    encode_mb_s: float
    restore_mb_s: float  # of decoding and dequantising
    quantise_mb_s: float  # of quantising and encoding


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("benchmarks.codec.speed", __doc__)
    parser.add_argument("--model", required=True, help="any transformers path")
    parser.add_argument("--profile", type=Path, required=True, help="the model's, by kvfetch calibrate")
    parser.add_argument("--text", type=Path, required=True, help="plain text, or JSONL with `prompt`")
    parser.add_argument("--context", type=whole_number, default=1024, help="tokens, from the text's first half")
    parser.add_argument("--rounds", type=whole_number, default=3, help="the fastest of these counts, for each cell")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args(argv)
    with no_traceback():
        rows = list(measure(args))
    columns = ("target KL", "codec", "bits per value", "decode", "encode", "decode and restore", "quantise and encode")
    Console().print(make_table("MB/s of raw KV, one thread", columns, map(_cells, rows)))
    if args.json:
        report = {"benchmark": "codec.speed", "config": settings(args), "rows": [asdict(row) for row in rows]}
        write_json(args.json, report)
    return 0


def measure(args: argparse.Namespace) -> Iterator[Row]:
    model, profile = KVModel(args.model), load_profile(args.profile)
    (ids,) = windows_of(model, read_texts(args.text), "0:0.5", 1, args.context)
    values = CellValues(*(x.bfloat16() for x in model.kv(ids)))
    torch.set_num_threads(1)
    for target_kl in in_range(profile, TARGET_KLS):
        quantiser = KltQuantiser(profile, target_kl)
        grid, cells = profile.grid, []
        for group, block in grid.cells():
            place = CellPlace(grid.layers(group), grid.heads(block), range(len(values.k)))
            cell = CellValues(*(x.contiguous() for x in values.cell(place.layers, place.heads)))
            cells.append((place, cell, quantiser.quantise(cell, place)))
        for name, codec in CODECS.items():
            yield _row(target_kl, name, codec, quantiser, cells, args.rounds)


def _row(
    target_kl: float | None,
    name: str,
    codec: Codec,
    quantiser: KltQuantiser,
    cells: Sequence[tuple[CellPlace, CellValues, Quantised]],
    rounds: int,
) -> Row:
    raw_bytes = coded_bytes = 0
    decode_s = encode_s = restore_s = quantise_s = 0.0
    for place, values, parts in cells:
        exponents, exact, integers = parts
        count, num_tokens = integers.shape
        layout = region_layout(count, num_tokens, resolution_for(codec.name, RESOLUTION))
        frames = layout.to_frames(integers)
        shape = len(frames), *frames.shape[2:]
        bitstream = codec.encode(frames)
        assert torch.equal(codec.decode(bitstream, shape), frames)
        decoding = _fastest(lambda: codec.decode(bitstream, shape), rounds)  # noqa: B023, called at once
        decode_s += decoding
        encode_s += _fastest(lambda: codec.encode(layout.to_frames(integers)), rounds)  # noqa: B023
        restore_s += decoding + _fastest(
            lambda: quantiser.dequantise(
                (exponents, exact, layout.from_frames(frames, tuple(integers.shape))),  # noqa: B023
                torch.bfloat16,
                place,  # noqa: B023
            ),
            rounds,
        )
        quantise_s += _fastest(lambda: quantiser.quantise(values, place), rounds)  # noqa: B023
        raw_bytes += sum(x.nbytes for x in values)
        coded_bytes += len(bitstream)
    speeds = (raw_bytes / s / 1e6 for s in (decode_s, encode_s, restore_s, quantise_s + encode_s))
    return Row(target_kl, name, coded_bytes * 16 / raw_bytes, *speeds)


def _fastest(work: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def _cells(row: Row) -> list[str]:
    speeds = (row.decode_mb_s, row.encode_mb_s, row.restore_mb_s, row.quantise_mb_s)
    target = "default" if row.target_kl is None else f"{row.target_kl:g}"
    return [target, row.codec, f"{row.bits:.3f}", *(f"{speed:,.0f}" for speed in speeds)]


if __name__ == "__main__":
    sys.exit(main())
