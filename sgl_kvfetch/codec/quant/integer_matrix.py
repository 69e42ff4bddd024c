"""The matrix with which `klt` restores values from integers on CPUs without AMX: int16, for exact sums.

`integer_product.h` says how it is multiplied, and why rows are frequent or rare.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

TILE_CHANNELS = 32  # as in integer_product.h
MOST_RARE_ENTRY = 4095  # as in integer_product.h

_MOST_ERROR = 0.01  # as a share of a channel's noise of rounding, rms: what the matrix may add
_MOST_RARE_ERROR = 0.002  # the same, by the entries of rare rows, which have 13 bits
_RARE_SPREAD = 1.75  # in steps; above it a list of rows to add costs more than a product
_MOST_RARE_ROWS = 2**13 - 2  # numbers of 16 bits count eighths of a row
_LARGEST = 128  # of an integer's magnitude
_LEAST = 2.0**-100  # of a channel's entries, where all are zero


class IntegerMatrix(NamedTuple):
    """A matrix ``(rows, channels)``, rounded to integers. All tensors are contiguous.

    Attributes:
        frequent_rows: int32 ``(pairs, 2)``. Where the number of frequent rows is odd, the last one comes twice, the
            second time with entries of zero.
        shifts: uint8 ``(rows,)``: a row's integers count ``2**shift`` times.
        rare_rows: int32 ``(rare,)``.
        frequent: int16 ``(tiles, pairs, TILE_CHANNELS, 2)``.
        rare: int16 ``(tiles, 1 + rare, TILE_CHANNELS / 2, 2)``, channels half a tile apart. The first row is zero.
        units: float32 ``(2, tiles * TILE_CHANNELS)``: of the entries of frequent rows, and of rare ones.
    """

    frequent_rows: torch.Tensor
    shifts: torch.Tensor
    rare_rows: torch.Tensor
    frequent: torch.Tensor
    rare: torch.Tensor
    units: torch.Tensor

    @classmethod
    def of(
        cls, inverse: torch.Tensor, shifts: torch.Tensor, spread: torch.Tensor, most_error: float = _MOST_ERROR
    ) -> IntegerMatrix | None:
        """Return None if rounding ``inverse`` would add errors that matter.

        Args:
            inverse: ``(rows, channels)``, without shifts.
            shifts: int64 ``(rows,)``.
            spread: float32 ``(kept,)``, in steps, of the first rows' coefficients. The other rows are the higher
                integers of some of these coefficients.
            most_error: The rms error, as a share of the noise that rounding coefficients to steps makes in a channel.
        """
        inverse, kept = inverse.double(), len(spread)
        noise = (inverse[:kept].norm(dim=0) / math.sqrt(12)).clamp_min(_LEAST)
        is_rare = _rare_rows(inverse, spread.double(), noise)
        frequent_rows, rare_rows = (~is_rare).nonzero().squeeze(1), is_rare.nonzero().squeeze(1)
        # Units of frequent rows are powers of two, so entries of a bfloat16 matrix are exact, except the smallest of a
        # channel. Sums fit int32 whatever the integers, down to -128, and although entries are rounded up.
        frequent, rare = inverse[frequent_rows], inverse[rare_rows]
        largest = _LARGEST * 2.0 ** shifts[frequent_rows].double()
        room = torch.minimum(
            (2**15 - 1) / _largest_of(frequent),
            (2**31 - 1 - largest.sum() / 2) / (largest @ frequent.abs()).clamp_min(_LEAST),
        )
        units, rare_units = 0.5 ** room.log2().floor(), _largest_of(rare) / MOST_RARE_ENTRY
        entries, rare_entries = (frequent / units).round(), (rare / rare_units).round()
        error = torch.empty_like(inverse)
        error[frequent_rows], error[rare_rows] = entries * units - frequent, rare_entries * rare_units - rare
        error = (error[:kept] * spread[:, None]).norm(dim=0) / noise
        if not float(error.square().mean().sqrt()) <= most_error:
            return None
        is_odd = len(frequent_rows) % 2
        pairs = torch.cat((frequent_rows, frequent_rows[-1:])) if is_odd else frequent_rows
        by_pair = _tiles(torch.nn.functional.pad(entries, (0, 0, 0, is_odd)))
        by_rare = _tiles(torch.nn.functional.pad(rare_entries, (0, 0, 1, 0)))
        num_tiles, num_rows, _ = by_pair.shape
        return cls(
            pairs.int().view(-1, 2),
            shifts.to(torch.uint8),
            rare_rows.int(),
            by_pair.view(num_tiles, num_rows // 2, 2, TILE_CHANNELS).transpose(2, 3).contiguous(),
            by_rare.view(num_tiles, -1, 2, TILE_CHANNELS // 2).transpose(2, 3).contiguous(),
            torch.nn.functional.pad(torch.stack((units, rare_units)), (0, -inverse.shape[1] % TILE_CHANNELS)).float(),
        )


def _rare_rows(inverse: torch.Tensor, spread: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return which rows are rare, bool ``(rows,)``: of those with little spread as many as errors allow."""
    order = spread.argsort()[: int((spread <= _RARE_SPREAD).sum())][:_MOST_RARE_ROWS]
    units = _largest_of(inverse[order]) / MOST_RARE_ENTRY
    error = (spread[order, None] * units / math.sqrt(12) / noise).square().mean(1).cumsum(0).sqrt()
    is_rare = torch.zeros(len(inverse), dtype=torch.bool)
    is_rare[order[error <= _MOST_RARE_ERROR]] = True
    return is_rare


def _largest_of(rows: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each channel, not zero."""
    return torch.cat((rows.abs(), rows.new_full((1, rows.shape[1]), _LEAST))).amax(0)


def _tiles(entries: torch.Tensor) -> torch.Tensor:
    """Return ``(rows, channels)`` as int16 ``(tiles, rows, TILE_CHANNELS)``."""
    filled = torch.nn.functional.pad(entries.short(), (0, -entries.shape[1] % TILE_CHANNELS))
    num_rows, num_channels = filled.shape
    return filled.view(num_rows, num_channels // TILE_CHANNELS, TILE_CHANNELS).transpose(0, 1).contiguous()
