"""Makes the tables of the codec `ans`, which are part of the stored format.

    python -m benchmarks.codec.ans_tables --model MODEL --profile FILE --text FILE --out FILE.npz

The distributions are generalised Gaussians (shape 1.65) of 48 widths, in 1,024 slots each. To choose one for each
class of rows and level of energy, the script counts ``klt``'s coefficients in windows of a text, at five steps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.codec.kv_model import KVModel, add_window_arguments, windows_of
from benchmarks.codec.ours import in_range, quantised_cells
from benchmarks.report import make_parser, no_traceback, whole_number
from sgl_kvfetch.codec.bitstream.ans import ESCAPE, SLOTS
from sgl_kvfetch.codec.quant.base import CellValues
from sgl_kvfetch.codec.quant.klt import LARGEST, ZERO, KltQuantiser
from sgl_kvfetch.codec.quant.profile import load_profile
from sgl_kvfetch.prompts import read_texts

TABLES, CLASSES, LEVELS = 48, 64, 32
SHAPE = 1.65  # of the generalised Gaussian: 2 is Gauss', 1 Laplace's
NARROWEST, OCTAVES = 0.2, 9.2  # widths, in steps
UNIT = 1024  # the energy of a token that is like its row
TARGET_KLS = (1e-4, None, 3e-3, 1e-2, 3e-2)
_COARSE = 4  # magnitudes of a third of an integer that its digit's distribution depends on
_PRIOR = 200.0  # the weight, in integers, of the expected distribution, for classes and levels that are rare

Array = np.ndarray


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("benchmarks.codec.ans_tables", __doc__)
    add_window_arguments(parser, part="0.5:1")
    parser.add_argument("--windows", type=whole_number, default=6)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    with no_traceback():
        slots, gains = np.stack([slots_of(probabilities(w)) for w in widths()]), gains_of_classes()
        counts = np.zeros((CLASSES, LEVELS, ESCAPE))
        for integers in tqdm(cells(args), disable=not sys.stderr.isatty()):
            count(integers, gains, counts)
        digits = np.stack([digits_of(probabilities(w)) for w in widths()])
        np.savez_compressed(args.out, slots=slots, choice=choose(counts, slots), gains=gains, digits=digits)
    print(f"wrote {args.out}")
    return 0


def cells(args: argparse.Namespace) -> Iterator[Array]:
    """Yield the coefficients of cells, int64 ``(rows, tokens)``, of each window at each target."""
    model, profile = KVModel(args.model), load_profile(args.profile)
    quantisers = [KltQuantiser(profile, kl) for kl in in_range(profile, TARGET_KLS)]
    for ids in windows_of(model, read_texts(args.text), args.part, args.windows, args.context):
        k, v = (x.bfloat16() for x in model.kv(ids))
        for quantiser in quantisers:
            for _, _, (*_, integers) in quantised_cells(CellValues(k, v), quantiser):
                yield integers.numpy().astype(np.int64) - ZERO


def widths() -> Array:
    return NARROWEST * 2.0 ** (np.arange(TABLES) * OCTAVES / (TABLES - 1))


def probabilities(width: float) -> Array:
    """Return the probabilities of -127 to 127 for a generalised Gaussian, ``exp(-|x / width| ** SHAPE)``."""
    edges = torch.arange(LARGEST + 1, dtype=torch.float64) + 0.5
    below = torch.special.gammainc(torch.full_like(edges, 1 / SHAPE), (edges / width) ** SHAPE).numpy()
    sizes = np.maximum(np.diff(below, prepend=0), 1e-9)
    sides = sizes[1:] / 2
    p: Array = np.concatenate((sides[::-1], sizes[:1], sides))
    p /= p.sum()
    return p


def slots_of(p: Array) -> Array:
    """Return the slots of all 256 integers and of the escape, uint16 ``(257,)``, in proportion to the probabilities
    ``p``. Integers in the middle, up to the last that would have three quarters of a slot, get at least one. The others
    are escaped."""
    most = max(n for n in range(LARGEST + 1) if p[LARGEST + n] * SLOTS >= 0.75 or n == 0)
    middle = slice(LARGEST - most, LARGEST + most + 1)
    found = np.zeros(ESCAPE + 1, np.uint16)
    found[ESCAPE] = max(1, round((1 - p[middle].sum()) * SLOTS))
    room = SLOTS - int(found[ESCAPE])
    wanted = p[middle] / p[middle].sum() * room
    slots = np.maximum(wanted.astype(int), 1)
    while slots.sum() != room:  # give a slot where it saves most bits, or take one where it costs least
        if slots.sum() < room:
            slots[np.argmax(wanted * np.log2((slots + 1) / slots))] += 1
        else:
            costs = wanted * np.log2(slots / np.maximum(slots - 1, 1))
            slots[np.argmin(np.where(slots > 1, costs, np.inf))] -= 1
    found[ZERO - most : ZERO + most + 1] = slots
    return found


def digits_of(p: Array) -> Array:
    """Return the slots of digits, uint16 ``(4, 3)``, for integers with these probabilities. Rows: the magnitude of a
    third of the integer, rounded, which is 0, 1, 2 or more. Columns: the digit towards zero, 0, and away from zero."""
    sides = np.append(p[LARGEST:], 0)  # those of 0 to 128
    thirds = np.stack([sides[[abs(3 * n - 1), 3 * n, 3 * n + 1]] for n in range(LARGEST // 3)])
    slots = np.empty((_COARSE, 3), np.uint16)
    for size, share in enumerate((*thirds[: _COARSE - 1], thirds[_COARSE - 1 :].sum(0))):
        each = np.maximum(np.round(share / share.sum() * SLOTS), 1)
        each[each.argmax()] += SLOTS - each.sum()
        slots[size] = each
    return slots


def row_class(mean_size: float) -> int:
    """Return the class of a row by the mean magnitude of its integers, as writers choose it: four to an octave."""
    return int(np.clip(np.round(4 * np.log2(mean_size + 1 / 64)) + 24, 0, CLASSES - 1))


def level_of(energies: Array) -> Array:
    """Return the levels of energies: four to an octave, by float32's exponent and two bits of its mantissa."""
    levels: Array = (energies.astype(np.float32).view(np.int32) >> 21) - (133 << 2)
    return levels.clip(0, LEVELS - 1)


def mean_of_class(row_class: Array) -> Any:
    """Return the mean magnitude of the integers in rows of these classes."""
    means: Array = np.exp2((row_class.astype(float) - 24) / 4)
    return means - 1 / 64


def gains_of_classes() -> Array:
    """Return what an integer of magnitude 1 adds to a token's energy, by the row's class, uint16 ``(64,)``."""
    means = np.maximum(mean_of_class(np.arange(CLASSES)), 1 / 16)
    return np.asarray(np.minimum(np.round(UNIT / means), 16 * UNIT), np.uint16)


def count(integers: Array, gains: Array, counts: Array) -> None:
    """Add how often each integer occurs, by class of row and level of energy, to ``counts``, ``(64, 32, 256)``."""
    energies = np.full(integers.shape[1], UNIT)
    for row in integers:
        which, sizes = row_class(np.abs(row).mean()), np.abs(row)
        np.add.at(counts[which], (level_of(energies), row + ZERO), 1)
        energies += (np.minimum(sizes * int(gains[which]), 16 * UNIT) >> 5) - (energies >> 5)


def choose(counts: Array, slots: Array) -> Array:
    """Return the distribution for each class and level, uint8 ``(64, 32)``: the one that codes what was counted, and
    ``_PRIOR`` integers as expected, in the fewest bits."""
    p = slots.astype(float) / SLOTS
    bits = np.where(p[:, :ESCAPE] > 0, -np.log2(np.maximum(p[:, :ESCAPE], 1e-9)), 8 - np.log2(p[:, ESCAPE:]))
    sizes = p[:, :ESCAPE] @ np.abs(np.arange(ESCAPE) - ZERO)
    energies = 2.0 ** ((np.arange(LEVELS) + 0.5) / 4 + 6) / UNIT
    expected = np.maximum(mean_of_class(np.arange(CLASSES)), 1e-3)[:, None] * energies**0.75
    nearest = np.abs(np.log(expected)[..., None] - np.log(sizes)).argmin(-1)
    return np.asarray(((counts + _PRIOR * p[nearest, :ESCAPE]) @ bits.T).argmin(-1), np.uint8)


if __name__ == "__main__":
    sys.exit(main())
