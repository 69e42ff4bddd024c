"""`ans`: interleaved rANS for transform coefficients, on CPUs a hundred times as fast as HEVC, and a tenth smaller.

**rANS** keeps a number, the state. To encode a symbol that has f of 1,024 slots, the state is divided by f, and the
remainder says which of the symbol's slots becomes the lower ten bits of the new state. So the state grows by
log2(1024 / f) bits, which is the symbol's information. Before it would exceed 32 bits, its lower 16 go out as a word.
The decoder undoes this, last symbol first: the lower ten bits name the slot, and so the symbol. So encoding goes
backwards, and decoding forwards. At the end, the decoder's state must be the encoder's first one, 2^16. This is a free
check.

**Which distribution.** Coefficients are around 0, with spreads that differ by row (a coefficient) and by token. Each
row has a class, which says how large its integers are. It is coded. Each token has an energy: how large its integers
were in the rows before, relative to those rows' classes. It is not coded, because the decoder computes it from the same
rows. Class and energy together choose one of 48 distributions, which are part of the format and the same for every
model (docs/format.md). So a bitstream has no tables, and short ones are small, too.

**Lanes.** A state depends on the one before, so one state would use one unit of a CPU. Tokens take turns in 32 lanes,
each with a state of its own, and share the words: vectors, or a warp's threads, decode one bitstream together. In each
turn, the lanes that need a word take one in the order of their numbers.

**What must never happen.** Whatever the bytes are, the decoder must not read outside the bitstream, and must not write
outside the frames. Words are read from the front and escaped integers from the end. If the two do not meet, the
bitstream is refused. Two machines must not decode differently, so every decision depends on integers alone.

rANS: Duda, "Asymmetric numeral systems" (arXiv 1311.2540); lanes: Giesen, "Interleaved entropy coders" (arXiv
1402.3392). The coder itself is ``ans.cpp``; the kernel of the same decoder is `triton_kernels.ans`.
"""

from __future__ import annotations

import struct
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import numpy as np
import torch
import zstandard

from sgl_kvfetch.codec.bitstream import _ans
from sgl_kvfetch.codec.bitstream.base import Codec, PictureShape
from sgl_kvfetch.codec.bitstream.entropy import ZstdCodec
from sgl_kvfetch.codec.layout.frames import PLANES
from sgl_kvfetch.errors import CorruptError

ESCAPE = 256  # the symbol of all integers that have no slots in a distribution
SLOTS = 1024  # of a distribution; a symbol's share of them is its probability
LANES = 32  # states of a group of tokens
GROUP = 128  # tokens that have states, words and escaped integers of their own
CLASS_LANES = 8  # states that code the classes of rows
CLASS_TABLE = 17  # the distribution that codes the classes of rows
ZERO = 128  # the integer that stands for n = 0
_NATIVE_ESCAPE = 1 << 28  # marks an escape in an entry of the native coder's tables
_HEADER = struct.Struct("<BI")  # of `ans-tables`: the number of distributions, and their compressed size in bytes
MOST_TABLES = 16  # of an `ans-tables` bitstream
_MOST_TOKENS = 1 << 22  # as in ans.cpp
DISTRIBUTION_BYTES = (ESCAPE + 1) * 2


class Tables(NamedTuple):
    """The tables of the format.

    ``slots``: uint16 ``(48, 257)``, of each symbol in each distribution. ``choice``: uint8 ``(64, 32)``, the
    distribution for a row's class and a token's level of energy. ``gains``: uint16 ``(64,)``, what an integer of
    magnitude 1 in a row of this class adds to a token's energy. ``digits``: uint16 ``(48, 4, 3)``, by distribution and
    magnitude of the coarser integer: the slots of the digit towards zero, of the digit 0, and of the digit away from
    zero (`ladder`).
    """

    slots: np.ndarray
    choice: np.ndarray
    gains: np.ndarray
    digits: np.ndarray


@cache
def tables() -> Tables:
    """Return the tables that `ans` codes with."""
    with files(__package__).joinpath("ans_tables.npz").open("rb") as file, np.load(file) as found:
        return Tables(found["slots"], found["choice"], found["gains"], found["digits"])


@cache
def static_tables(is_portable: bool = False) -> tuple[object, ...]:
    """Return the format's tables as the native coder takes them. ``is_portable``: whether the coder must do without the
    CPU's widest vectors."""
    found = tables()
    slots = found.slots.astype(np.uint32)
    starts = np.cumsum(slots, axis=1, dtype=np.uint32) - slots
    symbol = np.stack([np.repeat(np.arange(ESCAPE + 1, dtype=np.uint32), row) for row in slots])
    offset = np.arange(SLOTS, dtype=np.uint32) - np.take_along_axis(starts, symbol, 1)
    decode = (symbol & 255) | np.take_along_axis(slots, symbol, 1) << 8 | offset << 18
    decode |= (symbol == ESCAPE).astype(np.uint32) * _NATIVE_ESCAPE
    coded = np.where(slots[:, :ESCAPE] > 0, np.arange(ESCAPE), ESCAPE)
    encode = np.take_along_axis(starts, coded, 1) | np.take_along_axis(slots, coded, 1) << 10
    encode |= (coded == ESCAPE).astype(np.uint32) * _NATIVE_ESCAPE
    ends = np.cumsum(found.digits, axis=2, dtype=np.uint32)
    digits = ends[:, :, 0] | ends[:, :, 1] << 10
    as_bytes = (x.tobytes() for x in (decode, encode, found.choice, found.gains, digits))
    return (*as_bytes, CLASS_TABLE, is_portable)


def decoding_tables() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what the kernel decodes with: the native coder's decoding table, int32 ``(48, SLOTS)``; the choice of a
    distribution, uint8 ``(64, 32)``; and the gains, int32 ``(64,)``."""
    decode, found = static_tables()[0], tables()
    assert isinstance(decode, bytes)
    entries = torch.frombuffer(bytearray(decode), dtype=torch.int32).view(-1, SLOTS)
    return entries, torch.from_numpy(found.choice), torch.from_numpy(found.gains.astype(np.int32))


class AnsCodec(Codec):
    """Codes flat frames: each plane of each frame is a row, each of its values a token."""

    name = "ans"
    decode_cost = 1
    is_flat = True

    def __init__(self, *, is_portable: bool = False) -> None:
        self._is_portable = is_portable

    def encode(self, frames: torch.Tensor) -> bytes:
        rows, tokens = frames.shape[0] * PLANES, frames.shape[2] * frames.shape[3]
        return _ans.encode(static_tables(self._is_portable), frames.contiguous().cpu().numpy().data, rows, tokens)

    def decode(self, bitstream: bytes | memoryview, shape: PictureShape) -> torch.Tensor:
        num_frames, height, width = shape
        frames = torch.empty((num_frames, PLANES, height, width), dtype=torch.uint8)
        fill(static_tables(self._is_portable), bitstream, num_frames * PLANES, height * width, frames)
        return frames


class AnsTablesCodec(Codec):
    """Codes flat frames whose rows differ in distribution, not only in scale: quantised values, and bytes of values.

    Each place of a frame, a channel, is a row, each frame a token. Rows of similar histograms share a distribution. The
    bitstream holds these distributions; only the rows' classes are coded with one of the format.
    """

    name = "ans-tables"
    decode_cost = 1
    is_flat = True

    def __init__(self, *, is_portable: bool = False) -> None:
        self._is_portable = is_portable

    def encode(self, frames: torch.Tensor) -> bytes:
        tokens = frames.cpu().flatten(1).contiguous()
        slots, coded = _ans.encode_fitted(static_tables(self._is_portable), tokens.numpy().data, *tokens.shape)
        header = zstandard.ZstdCompressor(3).compress(slots)
        return b"".join((_HEADER.pack(len(slots) // DISTRIBUTION_BYTES, len(header)), header, coded))

    def decode(self, bitstream: bytes | memoryview, shape: PictureShape) -> torch.Tensor:
        num_frames, height, width = shape
        if num_frames > _MOST_TOKENS:
            raise CorruptError(f"ans-tables bitstream is for {num_frames} tokens, expected at most {_MOST_TOKENS}")
        slots, coded = read_tables(bitstream)
        rows = PLANES * height * width
        tokens = decode_fitted(slots, coded, num_frames, rows, is_portable=self._is_portable)
        return tokens.view(num_frames, PLANES, height, width)


def decode_fitted(
    slots: np.ndarray, coded: bytes | memoryview, tokens: int, rows: int, *, is_portable: bool = False
) -> torch.Tensor:
    """Decode what follows the distributions of an `ans-tables` bitstream, as `read_tables` returns both: uint8
    ``(tokens, rows)``. Raises CorruptError."""
    out = torch.empty((tokens, rows), dtype=torch.uint8)
    fault = _ans.decode_fitted(static_tables(is_portable), slots.data, coded, tokens, rows, out.numpy().data)
    if fault is not None:
        raise CorruptError(f"ans bitstream {fault}")
    return out


def read_tables(bitstream: bytes | memoryview) -> tuple[np.ndarray, memoryview]:
    """Return the distributions of an `ans-tables` bitstream, uint16 ``(n, 257)``, and what follows them. Raises
    CorruptError."""
    view = memoryview(bitstream)
    if len(view) < _HEADER.size:
        raise CorruptError("ans-tables bitstream is shorter than its header")
    count, size = _HEADER.unpack_from(view)
    data = ZstdCodec().decompress(view[_HEADER.size : _HEADER.size + size], count * DISTRIBUTION_BYTES)
    if not 1 <= count <= MOST_TABLES or len(data) != count * DISTRIBUTION_BYTES:
        raise CorruptError(
            f"ans-tables bitstream has {len(data)} bytes of {count} distributions, expected 1 to {MOST_TABLES} of "
            f"{DISTRIBUTION_BYTES} bytes each"
        )
    slots = np.frombuffer(data, "<u2").reshape(count, ESCAPE + 1)
    if (slots.sum(1) != SLOTS).any() or not slots[:, ESCAPE].all():
        raise CorruptError(f"ans-tables bitstream has distributions that do not add up to {SLOTS}, or without escapes")
    return slots, view[_HEADER.size + size :]


def fill(native: tuple[object, ...], bitstream: bytes | memoryview, rows: int, tokens: int, out: torch.Tensor) -> None:
    """Decode ``rows`` rows of ``tokens`` integers into ``out``, contiguous uint8. ``native``: as `static_tables`
    returns them. Raises CorruptError."""
    if (fault := _ans.decode(native, bitstream, rows, tokens, out.numpy().data)) is not None:
        raise CorruptError(f"ans bitstream {fault}")
