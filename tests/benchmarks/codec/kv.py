"""KV with what trained models have: channels of their own mean and spread, neighbours alike."""

from __future__ import annotations

import torch


def make_kv(num_tokens: int = 320, layers: int = 3, heads: int = 2, dim: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, bfloat16 ``(tokens, layers, heads, dim)``."""
    generator = torch.Generator().manual_seed(7)
    shape = (num_tokens, layers, heads, dim)
    pair = []
    for _ in range(2):
        mean, spread = (torch.randn(shape[1:], generator=generator) for _ in range(2))
        noise = torch.randn(shape, generator=generator)
        pair.append((mean + spread.abs() * noise).to(torch.bfloat16))
    return pair[0], pair[1]
