"""Code coefficients in levels, the coarsest first, each a bitstream of its own.

Level 0 has the coefficients at a step 3, 9 or 27 times as large, coded by `ans`. Each further level divides the step
by three: it has a digit, -1, 0 or 1, for each coefficient n, which becomes ``3 n + digit``. The last level restores the
integers bit for bit. Without the last levels, a reader gets the coefficients rounded to a larger step.

A digit's distribution follows from n, and from the distribution that `ans` would code the coefficient with. So all
levels together take about as many bits as the same coefficients in `ans`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import torch

from sgl_kvfetch.codec.bitstream import _ans
from sgl_kvfetch.codec.bitstream.ans import fill, static_tables
from sgl_kvfetch.codec.bitstream.base import MOST_LEVELS, PictureShape, Wide
from sgl_kvfetch.codec.layout.frames import PLANES
from sgl_kvfetch.errors import CorruptError

ZERO, LARGEST = 128, 127
_HEADER = struct.Struct("<BHH")  # levels, coefficients, and how many of them have two integers
_WIDE = np.dtype([("row", "<u2"), ("bits", "u1")])
_MOST_WIDE_BITS = 8


def encode_ladder(
    frames: torch.Tensor, wide: Sequence[Wide], num_integers: int, num_levels: int, *, is_portable: bool = False
) -> list[bytes]:
    """Return the bitstreams of all levels. ``frames``: uint8 ``(frames, 3, 1, tokens)``, whose first ``num_integers``
    rows are integers. ``wide``: the coefficients that have two integers, by row."""
    assert 2 <= num_levels <= MOST_LEVELS
    tokens = frames.shape[-1]
    integers = frames.reshape(-1, tokens)[:num_integers].numpy()
    wide_rows = np.array(list(wide), _WIDE)
    values = _joined(integers, wide_rows)
    tables = static_tables(is_portable)
    digits = []
    for _ in range(num_levels - 1):
        digits.append(_ans.encode_digits(tables, values.data, *values.shape))
        values = (values + np.int16(1)) // np.int16(3)
    header = _HEADER.pack(num_levels, len(values), len(wide)) + wide_rows.tobytes()
    far = _far_rows(wide_rows, num_levels)
    carried = (values[far] + np.int16(ZERO)) >> 8
    values[far] -= carried << 8
    coarse = (np.concatenate((values, carried)) + np.int16(ZERO)).astype(np.uint8)
    return [header + _ans.encode(tables, coarse.data, *coarse.shape), *reversed(digits)]


def decode_ladder(
    bitstreams: Sequence[bytes | memoryview], num_levels: int, shape: PictureShape, *, is_portable: bool = False
) -> torch.Tensor:
    """Return the frames of ``shape`` that ``bitstreams``, the first of ``num_levels`` levels, decode to.

    Raises CorruptError, also if they were encoded in another number of levels: their step would be taken for a smaller
    or larger one.
    """
    num_frames, height, tokens = shape
    assert height == 1
    assert 1 <= len(bitstreams) <= num_levels
    found, kept, wide, coded = _read_header(bitstreams[0], num_frames * PLANES)
    if found != num_levels:
        raise CorruptError(f"ladder has {found} levels, expected the manifest's {num_levels}")
    far, tables = _far_rows(wide, num_levels), static_tables(is_portable)
    coarse = torch.empty((kept + len(far), tokens), dtype=torch.uint8)
    fill(tables, coded, kept + len(far), tokens, coarse)
    values = coarse.numpy().astype(np.int16)
    values -= ZERO
    values[far] += values[kept:] << 8
    values = values[:kept]
    for bitstream in bitstreams[1:]:
        if (fault := _ans.refine(tables, bitstream, kept, tokens, values.data)) is not None:
            raise CorruptError(f"digits {fault}")
    values *= 3 ** (num_levels - len(bitstreams))
    frames = torch.full((num_frames, PLANES, 1, tokens), ZERO, dtype=torch.uint8)
    _split(values, wide, frames.view(-1, tokens).numpy())
    return frames


def _read_header(bitstream: bytes | memoryview, num_rows: int) -> tuple[int, int, np.ndarray, memoryview]:
    """Return the number of levels, the number of coefficients, the wide ones (``_WIDE``), and the bytes behind the
    header. Raises CorruptError."""
    view = memoryview(bitstream)
    if len(view) < _HEADER.size:
        raise CorruptError("ladder is shorter than its header")
    num_levels, kept, num_wide = _HEADER.unpack_from(view)
    end = _HEADER.size + num_wide * _WIDE.itemsize
    if not 2 <= num_levels <= MOST_LEVELS or not 1 <= kept <= num_rows - num_wide or end > len(view):
        raise CorruptError(
            f"ladder has {num_levels} levels of {kept} coefficients and {num_wide} second integers, expected 2 to "
            f"{MOST_LEVELS} levels, and 1 to {num_rows} integers in all"
        )
    wide = np.frombuffer(view[_HEADER.size : end], _WIDE)
    rows = wide["row"].astype(int)
    if (np.diff(rows, prepend=-1, append=kept) < 1).any() or ((wide["bits"] - 1) > _MOST_WIDE_BITS - 1).any():
        raise CorruptError("ladder has wide coefficients out of order, or of too many bits")
    return num_levels, kept, wide, view[end:]


def _far_rows(wide: np.ndarray, num_levels: int) -> np.ndarray:
    """Return the coefficients that a byte may not hold at the first level's step."""
    rows: np.ndarray = wide["row"][(1 << wide["bits"].astype(int)) > 3 ** (num_levels - 1)]
    return rows


def _joined(integers: np.ndarray, wide: np.ndarray) -> np.ndarray:
    """Join integers into coefficients, int16 ``(kept, tokens)``."""
    kept = len(integers) - len(wide)
    values = integers[:kept].astype(np.int16)
    values -= ZERO
    values[wide["row"]] += (integers[kept:].astype(np.int16) - ZERO) << wide["bits"][:, None]
    return values


def _split(values: np.ndarray, wide: np.ndarray, rows: np.ndarray) -> None:
    """Write coefficients into ``rows`` as integers. A value that no integers can represent becomes the nearest that
    they can."""
    kept, bits = len(values), wide["bits"][:, None].astype(np.int32)
    whole, half = values[wide["row"]].astype(np.int32), 1 << (bits - 1)
    high = ((whole + half) >> bits).clip(-LARGEST, LARGEST)
    rows[:kept] = values.clip(-ZERO, LARGEST) + np.int16(ZERO)
    rows[wide["row"]] = (whole - (high << bits)).clip(-half, half - 1) + ZERO
    rows[kept : kept + len(wide)] = high + ZERO
