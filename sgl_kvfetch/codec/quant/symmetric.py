"""Symmetric quantisers: uniform bins around zero, scaled to the largest magnitude in a vector.

With ``bins`` bins, ``centre = bins // 2 - 1``: a value x of a vector whose largest magnitude is m becomes
``round(x * centre / m) + centre``, an integer in ``[0, 2 * centre]``. This is CacheGen's vector-wise quantisation
(SIGCOMM'24, section 5.2; ``torch_quant_vectorized`` in its code), which ShadowServe shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from sgl_kvfetch.codec.quant.base import CellPlace, CellValues, Part, Quantised, Quantiser
from sgl_kvfetch.errors import ConfigError, FormatError, QuantiseError
from sgl_kvfetch.types import TENSORS, TensorName

MIN_BINS, MAX_BINS = 4, 256
_NO_NUMBER = 0x7F80  # the exponent of a bfloat16 that is infinite or no number


def centre_of(bins: int) -> int:
    """Return the integer that represents zero. It is also the largest magnitude in steps."""
    return bins // 2 - 1


class SymmetricQuantiser(Quantiser):
    """One step width a token and layer, for each head or for all heads of a cell together.

    The step (the width of one bin) is rounded up to bfloat16 *before* it is used. So the stored step is exactly the
    divisor, and the largest value still fits.
    """

    def __init__(
        self, name: str, scale_over: Literal["head", "layer"], k_bins: Sequence[int], v_bins: Sequence[int]
    ) -> None:
        """``k_bins`` and ``v_bins`` give the bins of each layer; the last entry applies to all further layers."""
        for key, bins in (("k_bins", k_bins), ("v_bins", v_bins)):
            if not bins or any(not MIN_BINS <= b <= MAX_BINS for b in bins):
                raise ConfigError(f"{key} = {list(bins)}: expected one or more numbers from {MIN_BINS} to {MAX_BINS}")
        self.splits_heads = scale_over == "head"
        self._bins: dict[TensorName, tuple[int, ...]] = {"k": tuple(k_bins), "v": tuple(v_bins)}

        k, v = (",".join(map(str, bins)) for bins in (k_bins, v_bins))
        self.identity = f"{name}(k={k};v={v})"

    def parts(self, dtype: torch.dtype) -> tuple[Part, ...]:
        return tuple(part for t in TENSORS for part in (Part(f"{t} scales"), Part(t, t)))

    def require_sound(self, plain: Sequence[np.ndarray], shape: tuple[int, int, int], token_bytes: int) -> None:
        num_tokens, num_layers, num_heads = shape
        num_scales = num_tokens * num_layers * (num_heads if self.splits_heads else 1)
        for scales in plain:
            if scales.size != num_scales * torch.bfloat16.itemsize:
                raise FormatError(f"{scales.size} bytes of scales, expected {num_scales} scales in bfloat16")
            if ((scales.view(np.uint16) & _NO_NUMBER) == _NO_NUMBER).any():
                raise FormatError("a scale is not finite")

    def centres(self, tensor: TensorName, layers: range) -> tuple[int, ...]:
        """Return the zero point of each layer."""
        bins = self._bins[tensor]
        return tuple(centre_of(bins[min(layer, len(bins) - 1)]) for layer in layers)

    def quantise(self, values: CellValues, place: CellPlace) -> Quantised:
        return (*self._quantise("k", values.k, place.layers), *self._quantise("v", values.v, place.layers))

    def _quantise(self, tensor: TensorName, values: torch.Tensor, layers: range) -> Quantised:
        x = values.to(torch.float32)
        centre = self._centre_tensor(tensor, layers, x.device)
        over = (-1,) if self.splits_heads else (-2, -1)
        magnitude = x.abs().amax(dim=over, keepdim=True)
        if not bool(torch.isfinite(magnitude).all()):
            raise QuantiseError("values are not finite")
        scales = step_widths(magnitude, centre, values.dtype)
        step = scales.to(torch.float32)
        # A zero step belongs to a vector of zeros (or of negligible values): all its integers are the centre.
        steps = torch.where(step > 0, x / step, 0.0).round()
        integers = (torch.clamp(steps, -centre, centre) + centre).to(torch.uint8)
        return scales.contiguous().view(torch.uint8).flatten(), integers

    def dequantise(
        self, quantised: Quantised, dtype: torch.dtype, place: CellPlace, tokens: slice = slice(None)
    ) -> CellValues:
        restored = []
        for tensor, scales, integers in zip(TENSORS, quantised[::2], quantised[1::2], strict=True):
            step = scales.view(torch.bfloat16).view(*integers.shape[:2], -1, 1)[tokens].to(torch.float32)
            centred = integers[tokens].to(torch.float32) - self._centre_tensor(tensor, place.layers, integers.device)
            restored.append((centred * step).to(dtype))
        return CellValues(*restored)

    def _centre_tensor(self, tensor: TensorName, layers: range, device: torch.device) -> torch.Tensor:
        return torch.tensor(self.centres(tensor, layers), dtype=torch.float32, device=device).view(1, -1, 1, 1)


def step_widths(magnitude: torch.Tensor, centre: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the step widths for these largest magnitudes (finite float32), rounded up to bfloat16.

    A width is rounded down instead if ``centre`` steps of it would exceed the range of ``dtype``: the largest float16
    must not be restored as infinity.
    """
    bits = (magnitude / centre).contiguous().view(torch.int32)
    up = (bits + 0xFFFF) >> 16
    too_far = (up << 16).view(torch.float32) * centre > torch.finfo(dtype).max
    return (up - too_far.to(torch.int32)).to(torch.int16).view(torch.bfloat16)
