"""Computes the least memory traffic of one kernel call, independent of the implementation."""

from __future__ import annotations

from dataclasses import dataclass

_SLOT_BYTES = 8
_EXPONENT_BYTES = 1  # of a token's step width
_MATRIX_VALUE_BYTES = 2  # bfloat16
_MEAN_BYTES = _ANGLE_BYTES = 4  # float32


@dataclass(frozen=True)
class Span:
    """The tokens of one call, and their shape. ``coefficients``: per token."""

    tokens: int
    coefficients: int
    heads: int
    dim: int = 128
    layers: int = 3

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.heads} heads of {self.dim}, {self.coefficients} coefficients"

    @property
    def num_channels(self) -> int:
        return self.layers * self.heads * self.dim

    @property
    def num_values(self) -> int:
        return self.tokens * self.num_channels


def restore_klt_bytes(span: Span, itemsize: int, rotary_dim: int) -> int:
    """Return the bytes for K and V. ``itemsize``: bytes of a value in the KV buffers. ``rotary_dim``: rotated channels
    per head of K."""
    a_token = span.coefficients + _EXPONENT_BYTES + _SLOT_BYTES + rotary_dim * _ANGLE_BYTES
    a_channel = span.coefficients * _MATRIX_VALUE_BYTES + _MEAN_BYTES
    return span.tokens * a_token + 2 * (span.num_channels * a_channel + span.num_values * itemsize)
