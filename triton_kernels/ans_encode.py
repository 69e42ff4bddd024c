"""ans_encode: encode many cells' integers as `ans` in one launch, a warp each. docs/format.md, "ans", has the format.

rANS encodes backwards, and a token's distribution depends on the rows before. So a pass over the rows, forwards, notes
every token's distribution and writes the escaped integers; a second goes backwards, and writes words and states. Lanes
and tokens are as in ``ans_decode``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from sgl_kvfetch.codec.bitstream import CLASS_TABLE, NUM_CLASSES, AnsCodec, encoding_tables, least_sums
from sgl_kvfetch.codec.layout import PLANES
from sgl_kvfetch.triton_kernels.ans import LANES, AnsChunk, below, bits_of, level_of, next_energy, ones, require_chunks
from sgl_kvfetch.triton_kernels.runtime import COMPILE_OPTIONS, jit, on_device, require, table_on, tl, use_kernels

MAX_TOKENS = 1 << 22  # of a chunk, as the native encoder takes them


def ans_encode(frames: torch.Tensor, chunks: Sequence[AnsChunk], data: torch.Tensor) -> torch.Tensor:
    """Encode frames: the inverse of ``ans_decode``, with ``frames`` as its ``out``. Return the bitstreams' sizes in
    bytes: int32 ``(chunks,)`` on the device.

    A chunk's ``size`` is the room for its bitstream, which ends where the room ends. So it lies at ``start + size``
    less the returned size. It has the bytes of ``AnsCodec.encode``. If the returned size is larger than the room, the
    room has parts of a bitstream. Nothing else is ever written. A symbol takes three bytes at most, and each lane four.

    This does not wait for the device. CPU tensors use the reference, unless Triton interprets. All others use the
    kernel, on the current stream. It needs scratch memory of a byte an integer.

    Args:
        frames: uint8, contiguous.
        chunks: Their rooms must not overlap. Each ``start`` is a multiple of ``ALIGNMENT``.
        data: uint8, contiguous, a multiple of ``ALIGNMENT`` bytes.

    Raises:
        ValueError: tensors of another dtype, device or strides, chunks that exceed them, or more than ``MAX_TOKENS``.
        UnsupportedError: a GPU without Triton.
    """
    require_chunks(chunks, data, frames)
    for chunk in chunks:
        require(chunk.tokens <= MAX_TOKENS, lambda chunk=chunk: f"{chunk} has more than {MAX_TOKENS} tokens")  # type: ignore[misc]
    return (_launch if use_kernels(data.device) else ans_encode_reference)(frames, chunks, data)


def ans_encode_reference(frames: torch.Tensor, chunks: Sequence[AnsChunk], data: torch.Tensor) -> torch.Tensor:
    """Compute ``ans_encode`` on the CPU, for tensors from any device. Same arguments."""
    sizes = []
    for chunk in chunks:
        integers = frames.view(-1)[chunk.out_start :][: chunk.num_bytes]
        bitstream = AnsCodec().encode(integers.view(chunk.num_frames, PLANES, 1, chunk.tokens))
        if len(bitstream) <= chunk.size:
            end = chunk.start + chunk.size
            data.view(-1)[end - len(bitstream) : end] = torch.frombuffer(bytearray(bitstream), dtype=torch.uint8)
        sizes.append(len(bitstream))
    return torch.tensor(sizes, dtype=torch.int32, device=data.device)


@cache
def _tables_on(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the tables on the device. 98 KiB, kept for good."""
    return tuple(x.to(device) for x in encoding_tables())


def _launch(frames: torch.Tensor, chunks: Sequence[AnsChunk], data: torch.Tensor) -> torch.Tensor:
    sizes = torch.empty(len(chunks), dtype=torch.int32, device=data.device)
    if not chunks:
        return sizes
    table, energies, notes = [], 0, 0
    for chunk in chunks:
        table.append((*chunk, energies, notes, *least_sums(chunk.tokens)))
        energies += chunk.tokens
        notes += chunk.num_frames * PLANES * (chunk.tokens + 1)
    with on_device(data.device):
        ans_encode_kernel[len(chunks),](
            frames,
            table_on(table, data.device),
            *_tables_on(data.device),
            torch.empty(energies, dtype=torch.int16, device=data.device),
            torch.empty(notes, dtype=torch.uint8, device=data.device),
            data,
            sizes,
            FIELDS=len(table[0]) - NUM_CLASSES + 1,
            CLASSES=NUM_CLASSES,
            CLASS_TABLE=CLASS_TABLE,
            LANES=LANES,
            PLANES=PLANES,
            num_warps=1,
            **COMPILE_OPTIONS,
        )
    return sizes


@jit
def _escape(o_entry, b_integer, m_lane, i_first, p_entries, p_data):
    """Write those integers that have no symbol, the first lane's last. Return where what is written begins now."""
    o_lane = tl.arange(0, m_lane.shape[0])
    b_entry = tl.load(p_entries + o_entry, mask=m_lane, other=0).to(tl.uint32, bitcast=True)
    m_escaped = m_lane & (b_entry >= 1 << 28)
    b_bits = bits_of(m_escaped, o_lane)
    o_byte = i_first - 1 - ones(b_bits & below(o_lane))
    tl.store(p_data + o_byte, b_integer.to(tl.uint8), mask=m_escaped & (o_byte >= 0))
    return i_first - ones(b_bits)


@jit
def _put(b_state, o_entry, m_lane, i_word, i_end, p_entries, p_reciprocals, p_data):
    """Give a symbol to each lane in the mask. Return the new states, and the number of the first word now: those before
    ``i_end`` are -1, -2 and so on. (Counted in bytes, the compiler would not know the form of ``ones``.)"""
    o_lane = tl.arange(0, b_state.shape[0])
    b_entry = tl.load(p_entries + o_entry, mask=m_lane, other=0).to(tl.uint32, bitcast=True)
    b_reciprocal = tl.load(p_reciprocals + o_entry, mask=m_lane, other=0).to(tl.uint32, bitcast=True)
    b_count = (b_entry >> 10) & 1023
    m_full = m_lane & (b_state >= b_count << 22)
    b_bits = bits_of(m_full, o_lane)
    i_word -= ones(b_bits)
    o_byte = i_end + 2 * (i_word + ones(b_bits & below(o_lane)))
    tl.store(p_data + o_byte, b_state.to(tl.uint8), mask=m_full & (o_byte >= 0))
    tl.store(p_data + o_byte + 1, (b_state >> 8).to(tl.uint8), mask=m_full & (o_byte >= 0))
    b_kept = tl.where(m_full, b_state >> 16, b_state)
    b_quotient = tl.umulhi(b_kept + ((b_entry >> 24) & 1), b_reciprocal) >> ((b_entry >> 20) & 15)
    b_kept += b_quotient * (1024 - b_count) + (b_entry & 1023)
    return tl.where(m_lane, b_kept, b_state), i_word


@jit
def ans_encode_kernel(
    p_frames,
    p_chunks,  # (chunks, FIELDS + CLASSES - 1): AnsChunk, where energies and notes begin, and the classes' least sums
    p_entries,  # (48, 256)
    p_reciprocals,  # (48, 256)
    p_choice,  # (64, 32)
    p_gains,  # (64,)
    p_energies,  # (tokens of all chunks,)
    p_notes,  # (rows of all chunks, 1 + tokens): the class as it is coded, and the tokens' distributions
    p_data,
    p_sizes,  # (chunks,)
    FIELDS: tl.constexpr,
    CLASSES: tl.constexpr,
    CLASS_TABLE: tl.constexpr,
    LANES: tl.constexpr,
    PLANES: tl.constexpr,
):
    """Each program encodes a chunk, from the end of its room on. Positions count from the room's first byte; what does
    not fit has positions below 0, and is counted, not written. What a thread notes, only that thread reads."""
    o_lane = tl.arange(0, LANES)
    p_chunk = p_chunks + tl.program_id(0) * (FIELDS + CLASSES - 1)
    p_data += tl.load(p_chunk)
    room = tl.load(p_chunk + 1).to(tl.int32)
    rows = tl.load(p_chunk + 2).to(tl.int32) * PLANES
    tokens = tl.load(p_chunk + 3).to(tl.int32)
    p_row = p_frames + tl.load(p_chunk + 4)
    p_energies += tl.load(p_chunk + 5)
    p_note = p_notes + tl.load(p_chunk + 6)
    o_class = tl.arange(0, CLASSES)
    b_least = tl.load(p_chunk + FIELDS + o_class, mask=o_class < CLASSES - 1, other=1 << 30).to(tl.int32)

    i_first, class_before = room, 0
    for i_row in range(0, rows):
        b_sum = tl.zeros((LANES,), dtype=tl.int32)
        for i_token in range(0, tokens, LANES):
            o_token = i_token + o_lane
            b_sum += tl.abs(tl.load(p_row + o_token, mask=o_token < tokens, other=128).to(tl.int32) - 128)
        row_class = tl.sum((b_least <= tl.sum(b_sum, axis=0)).to(tl.int32), axis=0)
        gain = tl.load(p_gains + row_class)
        b_delta = row_class - class_before + tl.full((LANES,), 128, tl.int32)
        tl.store(p_note + o_lane, b_delta.to(tl.uint8), mask=o_lane == 0)
        i_first = _escape(CLASS_TABLE * 256 + b_delta, b_delta, o_lane == 0, i_first, p_entries, p_data)
        for i_token in range(0, tokens, LANES):
            o_token = i_token + o_lane
            m_token = o_token < tokens
            b_integer = tl.load(p_row + o_token, mask=m_token, other=128).to(tl.int32)
            b_energy = tl.load(p_energies + o_token, mask=m_token & (i_row > 0), other=1024).to(tl.int32)
            b_table = tl.load(p_choice + row_class * 32 + level_of(b_energy))
            tl.store(p_note + 1 + o_token, b_table, mask=m_token)
            tl.store(p_energies + o_token, next_energy(b_energy, b_integer, gain).to(tl.int16), mask=m_token)
            i_first = _escape(b_table.to(tl.int32) * 256 + b_integer, b_integer, m_token, i_first, p_entries, p_data)
        class_before = row_class
        p_row += tokens
        p_note += 1 + tokens

    b_state, i_word = tl.full((LANES,), 65536, tl.uint32), 0
    for _ in range(0, rows):
        p_row -= tokens
        p_note -= 1 + tokens
        for i_token in range(0, tokens, LANES):
            o_token = (tokens - 1) // LANES * LANES - i_token + o_lane
            m_token = o_token < tokens
            b_integer = tl.load(p_row + o_token, mask=m_token, other=0).to(tl.int32)
            o_entry = tl.load(p_note + 1 + o_token, mask=m_token, other=0).to(tl.int32) * 256 + b_integer
            b_state, i_word = _put(b_state, o_entry, m_token, i_word, i_first, p_entries, p_reciprocals, p_data)
        b_delta = tl.load(p_note + o_lane, mask=o_lane == 0, other=0).to(tl.int32)
        o_entry = CLASS_TABLE * 256 + b_delta
        b_state, i_word = _put(b_state, o_entry, o_lane == 0, i_word, i_first, p_entries, p_reciprocals, p_data)
    i_first += 2 * i_word - 4 * tl.minimum(tokens, LANES)
    for i_byte in tl.static_range(4):
        o_byte = i_first + 4 * o_lane + i_byte
        tl.store(p_data + o_byte, (b_state >> (8 * i_byte)).to(tl.uint8), mask=(o_lane < tokens) & (o_byte >= 0))
    tl.store(p_sizes + tl.program_id(0), room - i_first)
