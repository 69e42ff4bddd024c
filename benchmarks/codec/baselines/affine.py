"""Integers of few bits between the smallest and the largest of a group, and their packing into bytes."""

from __future__ import annotations

import torch

from sgl_kvfetch.errors import UnsupportedError

META_DTYPE = torch.float16


def to_levels(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``(..., group)`` -> integers of the same shape, uint8 below ``2^bits``, and ``(..., 2)`` float16: step and
    smallest value. Rounds with the step and smallest value as stored.

    Raises UnsupportedError for values beyond float16.
    """
    smallest, largest = values.float().aminmax(dim=-1, keepdim=True)
    meta = torch.cat([(largest - smallest) / ((1 << bits) - 1), smallest], -1).to(META_DTYPE)
    if not bool(torch.isfinite(meta).all()):
        raise UnsupportedError(f"values up to {float(values.float().abs().max()):g} do not fit the scales' float16")
    step, zero = meta.float().split(1, -1)
    levels = torch.where(step > 0, (values.float() - zero) / step, 0.0).round()
    return levels.clamp(0, (1 << bits) - 1).to(torch.uint8), meta


def from_levels(levels: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    """The inverse, up to rounding: float32."""
    step, zero = meta.float().split(1, -1)
    return levels * step + zero


def pack(levels: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers below ``2^bits`` in C order, ``8 / bits`` to a byte, the first lowest. ``bits`` divides 8; the last byte
    is filled up with zeros."""
    per_byte = 8 // bits
    flat = levels.flatten()
    flat = torch.nn.functional.pad(flat, (0, -len(flat) % per_byte))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return (flat.view(-1, per_byte) << shifts).sum(1).to(torch.uint8)


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The first ``count`` integers of what ``pack`` made, in one dimension."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return ((packed.unsqueeze(1) >> shifts) & ((1 << bits) - 1)).flatten()[:count]
