"""Keeps a method's first tokens exact: they are attention sinks, with values unlike all others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.codec.method import KV_DTYPE, KVShape, Method, from_bytes, to_bytes
from sgl_kvfetch.types import TENSORS


class WithExactSink(Method):
    """Wraps a method, and additionally stores the exact K and V of the first tokens.

    The inner method still encodes all tokens, since some methods accept only whole pages. It sees copies of the next
    token in place of the first ones, so that a sink does not affect shared scales or frequency tables. Each of the
    first tokens thus costs its exact values and an ordinary token's bits. CacheGen and KVFetcher have a scale for each
    token, so they restore all other tokens to the same values with and without this.
    """

    def __init__(self, inner: Method, num_tokens: int = 1) -> None:
        """``num_tokens``: how many of the first tokens are kept exact. They count with 16 bits per value."""
        assert num_tokens > 0, num_tokens
        kept = "first token" if num_tokens == 1 else f"first {num_tokens} tokens"
        self.name = f"{inner.name}+sink"
        self.source = f"{inner.source}; the {kept} exact"
        self.family = f"{inner.family} + exact sink"
        self._inner = inner
        self._num_tokens = num_tokens

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> Sequence[bytes]:
        sinks = [to_bytes(values[: self._num_tokens]) for values in (k, v)]
        return [*sinks, *self._inner.encode(self._without_sink(k), self._without_sink(v))]

    def decode(self, parts: Sequence[bytes], shape: KVShape) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self._inner.decode(parts[len(TENSORS) :], shape)
        for values, sink in zip((k, v), parts, strict=False):
            exact = values[: self._num_tokens]
            exact[:] = from_bytes(sink, KV_DTYPE, exact.shape)
        return k, v

    def _without_sink(self, values: torch.Tensor) -> torch.Tensor:
        """Replace the sinks by copies of the next token. A context of only sinks is not changed."""
        ordinary = values[self._num_tokens : self._num_tokens + 1]
        if not len(ordinary):
            return values
        return torch.cat([ordinary.expand(self._num_tokens, *values.shape[1:]), values[self._num_tokens :]])
