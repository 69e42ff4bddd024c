"""A checksum of frames that CPUs and GPUs compute cheaply: 64 bits, a sum over their 8-byte words.

Each word j is combined with its index and goes through a mixer; the results are added modulo 2^64. The sum does not
depend on the order of addition, so every division of the frames into blocks gives the same bits.

The mixer is SplitMix64's: Stafford's variant 13 of MurmurHash3's finaliser, applied to ``word + (j + 1) * GAMMA`` as in
that generator. It is a permutation of the 64-bit integers, so frames that differ in only one word (one to eight pixels)
never have the same sum. If it were a random permutation for each index, other differing frames would have the same sum
with a probability of at most 1 / (2^64 - 1): the last differing word must compensate for all others, and one of its
values does. The sum is not a secret: it detects errors of decoders and memory, not forgeries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

WORD_BYTES = 8
GAMMA = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio; odd, so no two indices have the same multiple
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_BLOCK_WORDS = 1 << 14  # so that three arrays of this length fit a core's cache


def sum_of_frames(frames: torch.Tensor) -> int:
    """Return the frame sum, 0 to 2^64 - 1. ``frames``: uint8, from any device, a multiple of 8 bytes, as frames of our
    layouts are. Words are consecutive bytes in C order."""
    words = frames.contiguous().cpu().numpy().reshape(-1).view("<u8")
    steps = np.arange(1, min(_BLOCK_WORDS, len(words)) + 1, dtype=np.uint64) * np.uint64(GAMMA)
    shifted = np.empty_like(steps)
    total = 0
    for first in range(0, len(words), _BLOCK_WORDS):
        x = words[first : first + _BLOCK_WORDS] + np.uint64(first * GAMMA & _MASK)
        x += steps[: len(x)]
        _mix(x, shifted[: len(x)])
        total += int(x.sum())
    return total & _MASK


def _mix(x: np.ndarray, shifted: np.ndarray) -> None:
    """Hash ``x`` in place; ``shifted`` is scratch space of the same shape."""
    for bits, factor in ((30, MIX_1), (27, MIX_2)):
        x ^= np.right_shift(x, np.uint64(bits), out=shifted)
        x *= np.uint64(factor)
    x ^= np.right_shift(x, np.uint64(31), out=shifted)
