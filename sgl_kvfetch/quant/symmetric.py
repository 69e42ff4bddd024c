"""Uniform bins around zero, as wide as the largest magnitude in a vector asks for.

With ``bins`` bins, ``centre = bins // 2 - 1``: a value x of a vector whose largest magnitude is m becomes
``round(x * centre / m) + centre``, an integer in ``[0, 2 * centre]``. This is CacheGen's vector-wise quantisation
(SIGCOMM'24, section 5.2; ``torch_quant_vectorized`` in its code), which ShadowServe shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from sgl_kvfetch.errors import ConfigError, QuantiseError
from sgl_kvfetch.quant.base import Quantised, Quantiser
from sgl_kvfetch.quant.inverse import StepInverse
from sgl_kvfetch.types import TensorName

MIN_BINS, MAX_BINS = 4, 256

ScaleOver = Literal["head", "layer"]


def centre_of(bins: int) -> int:
    """The integer that stands for zero; also the largest magnitude in steps."""
    return bins // 2 - 1


class SymmetricQuantiser(Quantiser):
    """One step width a token and layer, for each head or for all heads together.

    The step (magnitude of one bin) is rounded up to bfloat16 *before* it is used, so that what is stored is exactly
    what was divided by, and the largest value still fits.
    """

    def __init__(self, name: str, scale_over: ScaleOver, k_bins: Sequence[int], v_bins: Sequence[int]) -> None:
        """``k_bins`` and ``v_bins`` give the bins of each layer; the last entry serves all layers that follow."""
        for key, bins in (("k_bins", k_bins), ("v_bins", v_bins)):
            if not bins or any(not MIN_BINS <= b <= MAX_BINS for b in bins):
                raise ConfigError(f"{key} = {list(bins)}: allowed are one or more of {MIN_BINS} to {MAX_BINS}")
        self._name = name
        self._scale_over = scale_over
        self._bins: dict[TensorName, tuple[int, ...]] = {"k": tuple(k_bins), "v": tuple(v_bins)}

    @property
    def identity(self) -> str:
        k, v = (",".join(map(str, self._bins[t])) for t in ("k", "v"))
        return f"{self._name}(k={k};v={v})"

    def planes(self, dtype: torch.dtype) -> int:
        return 1

    def scales_per_layer(self, num_heads: int) -> int:
        return num_heads if self._scale_over == "head" else 1

    def centres(self, tensor: TensorName, first_layer: int, num_layers: int) -> list[int]:
        """The zero point of each layer."""
        bins = self._bins[tensor]
        return [centre_of(bins[min(first_layer + i, len(bins) - 1)]) for i in range(num_layers)]

    def quantise(self, values: torch.Tensor, tensor: TensorName, first_layer: int, first_token: int = 0) -> Quantised:
        x = values.to(torch.float32)
        centre = self._centre_tensor(x, tensor, first_layer)
        over = (-1,) if self._scale_over == "head" else (-2, -1)
        magnitude = x.abs().amax(dim=over, keepdim=True)
        if not bool(torch.isfinite(magnitude).all()):
            raise QuantiseError("values are not finite")
        scales = step_widths(magnitude, centre, values.dtype)
        step = scales.to(torch.float32)
        # A zero step belongs to a vector of zeros (or of values too small to matter): all centre.
        steps = torch.where(step > 0, x / step, 0.0).round()
        integers = (torch.clamp(steps, -centre, centre) + centre).to(torch.uint8)
        return Quantised(integers.unsqueeze(0), scales.reshape(*x.shape[:2], -1))

    def dequantise(
        self, quantised: Quantised, dtype: torch.dtype, tensor: TensorName, first_layer: int, first_token: int = 0
    ) -> torch.Tensor:
        assert quantised.scales is not None
        integers = quantised.integers[0].to(torch.float32)
        step = quantised.scales.to(torch.float32).unsqueeze(-1)  # (tokens, layers, heads or 1, 1)
        return ((integers - self._centre_tensor(integers, tensor, first_layer)) * step).to(dtype)

    def inverse_of(self, tensor: TensorName, first_layer: int, num_layers: int) -> StepInverse:
        return StepInverse(tuple(self.centres(tensor, first_layer, num_layers)))

    def _centre_tensor(self, like: torch.Tensor, tensor: TensorName, first_layer: int) -> torch.Tensor:
        centres = self.centres(tensor, first_layer, like.shape[1])
        return torch.tensor(centres, dtype=torch.float32, device=like.device).view(1, -1, 1, 1)


def step_widths(magnitude: torch.Tensor, centre: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The steps that the largest magnitudes (finite float32) ask for, rounded up to bfloat16.

    Rounded down instead where ``centre`` steps would lead out of ``dtype``: the largest float16 must not come back as
    infinity.
    """
    bits = (magnitude / centre).contiguous().view(torch.int32)
    up = (bits + 0xFFFF) >> 16
    too_far = (up << 16).view(torch.float32) * centre > torch.finfo(dtype).max
    return (up - too_far.to(torch.int32)).to(torch.int16).view(torch.bfloat16)
