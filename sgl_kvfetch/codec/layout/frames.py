"""Shared parts of the layouts: the base class, the bounds of pictures, and the fill value of empty pixels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from sgl_kvfetch.errors import FormatError

if TYPE_CHECKING:
    import torch

PLANES = 3
FILL = 128  # of pixels without an integer: constant areas cost almost nothing in every codec
MIN_PICTURE = 144  # NVDEC decodes no HEVC picture smaller than 144x144
PICTURE_MULTIPLE = 8  # HEVC's smallest coding unit
MAX_PICTURE_VALUES = 1 << 22  # of one plane; a decoder keeps up to 17 pictures in memory

RESOLUTIONS: dict[str, tuple[int, int]] = {  # nominal width and height, as in KVFetcher's tables
    "240p": (432, 240),
    "480p": (856, 480),
    "640p": (1136, 640),
    "1080p": (1920, 1080),
}

FLAT = "flat"  # instead of a resolution: rows of integers, for codecs that know no pictures

Dim = Annotated[int, Meta(ge=1, le=1 << 16)]


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """A bijection between uint8 integers of one shape and frames, uint8 ``(frames, 3, height, width)``.

    Pixels that hold no integer are ``FILL``.
    """

    width: Dim
    height: Dim

    @property
    def is_flat(self) -> bool:
        """Whether frames are rows of integers, and not pictures for a video codec."""
        return self.height == 1

    def require_fits(self, shape: tuple[int, ...]) -> None:
        """Raise FormatError unless the pictures can hold integers of ``shape``."""
        if self.width * self.height > MAX_PICTURE_VALUES:
            raise FormatError(f"picture of {self.width}x{self.height} exceeds {MAX_PICTURE_VALUES} values")

    def num_frames(self, shape: tuple[int, ...]) -> int:
        """Return the number of frames that integers of ``shape`` take."""
        raise NotImplementedError

    def to_frames(self, integers: torch.Tensor) -> torch.Tensor:
        """Return the frames of ``integers``, contiguous, on the same device."""
        raise NotImplementedError

    def from_frames(self, frames: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the integers of ``shape`` that ``frames`` hold, contiguous, on the same device."""
        raise NotImplementedError

    def begins_with(self, shape: tuple[int, ...]) -> bool:
        """Return whether frames, read as bytes, begin with integers of ``shape``, in their order."""
        return False

    def _filled_up(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return whole pictures that begin with ``pixels``, ``(frames, 3, rows, columns)``, contiguous."""
        rows, columns = pixels.shape[2:]
        if (rows, columns) == (self.height, self.width):
            return pixels.contiguous()
        frames = pixels.new_full((*pixels.shape[:2], self.height, self.width), FILL)
        frames[:, :, :rows, :columns] = pixels
        return frames

    def frames_shape(self, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Return the shape of the frames that integers of ``shape`` take."""
        return self.num_frames(shape), PLANES, self.height, self.width


def picture_side(used: int) -> int:
    """Return the smallest side of a picture that has room for ``used`` values and is valid for every decoder."""
    side = max(used, MIN_PICTURE)
    return -(-side // PICTURE_MULTIPLE) * PICTURE_MULTIPLE
