"""What a codec is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch


class Codec(ABC):
    """Turns frames into a bitstream and back, bit for bit.

    Instances hold no state between calls and may be used from many threads at once; the work releases the GIL.
    """

    name: str
    is_video: bool = False  # so that video engines may decode it, to a GPU's memory

    @abstractmethod
    def encode(self, frames: torch.Tensor) -> bytes:
        """``frames``: uint8, ``(frames, 3, height, width)``."""

    @abstractmethod
    def decode(self, bitstream: bytes | memoryview, num_frames: int, height: int, width: int) -> torch.Tensor:
        """The frames that were encoded. Raises CorruptError if the bitstream does not decode to exactly those."""


@dataclass(frozen=True, slots=True)
class DecodedFrames:
    """Frames where they are wanted, uint8 ``(frames, 3, height, width)``, there by the time that they are returned; and
    what they are verified by: either the same on the host, which is one and the same tensor if they are wanted, or were
    decoded, there, or their frame sum, computed where they are.

    ``host`` may be the decoder's own memory: it is good until the next bitstream is decoded on the same session.
    """

    frames: torch.Tensor
    host: torch.Tensor | None
    is_on_device: bool
    frame_sum: int | None = None

    def __post_init__(self) -> None:
        assert (self.host is None) != (self.frame_sum is None)


class FrameDecoder(ABC):
    """Decodes a codec's bitstreams on a device. One of a session's, which is for one thread at a time."""

    @abstractmethod
    def decode(
        self,
        bitstream: bytes | memoryview,
        num_frames: int,
        height: int,
        width: int,
        *,
        with_sum: bool = False,
        to_host: bool = False,
    ) -> DecodedFrames:
        """``with_sum``: frames that are decoded to the device are to be verified by their frame sum, and are not
        wanted on the host. ``to_host``: they are wanted there, and not on the device. Raises CorruptError if the
        bitstream does not decode to exactly so many frames of this size."""


Decoders = Mapping[str, FrameDecoder]  # a session's, by codec; what it has none for is decoded on the CPU


class FrameEncoder(ABC):
    """Makes a codec's bitstreams elsewhere than on the CPU, for every decoder of that codec to read. From any
    thread."""

    @abstractmethod
    def encode(self, frames: torch.Tensor) -> bytes:
        """``frames``: uint8, ``(frames, 3, height, width)``."""

    @abstractmethod
    def distrust(self, reason: str) -> None:
        """A bitstream of this encoder decoded to something else: encode on the CPU from now on."""
