"""CacheGen's vector-wise bins (SIGCOMM'24, section 5.2), as in LMCache's ``torch_quant_vectorized``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_kvfetch.codec.quant.symmetric import centre_of
from sgl_kvfetch.types import TensorName


def lmcache_bins(tensor: TensorName, num_layers: int) -> list[int]:
    """Return each layer's bins as LMCache chooses them (``CacheGenConfig.from_model_name``) for models without an
    entry of their own: 32 everywhere below ten layers; else 32 for the first ten of K and two of V, then 16. Models
    with an entry get the same."""
    first = num_layers if num_layers < 10 else 10 if tensor == "k" else 2
    return [32] * first + [16] * (num_layers - first)


def to_bins(values: torch.Tensor, bins: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``(tokens, layers, heads, dim)``. Return integers, uint8 ``(layers, tokens, channels)``, and largest
    magnitudes, bfloat16 ``(layers, tokens, 1)``.

    Unlike in the original, a vector of zeros is restored to zeros, not NaN.
    """
    x = values.flatten(2).transpose(0, 1)
    centre = _centres(bins)
    largest = x.abs().amax(-1, keepdim=True)
    factor = torch.where(largest > 0, centre / largest, 0.0)
    return torch.round(x * factor + centre).to(torch.uint8), largest


def from_bins(integers: torch.Tensor, largest: torch.Tensor, bins: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """Invert ``to_bins``, up to rounding. Return bfloat16 of ``shape``, ``(tokens, layers, heads, dim)``."""
    centre = _centres(bins)
    x = (integers - centre) / centre * largest
    return x.transpose(0, 1).reshape(*shape).to(largest.dtype)


def _centres(bins: Sequence[int]) -> torch.Tensor:
    return torch.tensor([float(centre_of(b)) for b in bins])[:, None, None]
