"""A checksum of frames that a GPU computes in passing: 64 bits, a sum over their 8-byte words.

Word j goes, together with its place, through a mixer, and the results are added modulo 2^64. A sum does not mind the
order in which it is added up, so however a device cuts the frames into blocks, the bits are the same.

The mixer is SplitMix64's: Stafford's variant 13 of MurmurHash3's finaliser, on ``word + (j + 1) * GAMMA`` as that
generator has it. It is a permutation of the 64-bit integers, so frames that differ in one word, be it in one pixel or
in all eight, never have the same sum. If it were a random permutation for each place, others would have the same sum
with a probability of at most 1 / (2^64 - 1): of what differs, the last word must make up for all the rest, and one
of its values does. It is no secret: the sum finds what decoders and memory get wrong, not what somebody forges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

WORD_BYTES = 8
GAMMA = 0x9E3779B97F4A7C15  # 2^64 by the golden ratio, odd: no two places have the same multiple
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_BLOCK_WORDS = 1 << 14  # three arrays of them fit a core's cache


def sum_of_frames(frames: torch.Tensor) -> int:
    """The frame sum, 0 to 2^64 - 1. ``frames``: uint8, of a multiple of 8 bytes, from any device; what makes up a
    word lies side by side in C order. All frames that a `FrameLayout` gives are such."""
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
    """In place. ``shifted``: room for as many."""
    for bits, factor in ((30, MIX_1), (27, MIX_2)):
        x ^= np.right_shift(x, np.uint64(bits), out=shifted)
        x *= np.uint64(factor)
    x ^= np.right_shift(x, np.uint64(31), out=shifted)
