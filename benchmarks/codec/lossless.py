"""Prints ideal lengths of lossless codes of a KV cache: what SplitZip, FlexKV and `exact` reach, and what contexts add.

    python -m benchmarks.codec.lossless --model MODEL --text FILE [--windows N] [--json OUT]

A bfloat16 has a sign, 8 bits of exponent and 7 of mantissa. An adaptive code learns the distribution of each context
from the symbols before, and begins with the layer's distribution. So each figure includes the cost of learning. It also
includes 16 bits for each exponent that a layer has, and 8 or 11 bits for each channel's median and class. It does not
include an entropy coder's own loss, or headers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.codec.kv_model import KVModel
from benchmarks.codec.method import KV_DTYPE
from benchmarks.codec.windows import windows_of
from benchmarks.report import make_parser, make_table, output_file, run_and_report, settings, whole_number
from benchmarks.stats import Estimate, estimate
from sgl_kvfetch.prompts import read_texts

Array = np.ndarray
_MANTISSA_BITS = 7
_SPLITZIP_CODES = 16
_SPLITZIP_ESCAPE_BITS = 16 + 8  # the position in a chunk, and the exponent
_PRIOR = 8.0  # the weight, in symbols, of the layer's distribution in a context's
_TABLE_BITS = 16  # for each symbol that a layer has
_CHANNEL_BITS = 8 + 3  # for its median and its class
_WIDTH = 130


@dataclass(frozen=True)
class Row:
    """A code's bits a value: of both tensors, of K and of V. Raw ones take 16."""

    name: str
    bits: Estimate
    k_bits: Estimate
    v_bits: Estimate


@dataclass(frozen=True)
class Fields:
    """The parts of one tensor's values, int64 ``(tokens, layers, channels)``."""

    sign: Array
    exponent: Array
    mantissa: Array

    @classmethod
    def of(cls, values: torch.Tensor) -> Fields:
        """``values``: bfloat16 ``(tokens, layers, heads, dim)``."""
        bits = values.flatten(2).contiguous().view(torch.int16).numpy().astype(np.int64) & 0xFFFF
        return cls(bits >> 15, bits >> _MANTISSA_BITS & 0xFF, bits & (1 << _MANTISSA_BITS) - 1)


def adaptive_bits(symbols: Array, contexts: Array) -> float:
    """Return the length of an adaptive code of ``symbols``, ``(tokens, layers, channels)`` below 256, in all contexts
    together, and of the table of each layer.

    A context's n symbols with the counts c_s take ``-log2`` of the Dirichlet-multinomial probability with the prior
    counts ``_PRIOR * p_s``, where p is the distribution of the layer: any order of them costs the same.
    """
    layers = np.broadcast_to(np.arange(symbols.shape[1])[:, None], symbols.shape)
    flat = layers * 256 + symbols
    frequencies = np.bincount(flat.ravel(), minlength=symbols.shape[1] * 256).astype(float)
    prior = _PRIOR * frequencies / (symbols.size / symbols.shape[1])
    width = int(contexts.max()) + 1
    (_, totals) = np.unique(layers * width + contexts, return_counts=True)
    keys, counts = np.unique((layers * width + contexts) * 256 + symbols, return_counts=True)
    of_key = prior[keys // 256 // width * 256 + keys % 256]
    nats = (_log_gamma(totals + _PRIOR) - _log_gamma(_PRIOR)).sum() - (
        _log_gamma(counts + of_key) - _log_gamma(of_key)
    ).sum()
    return float(nats / np.log(2)) + _TABLE_BITS * int((frequencies > 0).sum())


def channels(x: Array) -> Array:
    """Return the number of each value's channel in its layer."""
    return np.broadcast_to(np.arange(x.shape[2]), x.shape)


def before(x: Array, axis: int) -> Array:
    """Return for each value the one before it along an axis; 0 for the first."""
    moved = np.zeros_like(x)
    np.copyto(np.moveaxis(moved, axis, 0)[1:], np.moveaxis(x, axis, 0)[:-1])
    return moved


def differences(exponent: Array) -> Array:
    """Return how far exponents are from their channel's median."""
    found: Array = exponent - np.median(exponent, axis=0).astype(np.int64)
    return found


def codes() -> dict[str, Callable[[Fields], float]]:
    """Return codes by name: each gives a tensor's length in bits."""
    return {
        "FlexKV: bytes, a distribution of the high ones and one of the low ones": _bytes,
        "SplitZip: 4 bits for the 16 most frequent exponents": _splitzip(by_layer=False),
        "the same, a codebook for each layer": _splitzip(by_layer=True),
        "3 bits for 8 exponents, a codebook for each layer": _splitzip(by_layer=True, codes=8),
        "3 bits for 8 exponents in a row, from each channel's own first one": _windowed(3),
        "2 bits for 4 exponents in a row, from each channel's own first one": _windowed(2),
        "exponents, a distribution for each layer": _exponents(lambda d: np.zeros_like(d)),
        "exponents beside the channel's median": _exponents(np.zeros_like, beside_median=True),
        "exponents, a distribution for each channel": _exponents(channels, beside_median=True),
        "beside the median, by the channel's spread": _exponents(_spread, beside_median=True),
        "by spread, and the same channel one layer before": _exponents(
            lambda d: _spread(d) * 7 + _limited(before(d, 1)), beside_median=True
        ),
        "by spread, and the same channel one token before": _exponents(
            lambda d: _spread(d) * 7 + _limited(before(d, 0)), beside_median=True
        ),
        "by spread, and the other channels of its token before it": _exponents(
            lambda d: _spread(d) * 7 + _token_size(d), beside_median=True
        ),
        "by spread, token and the layer before; signs and two bits of mantissa by channel": _all_fields,
    }


def _exponents(context: Callable[[Array], Array], *, beside_median: bool = False) -> Callable[[Fields], float]:
    """Code exponents by a context, which is computed from ``differences``; sign and mantissa as they are."""

    def length(f: Fields) -> float:
        found = differences(f.exponent)
        symbols = np.clip(found + 128, 0, 255) if beside_median else f.exponent
        sides = _CHANNEL_BITS * f.exponent[0].size if beside_median else 0
        return adaptive_bits(symbols, context(found)) + sides + (1 + _MANTISSA_BITS) * f.sign.size

    return length


def _log_gamma(x: Array | float) -> Array:
    found: Array = torch.lgamma(torch.as_tensor(x, dtype=torch.float64)).numpy()
    return found


def _bytes(f: Fields) -> float:
    """Code bytes as they lie in memory, where the exponent's last bit is in the low byte. nvCOMP's ANS codes low and
    high bytes in one stream, so it reaches less than this."""
    same = np.zeros_like(f.sign)
    high = f.sign << 7 | f.exponent >> 1
    low = (f.exponent & 1) << 7 | f.mantissa
    return adaptive_bits(high, same) + adaptive_bits(low, same)


def _splitzip(*, by_layer: bool, codes: int = _SPLITZIP_CODES) -> Callable[[Fields], float]:
    def length(f: Fields) -> float:
        layers = np.moveaxis(f.exponent, 1, 0) if by_layer else f.exponent[None]
        counts = [np.sort(np.bincount(layer.ravel(), minlength=256))[::-1] for layer in layers]
        escapes = sum(int(count[codes:].sum()) for count in counts)
        fixed = (1 + _MANTISSA_BITS + np.log2(codes)) * f.sign.size
        return float(fixed + escapes * _SPLITZIP_ESCAPE_BITS + len(counts) * codes * 8)

    return length


def _windowed(bits: int) -> Callable[[Fields], float]:
    """Code exponents by a range of ``2^bits`` exponents in a row: each channel's fullest one. Others are escapes."""

    def length(f: Fields) -> float:
        channels = f.exponent.reshape(len(f.exponent), -1)
        counts = np.stack([np.bincount(channel, minlength=256) for channel in channels.T])
        sums = np.cumsum(np.pad(counts, ((0, 0), (1, 0))), 1)
        held = (sums[:, 1 << bits :] - sums[:, : -(1 << bits)]).max(1)
        escapes = channels.size - int(held.sum())
        return float(
            (1 + _MANTISSA_BITS + bits) * f.sign.size + escapes * _SPLITZIP_ESCAPE_BITS + 8 * channels.shape[1]
        )

    return length


def _limited(difference: Array) -> Array:
    limited: Array = np.clip(difference, -3, 3) + 3
    return limited


def _spread(difference: Array) -> Array:
    """Return each channel's class, 0 to 7: four times the mean magnitude of its differences, cut to a whole number."""
    classes = np.minimum(7, np.abs(difference).mean(0) * 4).astype(np.int64)
    return np.broadcast_to(classes, difference.shape)


def _token_size(difference: Array) -> Array:
    """Return how large a token's values are in the channels before a value's, relative to these channels' medians: the
    mean of their differences in steps of a half, limited to -3 to 3 steps, as 0 to 6."""
    limited = np.clip(difference, -4, 4)
    sums = np.cumsum(limited, axis=2) - limited
    means = sums / np.maximum(1, np.arange(difference.shape[2]))
    return _limited(np.rint(2 * means).astype(np.int64))


def _all_fields(f: Fields) -> float:
    difference = differences(f.exponent)
    context = (_spread(difference) * 7 + _token_size(difference)) * 7 + _limited(before(difference, 1))
    channel = channels(f.exponent)
    top = f.mantissa >> 5
    return float(
        adaptive_bits(np.clip(difference + 128, 0, 255), context)
        + adaptive_bits(f.sign, channel * 2 + before(f.sign, 0))
        + adaptive_bits(top, (channel * 7 + _limited(difference)) * 2 + f.sign)
        + _CHANNEL_BITS * channel[0].size
        + 5 * f.sign.size
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("benchmarks.codec.lossless", __doc__)
    parser.add_argument("--model", required=True, help="any transformers path")
    parser.add_argument("--text", type=Path, required=True, help="plain text, or JSONL with `prompt`")
    parser.add_argument("--part", default="0:0.5", help="the part of it to code")
    parser.add_argument("--windows", type=whole_number, default=4, help="how many")
    parser.add_argument("--context", type=whole_number, default=1024, help="tokens of a window")
    parser.add_argument("--json", type=output_file, help="where to write the figures")
    return run_and_report(_run, parser.parse_args(argv), _WIDTH)


def _run(args: Any, console: Any) -> dict[str, Any]:
    model = KVModel(args.model)
    windows = windows_of(model, read_texts(args.text), args.part, args.windows, args.context)
    lengths: dict[str, list[tuple[float, float]]] = {name: [] for name in codes()}
    for k, v in _caches(model, windows):
        for name, code in codes().items():
            lengths[name].append((code(k) / k.sign.size, code(v) / v.sign.size))
    rows = []
    for name, found in lengths.items():
        both = [(k * model.k_head_dim + v * model.v_head_dim) / (model.k_head_dim + model.v_head_dim) for k, v in found]
        k_bits, v_bits = zip(*found, strict=True)
        rows.append(Row(name, estimate(both), estimate(k_bits), estimate(v_bits)))
    cells = [
        (r.name, r.bits.show(".2f"), f"{r.k_bits.mean:.2f}", f"{r.v_bits.mean:.2f}", f"{r.bits.mean / 16:.3f}")
        for r in rows
    ]
    columns = ("ideal code", "bits a value", "K", "V", "of raw")
    console.print(make_table("Lossless codes of bfloat16", columns, cells))
    return {"benchmark": "lossless", "config": settings(args), "rows": [asdict(row) for row in rows]}


def _caches(model: KVModel, windows: Sequence[torch.Tensor]) -> Iterator[tuple[Fields, Fields]]:
    for ids in windows:
        k, v = (x.to(KV_DTYPE).cpu() for x in model.kv(ids))
        yield Fields.of(k), Fields.of(v)


if __name__ == "__main__":
    sys.exit(main())
