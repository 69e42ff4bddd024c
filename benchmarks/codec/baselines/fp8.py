"""FP8, as LMCache stores it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from benchmarks.codec.method import KV_DTYPE, Shape, TensorMethod, from_bytes, to_bytes
from sgl_kvfetch.types import TensorName

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max


class Fp8(TensorMethod):
    """Each value in E4M3 (four bits of exponent, three of mantissa) without a scale: LMCache's serde ``fp8``, SGLang's
    and vLLM's ``--kv-cache-dtype fp8_e4m3`` with the scale 1. Larger values than 448 become 448."""

    name, family = "fp8", "FP8"

    def encode_tensor(self, tensor: TensorName, values: torch.Tensor) -> Iterator[bytes]:
        yield to_bytes(to_fp8(values.float()))

    def decode_tensor(self, tensor: TensorName, parts: Iterator[bytes], shape: Shape) -> torch.Tensor:
        return from_fp8(next(parts), shape).to(KV_DTYPE)


def to_fp8(values: torch.Tensor) -> torch.Tensor:
    """Return E4M3; values beyond its range become its largest."""
    return values.clamp(-_LARGEST, _LARGEST).to(FP8)


def from_fp8(data: bytes, shape: Sequence[int]) -> torch.Tensor:
    """Return float32 of ``shape``."""
    return from_bytes(data, FP8, shape).float()
