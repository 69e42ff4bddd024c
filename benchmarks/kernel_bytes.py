"""Computes the least memory traffic of one kernel call, independent of the implementation."""

from __future__ import annotations

from dataclasses import dataclass

_SLOT_BYTES = 8
_VALUE_SCALE_BYTES = 2  # bfloat16: a step width of `restore`
_EXPONENT_BYTES = 1  # of a token's step width, for `restore_klt`
_MATRIX_VALUE_BYTES = 2  # bfloat16
_MEAN_BYTES = _ANGLE_BYTES = 4  # float32


@dataclass(frozen=True)
class Span:
    """The tokens of one call, and their shape. ``coefficients``: coefficients per token, for ``restore_klt``."""

    tokens: int
    heads: int = 8
    dim: int = 128
    layers: int = 3
    coefficients: int = 0

    def __str__(self) -> str:
        coefficients = f", {self.coefficients} coefficients" if self.coefficients else ""
        return f"{self.tokens} tokens, {self.heads} heads of {self.dim}{coefficients}"

    @property
    def num_channels(self) -> int:
        return self.layers * self.heads * self.dim

    @property
    def num_values(self) -> int:
        return self.tokens * self.num_channels


def restore_bytes(span: Span, itemsize: int, num_scales: int | None) -> int:
    """Return the bytes for ``restore``. ``itemsize``: bytes of a value in the KV buffers. ``num_scales``: scales per
    token and layer; None for the exact operation. Only those parts of pictures that hold values count."""
    planes = itemsize if num_scales is None else 1
    scales = span.tokens * span.layers * (num_scales or 0) * _VALUE_SCALE_BYTES
    return span.tokens * _SLOT_BYTES + scales + span.num_values * (planes + itemsize)


def restore_klt_bytes(span: Span, itemsize: int, rotary_dim: int) -> int:
    """Return the bytes for K and V, with ``rotary_dim`` rotated channels per head of K."""
    a_token = span.coefficients + _EXPONENT_BYTES + _SLOT_BYTES + rotary_dim * _ANGLE_BYTES
    a_channel = span.coefficients * _MATRIX_VALUE_BYTES + _MEAN_BYTES
    return span.tokens * a_token + 2 * (span.num_channels * a_channel + span.num_values * itemsize)
