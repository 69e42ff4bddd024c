"""Addresses of values in frames of a ``TileLayout``, for kernels.

A *row* is a run of ``CHUNK`` values of one head of one token. The rows of a frame are numbered by chunk of a head, then
head of a token, then place in the frame. So consecutive rows are neighbours in the KV buffer, and a slot or scale is
loaded once a row. The layout's numbers are compile-time constants: divisions become shifts, and the compiler knows
which loads it can vectorise. A server uses few layouts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sgl_kvfetch.codec import TileLayout
from sgl_kvfetch.triton_kernels.runtime import jit, tl

_MIN_CHUNK, _MAX_CHUNK = 16, 64


class Tiles(NamedTuple):
    """A layout and the shape of a token: the constant ``L`` of every kernel. Triton can hash it, as it is a tuple."""

    places: int  # tiles in a frame, each for one token
    tile_cols: int
    head_rows: int
    head_cols: int
    dim_rows: int
    dim_cols: int
    width: int
    height: int
    num_heads: int
    head_dim: int


def tiles_of(layout: TileLayout, num_heads: int, head_dim: int) -> Tiles:
    return Tiles(
        places=layout.tokens_per_frame,
        tile_cols=layout.tile_cols,
        head_rows=layout.head_rows,
        head_cols=layout.head_cols,
        dim_rows=layout.dim_rows,
        dim_cols=layout.dim_cols,
        width=layout.width,
        height=layout.height,
        num_heads=num_heads,
        head_dim=head_dim,
    )


def tokens_of_frames(
    layout: TileLayout, slots: torch.Tensor, first_frame: int, num_frames: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the tokens in some of a span's frames, for the references.

    ``from_frames`` returns tokens as if these ``num_frames`` frames were the whole span. Returns two int64 tensors: the
    indices of those tokens that have a slot, and the positions of the same tokens in the span."""
    num_tokens = slots.numel()
    local = torch.arange(num_frames * layout.tokens_per_frame, device=slots.device)
    tokens = local // num_frames * layout.num_frames((num_tokens,)) + first_frame + local % num_frames
    kept = (tokens < num_tokens).nonzero().squeeze(1)
    kept = kept[slots[tokens[kept]] >= 0]
    return kept, tokens[kept]


def chunk_of(head_dim: int) -> int:
    """Return the values in a row: a power of two that divides ``head_dim``, or else one that holds a whole head."""
    divisor = head_dim & -head_dim
    return min(divisor, _MAX_CHUNK) if divisor >= _MIN_CHUNK else next_power_of_2(head_dim)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


@jit
def program_of(BLOCKS: tl.constexpr):
    """Return this program's block and frame. There is one grid axis, since the others are limited to 65535."""
    return tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS


@jit
def rows_of(L: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """Return this program's frame, and for its ROWS rows place and head, ``(ROWS,)``, and dim, ``(ROWS, CHUNK)``."""
    CHUNKS: tl.constexpr = (L.head_dim + CHUNK - 1) // CHUNK
    i_block, i_frame = program_of((L.places * L.num_heads * CHUNKS + ROWS - 1) // ROWS)
    o_row = i_block * ROWS + tl.arange(0, ROWS)
    o_dim = (o_row % CHUNKS * CHUNK)[:, None] + tl.arange(0, CHUNK)[None, :]
    return i_frame, o_row // (CHUNKS * L.num_heads), o_row // CHUNKS % L.num_heads, o_dim


@jit
def slots_of(p_slots, i_frame, o_place, num_tokens, num_frames, L: tl.constexpr):
    """Return the tokens at places of a frame, and their slots; a slot of -1 means none."""
    o_token = o_place * num_frames + i_frame
    m_token = (o_place < L.places) & (o_token < num_tokens)
    return o_token, tl.load(p_slots + o_token, mask=m_token, other=-1)


@jit
def pixel_of(i_place, i_head, i_dim, L: tl.constexpr):
    """Return a value's offset in its plane."""
    y = (
        (i_place // L.tile_cols) * (L.head_rows * L.dim_rows)
        + (i_head // L.head_cols) * L.dim_rows
        + i_dim // L.dim_cols
    )
    x = (i_place % L.tile_cols) * (L.head_cols * L.dim_cols) + (i_head % L.head_cols) * L.dim_cols + i_dim % L.dim_cols
    return y * L.width + x


@jit
def round_float32(b_x, dtype: tl.constexpr):
    """Round to the nearest value of ``dtype``, ties to even; NaN becomes bfloat16 0x7FC0. A cast would not do: Triton's
    interpreter truncates to bfloat16."""
    if dtype == tl.bfloat16:
        b_bits = b_x.to(tl.int32, bitcast=True)
        b_bits = (b_bits + 0x7FFF + ((b_bits >> 16) & 1)) >> 16
        b_bits = tl.where(b_x == b_x, b_bits, 0x7FC0)
        return b_bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return b_x.to(dtype)
