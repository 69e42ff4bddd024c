"""Bitstreams with wrong bytes, cut or prolonged."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from sgl_kvfetch.errors import CorruptError

Case = tuple[bytes, torch.Tensor, Callable[[bytes], torch.Tensor]]  # a bitstream, what it decodes to, the decoder


def share_that_is_corrupt(cases: Sequence[Case], num_mutations: int, head_bytes: int) -> float:
    """Decode bitstreams with wrong bytes, half of them within the head. Each decodes to its shape, or is corrupt: a
    flipped byte may decode to other integers, and that is what the checksums are for. Return the share of the latter.
    """
    random = np.random.default_rng(3)
    num_corrupt = 0
    for number in range(num_mutations):
        bitstream, frames, decode = cases[number % len(cases)]
        bad = np.frombuffer(bitstream, np.uint8).copy()
        places = random.integers(0, min(len(bad), head_bytes) if number % 2 else len(bad), 1 + number % 4)
        bad[places] ^= random.integers(1, 256, len(places)).astype(np.uint8)
        end = random.integers(0, 2 * len(bad)) if number % 5 == 0 else len(bad)
        try:
            assert decode(np.resize(bad, end).tobytes()).shape == frames.shape
        except CorruptError:
            num_corrupt += 1
    return num_corrupt / num_mutations
