"""A method's first tokens kept exact: attention sinks, whose values are unlike all others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.codec.method import KV_DTYPE, KVShape, Method, from_bytes, to_bytes
from sgl_kvfetch.types import TENSORS


class WithExactSink(Method):
    """Another method, with K and V of the first tokens as they are beside what it stores.

    The other method codes as many tokens as without, since some code only whole pages. In the place of the first tokens
    it sees copies of the next one, so that a sink widens no scale that tokens share, and enters no frequency table.
    The first tokens thus cost their exact values and an ordinary token's bits each. CacheGen and KVFetcher have a scale
    for each token: they restore all other tokens to the same values with and without this.
    """

    def __init__(self, inner: Method, num_tokens: int = 1) -> None:
        """``num_tokens``: of the context's start. They are counted at 16 bits a value."""
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
        """A context of sinks alone is left as it is."""
        ordinary = values[self._num_tokens : self._num_tokens + 1]
        if not len(ordinary):
            return values
        return torch.cat([ordinary.expand(self._num_tokens, *values.shape[1:]), values[self._num_tokens :]])
