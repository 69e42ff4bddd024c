"""Bytes that must cross memory for one call of a kernel, however it is written."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_kvfetch.triton_kernels.tuning import Operation

_SLOT_BYTES = 8
_SCALE_BYTES = 2  # bfloat16
_MATRIX_VALUE_BYTES = 2  # bfloat16
_MEAN_BYTES = _ANGLE_BYTES = 4  # float32


@dataclass(frozen=True)
class Span:
    """The tokens of one call, and their shape."""

    tokens: int
    heads: int = 8
    dim: int = 128
    layers: int = 3

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.heads} heads of {self.dim}"

    @property
    def num_values(self) -> int:
        return self.tokens * self.layers * self.heads * self.dim


def least_bytes(operation: Operation, span: Span, itemsize: int, *, block_heads: int = 1, rotary_dim: int = 0) -> int:
    """``itemsize``: of a value in the KV buffers. Pictures count as far as they hold values.

    ``block_heads``, ``rotary_dim``: heads of a matrix, and channels that are turned, of ``restore_klt``.
    """
    vectors = span.tokens * span.layers
    num_bytes = span.tokens * _SLOT_BYTES
    match operation:
        case "restore_exact" | "pack_exact":
            return num_bytes + span.num_values * 2 * itemsize
        case "restore_symmetric" | "pack_head":
            num_bytes += vectors * span.heads * _SCALE_BYTES
        case "pack_layer":
            num_bytes += vectors * _SCALE_BYTES
        case "restore_klt" | "restore_klt_interleaved":
            channels = span.layers * span.heads * span.dim
            num_bytes += vectors * _SCALE_BYTES + span.tokens * rotary_dim * _ANGLE_BYTES
            num_bytes += channels * (block_heads * span.dim * _MATRIX_VALUE_BYTES + _MEAN_BYTES)
    return num_bytes + span.num_values * (1 + itemsize)
