"""Parameters that turn the parts of a cell back into values. The restore kernels take them as arguments."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_kvfetch.codec.quant.rope import Rope


@dataclass(frozen=True, slots=True)
class ByteInverse:
    """The integers are the bytes of the values, one plane a byte."""


@dataclass(frozen=True, slots=True)
class StepInverse:
    """A value is the difference between its integer and its layer's centre, times its scale."""

    k_centres: tuple[int, ...]
    v_centres: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TransformInverse:
    """Integers are coefficients, in units of the token's scale.

    ``matrix``: bfloat16 ``(coefficients, channels)``, a row a coefficient. Channels are ordered by tensor (K, then V),
    layer, head and dim. ``mean``: float32 ``(channels,)``. ``rope``: applied to K last; None if K is not rotated.
    """

    matrix: torch.Tensor
    mean: torch.Tensor
    rope: Rope | None

    def to(self, device: torch.device) -> TransformInverse:
        return TransformInverse(self.matrix.to(device), self.mean.to(device), self.rope)


Inverse = ByteInverse | StepInverse | TransformInverse
