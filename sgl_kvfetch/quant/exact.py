"""Every bit back: a value's bytes as separate planes."""

from __future__ import annotations

import torch

from sgl_kvfetch.quant.base import Quantised, Quantiser
from sgl_kvfetch.quant.inverse import ByteInverse
from sgl_kvfetch.types import TensorName


class ExactQuantiser(Quantiser):
    """Rotates each value's bits left by one, then splits it into its bytes, least significant first.

    A float's sign is noise and leads its bits; rotated, it ends them, and the last plane is the exponent (all of it for
    bfloat16 and float32), which varies little and compresses. The low mantissa bytes are noise and do not. Byte planes
    rather than interleaved bytes, so that a codec sees each kind on its own.
    """

    identity = "exact"

    def planes(self, dtype: torch.dtype) -> int:
        return dtype.itemsize

    def scales_per_layer(self, num_heads: int) -> int:
        return 0

    def quantise(self, values: torch.Tensor, tensor: TensorName, first_layer: int, first_token: int = 0) -> Quantised:
        planes = values.contiguous().view(torch.uint8).view(*values.shape, values.dtype.itemsize).movedim(-1, 0)
        return Quantised((planes << 1) | (planes.roll(1, 0) >> 7), None)

    def dequantise(
        self, quantised: Quantised, dtype: torch.dtype, tensor: TensorName, first_layer: int, first_token: int = 0
    ) -> torch.Tensor:
        rotated = quantised.integers
        assert rotated.shape[0] == dtype.itemsize
        planes = (rotated >> 1) | (rotated.roll(-1, 0) << 7)
        return planes.movedim(0, -1).contiguous().flatten(-2).view(dtype)

    def inverse_of(self, tensor: TensorName, first_layer: int, num_layers: int) -> ByteInverse:
        return ByteInverse()
