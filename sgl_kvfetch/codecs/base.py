"""What a codec is."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class Codec(ABC):
    """Turns frames into a bitstream and back, bit for bit.

    Instances hold no state between calls and may be used from many threads at once; the work releases the GIL.
    """

    name: str

    @abstractmethod
    def encode(self, frames: torch.Tensor) -> bytes:
        """``frames``: uint8, ``(frames, 3, height, width)``."""

    @abstractmethod
    def decode(self, bitstream: bytes | memoryview, num_frames: int, height: int, width: int) -> torch.Tensor:
        """The frames that were encoded. Raises CorruptError if the bitstream does not decode to exactly those."""
