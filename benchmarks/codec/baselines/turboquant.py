"""TurboQuant (ICLR'26, arXiv 2504.19874), as its paper has it and as vLLM and LMCache ship it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch

from benchmarks.codec.baselines.affine import META_DTYPE, from_levels, pack, to_levels, unpack
from benchmarks.codec.baselines.fp8 import from_fp8, to_fp8
from benchmarks.codec.method import KV_DTYPE, Shape, TensorMethod, from_bytes, to_bytes
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.types import TensorName

Kind = Literal["fp8", "mse", "uniform"]
_SEED = 42
_ITERATIONS = 500


class Coder(NamedTuple):
    """How one of K and V is stored."""

    kind: Kind
    bits: int


class TurboQuant(TensorMethod):
    """Keys: each head's vector is divided by its norm and turned at random, so that each coordinate is nearly normal
    with the variance 1 / dim; each is stored as the nearest of ``2^bits`` centroids of Lloyd and Max, and the norm as
    float16 (the paper's algorithm 1, ``TurboQuant_mse``).

    vLLM and LMCache ship presets (``quantization/turboquant/config.py``, ``serde/turboquant``): keys as above, or in
    FP8 without a scale; values in uniform steps from smallest to largest, with both as float16 for each token and head;
    the first two and last two layers in bfloat16. All of it is counted. A slot's one byte of padding is not: it is
    needed only for odd sizes.

    The rotation is a Hadamard matrix with random signs, which differ by layer, as both ship it; the paper's is a random
    orthogonal matrix. Restored directions get the norm 1 again before they are scaled ("norm correction"; the presets
    have it, the paper does not). Left out: QJL's bit for unbiased products (algorithm 2), which both leave out too.
    """

    def __init__(self, name: str, family: str, coders: tuple[Coder, Coder], exact_layers: int) -> None:
        """``coders``: of K and of V. ``exact_layers``: how many first and how many last layers stay in bfloat16."""
        self.name, self.family = name, family
        self._coders: dict[TensorName, Coder] = {"k": coders[0], "v": coders[1]}
        self._exact_layers = exact_layers

    def encode_tensor(self, tensor: TensorName, values: torch.Tensor) -> Iterator[bytes]:
        coded = self._coded(values.shape[1])
        if coded.start:
            yield to_bytes(torch.cat((values[:, : coded.start], values[:, coded.stop :]), 1))
        kind, bits = self._coders[tensor]
        x = values[:, coded].float()
        if kind == "fp8":
            yield to_bytes(to_fp8(x))
        elif kind == "uniform":
            levels, meta = to_levels(x, bits)
            yield to_bytes(pack(levels, bits))
            yield to_bytes(meta)
        else:
            norms, directions = norms_of(x)
            scaled = turned(directions, coded.start) * math.sqrt(x.shape[-1])
            yield to_bytes(pack(nearest(scaled, centroids(bits)), bits))
            yield to_bytes(norms)

    def decode_tensor(self, tensor: TensorName, parts: Iterator[bytes], shape: Shape) -> torch.Tensor:
        values = torch.empty(shape, dtype=KV_DTYPE)
        coded = self._coded(shape[1])
        if count := coded.start:
            exact = from_bytes(next(parts), KV_DTYPE, (shape[0], 2 * count, *shape[2:]))
            values[:, :count], values[:, coded.stop :] = exact[:, :count], exact[:, count:]
        values[:, coded] = self._decode_layers(tensor, parts, values[:, coded].shape, coded.start).to(KV_DTYPE)
        return values

    def _decode_layers(
        self, tensor: TensorName, parts: Iterator[bytes], shape: Sequence[int], first_layer: int
    ) -> torch.Tensor:
        kind, bits = self._coders[tensor]
        if kind == "fp8":
            return from_fp8(next(parts), shape)
        integers = unpack(from_bytes(next(parts), torch.uint8, (-1,)), bits, math.prod(shape)).view(*shape)
        if kind == "uniform":
            return from_levels(integers, from_bytes(next(parts), META_DTYPE, (*shape[:-1], 2)))
        directions = with_norm_1(centroids(bits)[integers.long()])
        norms = from_bytes(next(parts), META_DTYPE, (*shape[:-1], 1)).float()
        return turned_back(directions, first_layer) * norms

    def _coded(self, num_layers: int) -> slice:
        """Return the layers that are not kept exact."""
        exact = min(self._exact_layers, num_layers // 2)
        return slice(exact, num_layers - exact)


def turboquant_methods() -> list[TurboQuant]:
    """Return two of the shipped presets, and the paper's MSE quantiser for both K and V."""
    presets = "TurboQuant, presets"
    return [
        TurboQuant("turboquant-k8v4", presets, (Coder("fp8", 8), Coder("uniform", 4)), 2),
        TurboQuant("turboquant-4bit", presets, (Coder("mse", 4), Coder("uniform", 4)), 2),
        TurboQuant("turboquant-mse-4", "TurboQuant, MSE for K and V", (Coder("mse", 4),) * 2, 0),
    ]


def norms_of(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return norms, float16 ``(..., 1)``, and directions of vectors. A vector of zeros has the direction 0.

    Raises UnsupportedError for norms beyond float16.
    """
    norms = values.norm(dim=-1, keepdim=True)
    stored = norms.to(META_DTYPE)
    if not bool(torch.isfinite(stored).all()):
        raise UnsupportedError(f"norms up to {float(norms.max()):g} do not fit float16")
    return stored, torch.where(norms > 0, values / norms, 0.0)


def with_norm_1(directions: torch.Tensor) -> torch.Tensor:
    scaled: torch.Tensor = directions / directions.norm(dim=-1, keepdim=True).clamp_min(1e-10)
    return scaled


def nearest(values: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Return the index of the nearest of ``levels``, which ascend, uint8."""
    middles = (levels[1:] + levels[:-1]) / 2
    return torch.bucketize(values.contiguous(), middles).to(torch.uint8)


@lru_cache
def centroids(bits: int) -> torch.Tensor:
    """Return the ``2^bits`` values that represent a standard normal variable with the least squared error: each is the
    mean between the middles to its neighbours (Lloyd and Max)."""
    normal: Any = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1.0)  # torch has no types for it
    count = 1 << bits
    levels: torch.Tensor = normal.icdf((torch.arange(count, dtype=torch.float64) + 0.5) / count)
    for _ in range(_ITERATIONS):
        middles = (levels[1:] + levels[:-1]) / 2
        density = torch.cat((torch.zeros(1), normal.log_prob(middles).exp(), torch.zeros(1)))
        below = torch.cat((torch.zeros(1), normal.cdf(middles), torch.ones(1)))
        levels = (density[:-1] - density[1:]) / (below[1:] - below[:-1])
    return levels.float()


@lru_cache
def _rotation(dim: int, layer: int) -> torch.Tensor:
    if dim & (dim - 1):
        raise UnsupportedError(f"turboquant: head dimension is {dim}; expected a power of two")
    generator = torch.Generator().manual_seed(_SEED + 1337 * layer)
    signs = torch.randint(0, 2, (dim,), generator=generator).float() * 2 - 1
    hadamard = torch.ones(1, 1)  # Sylvester's
    while len(hadamard) < dim:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    return signs[:, None] * (hadamard / math.sqrt(dim))


def turned(values: torch.Tensor, first_layer: int) -> torch.Tensor:
    """Turn ``(tokens, layers, heads, dim)``, each layer by its own rotation."""
    return torch.stack([x @ _rotation(x.shape[-1], first_layer + i) for i, x in enumerate(values.unbind(1))], 1)


def turned_back(values: torch.Tensor, first_layer: int) -> torch.Tensor:
    """Invert ``turned``."""
    return torch.stack([x @ _rotation(x.shape[-1], first_layer + i).T for i, x in enumerate(values.unbind(1))], 1)
