"""A profile that nobody calibrated, for a model with random values."""

from __future__ import annotations

import torch

from harness.layer_maps import plain_layers
from sgl_kvfetch.codec import Calibration, Profile
from sgl_kvfetch.codec.quant.profile import CellProfile, MeasuredStep
from sgl_kvfetch.codec.quant.rope import Rope
from sgl_kvfetch.types import CellGrid


def flat_profile(
    step: float, num_layers: int = 32, heads: int = 8, dim: int = 128, *, cell_layers: int = 3, cell_heads: int = 2
) -> Profile:
    """Return a profile whose transform changes nothing, for K and V with a standard deviation of 1. As many
    coefficients are kept as a calibrated cell of Llama-3.1-8B keeps. ``step``: its default."""
    grid = CellGrid(num_layers, heads, cell_layers, cell_heads)

    def cell(layers: int) -> CellProfile:
        size = 2 * layers * cell_heads * dim
        spread = torch.ones(size)
        spread[size * 700 // 1536 :] = 1e-3
        weight = torch.eye(cell_heads * dim).repeat(layers, 1, 1)
        return CellProfile(
            inverse=torch.eye(size, dtype=torch.bfloat16),
            k_weight=weight,
            v_weight=weight.clone(),
            mean=torch.zeros(size),
            spread=spread,
            reach=torch.stack((2.6 * spread, 6 * spread)),
            sensitivity=torch.zeros(size + 2 * layers * cell_heads + 1),
        )

    # A cell each: a file of tensors that share memory cannot be written.
    cells = {(group, block): cell(len(grid.layers(group))) for group, block in grid.cells()}
    curve = (MeasuredStep(step / 2, 1e-4, 2.5), MeasuredStep(2 * step, 1e-2, 0.7))
    rope = Rope(inv_freq=tuple(500000.0 ** (-i / (dim // 2)) for i in range(dim // 2)))
    layers = plain_layers(num_layers, rope)
    return Profile(grid, dim, dim, cells, layers, 0, curve, 1.0, Calibration("random", "0" * 32, "none", 1, 1, 1))
