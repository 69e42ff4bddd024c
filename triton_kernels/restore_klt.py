"""restore_klt: restore decoded frames of transform coefficients to slots of the K or V buffers.

This inverts the quantiser ``klt`` in one pass: multiply coefficients by their cell's matrix and the token's step, add
the mean, and for K apply the rotary embedding again, which the quantiser removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sgl_kvfetch.codec import PLANES, RegionLayout
from sgl_kvfetch.triton_kernels.runtime import (
    COMPILE_OPTIONS,
    INTERPRETED,
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

ZERO = 128  # the integer that represents zero

_COEFFICIENTS = 32  # summed in one step of the loop
_MOST_TOKENS = 64
_SUMS = 2048  # limit of tokens times channel pairs that a program sums at once
NUM_WARPS = 8
_MIN_SIDE = 16  # smallest side of a matrix for tensor cores


def restore_klt(
    frames: torch.Tensor,
    layout: RegionLayout,
    slots: torch.Tensor,
    outputs: Sequence[torch.Tensor],
    *,
    scales: torch.Tensor,
    matrix: torch.Tensor,
    mean: torch.Tensor,
    pixels: torch.Tensor,
    rotation: torch.Tensor | None = None,
    interleaved: bool = False,
) -> None:
    """Write the K or V of a cell's tokens, as ``KltQuantiser.dequantise`` does, except for tokens that are kept exact.

    CPU tensors use the reference, unless Triton interprets. All others use the kernel, on the current stream.
    Everything is computed in float32, in this order: ``integer - 128`` times the matrix, times the token's scale, plus
    the mean; then the rotation; then values are limited to the outputs' finite range and rounded to nearest, ties to
    even. Integers and matrix are exact in bfloat16, so their products are exact, and only the order of the sums is
    open. Results differ from the reference by the effect of that order in float32 (a rounding a coefficient), and by
    one unit in the last place of the outputs if that changes their rounding.

    Args:
        frames: uint8 ``(n, 3, height, width)``: all frames of the cell, contiguous.
        slots: int64 ``(tokens,)``: the destination row of every token of the span; -1 skips a token. Rows must be
            unique, and within the buffers, which is not checked on a GPU.
        outputs: Each layer's buffer, ``(num_slots, heads, dim)`` of the cell's heads, of equal shape, strides and
            dtype. Only ``dim`` must be contiguous.
        scales: float32 ``(tokens,)``, the step width of each token.
        matrix: bfloat16 ``(coefficients, channels)``, a row a coefficient. Channels are ordered by layer, head and dim.
            Each row is contiguous; rows may be further apart, so that K's and V's columns of one matrix can be passed.
        mean: float32 ``(channels,)``.
        pixels: int32 ``(coefficients,)``: `region_pixels` of the layout. So all layouts share the compiled kernel.
        rotation: float32 ``(tokens, rotary_dim)``, the cosines of each token's position, then its sines
            (``Rope.table``), for K; None for V. Channels from ``rotary_dim`` on are not rotated.
        interleaved: Whether pair i is channels ``(2i, 2i + 1)``, as in GPT-J, and not ``(i, i + rotary_dim / 2)``.

    Raises:
        ValueError: arguments that do not fit together, or a rotation for an odd ``dim``.
        FormatError: the layout cannot hold this number of tokens.
        UnsupportedError: a dtype that cannot be scaled, or a GPU without Triton.
    """
    outputs = list(outputs)
    require_buffers(outputs, slots)
    require_scalable(outputs[0].dtype)
    require(matrix.ndim == 2, lambda: f"matrix has shape {tuple(matrix.shape)}, expected (coefficients, channels)")
    shape = matrix.shape[0], slots.numel()
    layout.require_fits(shape)
    require_frames(frames, layout, slots.device, layout.num_frames(shape))
    require(
        frames.is_contiguous(),
        lambda: f"frames {tuple(frames.shape)} have strides {frames.stride()}, expected contiguous",
    )
    _require_model(slots, outputs, scales, matrix, mean, pixels, rotation)
    if not slots.numel():
        return
    run = _launch if use_kernels(slots.device) else restore_klt_reference
    run(frames, layout, slots, outputs, scales, matrix, mean, pixels, rotation, interleaved)


def region_pixels(layout: RegionLayout, num_coefficients: int) -> torch.Tensor:
    """Return where the region of each coefficient begins in a cell's frames: int32 ``(num_coefficients,)``."""
    c = torch.arange(num_coefficients, dtype=torch.int32)
    frame, region = c // layout.coefficients_per_frame, c // PLANES % (layout.region_rows * layout.region_cols)
    y = (frame * PLANES + c % PLANES) * layout.height + region // layout.region_cols * layout.token_rows
    return y * layout.width + region % layout.region_cols * layout.token_cols


def restore_klt_reference(
    frames: torch.Tensor,
    layout: RegionLayout,
    slots: torch.Tensor,
    outputs: Sequence[torch.Tensor],
    scales: torch.Tensor,
    matrix: torch.Tensor,
    mean: torch.Tensor,
    pixels: torch.Tensor,
    rotation: torch.Tensor | None,
    interleaved: bool,
) -> None:
    """``restore_klt`` in PyTorch, on any device. Same arguments."""
    kept = (slots >= 0).nonzero().squeeze(1)
    n = layout.from_frames(frames, (matrix.shape[0], slots.numel()))[:, kept].to(torch.float32) - ZERO
    x = (n.T @ matrix.to(torch.float32)) * scales[kept, None] + mean
    x = x.view(len(kept), len(outputs), *outputs[0].shape[1:])
    if rotation is not None:
        x = _rotated(x, rotation[kept], interleaved)
    largest = torch.finfo(outputs[0].dtype).max
    values = x.clamp(-largest, largest).to(outputs[0].dtype)
    for i_layer, output in enumerate(outputs):
        output[slots[kept]] = values[:, i_layer]


def _rotated(x: torch.Tensor, rotation: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate ``(tokens, layers, heads, dim)`` by ``(tokens, rotary_dim)``."""
    rotary_dim = rotation.shape[1]
    half = rotary_dim // 2
    first, second = slice(0, half), slice(half, rotary_dim)
    if interleaved:
        first, second = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    cos, sin = rotation[:, None, None, :half], rotation[:, None, None, half:]
    y = x.clone()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., second] * cos + x[..., first] * sin
    return y


def _require_model(
    slots: torch.Tensor,
    outputs: Sequence[torch.Tensor],
    scales: torch.Tensor,
    matrix: torch.Tensor,
    mean: torch.Tensor,
    pixels: torch.Tensor,
    rotation: torch.Tensor | None,
) -> None:
    num_tokens, (_, num_heads, head_dim) = slots.numel(), outputs[0].shape
    num_channels = len(outputs) * num_heads * head_dim

    def require_tensor(name: str, x: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        require(
            x.shape == shape and x.dtype == dtype and x.device == slots.device and x.stride(-1) == 1,
            lambda: (
                f"{name}: {x.dtype} {tuple(x.shape)} on {x.device} with strides {x.stride()}, expected {dtype} {shape} "
                f"on {slots.device}, its last dimension contiguous"
            ),
        )

    require_tensor("scales", scales, torch.float32, (num_tokens,))
    require_tensor("matrix", matrix, torch.bfloat16, (matrix.shape[0], num_channels))
    require_tensor("mean", mean, torch.float32, (num_channels,))
    require_tensor("pixels", pixels, torch.int32, (matrix.shape[0],))
    if rotation is None:
        return
    require(head_dim % 2 == 0, lambda: f"rotation of heads of {head_dim} values, expected an even number")
    require(
        rotation.ndim == 2 and 2 <= rotation.shape[1] <= head_dim and rotation.shape[1] % 2 == 0,
        lambda: (
            f"rotation has shape {tuple(rotation.shape)}, expected ({num_tokens}, even rotary_dim up to {head_dim})"
        ),
    )
    require_tensor("rotation", rotation, torch.float32, (num_tokens, rotation.shape[1]))
    require(rotation.is_contiguous(), lambda: f"rotation has strides {rotation.stride()}, expected contiguous rows")


class _Heads(NamedTuple):
    """The shape of a token: the constant ``L`` of the kernel. Triton can hash it, as it is a tuple."""

    num_heads: int
    head_dim: int


def _launch(
    frames: torch.Tensor,
    layout: RegionLayout,
    slots: torch.Tensor,
    outputs: Sequence[torch.Tensor],
    scales: torch.Tensor,
    matrix: torch.Tensor,
    mean: torch.Tensor,
    pixels: torch.Tensor,
    rotation: torch.Tensor | None,
    interleaved: bool,
) -> None:
    _, num_heads, head_dim = outputs[0].shape
    pairs = max(_MIN_SIDE, next_power_of_2(-(-head_dim // 2)))
    rows = max(_MIN_SIDE, min(_MOST_TOKENS, _SUMS // pairs))
    grid = (triton.cdiv(slots.numel(), rows) * num_heads,)
    if INTERPRETED:  # Triton's interpreter would multiply bfloat16's bits as integers
        matrix = matrix.to(torch.float32)
    with on_device(slots.device):
        restore_klt_kernel[grid](
            frames,
            pixels,
            scales,
            matrix,
            mean,
            rotation,
            tuple(outputs),
            slots,
            slots.numel(),
            matrix.shape[0],
            layout.token_cols,
            layout.width,
            matrix.stride(0),
            outputs[0].stride(0),
            outputs[0].stride(1),
            L=_Heads(num_heads, head_dim),
            ROTARY_DIM=0 if rotation is None else rotation.shape[1],
            INTERLEAVED=interleaved and rotation is not None,
            LARGEST=torch.finfo(outputs[0].dtype).max,
            PAIRS=pairs,
            COEFFICIENTS=_COEFFICIENTS,
            ROWS=rows,
            num_warps=NUM_WARPS,
            **COMPILE_OPTIONS,
        )


@jit
def _channels_of(o_pair, L: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the two channels of each pair. Channels without rotation are paired too; an odd one has no second."""
    NUM_PAIRS: tl.constexpr = (L.head_dim + 1) // 2
    TURNED: tl.constexpr = ROTARY_DIM // 2
    if INTERLEAVED:
        return 2 * o_pair, 2 * o_pair + 1
    elif TURNED == 0 or TURNED == NUM_PAIRS:
        return o_pair, o_pair + NUM_PAIRS
    else:
        o_first = tl.where(o_pair < TURNED, o_pair, o_pair + TURNED)
        return o_first, tl.where(o_pair < TURNED, o_pair + TURNED, o_pair + NUM_PAIRS)


@jit
def restore_klt_kernel(
    p_frames,  # (n, 3, height, width)
    p_pixels,  # (num_coefficients,)
    p_scales,  # (tokens,)
    p_matrix,  # (num_coefficients, layers * heads * dim)
    p_mean,  # (layers * heads * dim,)
    p_rotation,  # (tokens, ROTARY_DIM), or None if that is 0
    p_outputs,  # layers of (num_slots, heads, dim)
    p_slots,  # (tokens,)
    num_tokens,
    num_coefficients,
    token_cols,
    width,
    stride_row,
    stride_slot,
    stride_head,
    L: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LARGEST: tl.constexpr,
    PAIRS: tl.constexpr,
    COEFFICIENTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Each program handles ROWS tokens and one head of each layer. It sums the two channels of each pair separately,
    so that a rotation is arithmetic between two blocks of the same shape."""
    # Adjacent programs are the heads of one token block, which read the same integers.
    i_head, i_block = program_of(L.num_heads)
    o_token = i_block * ROWS + tl.arange(0, ROWS)
    b_slot = tl.load(p_slots + o_token, mask=o_token < num_tokens, other=-1)
    m_token = b_slot >= 0
    o_within = (o_token // token_cols) * width + o_token % token_cols
    o_pair = tl.arange(0, PAIRS)
    o_first, o_second = _channels_of(o_pair, L, ROTARY_DIM, INTERLEAVED)
    m_first = o_pair < (L.head_dim + 1) // 2
    m_second = m_first & (o_second < L.head_dim)
    o_coefficient = tl.arange(0, COEFFICIENTS)
    o_output = (b_slot * stride_slot + i_head * stride_head)[:, None]
    o_token = o_token.to(tl.int64)
    b_scale = tl.load(p_scales + o_token, mask=m_token, other=0.0)[:, None]

    for i_layer in tl.static_range(len(p_outputs)):
        o_column = (i_layer * L.num_heads + i_head) * L.head_dim
        b_first = tl.zeros((ROWS, PAIRS), dtype=tl.float32)
        b_second = tl.zeros((ROWS, PAIRS), dtype=tl.float32)
        for i_coefficient in range(0, num_coefficients, COEFFICIENTS):
            o_c = i_coefficient + o_coefficient
            m_c = o_c < num_coefficients
            o_pixel = tl.load(p_pixels + o_c, mask=m_c, other=0)[None, :] + o_within[:, None]
            b_integer = tl.load(p_frames + o_pixel, mask=m_token[:, None] & m_c[None, :], other=128)
            b_n = (b_integer.to(tl.int32) - 128).to(tl.float32).to(p_matrix.dtype.element_ty)
            p_row = p_matrix + (o_c.to(tl.int64) * stride_row + o_column)[:, None]
            b_matrix = tl.load(p_row + o_first[None, :], mask=m_c[:, None] & m_first[None, :], other=0.0)
            b_first = tl.dot(b_n, b_matrix, b_first)
            b_matrix = tl.load(p_row + o_second[None, :], mask=m_c[:, None] & m_second[None, :], other=0.0)
            b_second = tl.dot(b_n, b_matrix, b_second)

        p_layer_mean = p_mean + o_column
        b_first = b_first * b_scale + tl.load(p_layer_mean + o_first, mask=m_first, other=0.0)[None, :]
        b_second = b_second * b_scale + tl.load(p_layer_mean + o_second, mask=m_second, other=0.0)[None, :]
        if ROTARY_DIM:
            m_turned = (o_pair < ROTARY_DIM // 2)[None, :]
            p_cos = p_rotation + (o_token * ROTARY_DIM)[:, None] + o_pair[None, :]
            b_cos = tl.load(p_cos, mask=m_token[:, None] & m_turned, other=1.0)
            b_sin = tl.load(p_cos + ROTARY_DIM // 2, mask=m_token[:, None] & m_turned, other=0.0)
            b_turned = b_first * b_cos - b_second * b_sin
            b_second = tl.where(m_turned, b_second * b_cos + b_first * b_sin, b_second)
            b_first = tl.where(m_turned, b_turned, b_first)
        b_first = round_float32(_bounded(b_first, LARGEST), p_outputs[i_layer].dtype.element_ty)
        b_second = round_float32(_bounded(b_second, LARGEST), p_outputs[i_layer].dtype.element_ty)
        p_output = p_outputs[i_layer] + o_output
        tl.store(p_output + o_first[None, :], b_first, mask=m_token[:, None] & m_first[None, :])
        tl.store(p_output + o_second[None, :], b_second, mask=m_token[:, None] & m_second[None, :])


@jit
def _bounded(b_x, LARGEST: tl.constexpr):
    return tl.minimum(tl.maximum(b_x, -LARGEST), LARGEST)
