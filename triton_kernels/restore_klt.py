"""restore_klt: decoded frames of transform coefficients -> slots of the K or V buffers.

The inverse of the quantiser ``klt``, in one pass: coefficients through their block's matrix, times the step, plus the
mean, and for K the rotary embedding, which the quantiser took off.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_kvfetch.layout.frames import FrameLayout
from sgl_kvfetch.triton_kernels.runtime import (
    COMPILE_OPTIONS,
    INTERPRETED,
    jit,
    on_device,
    require,
    require_buffers,
    require_frames,
    require_scalable,
    tl,
    triton,
    use_kernels,
)
from sgl_kvfetch.triton_kernels.tiles import (
    chunk_of,
    pixel_of,
    program_of,
    round_float32,
    slots_of,
    tiles_of,
    tokens_of_frames,
)
from sgl_kvfetch.triton_kernels.tuning import Tuning, pairs_of, tuning_for

ZERO = 128  # the integer that stands for zero

# Of a step along the sum. They set the order in which is added, so that they are not for tuning.
_MIN_COEFFICIENTS, _MAX_COEFFICIENTS = 16, 32
_BLOCK_MATRIX = 4096  # values of one half of the matrix


def restore_klt(
    frames: torch.Tensor,
    layout: FrameLayout,
    slots: torch.Tensor,
    outputs: Sequence[torch.Tensor],
    *,
    scales: torch.Tensor,
    inverse: torch.Tensor,
    step: float,
    means: torch.Tensor,
    rotation: torch.Tensor | None = None,
    interleaved: bool = False,
    first_frame: int = 0,
    tuning: Tuning | None = None,
) -> None:
    """Write the tokens that some frames of a span hold: ``KltQuantiser.dequantise`` and a scatter.

    On the CPU the reference runs, unless Triton interprets; elsewhere the kernel, on the current stream. All is
    computed in float32, in this order: ``integer - 128`` times the matrix, times ``step * scale``, plus the mean; then
    the rotation; then bounded by the outputs' largest finite value and rounded to nearest, ties to even. Integers and
    matrix are exact in bfloat16, so that the products are exact, and what is left open is the order in which they are
    added: results differ from the reference's by what that gives in float32 (``C`` roundings of the sum), and by one
    unit in the last place of the outputs where it tips a rounding.

    Args:
        frames: uint8 ``(n, 3, height, width)``: frames ``first_frame`` to ``first_frame + n`` of the span's. Each frame
            is contiguous; the distance between frames is free.
        slots: int64 ``(tokens,)``: for every token of the span, the row it goes to; -1 leaves a token out. No row
            twice. Rows outside the buffers are the caller's fault, and go unnoticed on a GPU.
        outputs: Each layer's buffer, 1 to 3 of ``(num_slots, heads, dim)``, alike in shape, strides and dtype. Slots
            and heads may lie apart, a head's values may not.
        scales: bfloat16 ``(tokens, layers, 1)``.
        inverse: bfloat16 ``(layers, blocks, C, C)``, a row a coefficient, a column a channel. A block is ``C / dim``
            neighbouring heads, whose channels are numbered on from head to head. Coefficient c of a block stands in
            the frames where its channel c would.
        step: The width of a step, the same for all coefficients.
        means: float32 ``(layers, heads, dim)``, of the channels.
        rotation: float32 ``(tokens, rotary_dim)``, the cosines of each token's position, then its sines
            (``Rope.table``); for K. None for V. Channels from ``rotary_dim`` on are not turned.
        interleaved: Whether pair i is channels ``(2i, 2i + 1)``, as in GPT-J, and not ``(i, i + rotary_dim / 2)``.
        tuning: Another cut into programs than the table's. One of the candidates changes no bit.

    Raises:
        ValueError: arguments that do not fit together, or a rotation for an odd ``dim``.
        FormatError: the layout does not hold tokens of this shape.
        UnsupportedError: a dtype that cannot be scaled, or a GPU without Triton.
    """
    outputs = list(outputs)
    require_buffers(outputs, slots)
    require_scalable(outputs[0].dtype)
    require_frames([frames], layout, slots, outputs, first_frame, num_planes=1)
    _require_model(slots, outputs, scales, inverse, means, rotation)
    if not slots.numel() or not frames.shape[0]:
        return
    arguments = (frames, layout, slots, outputs, scales, inverse, step, means, rotation, interleaved, first_frame)
    if use_kernels(slots.device):
        _launch(*arguments, tuning)
    else:
        restore_klt_reference(*arguments)


def restore_klt_reference(
    frames: torch.Tensor,
    layout: FrameLayout,
    slots: torch.Tensor,
    outputs: Sequence[torch.Tensor],
    scales: torch.Tensor,
    inverse: torch.Tensor,
    step: float,
    means: torch.Tensor,
    rotation: torch.Tensor | None,
    interleaved: bool,
    first_frame: int,
) -> None:
    """``restore_klt`` in PyTorch, on any device. Arguments as there."""
    num_layers, (_, num_heads, head_dim) = len(outputs), outputs[0].shape
    kept, tokens = tokens_of_frames(layout, slots, first_frame, frames.shape[0])
    places = frames.shape[0] * layout.tokens_per_frame
    integers = layout.from_frames(frames, places, num_layers, num_heads, head_dim)[kept]
    n = (integers.to(torch.float32) - ZERO).view(-1, *inverse.shape[:3])  # (tokens, layers, blocks, C)
    sums = n.permute(1, 2, 0, 3) @ inverse.to(torch.float32)
    x = sums.permute(2, 0, 1, 3).reshape(integers.shape)
    x = x * (scales[tokens].to(torch.float32) * step).unsqueeze(-1) + means
    if rotation is not None:
        x = _rotated(x, rotation[tokens], interleaved)
    largest = torch.finfo(outputs[0].dtype).max
    values = x.clamp(-largest, largest).to(outputs[0].dtype)
    for i_layer, output in enumerate(outputs):
        output[slots[tokens]] = values[:, i_layer]


def _rotated(x: torch.Tensor, rotation: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """``(tokens, layers, heads, dim)``, turned by ``(tokens, rotary_dim)``."""
    rotary_dim = rotation.shape[1]
    half = rotary_dim // 2
    first, second = (
        (slice(0, rotary_dim, 2), slice(1, rotary_dim, 2))
        if interleaved
        else (
            slice(0, half),
            slice(half, rotary_dim),
        )
    )
    cos, sin = rotation[:, None, None, :half], rotation[:, None, None, half:]
    y = x.clone()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., second] * cos + x[..., first] * sin
    return y


def _require_model(
    slots: torch.Tensor,
    outputs: Sequence[torch.Tensor],
    scales: torch.Tensor,
    inverse: torch.Tensor,
    means: torch.Tensor,
    rotation: torch.Tensor | None,
) -> None:
    num_tokens, num_layers, (_, num_heads, head_dim) = slots.numel(), len(outputs), outputs[0].shape
    buffers = f"for {num_layers} buffers of shape {tuple(outputs[0].shape)}"

    def require_tensor(name: str, x: torch.Tensor, dtype: torch.dtype) -> None:
        require(
            x.dtype == dtype and x.device == slots.device and x.is_contiguous(),
            f"{name} of {x.dtype} on {x.device} with strides {x.stride()}, expected contiguous {dtype} on "
            f"{slots.device}",
        )

    require(
        scales.shape == (num_tokens, num_layers, 1),
        f"scales have shape {tuple(scales.shape)}, expected ({num_tokens}, {num_layers}, 1)",
    )
    require_tensor("scales", scales, torch.bfloat16)
    require(
        inverse.ndim == 4
        and inverse.shape[0] == num_layers
        and inverse.shape[2] == inverse.shape[3]
        and inverse.shape[2] % head_dim == 0
        and inverse.shape[1] * inverse.shape[2] == num_heads * head_dim,
        f"inverse has shape {tuple(inverse.shape)}, expected (layers, blocks, C, C) with whole heads a block {buffers}",
    )
    require_tensor("inverse", inverse, torch.bfloat16)
    require(
        means.shape == (num_layers, num_heads, head_dim),
        f"means have shape {tuple(means.shape)}, expected (layers, heads, dim) {buffers}",
    )
    require_tensor("means", means, torch.float32)
    if rotation is None:
        return
    require(head_dim % 2 == 0, f"rotation of heads of {head_dim} values, which are no pairs")
    require(
        rotation.ndim == 2
        and rotation.shape[0] == num_tokens
        and 2 <= rotation.shape[1] <= head_dim
        and rotation.shape[1] % 2 == 0,
        f"rotation has shape {tuple(rotation.shape)}, expected ({num_tokens}, even rotary_dim up to {head_dim})",
    )
    require_tensor("rotation", rotation, torch.float32)


def _launch(
    frames: torch.Tensor,
    layout: FrameLayout,
    slots: torch.Tensor,
    outputs: Sequence[torch.Tensor],
    scales: torch.Tensor,
    inverse: torch.Tensor,
    step: float,
    means: torch.Tensor,
    rotation: torch.Tensor | None,
    interleaved: bool,
    first_frame: int,
    tuning: Tuning | None,
) -> None:
    _, num_heads, head_dim = outputs[0].shape
    size, pairs = inverse.shape[2], pairs_of(head_dim)
    is_interleaved = interleaved and rotation is not None
    tuning = tuning or tuning_for("restore_klt_interleaved" if is_interleaved else "restore_klt", outputs[0])
    coefficients = max(_MIN_COEFFICIENTS, min(chunk_of(size), _MAX_COEFFICIENTS, _BLOCK_MATRIX // pairs))
    grid = (triton.cdiv(layout.tokens_per_frame, tuning.block) * num_heads * frames.shape[0],)
    with on_device(slots.device):
        restore_klt_kernel[grid](
            frames,
            scales.view(torch.int16),
            # Triton's interpreter multiplies bfloat16's bits as if they were integers.
            inverse.to(torch.float32) if INTERPRETED else inverse,
            step,
            means,
            rotation,
            tuple(outputs),
            slots,
            slots.numel(),
            first_frame,
            layout.num_frames(slots.numel()),
            frames.stride(0),
            outputs[0].stride(0),
            outputs[0].stride(1),
            L=tiles_of(layout, num_heads, head_dim),
            SIZE=size,
            ROTARY_DIM=0 if rotation is None else rotation.shape[1],
            INTERLEAVED=is_interleaved,
            LARGEST=torch.finfo(outputs[0].dtype).max,
            PAIRS=pairs,
            COEFFICIENTS=coefficients,
            ROWS=tuning.block,
            num_warps=tuning.warps,
            **COMPILE_OPTIONS,
        )


@jit
def _channels_of(o_pair, L: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two channels of a pair. What is not turned is paired anyhow; of an odd number, the last second is none."""
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
    p_scales,  # (tokens, layers, 1), bfloat16 bits
    p_inverse,  # (layers, blocks, SIZE, SIZE)
    step,
    p_means,  # (layers, heads, dim)
    p_rotation,  # (tokens, ROTARY_DIM), or None if that is 0
    p_outputs,  # layers of (num_slots, heads, dim)
    p_slots,  # (tokens,)
    num_tokens,
    first_frame,
    num_frames,
    stride_frame,
    stride_slot,
    stride_head,
    L: tl.constexpr,
    SIZE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LARGEST: tl.constexpr,
    PAIRS: tl.constexpr,
    COEFFICIENTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A program takes ROWS tokens and one head of each layer. It sums the two channels of each pair apart, so that to
    turn them is arithmetic between two blocks of the same shape."""
    TOKEN_BLOCKS: tl.constexpr = (L.places + ROWS - 1) // ROWS
    BLOCK_HEADS: tl.constexpr = SIZE // L.head_dim
    NUM_BLOCKS: tl.constexpr = L.num_heads // BLOCK_HEADS
    i_program, i_frame = program_of(TOKEN_BLOCKS * L.num_heads)
    i_head = i_program % L.num_heads  # of one token block's programs side by side, all read the same integers
    i_block = i_head // BLOCK_HEADS
    o_place = i_program // L.num_heads * ROWS + tl.arange(0, ROWS)
    o_token, _, b_slot = slots_of(p_slots, first_frame + i_frame, o_place, num_tokens, num_frames, L)
    m_token = b_slot >= 0
    o_pair = tl.arange(0, PAIRS)
    o_first, o_second = _channels_of(o_pair, L, ROTARY_DIM, INTERLEAVED)
    m_first = o_pair < (L.head_dim + 1) // 2
    m_second = m_first & (o_second < L.head_dim)
    o_column = i_head % BLOCK_HEADS * L.head_dim
    o_coefficient = tl.arange(0, COEFFICIENTS)
    p_frame = p_frames + i_frame.to(tl.int64) * stride_frame
    o_output = (b_slot * stride_slot + i_head * stride_head)[:, None]
    o_token = o_token.to(tl.int64)

    for i_layer in tl.static_range(len(p_outputs)):
        p_matrix = p_inverse + (i_layer * NUM_BLOCKS + i_block).to(tl.int64) * (SIZE * SIZE) + o_column
        b_first = tl.zeros((ROWS, PAIRS), dtype=tl.float32)
        b_second = tl.zeros((ROWS, PAIRS), dtype=tl.float32)
        for i_coefficient in range(0, SIZE, COEFFICIENTS):
            o_c = i_coefficient + o_coefficient
            m_c = o_c < SIZE
            o_pixel = pixel_of(
                o_place[:, None], (i_block * BLOCK_HEADS + o_c // L.head_dim)[None, :], (o_c % L.head_dim)[None, :], L
            )
            p_integer = p_frame + i_layer * (L.height * L.width) + o_pixel
            b_integer = tl.load(p_integer, mask=m_token[:, None] & m_c[None, :], other=128)
            b_n = (b_integer.to(tl.int32) - 128).to(tl.float32).to(p_inverse.dtype.element_ty)
            p_row = p_matrix + (o_c * SIZE)[:, None]
            b_matrix = tl.load(p_row + o_first[None, :], mask=m_c[:, None] & m_first[None, :], other=0.0)
            b_first = tl.dot(b_n, b_matrix, b_first)
            b_matrix = tl.load(p_row + o_second[None, :], mask=m_c[:, None] & m_second[None, :], other=0.0)
            b_second = tl.dot(b_n, b_matrix, b_second)

        b_scale = tl.load(p_scales + o_token * len(p_outputs) + i_layer, mask=m_token, other=0)
        b_step = ((b_scale.to(tl.int32) << 16).to(tl.float32, bitcast=True) * step)[:, None]
        p_mean = p_means + (i_layer * L.num_heads + i_head) * L.head_dim
        b_first = b_first * b_step + tl.load(p_mean + o_first, mask=m_first, other=0.0)[None, :]
        b_second = b_second * b_step + tl.load(p_mean + o_second, mask=m_second, other=0.0)[None, :]
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
