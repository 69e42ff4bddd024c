"""Rotary position embedding, as the engine applies it: removed from K before quantisation, applied again after.

A rotated channel of K has no mean and a large spread; without the rotation, its spread is small. The order of
operations is that of SGLang's PyTorch code (``srt/layers/rotary_embedding``). Calibration finds each layer's rotation
(`calibrate.layer_map`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import msgspec
import torch

_MOST_TABLES, _MOST_BYTES = 32, 32 << 20  # kept of a model's rotations, for spans of so many tokens
_SPAN_TOKENS = 1024
_LEAST, _MOST = 1e-6, 1e6  # of factors: their squares are float32


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """One rotation, of all heads of some layers of a model.

    Position p rotates pair i by ``p / position_divisor * inv_freq[i]`` and scales it by ``attention_scaling``.
    ``inv_freq`` has half the rotary dimension's entries, each a float32. ``interleaved``: pair i is channels
    ``(2i, 2i + 1)`` (GPT-J); otherwise ``(i, i + rotary_dim / 2)`` (NeoX). Channels from ``rotary_dim`` on are not
    rotated. Raises ValueError for invalid numbers.
    """

    inv_freq: tuple[float, ...]
    attention_scaling: float = 1.0
    interleaved: bool = False
    position_divisor: float = 1.0  # not merged into inv_freq: float32 rounds p / d * f and p * (f / d) differently

    def __post_init__(self) -> None:
        if not self.inv_freq or not all(abs(f) <= _MOST for f in self.inv_freq):
            raise ValueError(
                f"inv_freq has {len(self.inv_freq)} entries; expected one or more, all numbers up to {_MOST:g}"
            )
        for name in ("attention_scaling", "position_divisor"):
            value = getattr(self, name)
            if not _LEAST <= value <= _MOST:
                raise ValueError(f"{name} = {value}: expected a number from {_LEAST:g} to {_MOST:g}")

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.inv_freq)

    def table(self, first_token: int, num_tokens: int, device: torch.device | str | None = None) -> torch.Tensor:
        """Return ``(tokens, rotary_dim)`` float32: cosines, then sines, of the positions from ``first_token`` on.

        These are rows of SGLang's ``cos_sin_cache``, including ``attention_scaling``.
        """
        positions = torch.arange(first_token, first_token + num_tokens, dtype=torch.float32, device=device)
        inv_freq = torch.tensor(self.inv_freq, dtype=torch.float32, device=device)
        angles = (positions / self.position_divisor)[:, None] * inv_freq
        return torch.cat((angles.cos(), angles.sin()), dim=-1) * self.attention_scaling


@dataclass(frozen=True, eq=False)
class Rotations:
    """The rotations of a model's layers.

    They differ in their frequencies alone: all turn the same pairs of channels, so a kernel reads one layer's rows of a
    table or another's. A layer that turns nothing turns by angles of 0.

    ``ropes``: different ones. ``of_layers``: for each layer whose K and V are coded, which of ``ropes`` turns its K.
    """

    ropes: tuple[Rope, ...]
    of_layers: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len({(rope.rotary_dim, rope.interleaved) for rope in self.ropes}) == 1, self.ropes
        assert all(0 <= which < len(self.ropes) for which in self.of_layers), self.of_layers

    @property
    def rotary_dim(self) -> int:
        return self.ropes[0].rotary_dim

    @property
    def interleaved(self) -> bool:
        return self.ropes[0].interleaved

    def of(self, layers: range) -> tuple[int, ...]:
        """Return which table turns each of some layers."""
        return self.of_layers[layers.start : layers.stop]

    def table(self, first_token: int, num_tokens: int) -> torch.Tensor:
        """Return `make_table` on the CPU. All cells of a span need the same one, so the last ones are kept."""
        return self._kept(first_token, num_tokens)

    @cached_property
    def _kept(self) -> Callable[[int, int], torch.Tensor]:
        span_bytes = len(self.ropes) * self.rotary_dim * _SPAN_TOKENS * torch.float32.itemsize
        return lru_cache(max(1, min(_MOST_TABLES, _MOST_BYTES // span_bytes)))(self.make_table)

    def make_table(self, first_token: int, num_tokens: int, device: torch.device | str | None = None) -> torch.Tensor:
        """Return ``(ropes, tokens, rotary_dim)`` float32: the `Rope.table` of each."""
        return torch.stack([rope.table(first_token, num_tokens, device) for rope in self.ropes])

    def inverse_table(self, first_token: int, num_tokens: int) -> torch.Tensor:
        """Return `table` as rotations by the opposite angles need it, which undo both the rotation and the scaling."""
        tables = self.table(first_token, num_tokens)
        return torch.stack([x / rope.attention_scaling**2 for x, rope in zip(tables, self.ropes, strict=True)])


def rotate(x: torch.Tensor, table: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotate ``x``, float32 ``(tokens, ..., dim)``. ``table``: the rows of ``Rope.table`` for its tokens."""
    return _turned(x, table, rope, 1)


def unrotate(x: torch.Tensor, table: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Undo ``rotate``, up to rounding."""
    return _turned(x, table / rope.attention_scaling**2, rope, -1)


def _turned(x: torch.Tensor, table: torch.Tensor, rope: Rope, sign: int) -> torch.Tensor:
    """Rotate ``x`` by the angles of ``table`` times ``sign``."""
    dim = rope.rotary_dim
    assert len(table) == len(x), (table.shape, x.shape)
    assert x.shape[-1] >= dim, (x.shape, dim)
    # Broadcast over all dimensions between tokens and channels.
    cos, sin = table.view(len(x), *[1] * (x.ndim - 2), -1).chunk(2, dim=-1)
    first, second = (x[..., :dim:2], x[..., 1:dim:2]) if rope.interleaved else x[..., :dim].chunk(2, dim=-1)
    turned = (first * cos).addcmul_(second, sin, value=-sign), (second * cos).addcmul_(first, sin, value=sign)
    rotated = torch.stack(turned, -1).flatten(-2) if rope.interleaved else torch.cat(turned, -1)
    return rotated if dim == x.shape[-1] else torch.cat((rotated, x[..., dim:]), -1)
