"""ShadowServe (arXiv 2509.16857)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch

from benchmarks.codec.baselines.bins import from_bins, to_bins
from benchmarks.codec.method import KV_DTYPE, Shape, TensorMethod, from_bytes, to_bytes
from sgl_kvfetch.types import TensorName

_CHUNK_TOKENS = 256
_LEVEL = 6


class ShadowServe(TensorMethod):
    """Vector-wise bins, then deflate, which a SmartNIC's engine decompresses.

    Where the paper is silent, we assume: CacheGen's bins, the same for all layers; one byte per integer, layer by layer
    and token by token; separate chunks of 256 tokens (LMCache's default) for K and V; zlib's level 6; the largest
    magnitudes in bfloat16, not compressed.
    """

    family = "ShadowServe"

    def __init__(self, bins: int) -> None:
        self.name = f"shadowserve-{bins}"
        self.source = "ShadowServe (arXiv 2509.16857): vector-wise bins, deflate"
        self._bins = bins

    def encode_tensor(self, tensor: TensorName, values: torch.Tensor) -> Iterator[bytes]:
        for chunk in torch.split(values, _CHUNK_TOKENS):
            integers, largest = to_bins(chunk, [self._bins] * chunk.shape[1])
            yield to_bytes(largest)
            yield zlib.compress(to_bytes(integers), _LEVEL)

    def decode_tensor(self, tensor: TensorName, parts: Iterator[bytes], shape: Shape) -> torch.Tensor:
        num_tokens, num_layers, num_heads, head_dim = shape
        chunks = []
        for start in range(0, num_tokens, _CHUNK_TOKENS):
            size = min(_CHUNK_TOKENS, num_tokens - start)
            largest = from_bytes(next(parts), KV_DTYPE, (num_layers, size, 1))
            integers = from_bytes(zlib.decompress(next(parts)), torch.uint8, (num_layers, size, num_heads * head_dim))
            chunks.append(from_bins(integers, largest, [self._bins] * num_layers, (size, *shape[1:])))
        return torch.cat(chunks)
