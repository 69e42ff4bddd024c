"""SAW-INT4 (arXiv 2604.19157)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from benchmarks.codec.baselines.affine import META_DTYPE, from_levels, pack, to_levels, unpack
from benchmarks.codec.method import KV_DTYPE, Shape, TensorMethod, from_bytes, to_bytes
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.types import TensorName

_BITS = 4
_ORDER = 16


class SawInt4(TensorMethod):
    """Transforms K with a block-diagonal Hadamard matrix, then stores four bits per value, with a step and a smallest
    value for each token and head.

    The authors' code uses blocks of 16, for K alone or for V too (``HADAMARD_ORDER``, ``ROTATE_V``). We assume that
    step and smallest value are float16, which gives the reported 4.25 bits at a head dimension of 128.
    """

    family = "SAW-INT4"

    def __init__(self, rotate_v: bool) -> None:
        self.name = "saw-int4-kv" if rotate_v else "saw-int4"
        self.source = f"SAW-INT4 (arXiv 2604.19157), Hadamard blocks of {_ORDER} on {'K and V' if rotate_v else 'K'}"
        self._rotates = {"k": True, "v": rotate_v}

    def encode_tensor(self, tensor: TensorName, values: torch.Tensor) -> Iterator[bytes]:
        levels, meta = to_levels(_rotated(values.float()) if self._rotates[tensor] else values, _BITS)
        yield to_bytes(pack(levels, _BITS))
        yield to_bytes(meta)

    def decode_tensor(self, tensor: TensorName, parts: Iterator[bytes], shape: Shape) -> torch.Tensor:
        levels = unpack(from_bytes(next(parts), torch.uint8, (-1,)), _BITS, math.prod(shape)).view(shape)
        values = from_levels(levels, from_bytes(next(parts), META_DTYPE, (*shape[:-1], 2)))
        return (_rotated(values) if self._rotates[tensor] else values).to(KV_DTYPE)


def hadamard(order: int) -> torch.Tensor:
    """Return Sylvester's Hadamard matrix, orthonormal, so it is its own inverse. ``order``: a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < order:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(order)


def _rotated(values: torch.Tensor) -> torch.Tensor:
    if values.shape[-1] % _ORDER:
        raise UnsupportedError(f"saw-int4: head dimension is {values.shape[-1]}; expected a multiple of {_ORDER}")
    return (torch.unflatten(values, -1, (-1, _ORDER)) @ hadamard(_ORDER)).flatten(-2)
