"""What a Llama needs of SGLang's CUDA kernels, in Triton: RMSNorm, SwiGLU, RoPE, and storing K and V."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


def rmsnorm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, out: torch.Tensor | None = None, enable_pdl: Any = None
) -> torch.Tensor:
    """Normalise rows ``(..., size)``, and multiply them by ``weight``."""
    out = torch.empty_like(x) if out is None else out
    rows, size = _rows(x)
    strides = [t.stride(-2) if t.dim() > 1 else size for t in (x, out)]
    if rows:
        _rmsnorm[(rows,)](x, weight, out, eps, *strides, size, triton.next_power_of_2(size), num_warps=8)
    return out


def fused_add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, enable_pdl: Any = None
) -> None:
    """Add ``x`` to ``residual``, and write the normalised sum to ``x``."""
    rows, size = _rows(x)
    strides = x.stride(-2), residual.stride(-2)
    if rows:
        _fused_add_rmsnorm[(rows,)](x, residual, weight, eps, *strides, size, triton.next_power_of_2(size), num_warps=8)


def silu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: Any = None) -> torch.Tensor:
    """Multiply the second half of rows by the SiLU of the first."""
    size = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], size)) if out is None else out
    rows, _ = _rows(x)
    if rows:
        block = min(2048, triton.next_power_of_2(size))
        grid = rows, triton.cdiv(size, block)
        _silu_and_mul[grid](x, out, x.stride(-2), out.stride(-2), size, block, num_warps=4)
    return out


def rope(x: torch.Tensor, cache: torch.Tensor, positions: torch.Tensor) -> None:
    """Rotate ``x``, ``(tokens, heads, dim)``, in place, as NeoX does: the halves of a head against each other.
    ``cache``: cosines, then sines, by position."""
    half = cache.shape[-1] // 2
    tokens, heads, dim = x.shape
    assert x.stride(-1) == 1, x.stride()
    assert 2 * half <= dim, (x.shape, cache.shape)
    if tokens:
        blocks = triton.next_power_of_2(heads), half, triton.next_power_of_2(half)
        strides = x.stride(0), x.stride(1), cache.stride(0)
        _rope[(tokens,)](x, cache, positions, *strides, heads, *blocks, num_warps=4)


def store_rows(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, skip: int
) -> None:
    """Store K and V of tokens in their slots, but for those whose slot is ``skip``."""
    k, v, k_cache, v_cache = (x.flatten(1) if x.dim() > 2 else x for x in (k, v, k_cache, v_cache))
    rows, size = k.shape
    if rows:
        strides = k.stride(0), v.stride(0), k_cache.stride(0), v_cache.stride(0)
        block = triton.next_power_of_2(max(size, v.shape[1]))
        _store_rows[(rows,)](k, v, k_cache, v_cache, slots, *strides, skip, size, v.shape[1], block, num_warps=4)


def _rows(x: torch.Tensor) -> tuple[int, int]:
    assert x.stride(-1) == 1, x.stride()
    assert x.dim() <= 2 or x.is_contiguous(), (x.shape, x.stride())
    return x.numel() // x.shape[-1], x.shape[-1]


@triton.jit
def _rmsnorm(x, w, out, eps, stride_x, stride_out, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < D
    v = tl.load(x + row * stride_x + at, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(v * v, 0) / D + eps)
    weight = tl.load(w + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * stride_out + at, (v * scale * weight).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _fused_add_rmsnorm(x, r, w, eps, stride_x, stride_r, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < D
    v = tl.load(x + row * stride_x + at, mask=mask, other=0.0).to(tl.float32)
    v += tl.load(r + row * stride_r + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(r + row * stride_r + at, v.to(r.dtype.element_ty), mask=mask)
    scale = 1.0 / tl.sqrt(tl.sum(v * v, 0) / D + eps)
    weight = tl.load(w + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(x + row * stride_x + at, (v * scale * weight).to(x.dtype.element_ty), mask=mask)


@triton.jit
def _silu_and_mul(x, out, stride_x, stride_out, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < D
    gate = tl.load(x + row * stride_x + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride_x + D + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * stride_out + at, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rope(
    x,
    cache,
    positions,
    stride_token,
    stride_head,
    stride_cache,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    at = tl.arange(0, BLOCK)
    head = tl.arange(0, BLOCK_HEADS)
    in_half = at < HALF
    cos = tl.load(cache + position * stride_cache + at, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(cache + position * stride_cache + HALF + at, mask=in_half, other=0.0).to(tl.float32)[None, :]
    mask = (head < HEADS)[:, None] & in_half[None, :]
    one = x + token * stride_token + head[:, None] * stride_head + at[None, :]
    two = one + HALF
    a = tl.load(one, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(two, mask=mask, other=0.0).to(tl.float32)
    tl.store(one, (a * cos - b * sin).to(x.dtype.element_ty), mask=mask)
    tl.store(two, (b * cos + a * sin).to(x.dtype.element_ty), mask=mask)


@triton.jit
def _store_rows(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    stride_k,
    stride_v,
    stride_kc,
    stride_vc,
    skip,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot != skip:
        at = tl.arange(0, BLOCK)
        x = tl.load(k + row * stride_k + at, mask=at < D_K)
        tl.store(k_cache + slot * stride_kc + at, x, mask=at < D_K)
        y = tl.load(v + row * stride_v + at, mask=at < D_V)
        tl.store(v_cache + slot * stride_vc + at, y, mask=at < D_V)
