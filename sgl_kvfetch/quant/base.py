"""What a quantiser is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from sgl_kvfetch.layout.choose import default_layout
from sgl_kvfetch.layout.frames import FrameLayout
from sgl_kvfetch.quant.inverse import Inverse
from sgl_kvfetch.types import TensorName


@dataclass(frozen=True, slots=True)
class Quantised:
    """``integers``: uint8, ``(planes, tokens, layers, heads, dim)``. ``scales``: bfloat16, ``(tokens, layers,
    scales_per_layer)``, or None where the integers alone give the values back."""

    integers: torch.Tensor
    scales: torch.Tensor | None


class Quantiser(ABC):
    """Maps KV values to 8-bit integers and back. Stateless; works on any device."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """Name and parameters: a part of the namespace, so equal identities restore each other's integers."""

    @abstractmethod
    def planes(self, dtype: torch.dtype) -> int:
        """How many integers, each in a byte plane of its own, one value of ``dtype`` becomes."""

    @abstractmethod
    def scales_per_layer(self, num_heads: int) -> int:
        """How many scales one token has in one layer; 0 for none."""

    @abstractmethod
    def quantise(self, values: torch.Tensor, tensor: TensorName, first_layer: int, first_token: int = 0) -> Quantised:
        """``values``: ``(tokens, layers, heads, dim)``; its layers are the model's from ``first_layer`` on, its tokens
        the sequence's from ``first_token`` on.

        Raises QuantiseError for values that the quantiser cannot represent.
        """

    @abstractmethod
    def dequantise(
        self, quantised: Quantised, dtype: torch.dtype, tensor: TensorName, first_layer: int, first_token: int = 0
    ) -> torch.Tensor:
        """The inverse, up to rounding: ``(tokens, layers, heads, dim)`` of ``dtype``."""

    @abstractmethod
    def inverse_of(self, tensor: TensorName, first_layer: int, num_layers: int) -> Inverse:
        """What ``dequantise`` needs for these of the model's layers, for kernels that do it elsewhere."""

    def layout(
        self, tensor: TensorName, num_heads: int, head_dim: int, span_tokens: int, resolution: str
    ) -> FrameLayout:
        """How these integers lie best in frames, in spans of up to ``span_tokens`` tokens."""
        return default_layout(num_heads, head_dim, span_tokens, resolution)
