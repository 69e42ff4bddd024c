"""pack: slots of the K or V buffers -> frames. Gather, quantise and lay out in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sgl_kvfetch.errors import QuantiseError
from sgl_kvfetch.layout.frames import FILL, PLANES, FrameLayout
from sgl_kvfetch.quant.exact import ExactQuantiser
from sgl_kvfetch.quant.symmetric import ScaleOver, step_widths
from sgl_kvfetch.triton_kernels.runtime import (
    COMPILE_OPTIONS,
    integer_view,
    jit,
    on_device,
    require,
    require_buffers,
    require_scalable,
    tl,
    triton,
    use_kernels,
)
from sgl_kvfetch.triton_kernels.tiles import (
    chunk_of,
    next_power_of_2,
    pixel_of,
    program_of,
    rows_of,
    slots_of,
    tiles_of,
    to_float32,
    token_of,
)
from sgl_kvfetch.triton_kernels.tuning import Tuning, tuning_for


@dataclass(frozen=True, slots=True)
class Packed:
    """One span's integers as frames.

    Attributes:
        frames: uint8 ``(planes, frames, 3, height, width)``, a byte plane at a time as a codec takes it.
        scales: bfloat16 ``(tokens, layers, heads or 1)``, or None for ``exact``.
        not_finite: int32 ``(1,)``, 1 if values were infinite or NaN, or None for ``exact``.
    """

    frames: torch.Tensor
    scales: torch.Tensor | None
    not_finite: torch.Tensor | None

    def require_finite(self) -> None:
        """Raise QuantiseError if there were values that have no integer. Waits for the device."""
        if self.not_finite is not None and bool(self.not_finite.item()):
            raise QuantiseError("values are not finite")


def pack(
    buffers: Sequence[torch.Tensor],
    slots: torch.Tensor,
    layout: FrameLayout,
    *,
    centres: Sequence[int] | None = None,
    scale_over: ScaleOver = "head",
    tuning: Tuning | None = None,
) -> Packed:
    """Read a span's tokens. The same bits as ``Quantiser.quantise`` and ``FrameLayout.to_frames`` would give.

    On the CPU the reference runs, unless Triton interprets; elsewhere the kernels, on the current stream.

    Args:
        buffers: Each layer's buffer, 1 to 3 of ``(num_slots, heads, dim)``, alike in shape, strides and dtype. Slots
            and heads may lie apart, a head's values may not.
        slots: int64 ``(tokens,)``: the row of every token of the span. A negative one reads as zeros. Rows outside the
            buffers are the caller's fault, and go unnoticed on a GPU.
        centres: ``(layers,)``, the symmetric quantisers' zero points, 1 to 127; None for ``exact``.
        scale_over: Whether each head has a step width of its own. With ``centres`` only.
        tuning: Another cut into programs than the table's. It changes no bit.

    Values that are not finite raise nothing here, which would wait for the device: see ``Packed.require_finite``.
    A vector that holds one becomes all zeros, with a zero scale.

    Raises:
        ValueError: arguments that do not fit together.
        FormatError: the layout does not hold tokens of this shape.
        UnsupportedError: ``centres`` for a dtype that cannot be scaled, or a GPU without Triton.
    """
    buffers = list(buffers)
    require_buffers(buffers, slots)
    layout.require_fits(*buffers[0].shape[1:])
    if centres is not None:
        require_scalable(buffers[0].dtype)
        require(
            len(centres) == len(buffers) and all(1 <= c <= 127 for c in centres),
            f"centres are {list(centres)}, expected {len(buffers)} of 1 to 127",
        )
    if use_kernels(slots.device):
        return _launch(buffers, slots, layout, centres, scale_over, tuning)
    return pack_reference(buffers, slots, layout, centres, scale_over)


def pack_reference(
    buffers: Sequence[torch.Tensor],
    slots: torch.Tensor,
    layout: FrameLayout,
    centres: Sequence[int] | None,
    scale_over: ScaleOver,
) -> Packed:
    """``pack`` in PyTorch, on any device. Arguments as there."""
    rows = torch.stack([integer_view(x)[slots.clamp(min=0)] for x in buffers], dim=1)  # (tokens, layers, heads, dim)
    values = torch.where((slots >= 0).view(-1, 1, 1, 1), rows, 0).view(buffers[0].dtype)
    if centres is None:
        planes = ExactQuantiser().quantise(values, "k", 0).integers
        return Packed(torch.stack([layout.to_frames(x) for x in planes]), None, None)

    x = values.to(torch.float32)
    centre = torch.tensor(centres, dtype=torch.float32, device=slots.device).view(1, -1, 1, 1)
    magnitude = x.abs().amax(dim=(-1,) if scale_over == "head" else (-2, -1), keepdim=True)  # NaN wins
    finite = torch.isfinite(magnitude)
    scales = step_widths(torch.where(finite, magnitude, 0.0), centre, values.dtype)
    step = scales.to(torch.float32)
    steps = torch.where(step > 0, x / step, 0.0).round()
    integers = (torch.clamp(steps, -centre, centre) + centre).to(torch.uint8)
    return Packed(
        layout.to_frames(integers).unsqueeze(0),
        scales.flatten(2),
        (~finite).any().to(torch.int32).view(1),
    )


def _launch(
    buffers: Sequence[torch.Tensor],
    slots: torch.Tensor,
    layout: FrameLayout,
    centres: Sequence[int] | None,
    scale_over: ScaleOver,
    tuning: Tuning | None,
) -> Packed:
    num_tokens, num_layers, (_, num_heads, head_dim) = slots.numel(), len(buffers), buffers[0].shape
    num_frames, places = layout.num_frames(num_tokens), layout.tokens_per_frame
    num_planes = buffers[0].dtype.itemsize if centres is None else 1
    shape = (num_planes, num_frames, PLANES, layout.height, layout.width)
    frames = torch.full(shape, FILL, dtype=torch.uint8, device=slots.device)
    scales = not_finite = None
    if centres is not None:
        num_scales = num_heads if scale_over == "head" else 1
        scales = torch.empty((num_tokens, num_layers, num_scales), dtype=torch.bfloat16, device=slots.device)
        not_finite = torch.zeros(1, dtype=torch.int32, device=slots.device)
    if not num_tokens:
        return Packed(frames, scales, not_finite)

    common = (slots, num_tokens, num_frames, buffers[0].stride(0), buffers[0].stride(1))
    constants = {"L": tiles_of(layout, num_heads, head_dim)}
    is_exact = scales is None or centres is None
    read = tuple(integer_view(x) for x in buffers) if is_exact else tuple(buffers)
    tuning = tuning or tuning_for("pack_exact" if is_exact else f"pack_{scale_over}", read[0])
    options = {"num_warps": tuning.warps, **COMPILE_OPTIONS}
    chunk = chunk_of(head_dim)
    rows = max(1, tuning.block // chunk)
    with on_device(slots.device):
        if scales is None or centres is None:
            grid = (triton.cdiv(places * num_heads * triton.cdiv(head_dim, chunk), rows) * num_frames,)
            pack_exact_kernel[grid](read, tuple(frames), *common, **constants, CHUNK=chunk, ROWS=rows, **options)
            return Packed(frames, None, None)
        constants["LARGEST"] = torch.finfo(buffers[0].dtype).max
        arguments = (read, frames, scales.view(torch.int16), not_finite, tuple(map(float, centres)), *common)
        if scale_over == "head":
            chunk = next_power_of_2(head_dim)
            rows = max(1, tuning.block // chunk)
            grid = (triton.cdiv(places * num_heads, rows) * num_frames,)
            pack_head_kernel[grid](*arguments, **constants, CHUNK=chunk, ROWS=rows, **options)
        else:
            rows = min(next_power_of_2(num_heads * triton.cdiv(head_dim, chunk)), rows)
            pack_layer_kernel[(places * num_frames,)](*arguments, **constants, CHUNK=chunk, ROWS=rows, **options)
    return Packed(frames, scales, not_finite)


@jit
def _magnitude_bits(b_x):
    """float32's bits without the sign: ordered as the magnitudes are, infinity and NaN above all."""
    return b_x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def _scale_bits(b_magnitude_bits, centre, LARGEST: tl.constexpr):
    """The bits of a largest magnitude's step width, as ``step_widths`` has it. 0 if the magnitude is not finite.

    LARGEST is the largest finite value of the buffers' dtype.
    """
    b_magnitude_bits = tl.where(b_magnitude_bits < 0x7F800000, b_magnitude_bits, 0)
    b_step = tl.div_rn(b_magnitude_bits.to(tl.float32, bitcast=True), centre)
    b_up = (b_step.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    m_too_far = (b_up << 16).to(tl.float32, bitcast=True) * centre > LARGEST
    return tl.where(m_too_far, b_up - 1, b_up)


@jit
def _quantise(b_x, b_scale_bits, centre):
    """Integers of values, given their scale's bits in a shape that broadcasts."""
    b_step = (b_scale_bits << 16).to(tl.float32, bitcast=True)
    m_step = b_step > 0
    b_steps = tl.div_rn(tl.where(m_step, b_x, 0.0), tl.where(m_step, b_step, 1.0))
    # Adding 1.5 * 2**23 leaves no bits for a fraction: the sum is rounded to nearest, ties to even.
    b_steps = (b_steps + 12582912.0) - 12582912.0
    b_steps = tl.minimum(tl.maximum(b_steps, -centre), centre)
    return (b_steps + centre).to(tl.int32).to(tl.uint8)


@jit
def pack_head_kernel(
    p_buffers,  # layers of (num_slots, heads, dim)
    p_frames,  # (frames, 3, height, width)
    p_scales,  # (tokens, layers, heads), bfloat16 bits
    p_not_finite,  # (1,)
    centres,  # (layers,), by value
    p_slots,  # (tokens,)
    num_tokens,
    num_frames,
    stride_slot,
    stride_head,
    L: tl.constexpr,
    LARGEST: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A row is a whole head, so that its largest magnitude is found within the program."""
    i_frame, o_place, o_head, o_dim = rows_of(L, CHUNK, ROWS)
    o_token, m_row, b_slot = slots_of(p_slots, i_frame, o_place, num_tokens, num_frames, L)
    m = m_row[:, None] & (o_dim < L.head_dim)
    m_load = m & (b_slot >= 0)[:, None]
    o_buffer = (b_slot * stride_slot + o_head * stride_head)[:, None] + o_dim
    o_scale = o_token.to(tl.int64) * (len(p_buffers) * L.num_heads) + o_head
    o_pixel = pixel_of(o_place[:, None], o_head[:, None], o_dim, L)
    p_frame = p_frames + i_frame.to(tl.int64) * (3 * L.height * L.width)
    for i_layer in tl.static_range(len(p_buffers)):
        b_x = to_float32(tl.load(p_buffers[i_layer] + o_buffer, mask=m_load, other=0.0))
        b_magnitude = tl.max(_magnitude_bits(b_x), axis=1)
        tl.store(p_not_finite, 1, mask=tl.max(b_magnitude, axis=0) >= 0x7F800000)
        b_scale = _scale_bits(b_magnitude, centres[i_layer], LARGEST)
        tl.store(p_scales + i_layer * L.num_heads + o_scale, b_scale.to(tl.int16), mask=m_row)
        b_integer = _quantise(b_x, b_scale[:, None], centres[i_layer])
        tl.store(p_frame + i_layer * (L.height * L.width) + o_pixel, b_integer, mask=m)


@jit
def pack_layer_kernel(
    p_buffers,  # layers of (num_slots, heads, dim)
    p_frames,  # (frames, 3, height, width)
    p_scales,  # (tokens, layers, 1), bfloat16 bits
    p_not_finite,  # (1,)
    centres,  # (layers,), by value
    p_slots,  # (tokens,)
    num_tokens,
    num_frames,
    stride_slot,
    stride_head,
    L: tl.constexpr,
    LARGEST: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One token a program: once over its heads for the largest magnitude, once more, from the cache, to quantise."""
    CHUNKS: tl.constexpr = (L.head_dim + CHUNK - 1) // CHUNK
    BLOCKS: tl.constexpr = (L.num_heads * CHUNKS + ROWS - 1) // ROWS
    i_place, i_frame = program_of(L.places)
    i_token = token_of(i_frame, i_place, num_frames, L)
    if i_token < num_tokens:
        i_slot = tl.load(p_slots + i_token)
        num_readable = tl.where(i_slot >= 0, L.num_heads, 0)
        p_frame = p_frames + i_frame.to(tl.int64) * (3 * L.height * L.width)
        o_scale = i_token.to(tl.int64) * len(p_buffers)
        for i_layer in tl.static_range(len(p_buffers)):
            p_buffer = p_buffers[i_layer] + i_slot * stride_slot
            b_magnitude = tl.zeros((ROWS, CHUNK), dtype=tl.int32)
            for i_block in range(BLOCKS):
                o_head, o_dim = _head_and_dim(i_block, CHUNKS, CHUNK, ROWS)
                m = (o_head < num_readable) & (o_dim < L.head_dim)
                b_x = to_float32(tl.load(p_buffer + o_head * stride_head + o_dim, mask=m, other=0.0))
                b_magnitude = tl.maximum(b_magnitude, _magnitude_bits(b_x))
            magnitude = tl.max(tl.max(b_magnitude, axis=1), axis=0)
            tl.store(p_not_finite, 1, mask=magnitude >= 0x7F800000)
            scale = _scale_bits(magnitude, centres[i_layer], LARGEST)
            tl.store(p_scales + i_layer + o_scale, scale.to(tl.int16))
            for i_block in range(BLOCKS):
                o_head, o_dim = _head_and_dim(i_block, CHUNKS, CHUNK, ROWS)
                m = (o_head < num_readable) & (o_dim < L.head_dim)
                b_x = to_float32(tl.load(p_buffer + o_head * stride_head + o_dim, mask=m, other=0.0))
                b_integer = _quantise(b_x, scale, centres[i_layer])
                o_pixel = pixel_of(i_place, o_head, o_dim, L)
                m = (o_head < L.num_heads) & (o_dim < L.head_dim)
                tl.store(p_frame + i_layer * (L.height * L.width) + o_pixel, b_integer, mask=m)


@jit
def _head_and_dim(i_block, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """Of a block of one token's rows: head, ``(ROWS, 1)``, and dim, ``(ROWS, CHUNK)``."""
    o_row = i_block * ROWS + tl.arange(0, ROWS)[:, None]
    return o_row // CHUNKS, o_row % CHUNKS * CHUNK + tl.arange(0, CHUNK)[None, :]


@jit
def pack_exact_kernel(
    p_buffers,  # layers of (num_slots, heads, dim), integers
    p_frames,  # byte planes of (frames, 3, height, width)
    p_slots,  # (tokens,)
    num_tokens,
    num_frames,
    stride_slot,
    stride_head,
    L: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    BITS: tl.constexpr = 8 * len(p_frames)
    LOW_BITS: tl.constexpr = (1 << BITS) - 1
    i_frame, o_place, o_head, o_dim = rows_of(L, CHUNK, ROWS)
    _, m_row, b_slot = slots_of(p_slots, i_frame, o_place, num_tokens, num_frames, L)
    m = m_row[:, None] & (o_dim < L.head_dim)
    m_load = m & (b_slot >= 0)[:, None]
    o_buffer = (b_slot * stride_slot + o_head * stride_head)[:, None] + o_dim
    o_pixel = pixel_of(o_place[:, None], o_head[:, None], o_dim, L)
    o_frame = i_frame.to(tl.int64) * (3 * L.height * L.width)
    for i_layer in tl.static_range(len(p_buffers)):
        b_value = tl.load(p_buffers[i_layer] + o_buffer, mask=m_load, other=0).to(tl.uint32) & LOW_BITS
        b_value = (b_value << 1) | (b_value >> (BITS - 1))  # ``ExactQuantiser``: the sign goes to the lowest bit
        for i_plane in tl.static_range(len(p_frames)):
            b_byte = (b_value >> (8 * i_plane)).to(tl.uint8)
            tl.store(p_frames[i_plane] + o_frame + i_layer * (L.height * L.width) + o_pixel, b_byte, mask=m)
