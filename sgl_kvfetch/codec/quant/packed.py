"""What the kernels that restore `klt` need of a cell beside its integers."""

from __future__ import annotations

import numpy as np

from sgl_kvfetch.codec.quant.klt import EXACT


def pack(exponents: np.ndarray, exact: np.ndarray) -> tuple[bytes, int]:
    """Return what a cell has beside its frames and its page table, and its number of exact tokens.

    The result is a multiple of 4 bytes. The kernels expect the page table before it: an int32 for each page of the
    span, its page among the slots of the launch; -1 leaves it out.

    Args:
        exponents: uint8 ``(tokens,)``; 0 for an exact token.
        exact: uint8, the values of exact tokens: for each one byte plane after another, each of K and V
            (``quant.exact.to_planes``).
    """
    which = b""
    if exact.size:
        which = np.flatnonzero(exponents == EXACT).astype(np.int32).tobytes()
    packed = which + exponents.tobytes() + exact.tobytes()
    return packed + bytes(-len(packed) % 4), len(which) // 4
