"""quantise_klt: turn a cell's values, in slots of the KV buffers, into the integers of `klt`.

This does what ``KltQuantiser.quantise`` does on the CPU. A kernel undoes the rotation and subtracts the mean, torch
multiplies matrices, and a second kernel chooses each token's step and rounds. Sums are in another order than on the
CPU, but in float32 as there. So a coefficient in the middle between two integers may become the other one, and a token
may have the next step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from sgl_kvfetch.codec.layout import PLANES
from sgl_kvfetch.codec.quant import KltForward
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.triton_kernels.restore_klt import EXACT, ZERO
from sgl_kvfetch.triton_kernels.runtime import (
    COMPILE_OPTIONS,
    jit,
    next_power_of_2,
    on_device,
    require,
    require_buffers,
    require_scalable,
    require_tensor,
    round_float32,
    table_on,
    tl,
    triton,
    use_kernels,
)

NOT_FINITE = 255  # instead of an exponent: the token has a value that is infinite or not a number
_TOKENS = 16  # of one program
_CHANNELS = 128  # rounded in one step of a loop
_ALIGNMENT = 16  # of channels, in values
_TO_WHOLE = 1.5 * 2**23  # added and subtracted: rounds magnitudes up to 2^22, ties to even


def quantise_klt(
    forward: KltForward,
    k: Sequence[torch.Tensor],
    v: Sequence[torch.Tensor],
    slots: torch.Tensor,
    rotations: torch.Tensor | None,
    num_sinks: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the exponents of tokens' scales, uint8 ``(tokens,)``, and the integers, uint8 ``(rows, tokens)``. Rows of
    128 fill these up to a multiple of three, as in flat frames.

    Tokens that must be kept exact have the exponent 0, and tokens with a value that is not finite ``NOT_FINITE``; the
    integers of both are 128. This does not wait for the device. All work is on the current stream.

    Args:
        forward: The cell's, on the device.
        k: Each layer's buffer, ``(num_slots, heads, dim)`` of the cell's heads, of equal shape, strides and dtype.
        v: The same for V.
        slots: int64 ``(tokens,)``, none negative.
        rotations: float32 ``(rotations, tokens, rotary_dim)``, cosines, then sines, of K's positions, divided by the
            square of a rotation's ``attention_scaling``. Each layer's is undone. None without any.
        num_sinks: The first tokens that are kept exact.

    Raises:
        ValueError: tensors that do not fit together.
        UnsupportedError: a dtype without scales, or neither a GPU with Triton nor Triton's interpreter.
    """
    device, num_tokens = slots.device, len(slots)
    if not use_kernels(device):
        raise UnsupportedError(f"quantise_klt needs Triton's interpreter for tensors on {device}")
    for buffers in (k, v):
        require_buffers(buffers, slots)
        require_scalable(buffers[0].dtype)
    num_channels, num_norms = len(forward.mean), sum(len(x) * x[0].shape[1] for x in (k, v))
    expected = sum(len(x) * x[0].shape[1] * x[0].shape[2] for x in (k, v))
    require(num_channels == expected, lambda: f"{num_channels} channels, expected {expected} for these buffers")
    for name, x, size in (
        ("matrix", forward.matrix, (num_channels, num_channels)),
        ("sensitivity", forward.sensitivity, (num_channels + num_norms + 1,)),
    ):
        require_tensor(name, x, x.dtype, size, device)
    rotary_dim = 0
    require(len(forward.turns) == len(k) == len(v), lambda: f"{len(k)} layers, expected {len(forward.turns)}")
    if rotations is not None:
        rotary_dim = rotations.shape[2]
        require_tensor("rotations", rotations, torch.float32, (len(rotations), num_tokens, rotary_dim), device)
        has_all = max(forward.turns) < len(rotations)
        require(has_all, lambda: f"{len(rotations)} rotations, expected {max(forward.turns) + 1} or more")
        require(rotary_dim <= k[0].shape[2], lambda: f"rotation of {rotary_dim} of {k[0].shape[2]} values")

    centred = torch.empty((num_tokens, num_channels), dtype=forward.matrix.dtype, device=device)
    log_norms = torch.empty((num_norms, num_tokens), dtype=torch.float32, device=device)
    exponents = torch.empty(num_tokens, dtype=torch.uint8, device=device)
    num_rows = -(-forward.num_rows // PLANES) * PLANES
    integers = torch.full((num_rows, num_tokens), ZERO, dtype=torch.uint8, device=device)
    num_blocks = triton.cdiv(num_tokens, _TOKENS)
    # A divisor of each layer's channels, and so of any cell's. It is the same for all cells of a model, so they share
    # the compiled kernels.
    align = math.gcd(*(x[0].shape[1] * x[0].shape[2] for x in (k, v)), _ALIGNMENT)
    if num_tokens == 0:
        return exponents, integers
    with on_device(device):
        for buffers, first_norm, pairs in ((v, len(k) * k[0].shape[1], 0), (k, 0, rotary_dim // 2)):
            (_, heads, dim), (slot, head, _) = buffers[0].shape, buffers[0].stride()
            first_channel = first_norm * k[0].shape[2]
            centre_kernel[(num_blocks * len(buffers) * heads,)](
                table_on([[x.data_ptr(), turn] for x, turn in zip(buffers, forward.turns, strict=True)], device),
                slots,
                centred if rotations is None else rotations,
                *(forward.mean, centred, log_norms),
                *(num_tokens, num_channels, num_blocks, first_norm, first_channel),
                DTYPE=_FLOATS[buffers[0].dtype],
                HEADS=heads,
                DIM=dim,
                SLOT=slot,
                HEAD=head,
                PAIRS=pairs,
                INTERLEAVED=forward.interleaved,
                ALIGN=align,
                TOKENS=_TOKENS,
                BLOCK=next_power_of_2(dim),
                **COMPILE_OPTIONS,
            )
        round_kernel[(num_blocks,)](
            _product(centred, forward.matrix),
            *(forward.inverse_spread, forward.sensitivity, log_norms, forward.inverse_steps),
            *(forward.limits, forward.bits, forward.high, exponents, integers),
            *(num_tokens, num_channels, num_norms, forward.kept, num_sinks),
            ALIGN=align,
            TOKENS=_TOKENS,
            CHANNELS=_CHANNELS,
            TO_WHOLE=_TO_WHOLE,
            PER_EXPONENT=-1 / math.log(2),
            EXACT=EXACT,
            NOT_FINITE=NOT_FINITE,
            **COMPILE_OPTIONS,
        )
    return exponents, integers


def _product(centred: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return the product in the matrices' type: sums are in float32, and rounded once, as on the CPU.

    ``centred @ matrix`` would not do in bfloat16: by default, torch permits cuBLAS to split a sum, to round the parts
    to bfloat16, and to add them in bfloat16, which suits few tokens and many channels. In a simulation, that gave 2 to
    3% other integers. If the result is in float32, no part is rounded to anything less. A flag forbids it, too, but for
    the whole process, which is SGLang's. In float32 there is nothing to forbid, unless SGLang's option
    ``--enable-tf32-matmul`` is on: then a caller's trial decides.
    """
    if matrix.dtype == torch.float32:
        return centred @ matrix
    if centred.device.type == "cpu":  # in Triton's interpreter: torch has such a product on devices alone
        return (centred.float() @ matrix.float()).to(matrix.dtype)
    return torch.mm(centred, matrix, out_dtype=torch.float32).to(matrix.dtype)


if triton is not None:
    _FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@jit
def centre_kernel(
    p_buffers,  # (layers, 2): the address of (num_slots, heads, dim), and which rotation a layer has
    p_slots,  # (tokens,)
    p_rotations,  # (rotations, tokens, 2 * PAIRS)
    p_mean,  # (num_channels,)
    p_centred,  # (tokens, num_channels)
    p_log_norms,  # (norms, tokens)
    num_tokens,
    num_channels,
    num_blocks,
    first_norm,  # of K or V
    first_channel,
    DTYPE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SLOT: tl.constexpr,
    HEAD: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALIGN: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program handles TOKENS tokens of one head of one layer, of K or V. The logarithm of a norm is NaN if a value
    is not finite."""
    num_channels = num_channels // ALIGN * ALIGN  # which tells the compiler what divides it
    first_channel = first_channel // ALIGN * ALIGN
    i_block, i_head = tl.program_id(0) % num_blocks, tl.program_id(0) // num_blocks
    o_token, o_dim = i_block * TOKENS + tl.arange(0, TOKENS), tl.arange(0, BLOCK)
    m_token, m_dim = o_token < num_tokens, o_dim < DIM
    m_both = m_token[:, None] & m_dim[None, :]
    p_buffers += i_head // HEADS * 2
    p_head = tl.load(p_buffers).to(tl.pointer_type(DTYPE)) + i_head % HEADS * HEAD
    p_head += (tl.load(p_slots + o_token, mask=m_token, other=0) * SLOT)[:, None]
    b_x = tl.load(p_head + o_dim[None, :], mask=m_both, other=0.0).to(tl.float32)
    b_squares = tl.minimum(tl.maximum(tl.sum(b_x * b_x, axis=1), 1e-12), 3e38)
    b_log_norm = tl.log(b_squares) * 0.5 + tl.sum(b_x * 0.0, axis=1)
    tl.store(p_log_norms + (first_norm + i_head) * num_tokens + o_token, b_log_norm, mask=m_token)
    if PAIRS > 0:
        if INTERLEAVED:
            o_pair, o_other, m_first = o_dim // 2, o_dim ^ 1, o_dim % 2 == 0
        else:
            o_pair, o_other, m_first = o_dim % PAIRS, (o_dim + PAIRS) % (2 * PAIRS), o_dim < PAIRS
        m_turned = m_token[:, None] & (o_dim < 2 * PAIRS)[None, :]
        b_other = tl.load(p_head + o_other[None, :], mask=m_turned, other=0.0).to(tl.float32)
        p_rotations += tl.load(p_buffers + 1) * (num_tokens * (2 * PAIRS))
        p_cos = p_rotations + (o_token * (2 * PAIRS))[:, None] + o_pair[None, :]
        b_cos = tl.load(p_cos, mask=m_turned, other=1.0)
        b_sin = tl.load(p_cos + PAIRS, mask=m_turned, other=0.0)
        b_x = b_x * b_cos + tl.where(m_first[None, :], b_other, -b_other) * b_sin
    o_channel = first_channel + i_head * DIM + o_dim
    b_x -= tl.load(p_mean + o_channel, mask=m_dim, other=0.0)[None, :]
    p_row = p_centred + (o_token.to(tl.int64) * num_channels)[:, None]
    tl.store(p_row + o_channel[None, :], round_float32(b_x, p_centred.dtype.element_ty), mask=m_both)


@jit
def _steps(p_product, b_inverse_step, o_channel, num_kept, num_channels, TO_WHOLE: tl.constexpr):
    """Return coefficients in steps, ``(tokens, channels)``. Those that are kept are rounded to whole steps."""
    m_channel = (o_channel < num_channels)[None, :]
    b_x = tl.load(p_product + o_channel[None, :], mask=m_channel, other=0.0).to(tl.float32) * b_inverse_step[:, None]
    return tl.where((o_channel < num_kept)[None, :], b_x + TO_WHOLE - TO_WHOLE, b_x)


@jit
def round_kernel(
    p_product,  # (tokens, num_channels)
    p_inverse_spread,  # (num_channels,)
    p_sensitivity,  # (num_channels + num_norms + 1,)
    p_log_norms,  # (num_norms, tokens)
    p_inverse_steps,  # (256,), by exponent
    p_limits,  # (num_channels,)
    p_bits,  # (num_channels,): of the lower of two integers; 0 for coefficients that have one
    p_high,  # (num_channels,): the row of the higher one
    p_exponents,  # (tokens,)
    p_integers,  # (rows, tokens)
    num_tokens,
    num_channels,
    num_norms,
    num_kept,
    num_sinks,
    ALIGN: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TO_WHOLE: tl.constexpr,
    PER_EXPONENT: tl.constexpr,
    EXACT: tl.constexpr,
    NOT_FINITE: tl.constexpr,
):
    """Each program handles TOKENS tokens. It adds up their costs, then checks whether integers can hold them, then
    writes the integers. What is read past the last token is not stored."""
    o_token, o_c = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, CHANNELS)
    m_token = o_token < num_tokens
    num_channels = num_channels // ALIGN * ALIGN
    p_product += (tl.minimum(o_token, num_tokens - 1).to(tl.int64) * num_channels)[:, None]
    b_cost = tl.zeros((TOKENS,), dtype=tl.float32) + tl.load(p_sensitivity + num_channels + num_norms)
    for i_norm in range(0, num_norms):
        b_log_norm = tl.load(p_log_norms + i_norm * num_tokens + o_token, mask=m_token, other=0.0)
        b_cost += b_log_norm * tl.load(p_sensitivity + num_channels + i_norm)
    for i_channel in range(0, num_channels, CHANNELS):
        o_channel = i_channel + o_c
        m_channel = o_channel < num_channels
        b_x = tl.load(p_product + o_channel[None, :], mask=m_channel[None, :], other=0.0).to(tl.float32)
        b_x *= tl.load(p_inverse_spread + o_channel, mask=m_channel, other=0.0)[None, :]
        b_x = tl.minimum(tl.maximum(b_x, -8.0), 8.0)
        b_x *= tl.load(p_sensitivity + o_channel, mask=m_channel, other=0.0)[None, :]
        b_cost += tl.sum(b_x, axis=1)
    m_finite = b_cost == b_cost
    b_exponent = tl.where(m_finite, tl.minimum(tl.maximum(b_cost * PER_EXPONENT, -8.0), 8.0), 0.0)
    o_exponent = (b_exponent + TO_WHOLE - TO_WHOLE).to(tl.int32) + 128
    b_inverse_step = tl.load(p_inverse_steps + o_exponent)

    b_bad = tl.zeros((TOKENS,), dtype=tl.int32)
    for i_channel in range(0, num_channels, CHANNELS):
        b_n = _steps(p_product, b_inverse_step, i_channel + o_c, num_kept, num_channels, TO_WHOLE)
        b_limit = tl.load(p_limits + i_channel + o_c, mask=i_channel + o_c < num_channels, other=0.0)
        b_bad |= tl.max(tl.where(tl.abs(b_n) <= b_limit[None, :], 0, 1), axis=1)
    m_fits = m_finite & (b_bad == 0) & (o_token >= num_sinks)
    o_exponent = tl.where(m_fits, o_exponent, tl.where(m_finite, EXACT, NOT_FINITE))
    tl.store(p_exponents + o_token, o_exponent.to(tl.uint8), mask=m_token)
    for i_channel in range(0, num_kept, CHANNELS):
        o_channel = i_channel + o_c
        m_kept = o_channel < num_kept
        b_n = _steps(p_product, b_inverse_step, o_channel, num_kept, num_channels, TO_WHOLE)
        b_n = tl.where(m_fits[:, None], b_n, 0.0).to(tl.int32)
        b_bits = tl.load(p_bits + o_channel, mask=m_kept, other=0)[None, :]
        b_half = (1 << b_bits) >> 1
        b_low = tl.where(b_bits > 0, ((b_n + b_half) & (2 * b_half - 1)) - b_half, b_n)
        m_both = m_token[:, None] & m_kept[None, :]
        p_row = p_integers + o_token[:, None]
        tl.store(p_row + o_channel.to(tl.int64)[None, :] * num_tokens, (b_low + 128).to(tl.uint8), mask=m_both)
        o_high = tl.load(p_high + o_channel, mask=m_kept, other=0).to(tl.int64)[None, :]
        b_high = (b_n - b_low) >> b_bits
        tl.store(p_row + o_high * num_tokens, (b_high + 128).to(tl.uint8), mask=m_both & (b_bits > 0))
