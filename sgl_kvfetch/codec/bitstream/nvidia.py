"""What the NVDEC decoder and the NVENC encoder share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sgl_kvfetch.codec.bitstream.hevc import Hevc420Codec, HevcCodec
from sgl_kvfetch.codec.bitstream.nvdec_caps import DecodeCaps
from sgl_kvfetch.codec.bitstream.nvenc_caps import EncodeCaps

if TYPE_CHECKING:  # importing it loads Triton
    from sgl_kvfetch.codec.bitstream.nvdec import Nvdec

CODECS = {codec.name: codec for codec in (HevcCodec(), Hevc420Codec())}  # those that video engines support
_MESSAGE_CHARS = 240


def open_current_nvdec() -> tuple[Nvdec | None, str]:
    """Return NVDEC of torch's current GPU, or None, and a sentence that describes it or says why it is missing."""
    if not torch.cuda.is_available():
        return None, f"HEVC is decoded on the CPU: torch {torch.__version__} finds no usable GPU"
    from sgl_kvfetch.codec.bitstream import nvdec
    from sgl_kvfetch.codec.cuda_streams import Device

    torch.zeros(1, device="cuda")  # the video libraries need a current CUDA context
    return nvdec.open_nvdec(Device(torch.device("cuda", torch.cuda.current_device())))


def takes(sizes: DecodeCaps | EncodeCaps, width: int, height: int) -> bool:
    """Return whether an engine supports pictures of this size, in pixels."""
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
