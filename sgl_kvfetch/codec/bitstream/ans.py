"""`ans`: interleaved rANS for transform coefficients, on CPUs a hundred times as fast as HEVC, and a tenth smaller.

Each row (a coefficient) has a class, which says how large its integers are, and each token of a row an energy: how
large its integers were in the rows before, beside their rows' classes. Both together choose one of 48 distributions,
which are part of the format and the same for every model (docs/format.md, `benchmarks.codec.ans_tables`). Tokens lie
in lanes, so that vectors, or a warp's threads, decode one bitstream together.

rANS: Duda, "Asymmetric numeral systems" (arXiv 1311.2540); lanes: Giesen, "Interleaved entropy coders" (arXiv
1402.3392). The coder itself is ``ans.cpp``.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import NamedTuple

import numpy as np
import torch

from sgl_kvfetch.codec.bitstream import _ans
from sgl_kvfetch.codec.bitstream.base import Codec, PictureShape
from sgl_kvfetch.codec.layout.frames import PLANES
from sgl_kvfetch.errors import CorruptError

ESCAPE = 256  # the symbol of integers without one
SLOTS = 1024  # of a distribution; a symbol has as many as its probability
_CLASS_TABLE = 17  # codes the classes of rows
_NATIVE_ESCAPE = 1 << 28  # in an entry of the native coder's tables


class Tables(NamedTuple):
    """``slots``: uint16 ``(48, 257)``, of each symbol in each distribution. ``choice``: uint8 ``(64, 32)``, the
    distribution for a row's class and a token's level of energy. ``gains``: uint16 ``(64,)``, what an integer of
    magnitude 1 in a row of this class adds to a token's energy."""

    slots: np.ndarray
    choice: np.ndarray
    gains: np.ndarray


@cache
def tables() -> Tables:
    with files(__package__).joinpath("ans_tables.npz").open("rb") as file, np.load(file) as found:
        return Tables(found["slots"], found["choice"], found["gains"])


@cache
def native_tables(is_portable: bool = False) -> tuple[object, ...]:
    """Return the tables as the native coder takes them. ``is_portable``: without the CPU's widest vectors."""
    t = tables()
    starts = np.cumsum(t.slots, axis=1, dtype=np.uint32) - t.slots
    symbol = np.stack([np.repeat(np.arange(ESCAPE + 1, dtype=np.uint32), slots) for slots in t.slots])
    offset = np.arange(SLOTS, dtype=np.uint32) - np.take_along_axis(starts, symbol, 1)
    slots = np.take_along_axis(t.slots.astype(np.uint32), symbol, 1)
    decode = (symbol & 255) | slots << 8 | offset << 18 | (symbol == ESCAPE).astype(np.uint32) * _NATIVE_ESCAPE
    coded = np.where(t.slots[:, :ESCAPE] > 0, np.arange(ESCAPE), ESCAPE)
    encode = np.take_along_axis(starts, coded, 1) | np.take_along_axis(t.slots.astype(np.uint32), coded, 1) << 10
    encode |= (coded == ESCAPE).astype(np.uint32) * _NATIVE_ESCAPE
    as_bytes = (x.tobytes() for x in (decode, encode, t.choice, t.gains))
    return (*as_bytes, _CLASS_TABLE, is_portable)


class AnsCodec(Codec):
    """Codes flat frames: each plane of each frame is a row, each of its values a token."""

    name = "ans"
    is_flat = True

    def __init__(self, *, is_portable: bool = False) -> None:
        self._is_portable = is_portable

    def encode(self, frames: torch.Tensor) -> bytes:
        rows, tokens = frames.shape[0] * PLANES, frames.shape[2] * frames.shape[3]
        return _ans.encode(native_tables(self._is_portable), frames.contiguous().cpu().numpy().data, rows, tokens)

    def decode(self, bitstream: bytes | memoryview, shape: PictureShape) -> torch.Tensor:
        num_frames, height, width = shape
        frames = torch.empty((num_frames, PLANES, height, width), dtype=torch.uint8)
        fault = _ans.decode(
            native_tables(self._is_portable), bitstream, num_frames * PLANES, height * width, frames.numpy().data
        )
        if fault is not None:
            raise CorruptError(f"ans bitstream {fault}")
        return frames
