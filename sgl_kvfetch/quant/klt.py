"""Transform coding with uniform steps: few bits at a given accuracy, by what calibration knows of the model.

K is turned back by its rotary embedding, both tensors are centred, and a block of neighbouring heads of one layer goes
through the profile's transform (``sgl_kvfetch.calibrate.transform``), after which errors in all coefficients of all
layers cost alike; so all share one step. KVTC (arXiv 2511.01815) transforms KV caches with principal components; here
errors are weighted by what they do to the model's output.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Never

import torch

from sgl_kvfetch.errors import ConfigError, QuantiseError
from sgl_kvfetch.layout.choose import channel_layout
from sgl_kvfetch.layout.frames import FrameLayout
from sgl_kvfetch.layout.tiling import layout_of
from sgl_kvfetch.quant.base import Quantised, Quantiser
from sgl_kvfetch.quant.inverse import TransformInverse
from sgl_kvfetch.quant.profile import Profile
from sgl_kvfetch.quant.rope import rotate, unrotate
from sgl_kvfetch.types import TENSORS, TensorName

ZERO = 128  # the integer that stands for zero
_LARGEST = 127  # magnitude

# What eight bits must hold of a coefficient, in standard deviations. One that varies more has a coarser step: few do,
# so it hardly costs accuracy.
_DEVIATIONS = 4.0

_IDENTITY = re.compile(r"klt\(profile=([0-9a-f]{32});step=([0-9.e+-]{1,16})\)")


class KltIntegers(Quantiser):
    """All that can be done with ``klt`` integers without their profile: count, verify and look at them."""

    def __init__(self, identity: str) -> None:
        self._identity = identity

    @classmethod
    def of_identity(cls, identity: str) -> KltIntegers | None:
        return cls(identity) if _IDENTITY.fullmatch(identity) else None

    @property
    def identity(self) -> str:
        return self._identity

    def planes(self, dtype: torch.dtype) -> int:
        return 1

    def scales_per_layer(self, num_heads: int) -> int:
        return 1

    def quantise(self, values: torch.Tensor, tensor: TensorName, first_layer: int, first_token: int = 0) -> Quantised:
        self._needs_profile()

    def dequantise(
        self, quantised: Quantised, dtype: torch.dtype, tensor: TensorName, first_layer: int, first_token: int = 0
    ) -> torch.Tensor:
        self._needs_profile()

    def inverse_of(self, tensor: TensorName, first_layer: int, num_layers: int) -> TransformInverse:
        self._needs_profile()

    def layout(
        self, tensor: TensorName, num_heads: int, head_dim: int, span_tokens: int, resolution: str
    ) -> FrameLayout:
        return channel_layout(num_heads, head_dim, span_tokens, resolution)

    def _needs_profile(self) -> Never:
        raise QuantiseError(f"{self._identity} needs its profile")


class KltQuantiser(KltIntegers):
    """The quantiser ``klt`` for one model, or for one rank's heads of it.

    A token's coefficients in one layer share a scale, a power of two that is 1 unless one of them would not fit in
    eight bits (attention sinks).
    """

    def __init__(
        self,
        profile: Profile,
        target_kl: float | None = None,
        *,
        step: float | None = None,
        first_head: int = 0,
        num_heads: int | None = None,
    ) -> None:
        """Either ``target_kl``, nats a token as measured in calibration, or ``step``. ``first_head``, ``num_heads``:
        the heads that values have; all of the model's if not given.

        Raises ConfigError for a target that was not measured, heads that cut a block, or a profile that overflows.
        """
        assert (target_kl is None) != (step is None)
        step = profile.step_for(target_kl) if target_kl is not None else step
        assert step is not None
        super().__init__(f"klt(profile={profile.digest};step={step!r})")
        self.profile = profile
        self.step = step
        heads = num_heads or profile.num_heads
        self.mean = {t: profile.mean[t][:, first_head : first_head + heads] for t in TENSORS}
        self.inverse: dict[TensorName, torch.Tensor] = {}
        for tensor in TENSORS:
            block_heads = profile.block_heads(tensor)
            if first_head % block_heads or heads % block_heads or first_head + heads > profile.num_heads:
                raise ConfigError(
                    f"heads {first_head} to {first_head + heads} of {profile.num_heads} are no whole blocks of "
                    f"{block_heads}, as the profile has them; calibrate again with --tp-size"
                )
            first = first_head // block_heads
            blocks = slice(first, first + heads // block_heads)
            coarser = (profile.spread[tensor][:, blocks] * _DEVIATIONS / (_LARGEST * step)).clamp_min(1.0)
            inverse = profile.inverse[tensor][:, blocks].float() * coarser[..., None]
            self.inverse[tensor] = inverse.to(torch.bfloat16)
            if not bool(torch.isfinite(self.inverse[tensor]).all()):
                raise ConfigError(f"the profile's {tensor}.spread is too large for a step of {step:g}")

    @cached_property
    def _forward(self) -> dict[TensorName, torch.Tensor]:
        """``(layers, blocks, C, C)`` float32: channels to coefficients in steps."""
        return {t: (torch.linalg.inv(x.double()) / self.step).float() for t, x in self.inverse.items()}

    def layout(
        self, tensor: TensorName, num_heads: int, head_dim: int, span_tokens: int, resolution: str
    ) -> FrameLayout:
        tiling = self.profile.tiling[tensor]
        if tiling is not None and tiling.head_rows * tiling.head_cols == num_heads:
            return layout_of(tiling, span_tokens, resolution)
        return super().layout(tensor, num_heads, head_dim, span_tokens, resolution)

    def quantise(self, values: torch.Tensor, tensor: TensorName, first_layer: int, first_token: int = 0) -> Quantised:
        if values.dtype.itemsize == 1:
            raise QuantiseError(f"klt does not quantise {values.dtype}; use exact")
        x = values.to(torch.float32)
        rope = self.profile.rope
        if tensor == "k" and rope is not None:
            x = unrotate(x, rope.table(first_token, x.shape[0], x.device), rope)
        layers = slice(first_layer, first_layer + x.shape[1])
        coefficients = _through(x - self.mean[tensor][layers].to(x.device), self._forward[tensor][layers])
        magnitude = coefficients.abs().amax(dim=(2, 3), keepdim=True)
        if not bool(torch.isfinite(magnitude).all()):
            raise QuantiseError("values are not finite")
        scale = torch.exp2((magnitude.clamp_min(1e-30) / (_LARGEST + 0.5)).log2().ceil().clamp_min(0))
        integers = (coefficients / scale).round().clamp(-_LARGEST, _LARGEST) + ZERO
        return Quantised(integers.to(torch.uint8).unsqueeze(0), scale.flatten(2).to(torch.bfloat16))

    def dequantise(
        self, quantised: Quantised, dtype: torch.dtype, tensor: TensorName, first_layer: int, first_token: int = 0
    ) -> torch.Tensor:
        assert quantised.scales is not None
        n = quantised.integers[0].to(torch.float32) - ZERO
        layers = slice(first_layer, first_layer + n.shape[1])
        scale = (quantised.scales.to(torch.float32) * self.step).unsqueeze(-1)  # (tokens, layers, 1, 1)
        x = _through(n, self.inverse[tensor][layers].float()) * scale + self.mean[tensor][layers].to(n.device)
        rope = self.profile.rope
        if tensor == "k" and rope is not None:
            x = rotate(x, rope.table(first_token, x.shape[0], x.device), rope)
        largest = torch.finfo(dtype).max
        return x.clamp(-largest, largest).to(dtype)

    def inverse_of(self, tensor: TensorName, first_layer: int, num_layers: int) -> TransformInverse:
        layers = slice(first_layer, first_layer + num_layers)
        rope = self.profile.rope if tensor == "k" else None
        return TransformInverse(self.inverse[tensor][layers], self.step, self.mean[tensor][layers], rope)


def _through(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """``(tokens, layers, heads, dim)`` through ``(layers, blocks, C, C)``, row vectors times matrices, in blocks."""
    num_tokens, num_layers = x.shape[:2]
    _, num_blocks, size, _ = matrices.shape
    blocks = x.reshape(num_tokens, num_layers * num_blocks, size).transpose(0, 1)
    return (blocks @ matrices.to(x.device).flatten(0, 1)).transpose(0, 1).reshape(x.shape)
