"""Quantisers by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from sgl_kvfetch.quant.base import Quantiser
from sgl_kvfetch.quant.exact import ExactQuantiser
from sgl_kvfetch.quant.symmetric import SymmetricQuantiser

QuantiserName = Literal["exact", "uint8", "cachegen"]

# CacheGen's own choice (LMCache's CacheGenConfig for 32-layer models): finer bins for early layers.
CACHEGEN_K_BINS = (32,) * 10 + (16,)
CACHEGEN_V_BINS = (32,) * 2 + (16,)


def make_quantiser(
    name: QuantiserName, k_bins: Sequence[int] | None = None, v_bins: Sequence[int] | None = None
) -> Quantiser:
    """Build a quantiser. Bins matter to ``cachegen`` alone. Raises ConfigError for bins that are not allowed."""
    match name:
        case "exact":
            return ExactQuantiser()
        case "uint8":
            return SymmetricQuantiser("uint8", "head", (256,), (256,))
        case "cachegen":
            return SymmetricQuantiser("cachegen", "layer", k_bins or CACHEGEN_K_BINS, v_bins or CACHEGEN_V_BINS)
