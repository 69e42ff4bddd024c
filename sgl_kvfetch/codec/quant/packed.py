"""What the kernels that restore `klt` need of a cell beside its integers."""

from __future__ import annotations

import numpy as np
import torch

from sgl_kvfetch.codec.quant.klt import EXACT


def pack(pages: bytes, exponents: torch.Tensor, exact: torch.Tensor) -> tuple[bytes, int]:
    """Return what a cell has beside its frames, a multiple of 4 bytes, and its number of exact tokens.

    Args:
        pages: An int32 for each page of the span: its page among the slots of the launch; -1 leaves it out.
        exponents: uint8 ``(tokens,)``, on the host; 0 for an exact token.
        exact: uint8, the values of exact tokens, on the host: for each one byte plane after another, each of K and V
            (``quant.exact.to_planes``).
    """
    which, tokens = b"", exponents.numpy()
    if exact.numel():
        which = np.flatnonzero(tokens == EXACT).astype(np.int32).tobytes()
        tokens = np.concatenate((tokens, exact.numpy()))
    packed = pages + which + tokens.tobytes()
    return packed + bytes(-len(packed) % 4), len(which) // 4
