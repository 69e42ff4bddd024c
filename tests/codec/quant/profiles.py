"""Profiles of models that are only numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.layer_maps import plain_layers
from sgl_kvfetch.codec.calibrate.fit import transform_of
from sgl_kvfetch.codec.quant import klt
from sgl_kvfetch.codec.quant.base import CellPlace, CellValues
from sgl_kvfetch.codec.quant.klt import forward_of
from sgl_kvfetch.codec.quant.layer_map import LayerMap
from sgl_kvfetch.codec.quant.profile import Calibration, CellProfile, MeasuredKind, MeasuredStep, Profile
from sgl_kvfetch.codec.quant.rope import Rope, rotate
from sgl_kvfetch.types import CellGrid

CALIBRATION = Calibration("numbers", "0" * 32, "none", 2, 64, 32)
CURVE = (MeasuredStep(0.25, 1e-5, 2.0), MeasuredStep(1.0, 1e-4, 1.0), MeasuredStep(4.0, 1e-2, 0.3))
KINDS = (
    MeasuredKind("chats", 4, 1, True, 1.0, (1e-5, 1e-4, 1e-2)),
    MeasuredKind("tables", 3, 1, False, 0.5, (2e-5, 3e-4, 9e-3)),
)


def make_profile(
    *,
    num_layers: int = 3,
    num_heads: int = 4,
    head_dim: int = 16,
    v_head_dim: int | None = None,
    cell_layers: int = 3,
    cell_heads: int = 4,
    rope: Rope | None = None,
    layers: LayerMap | None = None,
    num_sinks: int = 0,
) -> Profile:
    """Channels as ``values_of`` draws them. Errors in them cost differently, and in all tokens alike. ``layers``: by
    default, all rotate by ``rope``."""
    v_head_dim = v_head_dim or head_dim
    grid = CellGrid(num_layers, num_heads, cell_layers, cell_heads)
    cells = {key: _cell(grid, key, head_dim, v_head_dim) for key in grid.cells()}
    layers = layers or plain_layers(num_layers, rope)
    return Profile(grid, head_dim, v_head_dim, cells, layers, num_sinks, CURVE, 1.0, CALIBRATION, KINDS)


def _cell(grid: CellGrid, key: tuple[int, int], k_head_dim: int, v_head_dim: int) -> CellProfile:
    layers, heads = grid.layers(key[0]), grid.heads(key[1])
    sizes = [len(heads) * dim for dim in (k_head_dim, v_head_dim) for _ in layers]
    mix = _mixing(sum(sizes), key)
    covariance = mix.T @ mix
    information = [x.T @ x for x in (_mixing(n, (*key, i)) for i, n in enumerate(sizes))]
    transform = transform_of(covariance, information)
    inverse = transform.inverse.to(torch.bfloat16)
    weights = [w.float() for w in transform.weights]
    forward = forward_of(inverse, weights).double()
    spread = (forward.T @ covariance @ forward).diagonal().sqrt().float()
    return CellProfile(
        inverse=inverse,
        k_weight=torch.stack(weights[: len(layers)]),
        v_weight=torch.stack(weights[len(layers) :]),
        mean=_normal((sum(sizes),), (*key, -1)).float(),
        spread=spread,
        reach=torch.stack((2.5 * spread, 8 * spread)),
        sensitivity=torch.zeros(sum(sizes) + 2 * len(layers) * len(heads) + 1),
    )


def values_of(profile: Profile, num_tokens: int, first_token: int = 0) -> CellValues:
    """K and V of all layers and heads, ``(tokens, layers, heads, dim)`` float32, K rotated to its positions."""
    grid = profile.grid
    k = torch.empty(num_tokens, grid.num_layers, grid.num_heads, profile.k_head_dim)
    v = torch.empty(num_tokens, grid.num_layers, grid.num_heads, profile.v_head_dim)
    for key, cell in profile.cells.items():
        sources = _normal((num_tokens, cell.num_channels), (*key, -2))
        x = (sources @ _mixing(cell.num_channels, key)).float() + cell.mean
        part = CellValues(k, v).cell(grid.layers(key[0]), grid.heads(key[1]))
        for whole, channels in zip(part, torch.split(x, [y[0].numel() for y in part], dim=1), strict=True):
            whole.copy_(channels.view(whole.shape))
    for index, number in enumerate(profile.layers.coded):
        rope = profile.layers.rope_of(number)
        if rope is not None:
            k[:, index] = rotate(k[:, index], rope.table(first_token, num_tokens), rope)
    return CellValues(k, v)


class WorstProducts(TorchDispatchMode):
    """Products in bfloat16 as the worst CPU may compute them: sums in float32, rounded to either neighbour."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.ops.aten.mm.default or args[0].dtype != torch.bfloat16:
            return function(*args, **(kwargs or {}))
        a, b = (x.double() for x in args)
        exact = a @ b
        sign = torch.randint(2, exact.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
        nearest = (exact + sign * len(b) * 2.0**-24 * (a.abs() @ b.abs())).bfloat16()
        towards = torch.where(nearest.double() < exact, torch.inf, -torch.inf).bfloat16()
        return torch.where(sign > 0, nearest, nearest.nextafter(towards))


PRODUCTS = ("of this CPU", "in float32", "with AMX at its worst")


@contextmanager
def products(how: str) -> Iterator[None]:
    """Let new quantisers multiply as one of the kinds of CPUs does, of ``PRODUCTS``."""
    if how == PRODUCTS[0]:
        yield
        return
    has_amx = how == PRODUCTS[2]
    with (
        patch.multiple(klt, _HAS_INTEGERS=has_amx, _HAS_AMX=has_amx, _HAS_BFLOAT16=has_amx),
        WorstProducts() if has_amx else nullcontext(),
    ):
        yield


def place_of(profile: Profile, key: tuple[int, int], num_tokens: int, first_token: int = 0) -> CellPlace:
    """Where the cell of this layer group and head block lies."""
    grid = profile.grid
    return CellPlace(grid.layers(key[0]), grid.heads(key[1]), range(first_token, first_token + num_tokens))


def _mixing(size: int, seed: tuple[int, ...]) -> torch.Tensor:
    """``(size, size)``: independent sources become channels that vary together, and unequally."""
    mix = torch.linalg.qr(_normal((size, size), seed)).Q
    return torch.logspace(1, -1, size, dtype=torch.float64)[:, None] * mix


def _normal(shape: tuple[int, ...], seed: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash(seed) & 0xFFFFFFFF)
    return torch.randn(shape, generator=generator, dtype=torch.float64)
