"""ans_decode: decode many bitstreams of `ans` in one launch, a warp each. docs/format.md, "ans", has the format.

The 32 lanes of a bitstream are the threads of a warp: lane l has the tokens l, l + 32, l + 64, ... of every row. What
the lanes share (the two ends of the bitstream that is left, the row's class) is the same in all threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from sgl_kvfetch.codec.bitstream import CLASS_TABLE, SLOTS, AnsCodec, decoding_tables
from sgl_kvfetch.codec.layout import PLANES
from sgl_kvfetch.errors import CorruptError
from sgl_kvfetch.triton_kernels.runtime import COMPILE_OPTIONS, jit, on_device, require, table_on, tl, use_kernels

LANES = 32
ALIGNMENT = 4  # of bitstreams in memory, in bytes
MAX_BYTES = 1 << 28  # of a bitstream, and of its frames: positions have 31 bits, and a symbol may take two bytes


class AnsChunk(NamedTuple):
    """One bitstream: bytes ``start`` to ``start + size`` of the data. Its frames, ``(num_frames, 3, tokens)``, go to
    the output from ``out_start`` on."""

    start: int
    size: int
    num_frames: int
    tokens: int
    out_start: int

    @property
    def num_bytes(self) -> int:
        """The size of its frames."""
        return self.num_frames * PLANES * self.tokens


def ans_decode(data: torch.Tensor, chunks: Sequence[AnsChunk], out: torch.Tensor) -> torch.Tensor:
    """Decode bitstreams. Return for each whether it is broken: int32 ``(chunks,)`` on the device, 0 for sound ones.

    A sound bitstream gives the bits of ``AnsCodec.decode``; a broken one leaves arbitrary bytes in its own part of
    ``out``. Both take the same time. This does not wait for the device. CPU tensors use the reference, unless Triton's
    interpreter is on. All others use the kernel, on the current stream.

    Args:
        data: uint8, contiguous, a multiple of ``ALIGNMENT`` bytes, at such an address.
        chunks: Their parts of ``out`` must not overlap. Each ``start`` is a multiple of ``ALIGNMENT``.
        out: uint8, contiguous.

    Raises:
        ValueError: tensors of another dtype, device or strides, or chunks that exceed them.
        UnsupportedError: a GPU without Triton.
    """
    require_chunks(chunks, data, out)
    return (_launch if use_kernels(data.device) else ans_decode_reference)(data, chunks, out)


def require_chunks(chunks: Sequence[AnsChunk], data: torch.Tensor, out: torch.Tensor) -> None:
    """Raise ValueError unless both tensors are as ``ans_decode`` takes them, and ``chunks`` lie within them."""
    for name, x in (("data", data), ("out", out)):
        require(
            x.dtype == torch.uint8 and x.device == data.device and x.is_contiguous(),
            lambda name=name, x=x: (  # type: ignore[misc]
                f"{name} is {x.dtype} on {x.device} with strides {x.stride()}, expected contiguous uint8 on "
                f"{data.device}"
            ),
        )
    require(data.numel() % ALIGNMENT == 0, lambda: f"data has {data.numel()} bytes, expected a multiple of {ALIGNMENT}")
    for chunk in chunks:
        require(
            min(chunk) >= 0
            and 0 < chunk.num_bytes <= MAX_BYTES
            and chunk.size <= MAX_BYTES
            and chunk.start % ALIGNMENT == 0
            and chunk.start + chunk.size <= data.numel()
            and chunk.out_start + chunk.num_bytes <= out.numel(),
            lambda chunk=chunk: f"{chunk} exceeds {data.numel()} bytes of data or {out.numel()} of output",  # type: ignore[misc]
        )


def ans_decode_reference(data: torch.Tensor, chunks: Sequence[AnsChunk], out: torch.Tensor) -> torch.Tensor:
    """Compute ``ans_decode`` on the CPU, for tensors from any device. Same arguments."""
    status = []
    for chunk in chunks:
        bitstream = data[chunk.start : chunk.start + chunk.size].cpu().numpy().data
        try:
            frames = AnsCodec().decode(bitstream, (chunk.num_frames, 1, chunk.tokens))
            out.view(-1)[chunk.out_start :][: chunk.num_bytes] = frames.view(-1).to(out.device)
            status.append(0)
        except CorruptError:
            status.append(1)
    return torch.tensor(status, dtype=torch.int32, device=out.device)


@cache
def _tables_on(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `decoding_tables` on the device. They take 194 KiB, and stay there."""
    return tuple(x.to(device) for x in decoding_tables())  # type: ignore[return-value]


def _launch(data: torch.Tensor, chunks: Sequence[AnsChunk], out: torch.Tensor) -> torch.Tensor:
    status = torch.empty(len(chunks), dtype=torch.int32, device=data.device)
    if not chunks:
        return status
    table, energies = [], 0
    for chunk in chunks:
        table.append((*chunk, energies))
        energies += chunk.tokens
    _launch_table(data, table_on(table, data.device), energies, out, status)
    return status


def ans_decode_table(
    data: torch.Tensor, table: torch.Tensor, num_energies: int, out: torch.Tensor, status: torch.Tensor
) -> None:
    """Do the same as ``ans_decode`` with a table that was made before, so that its time does not depend on the number
    of bitstreams. Checks nothing.

    Args:
        table: int64 ``(chunks, 6)`` on the device: the fields of an `AnsChunk`, and the sum of ``tokens`` of all rows
            before.
        num_energies: The sum of all ``tokens``.
        status: int32 ``(chunks,)`` on the device, for what ``ans_decode`` returns.
    """
    if use_kernels(data.device):
        _launch_table(data, table, num_energies, out, status)
        return
    status.copy_(ans_decode_reference(data, [AnsChunk(*row[:5]) for row in table.tolist()], out))


def _launch_table(
    data: torch.Tensor, table: torch.Tensor, num_energies: int, out: torch.Tensor, status: torch.Tensor
) -> None:
    with on_device(data.device):
        ans_decode_kernel[len(table),](
            data,
            data.view(torch.int16),
            table,
            *_tables_on(data.device),
            torch.empty(num_energies, dtype=torch.int16, device=data.device),
            out,
            status,
            FIELDS=table.shape[1],
            SLOTS=SLOTS,
            CLASS_TABLE=CLASS_TABLE,
            LANES=LANES,
            PLANES=PLANES,
            num_warps=1,
            **COMPILE_OPTIONS,
        )


@jit
def bits_of(m_lane, o_lane):
    """Return a number with the bit of each lane in the mask."""
    return tl.sum(tl.where(m_lane, tl.full(o_lane.shape, 1, tl.uint32) << o_lane.to(tl.uint32), 0), axis=0)


@jit
def ones(b_bits):
    """Count the bits that are one: the compiler knows this form, and makes one instruction of it."""
    b_bits = b_bits - ((b_bits >> 1) & 0x55555555)
    b_bits = (b_bits & 0x33333333) + ((b_bits >> 2) & 0x33333333)
    b_bits = (b_bits + (b_bits >> 4)) & 0x0F0F0F0F
    return ((b_bits * 0x01010101) >> 24).to(tl.int32)


@jit
def below(o_lane):
    """Return for each lane the bits of the lanes below it."""
    return (tl.full(o_lane.shape, 1, tl.uint32) << o_lane.to(tl.uint32)) - 1


@jit
def level_of(b_energy):
    """Return a token's level of energy, 0 to 31: four to an octave."""
    b_level = (b_energy.to(tl.float32).to(tl.int32, bitcast=True) >> 21) - 532
    return tl.minimum(tl.maximum(b_level, 0), 31)


@jit
def next_energy(b_energy, b_integer, gain):
    """Return a token's energy after an integer in a row whose class has this gain."""
    b_seen = tl.minimum(tl.abs(b_integer - 128) * gain, 16384)
    return b_energy + ((b_seen >> 5) - (b_energy >> 5))


@jit
def _take(b_state, o_table, m_lane, i_next, i_last, p_bytes, p_words, p_decode, size, SLOTS: tl.constexpr):
    """Take a symbol from each lane in the mask. Return the new states, the integers, and the two ends of what is left
    of the bitstream: the next word, and the byte behind the next escape. Outside the bitstream, 0 is read instead."""
    o_lane = tl.arange(0, b_state.shape[0])
    o_slot = (b_state & (SLOTS - 1)).to(tl.int32)
    b_entry = tl.load(p_decode + o_table * SLOTS + o_slot, mask=m_lane, other=0).to(tl.uint32, bitcast=True)
    b_moved = ((b_entry >> 8) & 1023) * (b_state // SLOTS) + ((b_entry >> 18) & 1023)
    m_low = m_lane & (b_moved < 65536)
    b_bits = bits_of(m_low, o_lane)
    o_word = i_next + ones(b_bits & below(o_lane))
    b_word = tl.load(p_words + o_word, mask=m_low & (o_word < size // 2), other=0).to(tl.uint32) & 0xFFFF
    b_state = tl.where(m_lane, tl.where(m_low, (b_moved << 16) | b_word, b_moved), b_state)

    m_escaped = m_lane & (b_entry >= 1 << 28)
    b_escapes = bits_of(m_escaped, o_lane)
    o_escape = i_last - 1 - ones(b_escapes & below(o_lane))
    b_escaped = tl.load(p_bytes + o_escape, mask=m_escaped & (o_escape >= 0), other=0).to(tl.int32)
    b_integer = tl.where(m_escaped, b_escaped, (b_entry & 255).to(tl.int32))
    return b_state, b_integer, i_next + ones(b_bits), i_last - ones(b_escapes)


@jit
def ans_decode_kernel(
    p_data,  # (bytes,)
    p_words,  # the same, as words of two bytes
    p_chunks,  # (chunks, FIELDS): AnsChunk, and where the chunk's energies begin
    p_decode,  # (48, SLOTS): symbol | frequency << 8 | offset in the symbol << 18 | escape << 28
    p_choice,  # (64, 32): a distribution for a row's class and a token's level of energy
    p_gains,  # (64,)
    p_energies,  # (tokens of all chunks,)
    p_out,
    p_status,  # (chunks,)
    FIELDS: tl.constexpr,
    SLOTS: tl.constexpr,
    CLASS_TABLE: tl.constexpr,
    LANES: tl.constexpr,
    PLANES: tl.constexpr,
):
    """Each program decodes one chunk. Whatever its bytes are, a program takes the steps of all rows, and reads and
    writes nothing outside its chunk. Faults are detected at the end: once the two ends of the bitstream have crossed,
    they never meet again."""
    p_chunk = p_chunks + tl.program_id(0) * FIELDS
    start = tl.load(p_chunk)
    size = tl.load(p_chunk + 1).to(tl.int32)
    rows = tl.load(p_chunk + 2).to(tl.int32) * PLANES
    tokens = tl.load(p_chunk + 3).to(tl.int32)
    p_row = p_out + tl.load(p_chunk + 4)
    p_energies += tl.load(p_chunk + 5)
    p_data += start
    p_words += start // 2

    o_lane = tl.arange(0, LANES)
    i_next, i_last = 2 * tl.minimum(tokens, LANES), size
    m_state = (o_lane < tokens) & (4 * o_lane + 4 <= size)
    b_low = tl.load(p_words + 2 * o_lane, mask=m_state, other=0).to(tl.uint32) & 0xFFFF
    b_high = tl.load(p_words + 2 * o_lane + 1, mask=m_state, other=1).to(tl.uint32) & 0xFFFF
    b_state = (b_high << 16) | b_low
    m_broken = b_high == 0
    row_class = 0
    for i_row in range(0, rows):
        b_state, b_integer, i_next, i_last = _take(
            b_state, CLASS_TABLE, o_lane == 0, i_next, i_last, p_data, p_words, p_decode, size, SLOTS
        )
        row_class += tl.sum(tl.where(o_lane == 0, b_integer - 128, 0), axis=0)
        row_class = tl.minimum(tl.maximum(row_class, 0), 63)
        gain = tl.load(p_gains + row_class)
        for i_token in range(0, tokens, LANES):
            o_token = i_token + o_lane
            m_token = o_token < tokens
            b_energy = tl.load(p_energies + o_token, mask=m_token & (i_row > 0), other=1024).to(tl.int32)
            o_table = tl.load(p_choice + row_class * 32 + level_of(b_energy)).to(tl.int32)
            b_state, b_integer, i_next, i_last = _take(
                b_state, o_table, m_token, i_next, i_last, p_data, p_words, p_decode, size, SLOTS
            )
            tl.store(p_row + o_token, b_integer.to(tl.uint8), mask=m_token)
            tl.store(p_energies + o_token, next_energy(b_energy, b_integer, gain).to(tl.int16), mask=m_token)
        p_row += tokens
    m_broken |= (b_state != 65536) | (2 * i_next != i_last)
    tl.store(p_status + tl.program_id(0), tl.max(m_broken.to(tl.int32), axis=0))
