"""Every bit back: a value's bytes as separate planes."""

from __future__ import annotations

import torch

from sgl_kvfetch.quant.base import Quantised, Quantiser
from sgl_kvfetch.types import TensorName


class ExactQuantiser(Quantiser):
    """Splits each value into its bytes, least significant first.

    Signs and exponents (the last plane) vary slowly and compress; the low mantissa bytes are noise and do not. Byte
    planes rather than interleaved bytes, so that a codec sees each kind on its own.
    """

    identity = "exact"

    def planes(self, dtype: torch.dtype) -> int:
        return dtype.itemsize

    def scales_per_layer(self, num_heads: int) -> int:
        return 0

    def quantise(self, values: torch.Tensor, tensor: TensorName, first_layer: int) -> Quantised:
        as_bytes = values.contiguous().view(torch.uint8).view(*values.shape, values.dtype.itemsize)
        return Quantised(as_bytes.movedim(-1, 0).contiguous(), None)

    def dequantise(
        self, quantised: Quantised, dtype: torch.dtype, tensor: TensorName, first_layer: int
    ) -> torch.Tensor:
        assert quantised.integers.shape[0] == dtype.itemsize
        return quantised.integers.movedim(0, -1).contiguous().flatten(-2).view(dtype)
