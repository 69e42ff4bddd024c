"""KIVI (ICML'24, arXiv 2402.02750)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from benchmarks.codec.baselines.affine import META_DTYPE, from_levels, pack, to_levels, unpack
from benchmarks.codec.method import KV_DTYPE, Shape, TensorMethod, from_bytes, to_bytes
from sgl_kvfetch.types import TensorName

_GROUP = 32
_RESIDUAL_TOKENS = 128


class Kivi(TensorMethod):
    """Quantises K in groups of 32 tokens of one channel, and V in groups of 32 channels of one token. Each group has a
    step and a smallest value in float16 (section 3.2, algorithm 1; groups and residual as in its experiments).

    The residual is not quantised: for K the tokens after the last multiple of 128, for V the last 128. If V's head
    dimension is not a multiple of 32, its groups have the largest size that divides both.
    """

    family = "KIVI"

    def __init__(self, bits: int) -> None:
        self.name = f"kivi-{bits}"
        self._bits = bits

    def encode_tensor(self, tensor: TensorName, values: torch.Tensor) -> Iterator[bytes]:
        num_coded = _coded_tokens(tensor, len(values))
        if num_coded:
            levels, meta = to_levels(_to_groups(tensor, values[:num_coded]), self._bits)
            yield to_bytes(pack(levels, self._bits))
            yield to_bytes(meta)
        yield to_bytes(values[num_coded:])

    def decode_tensor(self, tensor: TensorName, parts: Iterator[bytes], shape: Shape) -> torch.Tensor:
        num_coded = _coded_tokens(tensor, shape[0])
        values = torch.empty(shape, dtype=KV_DTYPE)
        if num_coded:
            coded = values[:num_coded]
            groups = _to_groups(tensor, coded).shape
            levels = unpack(from_bytes(next(parts), torch.uint8, (-1,)), self._bits, coded.numel()).view(groups)
            restored = from_levels(levels, from_bytes(next(parts), META_DTYPE, (*groups[:-1], 2)))
            coded.copy_((restored.movedim(-1, 1) if tensor == "k" else restored).reshape(coded.shape))
        if residual := next(parts):
            values[num_coded:] = from_bytes(residual, KV_DTYPE, values[num_coded:].shape)
        return values


def _coded_tokens(tensor: TensorName, num_tokens: int) -> int:
    """Return how many tokens are quantised."""
    return num_tokens - num_tokens % _RESIDUAL_TOKENS if tensor == "k" else max(0, num_tokens - _RESIDUAL_TOKENS)


def _to_groups(tensor: TensorName, values: torch.Tensor) -> torch.Tensor:
    """Return K as ``(tokens / 32, layers, heads, dim, 32)``, V as ``(tokens, layers, heads, dim / group, group)``."""
    if tensor == "k":
        return torch.unflatten(values, 0, (-1, _GROUP)).movedim(1, -1)
    return torch.unflatten(values, -1, (-1, math.gcd(_GROUP, values.shape[-1])))
