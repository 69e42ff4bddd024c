"""The interfaces of codecs and decoders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch

PictureShape = tuple[int, int, int]  # number of frames, height, width


class Codec(ABC):
    """Encodes frames into a bitstream and decodes them bit for bit.

    Instances keep no state between calls. They are thread-safe, and release the GIL while they work.
    """

    name: str
    is_video: bool = False  # whether a GPU's video engines may decode it
    is_flat: bool = False  # whether it codes rows of integers, in flat layouts alone, and not pictures

    @abstractmethod
    def encode(self, frames: torch.Tensor) -> bytes:
        """Encode ``frames``: uint8, ``(frames, 3, height, width)``."""

    @abstractmethod
    def decode(self, bitstream: bytes | memoryview, shape: PictureShape) -> torch.Tensor:
        """Return the encoded frames. Raises CorruptError if the bitstream does not decode to exactly this shape."""


@dataclass(frozen=True, slots=True)
class DecodedFrames:
    """Decoded frames, uint8 ``(frames, 3, height, width)``, complete when this is returned.

    One field serves to verify them: ``host``, a copy on the host (``frames`` itself if that is on the host), or
    ``frame_sum``, which was computed on the device. ``host`` may be memory of the decoder, valid until the session
    decodes its next bitstream.
    """

    frames: torch.Tensor
    host: torch.Tensor | None
    frame_sum: int | None = None

    def __post_init__(self) -> None:
        assert (self.host is None) != (self.frame_sum is None)

    @property
    def is_on_device(self) -> bool:
        """Whether ``frames`` are on the device, and not on the host."""
        return self.host is not self.frames


class FrameDecoder(ABC):
    """Decodes a codec's bitstreams on a device. It belongs to a session, which one thread uses at a time."""

    @abstractmethod
    def decode(
        self,
        bitstream: bytes | memoryview,
        shape: PictureShape,
        *,
        with_sum: bool = False,
        to_host: bool = False,
    ) -> DecodedFrames:
        """Decode a bitstream. ``with_sum``: return the frame sum of frames that are decoded on the device, and no copy
        on the host. ``to_host``: return the frames on the host only. Raises CorruptError if the bitstream does not
        decode to exactly this shape."""


Decoders = Mapping[str, FrameDecoder]  # of one session, by codec; codecs without one are decoded on the CPU
