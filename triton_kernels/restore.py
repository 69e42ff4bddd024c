"""restore: dequantise and reshape decoded frames, and scatter them to slots of the K or V buffers, in one pass.

A *row* is a run of ``CHUNK`` values of one head of one token. The rows of a frame are numbered by chunk of a head, then
head of a token, then place in the frame. So consecutive rows are neighbours in the KV buffer, and a slot or scale is
loaded once a row. The layout's numbers are compile-time constants: divisions become shifts, and the compiler knows
which loads it can vectorise. A server uses few layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sgl_kvfetch.codec.layout import TileLayout
from sgl_kvfetch.codec.quant import from_planes
from sgl_kvfetch.triton_kernels.runtime import (
    COMPILE_OPTIONS,
    integer_view,
    jit,
    next_power_of_2,
    on_device,
    program_of,
    require,
    require_buffers,
    require_frames,
    require_scalable,
    round_float32,
    tl,
    triton,
    use_kernels,
)

# Values of each layer that one program handles, and its warps.
BLOCK_VALUES, NUM_WARPS = 2048, 4
_MIN_CHUNK, _MAX_CHUNK = 16, 64


def restore(
    frames: Sequence[torch.Tensor],
    layout: TileLayout,
    slots: torch.Tensor,
    outputs: Sequence[torch.Tensor],
    *,
    scales: torch.Tensor | None = None,
    centres: Sequence[int] | None = None,
    first_frame: int = 0,
) -> None:
    """Write the K or V of the tokens in some frames of a span, with the same bits as ``Quantiser.dequantise``.

    CPU tensors use the reference, unless Triton interprets. All others use the kernels, on the current stream.

    Args:
        frames: One tensor a byte plane, uint8 ``(n, 3, height, width)`` each: the span's frames ``first_frame`` to
            ``first_frame + n``. Each frame is contiguous; the distance between frames may be larger. With ``scales``
            there is one plane. Without, there is one for each byte of a value, the least significant first.
        slots: int64 ``(tokens,)``: the destination row of every token of the span; -1 skips a token. Rows must be
            unique, and within the buffers, which is not checked on a GPU.
        outputs: Each layer's buffer, 1 to 3 of ``(num_slots, heads, dim)``, of equal shape, strides and dtype. Only
            ``dim`` must be contiguous.
        scales: bfloat16 ``(tokens, layers, heads or 1)``, the symmetric quantisers' step widths; None for ``exact``.
        centres: ``(layers,)``, the integers that represent zero. Only with ``scales``.

    Raises:
        ValueError: arguments that do not fit together.
        FormatError: the layout cannot hold tokens of this shape.
        UnsupportedError: ``scales`` for a dtype that cannot be scaled, or a GPU without Triton.
    """
    frames, outputs = list(frames), list(outputs)
    require_buffers(outputs, slots)
    _require_planes(frames, layout, slots, outputs, first_frame, planes_of(outputs, scales))
    if scales is not None:
        _require_scales(scales, centres, slots, outputs)
    else:
        require(centres is None, lambda: "centres without scales")
    if not slots.numel() or not frames[0].shape[0]:
        return
    run = _launch if use_kernels(slots.device) else restore_reference
    run(frames, layout, slots, outputs, scales, centres, first_frame)


def planes_of(buffers: Sequence[torch.Tensor], scales: torch.Tensor | None) -> int:
    """Return the number of byte planes of a value."""
    return buffers[0].dtype.itemsize if scales is None else 1


def restore_reference(
    frames: Sequence[torch.Tensor],
    layout: TileLayout,
    slots: torch.Tensor,
    outputs: Sequence[torch.Tensor],
    scales: torch.Tensor | None,
    centres: Sequence[int] | None,
    first_frame: int,
) -> None:
    """``restore`` in PyTorch, on any device. Same arguments."""
    num_layers, (_, num_heads, head_dim) = len(outputs), outputs[0].shape
    kept, tokens = _tokens_of_frames(layout, slots, first_frame, frames[0].shape[0])
    integers = [
        layout.from_frames(f, (f.shape[0] * layout.tokens_per_frame, num_layers, num_heads, head_dim))[kept]
        for f in frames
    ]
    if scales is None:
        values = from_planes(torch.stack(integers), integer_view(outputs[0]).dtype)
    else:
        centre = torch.tensor(centres, dtype=torch.float32, device=slots.device).view(1, -1, 1, 1)
        step = scales[tokens].to(torch.float32).unsqueeze(-1)  # (tokens, layers, heads or 1, 1)
        values = integer_view(((integers[0].to(torch.float32) - centre) * step).to(outputs[0].dtype))
    for i_layer, output in enumerate(outputs):
        integer_view(output)[slots[tokens]] = values[:, i_layer]


def _tokens_of_frames(
    layout: TileLayout, slots: torch.Tensor, first_frame: int, num_frames: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the tokens in some of a span's frames, for the reference.

    ``from_frames`` returns tokens as if these ``num_frames`` frames were the whole span. Returns two int64 tensors: the
    indices of those tokens that have a slot, and the positions of the same tokens in the span."""
    num_tokens = slots.numel()
    local = torch.arange(num_frames * layout.tokens_per_frame, device=slots.device)
    tokens = local // num_frames * layout.num_frames((num_tokens,)) + first_frame + local % num_frames
    kept = (tokens < num_tokens).nonzero().squeeze(1)
    kept = kept[slots[tokens[kept]] >= 0]
    return kept, tokens[kept]


def _require_planes(
    frames: Sequence[torch.Tensor],
    layout: TileLayout,
    slots: torch.Tensor,
    outputs: Sequence[torch.Tensor],
    first_frame: int,
    num_planes: int,
) -> None:
    """Raise ValueError unless ``frames`` are ``num_planes`` byte planes of the span's frames from ``first_frame`` on.
    Raise FormatError unless they have room for tokens of the outputs' shape."""
    layout.require_fits((slots.numel(), len(outputs), *outputs[0].shape[1:]))
    require(
        len(frames) == num_planes,
        lambda: f"{len(frames)} byte planes of frames, expected {num_planes} for {outputs[0].dtype}",
    )
    first = frames[0]
    for x in frames:
        require_frames(x, layout, slots.device)
    require(
        all(x.shape == first.shape and x.stride(0) == first.stride(0) for x in frames),
        lambda: (
            f"byte planes differ: shapes {[tuple(x.shape) for x in frames]}, strides {[x.stride() for x in frames]}"
        ),
    )
    num_frames = layout.num_frames((slots.numel(),))
    require(
        first_frame >= 0 and first_frame + first.shape[0] <= num_frames,
        lambda: (
            f"frames {first_frame} to {first_frame + first.shape[0]}, but {tuple(slots.shape)} tokens fill {num_frames}"
        ),
    )


def _require_scales(
    scales: torch.Tensor,
    centres: Sequence[int] | None,
    slots: torch.Tensor,
    outputs: Sequence[torch.Tensor],
) -> None:
    require_scalable(outputs[0].dtype)
    num_tokens, num_layers, num_heads = slots.numel(), len(outputs), outputs[0].shape[1]
    require(
        scales.ndim == 3 and scales.shape[:2] == (num_tokens, num_layers) and scales.shape[2] in (1, num_heads),
        lambda: (
            f"scales have shape {tuple(scales.shape)}, expected ({num_tokens}, {num_layers}, {num_heads} or 1) "
            f"for buffers of shape {tuple(outputs[0].shape)}"
        ),
    )
    require(
        scales.dtype == torch.bfloat16 and scales.device == slots.device and scales.is_contiguous(),
        lambda: (
            f"scales are {scales.dtype} on {scales.device} with strides {scales.stride()}, "
            f"expected contiguous bfloat16 on {slots.device}"
        ),
    )
    require(centres is not None and len(centres) == num_layers, lambda: f"centres are {centres}, expected {num_layers}")


class _Tiles(NamedTuple):
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


def _tiles_of(layout: TileLayout, num_heads: int, head_dim: int) -> _Tiles:
    return _Tiles(
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


def _chunk_of(head_dim: int) -> int:
    """Return the values in a row: a power of two that divides ``head_dim``, or else one that holds a whole head."""
    divisor = head_dim & -head_dim
    return min(divisor, _MAX_CHUNK) if divisor >= _MIN_CHUNK else next_power_of_2(head_dim)


def _launch(
    frames: Sequence[torch.Tensor],
    layout: TileLayout,
    slots: torch.Tensor,
    outputs: Sequence[torch.Tensor],
    scales: torch.Tensor | None,
    centres: Sequence[int] | None,
    first_frame: int,
) -> None:
    _, num_heads, head_dim = outputs[0].shape
    buffers = tuple(integer_view(x) for x in outputs) if scales is None else tuple(outputs)
    chunk = _chunk_of(head_dim)
    rows = max(1, BLOCK_VALUES // chunk)
    rows_per_frame = layout.tokens_per_frame * num_heads * triton.cdiv(head_dim, chunk)
    grid = (triton.cdiv(rows_per_frame, rows) * frames[0].shape[0],)
    common = (
        slots,
        slots.numel(),
        first_frame,
        layout.num_frames((slots.numel(),)),
        frames[0].stride(0),
        outputs[0].stride(0),
        outputs[0].stride(1),
    )
    constants = {"L": _tiles_of(layout, num_heads, head_dim), "CHUNK": chunk, "ROWS": rows}
    options = {"num_warps": NUM_WARPS, **COMPILE_OPTIONS}
    with on_device(slots.device):
        if scales is None:
            restore_exact_kernel[grid](tuple(frames), buffers, *common, **constants, **options)
        else:
            assert centres is not None
            restore_symmetric_kernel[grid](
                frames[0],
                scales.view(torch.int16),
                tuple(map(float, centres)),
                buffers,
                *common,
                **constants,
                NUM_SCALES=scales.shape[2],
                **options,
            )


@jit
def _locate(p_slots, num_tokens, first_frame, num_frames, L: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """Return this program's frame, and for its ROWS rows token, slot (-1: none) and head, ``(ROWS,)``; dim, pixel and
    mask, ``(ROWS, CHUNK)``."""
    CHUNKS: tl.constexpr = (L.head_dim + CHUNK - 1) // CHUNK
    i_block, i_frame = program_of((L.places * L.num_heads * CHUNKS + ROWS - 1) // ROWS)
    o_row = i_block * ROWS + tl.arange(0, ROWS)
    o_place, o_head = o_row // (CHUNKS * L.num_heads), o_row // CHUNKS % L.num_heads
    o_dim = (o_row % CHUNKS * CHUNK)[:, None] + tl.arange(0, CHUNK)[None, :]
    o_token = o_place * num_frames + (first_frame + i_frame)
    b_slot = tl.load(p_slots + o_token, mask=(o_place < L.places) & (o_token < num_tokens), other=-1)
    o_pixel = _pixel_of(o_place[:, None], o_head[:, None], o_dim, L)
    return i_frame, o_token, b_slot, o_head, o_dim, o_pixel, (b_slot >= 0)[:, None] & (o_dim < L.head_dim)


@jit
def _pixel_of(i_place, i_head, i_dim, L: tl.constexpr):
    """Return a value's offset in its plane."""
    y = (
        (i_place // L.tile_cols) * (L.head_rows * L.dim_rows)
        + (i_head // L.head_cols) * L.dim_rows
        + i_dim // L.dim_cols
    )
    x = (i_place % L.tile_cols) * (L.head_cols * L.dim_cols) + (i_head % L.head_cols) * L.dim_cols + i_dim % L.dim_cols
    return y * L.width + x


@jit
def restore_symmetric_kernel(
    p_frames,  # (n, 3, height, width)
    p_scales,  # (tokens, layers, NUM_SCALES), bfloat16 bits
    centres,  # (layers,), by value
    p_outputs,  # layers of (num_slots, heads, dim)
    p_slots,  # (tokens,)
    num_tokens,
    first_frame,
    num_frames,
    stride_frame,
    stride_slot,
    stride_head,
    L: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_SCALES: tl.constexpr,
):
    i_frame, o_token, b_slot, o_head, o_dim, o_pixel, m = _locate(
        p_slots, num_tokens, first_frame, num_frames, L, CHUNK, ROWS
    )
    p_frame = p_frames + i_frame.to(tl.int64) * stride_frame
    o_output = (b_slot * stride_slot + o_head * stride_head)[:, None] + o_dim
    o_scale = o_token.to(tl.int64) * (len(p_outputs) * NUM_SCALES)
    if NUM_SCALES > 1:
        o_scale += o_head
    m_row = b_slot >= 0
    for i_layer in tl.static_range(len(p_outputs)):
        b_integer = tl.load(p_frame + i_layer * (L.height * L.width) + o_pixel, mask=m, other=0)
        b_bits = tl.load(p_scales + i_layer * NUM_SCALES + o_scale, mask=m_row, other=0)
        b_step = (b_bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        b_value = (b_integer.to(tl.float32) - centres[i_layer]) * b_step[:, None]
        tl.store(p_outputs[i_layer] + o_output, round_float32(b_value, p_outputs[i_layer].dtype.element_ty), mask=m)


@jit
def restore_exact_kernel(
    p_frames,  # byte planes of (n, 3, height, width)
    p_outputs,  # layers of (num_slots, heads, dim), integers
    p_slots,  # (tokens,)
    num_tokens,
    first_frame,
    num_frames,
    stride_frame,
    stride_slot,
    stride_head,
    L: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    i_frame, _, b_slot, o_head, o_dim, o_pixel, m = _locate(
        p_slots, num_tokens, first_frame, num_frames, L, CHUNK, ROWS
    )
    o_frame = i_frame.to(tl.int64) * stride_frame
    o_output = (b_slot * stride_slot + o_head * stride_head)[:, None] + o_dim
    for i_layer in tl.static_range(len(p_outputs)):
        b_value = tl.zeros((ROWS, CHUNK), dtype=tl.uint32)
        for i_plane in tl.static_range(len(p_frames)):
            b_byte = tl.load(p_frames[i_plane] + o_frame + i_layer * (L.height * L.width) + o_pixel, mask=m, other=0)
            b_value |= b_byte.to(tl.uint32) << (8 * i_plane)
        b_value = (b_value >> 1) | (b_value << (8 * len(p_frames) - 1))  # undo the rotation of ``quant.exact``
        tl.store(p_outputs[i_layer] + o_output, b_value.to(p_outputs[i_layer].dtype.element_ty), mask=m)
