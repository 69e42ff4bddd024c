"""ans_decode: decode many bitstreams of `ans` or `ans-tables` in one launch, a warp for each group. docs/format.md has
both formats.

A launch lasts as long as the longest chain of steps, however few run: a step waits for the state that the step before
has left, some 0.1 us. Groups of 128 tokens make the chain an eighth of that of a whole span.

The 32 lanes of a group are the threads of a warp: lane l has the tokens l, l + 32, l + 64 and l + 96 of every row. What
the lanes share (the two ends of the piece that is left, the row's class) is the same in all threads. A row's four steps
are written out, with the energies of four tokens in each thread's registers: all but the states is known before the
first one, so only the states wait for each other. Each warp decodes the classes itself, eight rows at once.

**`ans-tables`** is decoded by the same kernel, compiled without energies. A launch before it makes decoding tables of
the bitstreams' own distributions. Three things differ. Such a bitstream begins behind its distributions, at any byte,
so that words are read as two bytes each. Its rows are places of a frame, of which the last may hold nothing: those are
decoded and left out. And integers go to memory token by token, as they are stored elsewhere and as their checksum is
made: a thread gathers eight neighbouring ones before it writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from sgl_kvfetch.codec import CLASS_LANES, PLANES, Device, why_no_gpu
from sgl_kvfetch.codec.bitstream.ans import (
    CLASS_TABLE,
    DISTRIBUTION_BYTES,
    ESCAPE,
    GROUP,
    LANES,
    MOST_TABLES,
    SLOTS,
    AnsCodec,
    decode_fitted,
    decoding_tables,
)
from sgl_kvfetch.errors import CorruptError
from sgl_kvfetch.log import brief
from sgl_kvfetch.triton_kernels.runtime import COMPILE_OPTIONS, jit, on_device, require, table_on, tl, use_kernels
from sgl_kvfetch.triton_kernels.xxh3 import SUMS, digest_of, xxh3_sums

ALIGNMENT = 4  # of bitstreams in memory, in bytes
MAX_BYTES = 1 << 28  # of a bitstream, and of its frames: positions have 31 bits, and a symbol may take two bytes
GATHERED = CLASS_LANES  # neighbouring integers of `ans-tables` that are written at once: tokens have a multiple of it
DECODING_TABLE_BYTES = 4 * SLOTS  # of one distribution


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


class FittedChunk(NamedTuple):
    """One bitstream of `ans-tables`, without its distributions."""

    start: int  # of its bytes in the data
    size: int  # in bytes
    rows: int  # integers per token, a multiple of 3
    tokens: int
    out_start: int  # where the output has its integers, uint8 (tokens, kept); a multiple of `GATHERED`
    kept: int  # the first of a token's integers are wanted, so many; a multiple of `GATHERED`
    slots_start: int  # the byte of the slots where its distributions begin, uint16 (num_tables, 257)
    num_tables: int  # distributions, and decoding tables that are made of them
    first_table: int  # the number of the first of these decoding tables


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
    status = torch.zeros(len(chunks), dtype=torch.int32, device=data.device)
    if chunks:
        most_tokens = max(chunk.tokens for chunk in chunks)
        _launch_table(data, table_on(chunks, data.device), most_tokens, out, status)
    return status


def ans_decode_table(
    data: torch.Tensor, table: torch.Tensor, most_tokens: int, out: torch.Tensor, status: torch.Tensor
) -> None:
    """Do the same as ``ans_decode`` with a table that was made before, so that its time does not depend on the number
    of bitstreams. Checks nothing.

    Args:
        table: int64 ``(chunks, 5)`` on the device: the fields of an `AnsChunk`.
        most_tokens: The largest ``tokens``.
        status: int32 ``(chunks,)`` on the device, zeros. What ``ans_decode`` returns is written there.
    """
    if use_kernels(data.device):
        _launch_table(data, table, most_tokens, out, status)
        return
    status.copy_(ans_decode_reference(data, [AnsChunk(*row) for row in table.tolist()], out))


def fitted_decode_table(
    data: torch.Tensor,
    table: torch.Tensor,
    most_tokens: int,
    slots: torch.Tensor,
    tables: torch.Tensor,
    out: torch.Tensor,
    status: torch.Tensor,
) -> None:
    """Do the same as `ans_decode_table` for bitstreams of `ans-tables`. Checks nothing.

    Args:
        data: uint8, contiguous, at any address.
        table: int64 ``(chunks, 9)`` on the device: the fields of a `FittedChunk`.
        slots: uint8, on the device, at an even address: the distributions.
        tables: int32 ``(distributions, SLOTS)`` on the device, which this writes.
        out: uint8, contiguous, at a multiple of `GATHERED` bytes.
        status: As for `ans_decode_table`.
    """
    if use_kernels(data.device):
        with on_device(data.device):
            decoding_tables_kernel[len(table) * MOST_TABLES,](
                table, slots.view(torch.int16), tables, FIELDS=table.shape[1], SLOTS=SLOTS, ESCAPE=ESCAPE,
                MOST_TABLES=MOST_TABLES, **COMPILE_OPTIONS,
            )  # fmt: skip
        _launch_table(data, table, most_tokens, out, status, tables)
        return
    found = []
    for chunk in (FittedChunk(*row) for row in table.tolist()):
        own = slots[chunk.slots_start :][: chunk.num_tables * DISTRIBUTION_BYTES].cpu().numpy().view("<u2")
        bitstream = data[chunk.start : chunk.start + chunk.size].cpu().numpy().data
        try:
            tokens = decode_fitted(own.reshape(chunk.num_tables, -1), bitstream, chunk.tokens, chunk.rows)
            kept = tokens[:, : chunk.kept].flatten()
            out[chunk.out_start : chunk.out_start + len(kept)] = kept.to(out.device)
            found.append(0)
        except CorruptError:
            found.append(1)
    status.copy_(torch.tensor(found, dtype=torch.int32))


def _launch_table(
    data: torch.Tensor,
    table: torch.Tensor,
    most_tokens: int,
    out: torch.Tensor,
    status: torch.Tensor,
    fitted: torch.Tensor | None = None,
) -> None:
    """Launch the decoder of all bitstreams in a table, a program for each group of tokens. ``fitted``: the decoding
    tables of `ans-tables`, for bitstreams of this codec."""
    num_groups = -(-most_tokens // GROUP)
    decode, *others = _tables_on(data.device)
    with on_device(data.device):
        ans_decode_kernel[len(table) * num_groups,](
            data,
            data.view(torch.int16) if fitted is None else data,
            table,
            num_groups,
            decode,
            decode if fitted is None else fitted,
            *others,
            out,
            status,
            FITTED=fitted is not None,
            FIELDS=table.shape[1],
            SLOTS=SLOTS,
            CLASS_TABLE=CLASS_TABLE,
            LANES=LANES,
            CLASS_LANES=CLASS_LANES,
            GROUP=GROUP,
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
def _words_at(p_data, p_words, byte, FITTED: tl.constexpr):
    """Return a pointer for `_word`: to words of two bytes, or, where they lie at any byte, to bytes."""
    if FITTED:
        return p_data + byte
    else:
        return p_words + byte // 2


@jit
def _word(p_words, o_word, m_word, other, FITTED: tl.constexpr):
    if FITTED:
        b_low = tl.load(p_words + 2 * o_word, mask=m_word, other=0).to(tl.uint32)
        b_high = tl.load(p_words + 2 * o_word + 1, mask=m_word, other=0).to(tl.uint32)
        return tl.where(m_word, (b_high << 8) | b_low, other)
    else:
        return tl.load(p_words + o_word, mask=m_word, other=other).to(tl.uint32) & 0xFFFF


@jit
def _take(b_state, o_table, m_lane, i_next, p_words, p_decode, size, SLOTS: tl.constexpr, FITTED: tl.constexpr):
    """Take a symbol from each lane in the mask. Return the new states, the symbols' entries (0 for other lanes), and
    the next word. Outside the piece, words are 0."""
    o_lane = tl.arange(0, b_state.shape[0])
    o_slot = (b_state & (SLOTS - 1)).to(tl.int32)
    b_entry = tl.load(p_decode + (o_table * SLOTS + o_slot), mask=m_lane, other=0).to(tl.uint32, bitcast=True)
    b_moved = ((b_entry >> 8) & 1023) * (b_state // SLOTS) + ((b_entry >> 18) & 1023)
    m_low = m_lane & (b_moved < 65536)
    b_bits = bits_of(m_low, o_lane)
    o_word = i_next + ones(b_bits & below(o_lane))
    b_word = _word(p_words, o_word, m_low & (o_word < size // 2), 0, FITTED)
    b_state = tl.where(m_lane, tl.where(m_low, (b_moved << 16) | b_word, b_moved), b_state)
    return b_state, b_entry, i_next + ones(b_bits)


@jit
def _integers_of(b_entry):
    """Return the integers of symbols that are no escapes."""
    return (b_entry & 255).to(tl.int32)


@jit
def _escaped(b_entry, b_integer, i_last, p_bytes):
    """Return the integers with the escaped ones, and the byte behind the next escape. Outside the piece, they are 0."""
    o_lane = tl.arange(0, b_entry.shape[0])
    m_escaped = b_entry >= 1 << 28
    b_escapes = bits_of(m_escaped, o_lane)
    o_escape = i_last - 1 - ones(b_escapes & below(o_lane))
    b_escaped = tl.load(p_bytes + o_escape, mask=m_escaped & (o_escape >= 0), other=0).to(tl.int32)
    return tl.where(m_escaped, b_escaped, b_integer), i_last - ones(b_escapes)


@jit
def _states_of(p_words, o_lane, num_lanes, size, FITTED: tl.constexpr):
    """Return the states at the beginning of a piece. Lanes without one have the state that all end with."""
    m_state = (o_lane < num_lanes) & (4 * o_lane + 4 <= size)
    b_high = _word(p_words, 2 * o_lane + 1, m_state, 1, FITTED)
    return (b_high << 16) | _word(p_words, 2 * o_lane, m_state, 0, FITTED)


@jit
def _is_broken(b_first, b_state, i_next, i_last, p_bytes):
    """Return whether a piece that began with the states ``b_first`` was not decoded to its end. A byte of 0 may be
    left."""
    num_left = i_last - 2 * i_next
    left = tl.load(p_bytes + 2 * i_next, mask=num_left == 1, other=0).to(tl.int32)
    is_wrong = (num_left < 0) | (num_left > 1) | (left != 0)
    m_broken = (b_first < 65536) | (b_state != 65536) | is_wrong
    return tl.max(m_broken.to(tl.int32), axis=0)


@jit
def decoding_tables_kernel(
    p_chunks,  # (chunks, FIELDS): FittedChunk
    p_slots,  # distributions
    p_tables,  # (distributions, SLOTS): as p_decode of ans_decode_kernel
    FIELDS: tl.constexpr,
    SLOTS: tl.constexpr,
    ESCAPE: tl.constexpr,
    MOST_TABLES: tl.constexpr,
):
    """Each program makes the decoding table of one distribution, from the slots of its symbols."""
    p_chunk = p_chunks + tl.program_id(0) // MOST_TABLES * FIELDS
    i_table = tl.program_id(0) % MOST_TABLES
    if i_table >= tl.load(p_chunk + 7):
        return
    p_slots += tl.load(p_chunk + 6) // 2 + i_table * (ESCAPE + 1)
    o_slot = tl.arange(0, SLOTS)
    b_entry = tl.zeros((SLOTS,), tl.int32)
    first = 0
    for symbol in range(0, ESCAPE + 1):
        num_slots = tl.load(p_slots + symbol).to(tl.int32)
        m_symbol = (o_slot >= first) & (o_slot < first + num_slots)
        b_found = (symbol % ESCAPE) | (symbol // ESCAPE << 28) | (num_slots << 8) | ((o_slot - first) << 18)
        b_entry = tl.where(m_symbol, b_found, b_entry)
        first += num_slots
    tl.store(p_tables + (tl.load(p_chunk + 8) + i_table) * SLOTS + o_slot, b_entry)


@jit
def ans_decode_kernel(
    p_data,  # (bytes,)
    p_words,  # the same, as words of two bytes; or, if FITTED, as it is
    p_chunks,  # (chunks, FIELDS): AnsChunk, or FittedChunk
    num_groups,  # programs of each chunk: the largest number of groups
    p_decode,  # (48, SLOTS): symbol | frequency << 8 | offset in the symbol << 18 | escape << 28
    p_fitted,  # the same of the bitstreams' own distributions, if FITTED
    p_choice,  # (64, 32): a distribution for a row's class and a token's level of energy
    p_gains,  # (64,)
    p_out,
    p_status,  # (chunks,), zeros
    FITTED: tl.constexpr,
    FIELDS: tl.constexpr,
    SLOTS: tl.constexpr,
    CLASS_TABLE: tl.constexpr,
    LANES: tl.constexpr,
    CLASS_LANES: tl.constexpr,
    GROUP: tl.constexpr,
    PLANES: tl.constexpr,
):
    """Each program decodes a group of a chunk. Whatever its bytes are, a program takes the steps of all rows, and reads
    and writes nothing outside its chunk. Faults are detected at the end: once the two ends of a piece have crossed,
    they never meet again."""
    tl.static_assert(GROUP == 4 * LANES)
    i_chunk = tl.program_id(0) // num_groups
    i_group = tl.program_id(0) % num_groups
    p_chunk = p_chunks + i_chunk * FIELDS
    tokens = tl.load(p_chunk + 3).to(tl.int32)
    if i_group * GROUP >= tokens:
        return
    start = tl.load(p_chunk)
    size = tl.load(p_chunk + 1).to(tl.int32)
    rows = tl.load(p_chunk + 2).to(tl.int32)
    p_row = p_out + tl.load(p_chunk + 4)
    if FITTED:
        tl.static_assert(CLASS_LANES == 8)
        kept = tl.load(p_chunk + 5).to(tl.int32)
        p_row += i_group * GROUP * kept
        last_table = tl.load(p_chunk + 7).to(tl.int32) - 1
        p_fitted += tl.load(p_chunk + 8) * SLOTS
    else:
        rows *= PLANES
        p_row += i_group * GROUP
    p_words = _words_at(p_data, p_words, start, FITTED)
    p_data += start
    o_lane = tl.arange(0, LANES)

    # Where the pieces lie. The last one, that of the classes, takes what the groups leave.
    groups = (tokens + GROUP - 1) // GROUP
    words_before = tl.zeros((), tl.int64)
    words_of_groups = tl.zeros((), tl.int64)
    group_words = tl.zeros((), tl.int64)
    for i in range(0, groups, LANES):
        o_size = i + o_lane
        m_size = (o_size < groups) & (4 * o_size + 4 <= size)
        b_high = _word(p_words, 2 * o_size + 1, m_size, 0, FITTED).to(tl.int64)
        b_words = (b_high << 16) | _word(p_words, 2 * o_size, m_size, 0, FITTED).to(tl.int64)
        words_of_groups += tl.sum(b_words, axis=0)
        words_before += tl.sum(tl.where(o_size < i_group, b_words, 0), axis=0)
        group_words += tl.sum(tl.where(o_size == i_group, b_words, 0), axis=0)
    is_sound = (size % 2 == 0) & (4 * groups + 2 * words_of_groups <= size)
    class_start = tl.where(is_sound, 4 * groups + 2 * words_of_groups, 0).to(tl.int32)
    class_size = tl.where(is_sound, size - class_start, 0)
    group_start = tl.where(is_sound, 4 * groups + 2 * words_before, 0).to(tl.int32)
    group_size = tl.where(is_sound, 2 * group_words, 0).to(tl.int32)
    p_class_data, p_class_words = p_data + class_start, _words_at(p_data, p_words, class_start, FITTED)
    p_words = _words_at(p_data, p_words, group_start, FITTED)
    p_data += group_start

    o_class = tl.arange(0, CLASS_LANES)
    b_class_first = _states_of(p_class_words, o_class, rows, class_size, FITTED)
    b_class_state = b_class_first
    i_class_next, i_class_last = 2 * tl.minimum(rows, CLASS_LANES), class_size
    row_class = 0

    tokens -= i_group * GROUP
    b_first = _states_of(p_words, o_lane, tokens, group_size, FITTED)
    b_state = b_first
    i_next, i_last = 2 * tl.minimum(tokens, LANES), group_size
    m_0, m_1, m_2, m_3 = o_lane < tokens, o_lane + 32 < tokens, o_lane + 64 < tokens, o_lane + 96 < tokens
    b_energy_0 = tl.full((LANES,), 1024, tl.int32)
    b_energy_1, b_energy_2, b_energy_3 = b_energy_0, b_energy_0, b_energy_0
    stride = tl.load(p_chunk + 3)
    for i_row in range(0, rows, CLASS_LANES):
        b_class_state, b_entry, i_class_next = _take(
            b_class_state,
            CLASS_TABLE,
            i_row + o_class < rows,
            i_class_next,
            p_class_words,
            p_decode,
            class_size,
            SLOTS,
            FITTED,
        )
        b_delta, i_class_last = _escaped(b_entry, _integers_of(b_entry), i_class_last, p_class_data)
        b_class = (row_class + tl.cumsum(b_delta - 128, axis=0)) & 63
        row_class = tl.sum(tl.where(o_class == CLASS_LANES - 1, b_class, 0), axis=0)
        if FITTED:
            b_eight_0 = tl.zeros((LANES,), tl.uint64)
            b_eight_1, b_eight_2, b_eight_3 = b_eight_0, b_eight_0, b_eight_0
        for i in range(0, tl.minimum(CLASS_LANES, rows - i_row)):
            this_class = tl.sum(tl.where(o_class == i, b_class, 0), axis=0)
            if FITTED:
                p_tables, o_table_0 = p_fitted, tl.minimum(this_class, last_table)
                o_table_1, o_table_2, o_table_3 = o_table_0, o_table_0, o_table_0
            else:
                p_tables, o_choice = p_decode, this_class * 32
                o_table_0 = tl.load(p_choice + (o_choice + level_of(b_energy_0))).to(tl.int32)
                o_table_1 = tl.load(p_choice + (o_choice + level_of(b_energy_1))).to(tl.int32)
                o_table_2 = tl.load(p_choice + (o_choice + level_of(b_energy_2))).to(tl.int32)
                o_table_3 = tl.load(p_choice + (o_choice + level_of(b_energy_3))).to(tl.int32)
            b_state, b_entry_0, i_next = _take(
                b_state, o_table_0, m_0, i_next, p_words, p_tables, group_size, SLOTS, FITTED
            )
            b_state, b_entry_1, i_next = _take(
                b_state, o_table_1, m_1, i_next, p_words, p_tables, group_size, SLOTS, FITTED
            )
            b_state, b_entry_2, i_next = _take(
                b_state, o_table_2, m_2, i_next, p_words, p_tables, group_size, SLOTS, FITTED
            )
            b_state, b_entry_3, i_next = _take(
                b_state, o_table_3, m_3, i_next, p_words, p_tables, group_size, SLOTS, FITTED
            )
            b_0, b_1 = _integers_of(b_entry_0), _integers_of(b_entry_1)
            b_2, b_3 = _integers_of(b_entry_2), _integers_of(b_entry_3)
            # Most rows have none, and words and escapes do not wait for each other.
            b_flags = ((b_entry_0 | b_entry_1 | b_entry_2 | b_entry_3) >> 28).to(tl.int32)
            if tl.max(b_flags, axis=0) != 0:
                b_0, i_last = _escaped(b_entry_0, b_0, i_last, p_data)
                b_1, i_last = _escaped(b_entry_1, b_1, i_last, p_data)
                b_2, i_last = _escaped(b_entry_2, b_2, i_last, p_data)
                b_3, i_last = _escaped(b_entry_3, b_3, i_last, p_data)
            if FITTED:
                b_eight_0 |= b_0.to(tl.uint64) << (8 * i)
                b_eight_1 |= b_1.to(tl.uint64) << (8 * i)
                b_eight_2 |= b_2.to(tl.uint64) << (8 * i)
                b_eight_3 |= b_3.to(tl.uint64) << (8 * i)
            else:
                gain = tl.load(p_gains + this_class)
                tl.store(p_row + o_lane, b_0.to(tl.uint8), mask=m_0)
                tl.store(p_row + o_lane + 32, b_1.to(tl.uint8), mask=m_1)
                tl.store(p_row + o_lane + 64, b_2.to(tl.uint8), mask=m_2)
                tl.store(p_row + o_lane + 96, b_3.to(tl.uint8), mask=m_3)
                b_energy_0 = next_energy(b_energy_0, b_0, gain)
                b_energy_1 = next_energy(b_energy_1, b_1, gain)
                b_energy_2 = next_energy(b_energy_2, b_2, gain)
                b_energy_3 = next_energy(b_energy_3, b_3, gain)
                p_row += stride
        if FITTED:
            p_eight, m_kept = (p_row + i_row).to(tl.pointer_type(tl.uint64)), i_row + 0 * o_lane < kept
            tl.store(p_eight + o_lane * (kept // 8), b_eight_0, mask=m_0 & m_kept)
            tl.store(p_eight + (o_lane + 32) * (kept // 8), b_eight_1, mask=m_1 & m_kept)
            tl.store(p_eight + (o_lane + 64) * (kept // 8), b_eight_2, mask=m_2 & m_kept)
            tl.store(p_eight + (o_lane + 96) * (kept // 8), b_eight_3, mask=m_3 & m_kept)
    is_broken = _is_broken(b_first, b_state, i_next, i_last, p_data)
    is_broken |= _is_broken(b_class_first, b_class_state, i_class_next, i_class_last, p_class_data)
    tl.store(p_status + i_chunk, 1, mask=is_broken != 0)


def try_gpu_ans(device: Device) -> tuple[bool, str]:
    """Return whether this GPU decodes `ans` and verifies it as the CPU does, and a sentence about that. A trial says
    so, which also compiles the kernels. Raises nothing."""
    try:
        fault = why_no_gpu() or _trial(device)
    except Exception as e:  # a compiler and a driver fail in many ways
        fault = f"a trial failed: {brief(e)}"
    if fault:
        return False, f"ans is decoded on the CPU: {fault}"
    return True, "ans is decoded on the GPU"


def _trial(device: Device) -> str:
    """Decode rows of all widths, with escaped integers. Return what is wrong; an empty string if nothing is."""
    generator = torch.Generator().manual_seed(0)
    widths = torch.logspace(2, -1, 12).view(4, 3, 1, 1)
    frames = (128 + widths * torch.randn((4, 3, 1, 72), generator=generator)).round().clamp(0, 255).to(torch.uint8)
    bitstream, num_bytes = AnsCodec().encode(frames), frames.numel()
    coded = device.pinned(-(-len(bitstream) // ALIGNMENT) * ALIGNMENT)
    coded.numpy()[: len(bitstream)] = np.frombuffer(bitstream, np.uint8)
    stream = device.new_stream()
    data, out = (device.empty((size,), stream) for size in (len(coded), num_bytes))
    status = device.pinned(4).view(torch.int32)
    sums = device.pinned(8 * SUMS).view(torch.int64)
    found = device.pinned(num_bytes)

    def work() -> None:
        data.copy_(coded, non_blocking=True)
        status.copy_(ans_decode(data, [AnsChunk(0, len(bitstream), 4, 72, 0)], out), non_blocking=True)
        sums.copy_(xxh3_sums(out, [(0, num_bytes)])[0], non_blocking=True)
        found.copy_(out, non_blocking=True)

    device.launch(stream, work)
    device.mark(stream).synchronize()
    if status.item():
        return "a trial's bitstream does not decode"
    if not torch.equal(found, frames.flatten()):
        return "a trial gave other integers"
    is_right = digest_of(sums.tolist(), num_bytes) == xxhash.xxh3_128_digest(frames.numpy().data)
    return "" if is_right else "a trial gave another checksum"
