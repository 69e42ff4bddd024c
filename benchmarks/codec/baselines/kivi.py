"""KIVI (ICML'24, arXiv 2402.02750)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from benchmarks.codec.baselines.affine import META_DTYPE, from_levels, pack, to_levels, unpack
from benchmarks.codec.method import KV_DTYPE, KVShape, Method, from_bytes, to_bytes

_GROUP = 32
_RESIDUAL_TOKENS = 128


class Kivi(Method):
    """Quantises K in groups of 32 tokens of one channel, and V in groups of 32 channels of one token. Each group has a
    step and a smallest value in float16 (section 3.2, algorithm 1; groups and residual as in its experiments).

    The residual is not quantised: for K the tokens after the last multiple of 128, for V the last 128. If V's head
    dimension is not a multiple of 32, its groups have the largest size that divides both.
    """

    family = "KIVI"

    def __init__(self, bits: int) -> None:
        self.name = f"kivi-{bits}"
        self.source = f"KIVI (arXiv 2402.02750, 3.2), {bits} bits, groups of 32, residual of 128 tokens"
        self._bits = bits

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> Sequence[bytes]:
        k_coded, v_coded = _coded_tokens(k.shape[0])
        return [
            *self._encode_groups(_k_groups(k[:k_coded])),
            to_bytes(k[k_coded:]),
            *self._encode_groups(_v_groups(v[:v_coded])),
            to_bytes(v[v_coded:]),
        ]

    def decode(self, parts: Sequence[bytes], shape: KVShape) -> tuple[torch.Tensor, torch.Tensor]:
        k_shape, v_shape = shape.of_tensor("k"), shape.of_tensor("v")
        k_coded, v_coded = _coded_tokens(shape.num_tokens)
        num_groups = k_coded // _GROUP
        k = self._decode_groups(parts[:2], (num_groups, *k_shape[1:], _GROUP)).movedim(-1, 1)
        group = math.gcd(_GROUP, shape.v_head_dim)
        v = self._decode_groups(parts[3:5], (v_coded, *v_shape[1:3], shape.v_head_dim // group, group))
        return (
            _with_residual(k.reshape(k_coded, *k_shape[1:]), parts[2], k_shape),
            _with_residual(v.reshape(v_coded, *v_shape[1:]), parts[5], v_shape),
        )

    def _encode_groups(self, groups: torch.Tensor) -> tuple[bytes, bytes]:
        if not groups.numel():
            return b"", b""
        levels, meta = to_levels(groups, self._bits)
        return to_bytes(pack(levels, self._bits)), to_bytes(meta)

    def _decode_groups(self, parts: Sequence[bytes], shape: tuple[int, ...]) -> torch.Tensor:
        if not math.prod(shape):
            return torch.empty(shape)
        packed = from_bytes(parts[0], torch.uint8, (-1,))
        levels = unpack(packed, self._bits, math.prod(shape)).view(shape)
        return from_levels(levels, from_bytes(parts[1], META_DTYPE, (*shape[:-1], 2)))


def _coded_tokens(num_tokens: int) -> tuple[int, int]:
    """Return how many tokens of K and of V are quantised."""
    return num_tokens - num_tokens % _RESIDUAL_TOKENS, max(0, num_tokens - _RESIDUAL_TOKENS)


def _k_groups(k: torch.Tensor) -> torch.Tensor:
    """Return ``(tokens / 32, layers, heads, dim, 32)``."""
    return k.reshape(k.shape[0] // _GROUP, _GROUP, *k.shape[1:]).movedim(1, -1)


def _v_groups(v: torch.Tensor) -> torch.Tensor:
    """Return ``(tokens, layers, heads, dim / group, group)``."""
    return v.unflatten(-1, (-1, math.gcd(_GROUP, v.shape[-1])))


def _with_residual(coded: torch.Tensor, residual: bytes, shape: tuple[int, ...]) -> torch.Tensor:
    values = torch.empty(shape, dtype=KV_DTYPE)
    values[: len(coded)] = coded.to(KV_DTYPE)
    if residual:
        values[len(coded) :] = from_bytes(residual, KV_DTYPE, (shape[0] - len(coded), *shape[1:]))
    return values
