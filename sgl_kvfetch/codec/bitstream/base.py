"""The interfaces of codecs and decoders, and the names of codecs and levels.

The coder of levels is in `ladder`: it needs numpy and torch, which a store does not have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from sgl_kvfetch.errors import ConfigError

if TYPE_CHECKING:  # a store has none
    import torch

CodecName = Literal["ans", "hevc", "hevc420", "zstd", "deflate", "raw"]  # that a user may choose
LADDER, DIGITS = "ladder", "digits"  # the codecs of level 0 and of the other levels
MOST_LEVELS = 4


def require_writable(name: str) -> str:
    """Return the name of a codec that a user may choose. Raises ConfigError for any other."""
    if name not in (known := get_args(CodecName)):
        raise ConfigError(f"codec {name!r} is unknown; known are {', '.join(known)}")
    return name


class Wide(NamedTuple):
    """A coefficient of two integers: ``low + high * 2**bits``. The second integers of all rows come after all first
    ones, in the order of the rows."""

    row: int
    bits: int


PictureShape = tuple[int, int, int]  # number of frames, height, width


class Codec(ABC):
    """Encodes frames into a bitstream and decodes them bit for bit.

    Instances keep no state between calls. They are thread-safe, and release the GIL while they work.
    """

    name: str
    # Rank of the time that decoding takes on a CPU; low is fast. Background encoding reads a segment's fastest variant.
    decode_cost: int
    is_video: bool = False  # whether a GPU's video engines may decode it
    is_flat: bool = False  # whether it codes rows of integers, in flat layouts alone, and not pictures

    @abstractmethod
    def encode(self, frames: torch.Tensor) -> bytes:
        """Encode ``frames``: uint8, ``(frames, 3, height, width)``."""

    @abstractmethod
    def decode(self, bitstream: bytes | memoryview, shape: PictureShape) -> torch.Tensor:
        """Return the encoded frames. Raises CorruptError if the bitstream does not decode to exactly this shape."""


class DecodedFrames(NamedTuple):
    """Decoded frames on the host, uint8 ``(frames, 3, height, width)``, not yet verified. They may be memory of the
    decoder, valid until the session decodes its next bitstream. ``on_cpu``: whether the decoder left them to the CPU.
    """

    frames: torch.Tensor
    on_cpu: bool


class FrameDecoder(ABC):
    """Decodes a codec's bitstreams on a device. It belongs to a session, which one thread uses at a time."""

    @abstractmethod
    def decode(self, bitstream: bytes | memoryview, shape: PictureShape) -> DecodedFrames:
        """Decode a bitstream. Raises CorruptError if it does not decode to exactly this shape."""


Decoders = Mapping[str, FrameDecoder]  # of one session, by codec; codecs without one are decoded on the CPU
