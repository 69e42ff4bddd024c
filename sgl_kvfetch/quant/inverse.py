"""What turns the parts of a cell back into values: the arguments of the restore kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_kvfetch.quant.rope import Rope


@dataclass(frozen=True, slots=True)
class ByteInverse:
    """The integers are the values' bytes, a plane each."""


@dataclass(frozen=True, slots=True)
class StepInverse:
    """A value is its integer's distance from the centre of its layer, times its scale."""

    k_centres: tuple[int, ...]
    v_centres: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TransformInverse:
    """Integers are coefficients, in units of the token's scale.

    ``matrix``: bfloat16 ``(coefficients, channels)``, a row a coefficient. Channels go by tensor (K, then V), layer,
    head and dim. ``mean``: float32 ``(channels,)``. ``rope``: applied to K last; None where nothing is to be turned.
    """

    matrix: torch.Tensor
    mean: torch.Tensor
    rope: Rope | None

    def to(self, device: torch.device) -> TransformInverse:
        return TransformInverse(self.matrix.to(device), self.mean.to(device), self.rope)


Inverse = ByteInverse | StepInverse | TransformInverse
