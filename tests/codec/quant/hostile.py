"""Values that a lossless codec may not change, of any type."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

KINDS = "bits", "special", "constant", "usual"

# Of half types and of float32: zeros, the least and the largest denormals, one, infinities, and NaNs of all kinds.
SPECIAL = {
    2: "0000 8000 0001 007f 0080 03ff 0400 3c00 3f80 7bff 7c00 7c01 7f7f 7f80 7f81 7fc0 7fff fc00 ff80 ffff",
    4: "00000000 80000000 00000001 007fffff 00800000 3f800000 7f7fffff 7f800000 7f800001 7fc00000 ff800000 ffffffff",
}


def hostile(shape: Sequence[int], dtype: torch.dtype, kind: str, generator: torch.Generator) -> torch.Tensor:
    """Return values of one kind, ``shape``."""
    size = dtype.itemsize
    noise = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=generator).view(dtype)
    if kind == "bits" or (kind == "special" and size == 1):  # of which a byte has all
        return noise
    if kind == "special":
        values = np.array([int(each, 16) for each in SPECIAL[size].split()], dtype=f"u{size}").view(f"i{size}")
        which = torch.randint(0, len(values), tuple(shape), generator=generator)
        return torch.from_numpy(values)[which].view(dtype)
    if kind == "constant":
        return noise.flatten()[0].expand(tuple(shape)).contiguous()
    spread = torch.logspace(-3, 1, shape[-1])
    return (spread * torch.randn(tuple(shape), generator=generator)).to(dtype)
