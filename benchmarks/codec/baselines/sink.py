"""Keeps a method's first token exact: it is an attention sink, with values unlike all others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.codec.method import KV_DTYPE, KVShape, Method, from_bytes, to_bytes


class WithExactSink(Method):
    """Wraps a method, and additionally stores the exact K and V of the first token, of two or more.

    The inner method still encodes all tokens, since some methods accept only whole pages. It sees a copy of the second
    token in place of the first, so that the sink does not affect shared scales or frequency tables. The first token
    thus costs its exact values and an ordinary token's bits. CacheGen and KVFetcher have a scale for each token, so
    they restore all other tokens to the same values with and without this.
    """

    def __init__(self, inner: Method) -> None:
        self.name = f"{inner.name}+sink"
        self.source = f"{inner.source}; the first token exact"
        self.family = f"{inner.family} + exact sink"
        self._inner = inner

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> Sequence[bytes]:
        without = (torch.cat([values[1:2], values[1:]]) for values in (k, v))
        return [to_bytes(k[0]), to_bytes(v[0]), *self._inner.encode(*without)]

    def decode(self, parts: Sequence[bytes], shape: KVShape) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self._inner.decode(parts[2:], shape)
        for values, sink in zip((k, v), parts, strict=False):
            values[0] = from_bytes(sink, KV_DTYPE, values.shape[1:])
        return k, v
