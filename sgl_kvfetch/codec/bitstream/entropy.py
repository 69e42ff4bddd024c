"""General-purpose byte codecs: fast, without a video engine. They compress a chunk's frames as one run of bytes."""

from __future__ import annotations

import threading
import zlib

import torch
import zstandard

from sgl_kvfetch.codec.bitstream.base import Codec, PictureShape
from sgl_kvfetch.errors import CorruptError

_kept = threading.local()


def _of_this_thread() -> zstandard.ZstdDecompressor:
    """Return a decompressor, which only one thread may use at a time. To make one takes longer than to decompress a few
    kilobytes."""
    found: zstandard.ZstdDecompressor | None = getattr(_kept, "decompressor", None)
    if found is None:
        found = _kept.decompressor = zstandard.ZstdDecompressor()
    return found


class _BytesCodec(Codec):
    def encode(self, frames: torch.Tensor) -> bytes:
        return self.compress(frames.contiguous().cpu().numpy().reshape(-1).data)

    def decode(self, bitstream: bytes | memoryview, shape: PictureShape) -> torch.Tensor:
        num_frames, height, width = shape
        expected = num_frames * 3 * height * width
        data = self.decompress(bitstream, expected)
        if len(data) != expected:
            raise CorruptError(f"{self.name} bitstream decodes to {len(data)} bytes, expected {expected}")
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(num_frames, 3, height, width)

    def compress(self, data: bytes | memoryview) -> bytes:
        return bytes(data)

    def decompress(self, data: bytes | memoryview, max_bytes: int) -> bytes | memoryview:
        """Return at most ``max_bytes`` bytes, even if the data claims to hold more. Raises CorruptError."""
        return data


class ZstdCodec(_BytesCodec):
    name = "zstd"
    decode_cost = 2
    level = 3

    def compress(self, data: bytes | memoryview) -> bytes:
        return zstandard.ZstdCompressor(self.level).compress(data)

    def decompress(self, data: bytes | memoryview, max_bytes: int) -> bytes:
        try:
            # The decoder allocates as many bytes as the frame claims, and never writes more.
            claimed = zstandard.frame_content_size(data)
            if not 0 <= claimed <= max_bytes:
                raise CorruptError(f"zstd frame claims {claimed} bytes (-1: unknown), expected at most {max_bytes}")
            return _of_this_thread().decompress(data, allow_extra_data=False)
        except zstandard.ZstdError as e:
            raise CorruptError(f"zstd bitstream does not decode: {e}") from e


class RawCodec(_BytesCodec):
    """Stores bytes as they are, for noise and fast networks. A chunk in `raw` is integers without frames."""

    name = "raw"
    decode_cost = 0


class DeflateCodec(_BytesCodec):
    name = "deflate"
    decode_cost = 3
    level = 1

    def compress(self, data: bytes | memoryview) -> bytes:
        return zlib.compress(data, self.level)

    def decompress(self, data: bytes | memoryview, max_bytes: int) -> bytes:
        decompressor = zlib.decompressobj()
        try:
            out = decompressor.decompress(data, max_bytes)
            if not decompressor.eof:  # the checksum may still follow, but no more data
                out += decompressor.decompress(decompressor.unconsumed_tail, 1)
        except zlib.error as e:
            raise CorruptError(f"deflate bitstream does not decode: {e}") from e
        if not decompressor.eof or decompressor.unused_data:
            raise CorruptError(f"deflate bitstream is cut, has trailing bytes, or decodes to over {max_bytes} bytes")
        return out
