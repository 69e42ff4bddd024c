"""The lossless quantiser: it stores the bytes of values as separate planes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_kvfetch import blocks
from sgl_kvfetch.codec.quant import _exact
from sgl_kvfetch.codec.quant.base import CellPlace, CellValues, Part, Quantised, Quantiser
from sgl_kvfetch.types import TENSORS


class ExactQuantiser(Quantiser):
    """Rotates each value's bits left by one, then splits it into its bytes, least significant first.

    A float's sign is noise and its first bit. The rotation moves it to the end, so that the last plane is the exponent
    (all of it for bfloat16 and float32), which varies little and compresses well. The low mantissa bytes are noise and
    do not compress. Byte planes, unlike interleaved bytes, show a codec each kind of byte separately.
    """

    identity = "exact"

    def parts(self, dtype: torch.dtype) -> tuple[Part, ...]:
        return tuple(Part(f"{t} byte {i}", t) for t in TENSORS for i in range(dtype.itemsize))

    def quantise(self, values: CellValues, place: CellPlace) -> Quantised:
        return self.quantise_pieces([values], place)

    def quantise_pieces(self, pieces: Sequence[CellValues], place: CellPlace) -> Quantised:
        return tuple(plane for tensor in zip(*pieces, strict=True) for plane in _planes_of(tensor))

    def dequantise(
        self, quantised: Quantised, dtype: torch.dtype, place: CellPlace, tokens: slice = slice(None)
    ) -> CellValues:
        size = dtype.itemsize
        assert len(quantised) == len(TENSORS) * size
        k, v = (torch.stack([plane[tokens] for plane in quantised[i : i + size]]) for i in (0, size))
        return CellValues(from_planes(k, dtype), from_planes(v, dtype))


def to_planes(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of ``values``, whose bits are rotated left by one: uint8 ``(itemsize, *values.shape)``, least
    significant first."""
    return _planes_of((values,))


def _planes_of(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the planes of tensors on the host that follow each other in their first dimension. Reads each of them
    once, and copies nothing else."""
    size = pieces[0].dtype.itemsize
    planes = blocks.empty((size, sum(map(len, pieces)), *pieces[0].shape[1:]))
    first = 0
    for piece in pieces:
        aligned = piece if piece.stride(-1) == 1 else piece.contiguous()
        _exact.split(aligned.detach().view(torch.uint8).numpy().data, size, planes.numpy().data, first)
        first += piece.numel()
    return planes


def from_planes(rotated: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values that ``to_planes`` split."""
    assert rotated.shape[0] == dtype.itemsize
    planes = (rotated >> 1) | (rotated.roll(-1, 0) << 7)
    return planes.movedim(0, -1).contiguous().flatten(-2).view(dtype)
