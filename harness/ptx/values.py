"""Types of PTX as those of numpy. Registers hold bits, as unsigned numbers; predicates are bool."""

from __future__ import annotations

import re
from typing import Any, TypeAlias

import numpy as np

Values: TypeAlias = np.ndarray[Any, Any]  # of a register: one for each thread

UNSIGNED: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED: dict[int, Any] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}


class Fault(Exception):
    """A kernel does what it must not. On a GPU this would be an error, a wrong value, or luck."""


def width_of(name: str) -> int:
    """Return the bits of a type such as ``s32``, ``bf16x2`` or ``pred``."""
    if name == "pred":
        return 1
    size, _, count = re.sub(r"^[a-z]+", "", name).partition("x")
    return int(size) * int(count or 1)


def float_of_bfloat(bits: Values) -> Values:
    floats: Values = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return floats


def bfloat_of_float(x: Values) -> Values:
    """Round float32 to bfloat16, ties to even; return its bits."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def halves_of(bits: Values) -> tuple[Values, Values]:
    """Return the lower and the upper 16 bits of 32."""
    return (bits & np.uint32(0xFFFF)).astype(np.uint16), (bits >> np.uint32(16)).astype(np.uint16)


def joined(low: Values, high: Values) -> Values:
    """Join a lower and an upper half of 16 bits."""
    bits: Values = low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))
    return bits
