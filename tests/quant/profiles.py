"""Profiles of models that are only numbers."""

from __future__ import annotations

import torch

from sgl_kvfetch.calibrate.transform import inverse_transform
from sgl_kvfetch.quant.profile import Calibration, CurvePoint, Profile
from sgl_kvfetch.quant.rope import Rope
from sgl_kvfetch.types import TENSORS, TensorName

CALIBRATION = Calibration("numbers", "0" * 32, "none", 2, 64, 32)
CURVE = (CurvePoint(0.25, 1e-5, 2.0), CurvePoint(1.0, 1e-4, 1.0), CurvePoint(4.0, 1e-2, 0.3))


def _mixing(num_layers: int, num_blocks: int, size: int, seed: int) -> torch.Tensor:
    """``(layers, blocks, size, size)``: independent sources become channels that vary together, and unequally."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.linalg.qr(torch.randn((num_layers, num_blocks, size, size), generator=generator, dtype=torch.float64)).Q
    return torch.logspace(1, -1, size, dtype=torch.float64)[:, None] * mix


def make_profile(
    *,
    num_layers: int = 3,
    num_heads: int = 4,
    head_dim: int = 16,
    block_heads: int = 4,
    rope: Rope | None = None,
) -> Profile:
    """Channels as ``values_of`` draws them, errors in which cost differently."""
    shape = (num_layers, num_heads // block_heads, block_heads * head_dim)
    inverse, spread, mean = {}, {}, {}
    for seed, tensor in enumerate(TENSORS):
        mix = _mixing(*shape, seed)
        weights = _mixing(*shape, seed + 10)
        covariance = mix.mT @ mix
        inverse[tensor] = (inverse_transform(covariance, weights.mT @ weights)).to(torch.bfloat16)
        forward = torch.linalg.inv(inverse[tensor].double())
        spread[tensor] = (forward.mT @ covariance @ forward).diagonal(dim1=-2, dim2=-1).sqrt().float()
        mean[tensor] = torch.randn(
            (num_layers, num_heads, head_dim), generator=torch.Generator().manual_seed(seed + 20)
        )
    return Profile(inverse, spread, mean, rope, CURVE, CALIBRATION, dict.fromkeys(TENSORS))


def values_of(profile: Profile, tensor: TensorName, num_tokens: int) -> torch.Tensor:
    """``(tokens, layers, heads, dim)`` float32, K as it is before its rotation."""
    generator = torch.Generator().manual_seed(30)
    layers, blocks, size = profile.spread[tensor].shape
    sources = torch.randn((num_tokens, layers, blocks, size), generator=generator, dtype=torch.float64)
    channels = torch.einsum("tlbi,lbij->tlbj", sources, _mixing(layers, blocks, size, TENSORS.index(tensor)))
    return channels.reshape(num_tokens, *profile.mean[tensor].shape).float() + profile.mean[tensor]
