"""Quantises groups of values to integers of few bits, from smallest to largest, and packs these into bytes."""

from __future__ import annotations

import numpy as np
import torch

from sgl_kvfetch.errors import UnsupportedError

META_DTYPE = torch.float16


def to_levels(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``(..., group)`` values. Return uint8 integers below ``2^bits``, of the same shape, and float16
    ``(..., 2)``: step and smallest value. The stored, rounded step and smallest value are used for quantising.

    Raises UnsupportedError for values beyond float16.
    """
    smallest, largest = values.float().aminmax(dim=-1, keepdim=True)
    meta = torch.cat([(largest - smallest) / ((1 << bits) - 1), smallest], -1).to(META_DTYPE)
    if not bool(torch.isfinite(meta).all()):
        raise UnsupportedError(f"values up to {float(values.float().abs().max()):g} do not fit the scales' float16")
    step, zero = torch.split(meta.float(), 1, -1)
    levels = torch.where(step > 0, (values.float() - zero) / step, 0.0).round()
    return levels.clamp(0, (1 << bits) - 1).to(torch.uint8), meta


def from_levels(levels: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    """Invert ``to_levels``, up to rounding. Return float32."""
    step, zero = torch.split(meta.float(), 1, -1)
    return levels * step + zero


def pack(levels: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack integers below ``2^bits`` in C order, without gaps, the first in the lowest bits. ``bits``: at most 8. The
    last byte is padded with zeros."""
    flat = levels.to(torch.uint8).flatten().numpy()
    digits = np.unpackbits(flat[:, None], axis=1, count=bits, bitorder="little")
    return torch.from_numpy(np.packbits(digits, bitorder="little"))


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpack the first ``count`` integers of a result of ``pack``, in one dimension."""
    digits = np.unpackbits(packed.numpy(), count=count * bits, bitorder="little").reshape(count, bits)
    return torch.from_numpy(np.packbits(digits, axis=1, bitorder="little")[:, 0])
