"""LLM.265 (MICRO'25; arXiv 2407.00467 as VcLLM)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from fractions import Fraction

import av
import numpy as np
import torch

from benchmarks.codec.method import KV_DTYPE, Shape, TensorMethod, from_bytes, to_bytes
from sgl_kvfetch.types import TensorName

_U32 = struct.Struct("<I")
# ipratio: without it, intra pictures would get a lower QP than the requested one.
_X265_PARAMS = "keyint=1:bframes=0:ipratio=1:annexb=1:info=0:pools=none:frame-threads=1:wpp=0:log-level=none"


class Llm265(TensorMethod):
    """Stores each layer as one grey picture of tokens by channels, with 8 bits between the picture's smallest and
    largest value, in lossy intra-only HEVC.

    Where the paper leaves it open, we assume: a picture holds a layer's K or V of the whole context; its range is two
    float32; libx265 with preset ``fast``, tuned for squared error, and a constant QP replaces NVENC.
    """

    family = "LLM.265"

    def __init__(self, qp: int) -> None:
        self.name = f"llm.265-qp{qp}"
        self.source = f"LLM.265 (MICRO'25; arXiv 2407.00467), intra-only HEVC, QP {qp}"
        self._qp = qp

    def encode_tensor(self, tensor: TensorName, values: torch.Tensor) -> Iterator[bytes]:
        pictures = values.float().flatten(2).transpose(0, 1)  # (layers, tokens, channels)
        smallest, largest = pictures.amin((1, 2), keepdim=True), pictures.amax((1, 2), keepdim=True)
        unit = torch.where(largest > smallest, (pictures - smallest) / (largest - smallest), 0.0)
        yield to_bytes(torch.cat((smallest, largest), 1))
        yield self._encode_pictures((unit * 255).round().to(torch.uint8).numpy())

    def decode_tensor(self, tensor: TensorName, parts: Iterator[bytes], shape: Shape) -> torch.Tensor:
        num_tokens, num_layers, num_heads, head_dim = shape
        smallest, largest = torch.split(from_bytes(next(parts), torch.float32, (num_layers, 2, 1)), 1, 1)
        pixels = torch.from_numpy(_decode_pictures(next(parts), num_tokens, num_heads * head_dim))
        values = pixels.float() / 255 * (largest - smallest) + smallest
        return values.transpose(0, 1).reshape(shape).to(KV_DTYPE)

    def _encode_pictures(self, pixels: np.ndarray) -> bytes:
        """Return the access units, each after its length as u32."""
        encoder = av.CodecContext.create("libx265", "w")
        assert isinstance(encoder, av.VideoCodecContext)
        encoder.width, encoder.height = pixels.shape[2], pixels.shape[1]
        encoder.pix_fmt = "gray"
        encoder.time_base = Fraction(1, 25)
        encoder.thread_count = 1
        params = f"qp={self._qp}:{_X265_PARAMS}"
        encoder.options = {"preset": "fast", "tune": "psnr", "x265-params": params}
        units: list[bytes] = []
        for index, picture in enumerate(pixels):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="gray")
            frame.pts = index
            units += map(bytes, encoder.encode(frame))
        units += map(bytes, encoder.encode(None))
        return b"".join(_U32.pack(len(unit)) + unit for unit in units)


def _decode_pictures(data: bytes, height: int, width: int) -> np.ndarray:
    """Return uint8 ``(pictures, height, width)``."""
    decoder = av.CodecContext.create("hevc", "r")
    assert isinstance(decoder, av.VideoCodecContext)
    decoder.thread_count = 1
    pictures = []
    offset = 0
    packets: list[av.Packet | None] = []
    while offset < len(data):
        (size,) = _U32.unpack_from(data, offset)
        offset += _U32.size + size
        packets.append(av.Packet(data[offset - size : offset]))
    for packet in [*packets, None]:
        pictures += [frame.to_ndarray(format="gray") for frame in decoder.decode(packet)]
    stacked = np.stack(pictures)
    assert stacked.shape[1:] == (height, width), stacked.shape
    return stacked
