"""KVTC's groups of neighbouring coefficients of one token, and their quantisation to few bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from benchmarks.codec.baselines.affine import META_DTYPE, from_levels, pack, to_levels, unpack
from benchmarks.codec.method import from_bytes, to_bytes
from sgl_kvfetch.errors import UnsupportedError

Kind = Literal["int2", "int4", "fp8"]
KINDS: tuple[Kind, ...] = ("int2", "int4", "fp8")
SIZES = (1, 16, 64, 256, 1024)
META_BITS = 2 * META_DTYPE.itemsize * 8
_BITS: dict[Kind, int] = {"int2": 2, "int4": 4, "fp8": 8}
_FP8 = torch.float8_e4m3fn
_FP8_LARGEST = torch.finfo(_FP8).max


@dataclass(frozen=True, slots=True)
class Group:
    """Coefficients ``[first, first + size)``, all of one kind. A coefficient in no group is dropped, and becomes 0."""

    first: int
    size: int
    kind: Kind

    @property
    def end(self) -> int:
        return self.first + self.size


def bits_of(size: int, kind: Kind) -> int:
    """Return a group's bits per token before DEFLATE: those of the coefficients, and 16 each for scale and shift."""
    return size * _BITS[kind] + META_BITS


def quantise(values: torch.Tensor, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise float32 ``(..., size)``. Return uint8 codes of that shape, and scale and shift, float16 ``(..., 2)``.

    Integers divide the range from the group's smallest to its largest value. FP8 (E4M3) is centred between them, and
    scaled so that they become its own extremes. Raises UnsupportedError for values beyond float16.
    """
    if kind != "fp8":
        return to_levels(values, _BITS[kind])
    smallest, largest = values.aminmax(dim=-1, keepdim=True)
    meta = torch.cat([(largest - smallest) / 2, (largest + smallest) / 2], -1).to(META_DTYPE)
    if not bool(torch.isfinite(meta).all()):
        raise UnsupportedError(f"values up to {float(values.abs().max()):g} do not fit the scales' float16")
    scale, shift = meta[..., :1].float(), meta[..., 1:].float()
    unit = torch.where(scale > 0, (values - shift) / scale, 0.0).clamp(-1, 1)  # float16 may have rounded the scale down
    return (unit * _FP8_LARGEST).to(_FP8).view(torch.uint8), meta


def dequantise(codes: torch.Tensor, meta: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Invert ``quantise``, up to rounding. Return float32."""
    if kind != "fp8":
        return from_levels(codes, meta)
    scale, shift = meta[..., :1].float(), meta[..., 1:].float()
    return codes.view(_FP8).float() / _FP8_LARGEST * scale + shift


def pack_codes(codes: torch.Tensor, kind: Kind) -> bytes:
    """Pack ``quantise``'s codes, uint8 ``(tokens, size)``, coefficient by coefficient: each with all its tokens."""
    return to_bytes(pack(codes.T, _BITS[kind]))


def unpack_codes(data: bytes, num_tokens: int, size: int, kind: Kind) -> torch.Tensor:
    """Invert ``pack_codes``."""
    return unpack(from_bytes(data, torch.uint8, (-1,)), _BITS[kind], num_tokens * size).view(size, num_tokens).T


def code_bytes(num_tokens: int, size: int, kind: Kind) -> int:
    """Return the number of bytes that ``pack_codes`` returns."""
    return -(-num_tokens * size * _BITS[kind] // 8)
