"""What turns integers back into values, beside the integers and their scales: the arguments of the restore kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_kvfetch.quant.rope import Rope


@dataclass(frozen=True, slots=True)
class ByteInverse:
    """The integers are the values' bytes, a plane each."""


@dataclass(frozen=True, slots=True)
class StepInverse:
    """A value is its integer's distance from ``centres``, one a layer, times its scale."""

    centres: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TransformInverse:
    """Integers are coefficients, in units of ``step`` times the token's scale. ``matrices``: bfloat16, ``(layers,
    blocks, C, C)``, coefficients to channels. ``means``: float32, ``(layers, heads, dim)``. ``rope``: applied last,
    None where nothing is to be turned."""

    matrices: torch.Tensor
    step: float
    means: torch.Tensor
    rope: Rope | None

    def to(self, device: torch.device) -> TransformInverse:
        return TransformInverse(
            self.matrices.contiguous().to(device), self.step, self.means.contiguous().to(device), self.rope
        )


Inverse = ByteInverse | StepInverse | TransformInverse
