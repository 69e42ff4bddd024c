"""The interface of a KV cache codec: values to bytes, and bytes back to values."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sgl_kvfetch.types import TENSORS, TensorName

KV_DTYPE = torch.bfloat16
Shape = tuple[int, int, int, int]  # tokens, layers, heads, dim


@dataclass(frozen=True, slots=True)
class KVShape:
    """A KV cache's shape. Reader and writer both know it, so it is not counted."""

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

    def of_tensor(self, tensor: TensorName) -> Shape:
        """Return ``(tokens, layers, heads, dim)``."""
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
    """``k``, ``v``: the restored values, bfloat16 ``(tokens, layers, heads, dim)``. ``parts``: all stored bytes."""

    k: torch.Tensor
    v: torch.Tensor
    parts: Sequence[bytes]
    encode_s: float
    decode_s: float

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.parts))

    @property
    def bits_per_value(self) -> float:
        return self.num_bytes * 8 / (self.k.numel() + self.v.numel())


class Method(ABC):
    """One way to store a KV cache, at one rate.

    ``name`` is unique. Methods of one ``family`` differ only in their rate, and form one curve of the plot.
    """

    name: str
    family: str

    @abstractmethod
    def encode(self, k: torch.Tensor, v: torch.Tensor) -> Sequence[bytes]:
        """Return all bytes to store for a sequence from its start. ``k``, ``v``: bfloat16 ``(tokens, layers, heads,
        dim)``, K with its rotary embedding. Raises UnsupportedError for a shape that the method cannot encode."""

    @abstractmethod
    def decode(self, parts: Sequence[bytes], shape: KVShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Restore K and V from the result of ``encode`` alone."""

    def code(self, k: torch.Tensor, v: torch.Tensor) -> Coded:
        """Encode and decode, and measure the time of both."""
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


class TensorMethod(Method):
    """Codes K and V one after the other."""

    @abstractmethod
    def encode_tensor(self, tensor: TensorName, values: torch.Tensor) -> Iterator[bytes]:
        """Yield all bytes to store for one of K and V, as in ``encode``."""

    @abstractmethod
    def decode_tensor(self, tensor: TensorName, parts: Iterator[bytes], shape: Shape) -> torch.Tensor:
        """Restore K or V of ``shape``. Take as many of ``parts`` as ``encode_tensor`` yielded."""

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> Sequence[bytes]:
        return [*self.encode_tensor("k", k), *self.encode_tensor("v", v)]

    def decode(self, parts: Sequence[bytes], shape: KVShape) -> tuple[torch.Tensor, torch.Tensor]:
        left = iter(parts)
        k, v = (self.decode_tensor(tensor, left, shape.of_tensor(tensor)) for tensor in TENSORS)
        return k, v


def to_bytes(values: torch.Tensor) -> bytes:
    """Return a tensor's values in C order, in its own dtype."""
    return values.contiguous().view(torch.uint8).numpy().tobytes()


def from_bytes(data: bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Invert ``to_bytes``."""
    return torch.frombuffer(bytearray(data), dtype=dtype).view(*shape)
