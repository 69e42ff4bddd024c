"""What a way to code KV caches is: values to bytes, and bytes alone back to values."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sgl_kvfetch.types import TENSORS, TensorName

KV_DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class KVShape:
    """What reader and writer both know, so that it is not counted."""

    num_tokens: int
    num_layers: int
    num_heads: int
    k_head_dim: int
    v_head_dim: int

    @classmethod
    def of(cls, k: torch.Tensor, v: torch.Tensor) -> KVShape:
        assert k.shape[:3] == v.shape[:3], (k.shape, v.shape)
        num_tokens, num_layers, num_heads, k_head_dim = k.shape
        return cls(num_tokens, num_layers, num_heads, k_head_dim, v.shape[3])

    def of_tensor(self, tensor: TensorName) -> tuple[int, int, int, int]:
        """``(tokens, layers, heads, dim)``"""
        head_dim = self.k_head_dim if tensor == "k" else self.v_head_dim
        return self.num_tokens, self.num_layers, self.num_heads, head_dim

    @property
    def num_values(self) -> int:
        return self.num_tokens * self.num_layers * self.num_heads * (self.k_head_dim + self.v_head_dim)

    @property
    def raw_bytes(self) -> int:
        return self.num_values * KV_DTYPE.itemsize


@dataclass(frozen=True, slots=True)
class Coded:
    """``k``, ``v``: what came back, bfloat16 ``(tokens, layers, heads, dim)``. ``parts``: all that was stored."""

    k: torch.Tensor
    v: torch.Tensor
    parts: Sequence[bytes]
    encode_s: float
    decode_s: float

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.parts))


class Method(ABC):
    """One form of a KV cache at one rate.

    ``name`` is unique; ``source`` says where the method is described; methods of one ``family`` differ in their rate
    alone, and are one curve of the plot.
    """

    name: str
    source: str
    family: str

    @abstractmethod
    def encode(self, k: torch.Tensor, v: torch.Tensor) -> Sequence[bytes]:
        """All that would be stored of a sequence from its start. ``k``, ``v``: bfloat16 ``(tokens, layers, heads,
        dim)``, K with its rotary embedding. Raises UnsupportedError for a shape that the method has no form for."""

    @abstractmethod
    def decode(self, parts: Sequence[bytes], shape: KVShape) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V back from what ``encode`` returned, and from nothing else."""

    def sizes(self, parts: Sequence[bytes]) -> Mapping[str, int]:
        """Tell apart what the bytes that ``encode`` returned hold: names with bytes, which add up to all. Empty for a
        method that does not tell."""
        return {}

    def code(self, k: torch.Tensor, v: torch.Tensor) -> Coded:
        """There and back, with the time that each way took."""
        assert k.dtype == v.dtype == KV_DTYPE, (k.dtype, v.dtype)
        shape = KVShape.of(k, v)
        started_s = time.perf_counter()
        parts = self.encode(k, v)
        encoded_s = time.perf_counter()
        restored = self.decode(parts, shape)
        decoded_s = time.perf_counter()
        for tensor, values in zip(TENSORS, restored, strict=True):
            assert values.shape == shape.of_tensor(tensor), (self.name, values.shape)
            assert values.dtype == KV_DTYPE, (self.name, values.dtype)
        return Coded(*restored, parts, encoded_s - started_s, decoded_s - encoded_s)


def to_bytes(values: torch.Tensor) -> bytes:
    """A tensor's values in C order, in its own dtype."""
    return values.contiguous().view(torch.uint8).numpy().tobytes()


def from_bytes(data: bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The inverse of ``to_bytes``."""
    return torch.frombuffer(bytearray(data), dtype=dtype).view(*shape)
