"""What the NVDEC decoder and the NVENC encoder share."""

from __future__ import annotations

from typing import Protocol

import torch

from sgl_kvfetch.codecs.hevc import Hevc420Codec, HevcCodec

CODECS = {codec.name: codec for codec in (HevcCodec(), Hevc420Codec())}  # those that video engines support
_MESSAGE_CHARS = 240


class PictureSizes(Protocol):
    """The sizes of pictures that an engine supports, in pixels. A macroblock is 16x16."""

    @property
    def min_width(self) -> int: ...
    @property
    def min_height(self) -> int: ...
    @property
    def max_width(self) -> int: ...
    @property
    def max_height(self) -> int: ...
    @property
    def max_macroblocks(self) -> int: ...


def takes(sizes: PictureSizes, width: int, height: int) -> bool:
    macroblocks = -(-width // 16) * -(-height // 16)
    return bool(
        sizes.min_width <= width <= sizes.max_width
        and sizes.min_height <= height <= sizes.max_height
        and macroblocks <= sizes.max_macroblocks
    )


def moving_gradients(num_frames: int, height: int, width: int) -> torch.Tensor:
    """Return frames for a trial, uint8 ``(frames, 3, height, width)``, each predictable from the one before."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    planes = torch.stack([(rows * (plane + 1) + columns) // 2 for plane in range(3)])
    return torch.stack([(planes + frame) % 256 for frame in range(num_frames)]).to(torch.uint8)


def brief(error: Exception) -> str:
    """Return an exception's message in one line: PyNvVideoCodec's spread over several, and the first says little."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MESSAGE_CHARS]
