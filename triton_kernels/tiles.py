"""Addresses: the kernels' side of ``FrameLayout``, and how values are cut into rows.

A *row* is a run of ``CHUNK`` values of one head of one token. Rows of a frame count up through the chunks of a head,
the heads of a token and the tiles of the frame, so that rows next to each other lie next to each other in the KV
buffer, and a slot or a scale is loaded once a row. A layout's numbers are compile-time constants: divisions become
shifts, and the compiler sees which loads it may widen. A server uses few layouts.
"""

from __future__ import annotations

from sgl_kvfetch.layout.frames import FrameLayout
from sgl_kvfetch.triton_kernels.runtime import jit, tl

BLOCK_VALUES = 2048  # of one layer, in one program
NUM_WARPS = 4
_MIN_CHUNK, _MAX_CHUNK = 16, 64


def layout_constants(layout: FrameLayout, num_heads: int, head_dim: int) -> dict[str, int | bool]:
    """The constants that every kernel takes."""
    return {
        "SLICED": layout.inter_frame == "sliced",
        "TILES": layout.tokens_per_frame,
        "TILE_COLS": layout.tile_cols,
        "HEAD_ROWS": layout.head_rows,
        "HEAD_COLS": layout.head_cols,
        "DIM_ROWS": layout.dim_rows,
        "DIM_COLS": layout.dim_cols,
        "WIDTH": layout.width,
        "HEIGHT": layout.height,
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
    }


def chunk_of(head_dim: int) -> int:
    """Values in a row: a power of two that divides ``head_dim``, or, if all are small, one that holds a head."""
    divisor = head_dim & -head_dim
    return min(divisor, _MAX_CHUNK) if divisor >= _MIN_CHUNK else next_power_of_2(head_dim)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


@jit
def program_of(BLOCKS: tl.constexpr):
    """Block and frame of this program. One grid axis: the others hold no more than 65535."""
    return tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS


@jit
def token_of(i_frame, i_tile, num_frames, SLICED: tl.constexpr, TILES: tl.constexpr):
    """The token of the span that a tile of a frame holds; past the span's end for padding."""
    if SLICED:
        return i_tile * num_frames + i_frame
    else:
        return i_frame * TILES + i_tile


@jit
def pixel_of(
    i_tile,
    i_head,
    i_dim,
    TILE_COLS: tl.constexpr,
    HEAD_ROWS: tl.constexpr,
    HEAD_COLS: tl.constexpr,
    DIM_ROWS: tl.constexpr,
    DIM_COLS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A value's offset in its plane."""
    y = (i_tile // TILE_COLS) * (HEAD_ROWS * DIM_ROWS) + (i_head // HEAD_COLS) * DIM_ROWS + i_dim // DIM_COLS
    x = (i_tile % TILE_COLS) * (HEAD_COLS * DIM_COLS) + (i_head % HEAD_COLS) * DIM_COLS + i_dim % DIM_COLS
    return y * WIDTH + x


@jit
def to_float32(b_x):
    """Widen exactly. Not by a cast: Triton's interpreter gets bfloat16 subnormals wrong."""
    if b_x.dtype == tl.bfloat16:
        return (b_x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return b_x.to(tl.float32)


@jit
def round_float32(b_x, dtype: tl.constexpr):
    """Narrow, to nearest, ties to even, NaN to 0x7FC0. Not by a cast: the interpreter truncates to bfloat16."""
    if dtype == tl.bfloat16:
        b_bits = b_x.to(tl.int32, bitcast=True)
        b_bits = (b_bits + 0x7FFF + ((b_bits >> 16) & 1)) >> 16
        b_bits = tl.where(b_x == b_x, b_bits, 0x7FC0)
        return b_bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return b_x.to(dtype)
