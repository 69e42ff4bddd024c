"""FP8, as LMCache stores it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from benchmarks.codec.method import KV_DTYPE, Shape, TensorMethod, from_bytes, to_bytes
from sgl_kvfetch.types import TensorName

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
_CHUNK_TOKENS = 256


class Fp8(TensorMethod):
    """Each value in E4M3 (four bits of exponent, three of mantissa) without a scale: LMCache's serde ``fp8``, SGLang's
    and vLLM's ``--kv-cache-dtype fp8_e4m3`` with the scale 1. Larger values than 448 become 448."""

    name, family = "fp8", "FP8"
    source = "LMCache's serde fp8: E4M3 without a scale"

    def encode_tensor(self, tensor: TensorName, values: torch.Tensor) -> Iterator[bytes]:
        yield to_bytes(to_fp8(values.float()))

    def decode_tensor(self, tensor: TensorName, parts: Iterator[bytes], shape: Shape) -> torch.Tensor:
        return from_fp8(next(parts), shape).to(KV_DTYPE)


class AsymK16V8(TensorMethod):
    """K in bfloat16, V in E4M3, which a float32 scale for each chunk brings to its largest magnitude (LMCache's
    ``kv_codec/asym_k16_v8.py`` with its default, ``PER_TENSOR``).

    A chunk is LMCache's: 256 tokens of all layers. Its header of some hundred bytes is not counted.
    """

    name, family = "asym-k16-v8", "K16 V8"
    source = "LMCache's asym_k16_v8: K in bfloat16, V in E4M3 with a scale for each chunk"

    def encode_tensor(self, tensor: TensorName, values: torch.Tensor) -> Iterator[bytes]:
        if tensor == "k":
            yield to_bytes(values)
            return
        for chunk in torch.split(values.float(), _CHUNK_TOKENS):
            scale = (chunk.abs().max() / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
            yield to_bytes(scale.reshape(1))
            yield to_bytes(to_fp8(chunk / scale))

    def decode_tensor(self, tensor: TensorName, parts: Iterator[bytes], shape: Shape) -> torch.Tensor:
        if tensor == "k":
            return from_bytes(next(parts), KV_DTYPE, shape)
        restored = torch.empty(shape, dtype=KV_DTYPE)
        for chunk in torch.split(restored, _CHUNK_TOKENS):
            scale = from_bytes(next(parts), torch.float32, (1,))
            chunk.copy_(from_fp8(next(parts), chunk.shape) * scale)
        return restored


def to_fp8(values: torch.Tensor) -> torch.Tensor:
    """Return E4M3; values beyond its range become its largest."""
    return values.clamp(-_LARGEST, _LARGEST).to(FP8)


def from_fp8(data: bytes, shape: Sequence[int]) -> torch.Tensor:
    """Return float32 of ``shape``."""
    return from_bytes(data, FP8, shape).float()
