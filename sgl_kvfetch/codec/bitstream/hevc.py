"""Lossless HEVC on the CPU: libx265 to encode, libavcodec to decode, both through PyAV.

A bitstream is a table of access units (u32 count, then a u32 size for each; little endian) followed by the access
units themselves in Annex B form, one a picture. The table lets decoders, NVDEC included, work without a demuxer.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from sgl_kvfetch.codec.bitstream.base import Codec, PictureShape
from sgl_kvfetch.codec.layout.frames import FILL
from sgl_kvfetch.errors import CorruptError

if TYPE_CHECKING:  # the other codecs work without PyAV
    import av

_U32 = struct.Struct("<I")
# NAL units of type 33, up to the next start code. Emulation prevention keeps start codes out of all payloads.
_SEQUENCE_PARAMETER_SET = re.compile(rb"\x00\x00\x01([\x42\x43].*?)(?=\x00\x00\x01|\Z)", re.DOTALL)
# For lossless video, x265 signals level 8.5, which means no level; a hardware decoder may refuse that. All our pictures
# are within the size and rate of level 5.1. Lossless pictures may exceed the bit rate of any level.
_NO_LEVEL, _LEVEL_5_1 = 255, 153
_LEVEL_AT = {32: 17, 33: 14}  # offset of general_level_idc in the NAL units of types VPS and SPS, headers included
# In an access unit. Ours have one slice, and the first has three parameter sets, too. libavcodec allocates 4.6 KB for
# each NAL unit, however short it is.
_MOST_NAL_UNITS = 256
_LARGEST_UNIT = 64  # pixels; encoders may code pictures in whole coding units and crop them

# Slower presets gain 1% or less on this kind of data (docs/codec.md), and take ten times as long. Each encoder uses one
# thread, since chunks are encoded in parallel.
_X265 = {
    "lossless": 1,
    "bframes": 0,
    "keyint": -1,
    "min-cu-size": 8,  # the preset's 16 costs 5% here: tiles are smaller
    "repeat-headers": 1,
    "annexb": 1,
    "info": 0,
    "pools": "none",
    "frame-threads": 1,
    "wpp": 0,
    "log-level": "none",
}
_X265_OPTIONS = {
    "preset": "ultrafast",
    "x265-params": ":".join(f"{key}={value}" for key, value in _X265.items()),
}


class HevcCodec(Codec):
    """4:4:4 HEVC: each of a picture's three planes holds one layer."""

    name = "hevc"
    decode_cost = 4
    is_video = True
    pixel_format = "yuv444p"
    planes_a_picture = 3

    def encode(self, frames: torch.Tensor) -> bytes:
        import av

        pictures = self.to_pictures(frames.contiguous().cpu().numpy())
        encoder = av.CodecContext.create("libx265", "w")
        assert isinstance(encoder, av.VideoCodecContext)
        encoder.width, encoder.height = frames.shape[3], frames.shape[2]
        encoder.pix_fmt = self.pixel_format
        encoder.time_base = Fraction(1, 25)
        encoder.thread_count = 1
        encoder.options = _X265_OPTIONS
        access_units: list[bytes] = []
        for index, picture in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(picture, format=self.pixel_format)
            frame.pts = index
            access_units += map(bytes, encoder.encode(frame))
        access_units += map(bytes, encoder.encode(None))
        assert len(access_units) == len(pictures), (len(access_units), len(pictures))
        return join_access_units([_with_known_level(unit) for unit in access_units])

    def decode(self, bitstream: bytes | memoryview, shape: PictureShape) -> torch.Tensor:
        """Decode on the CPU. Raises CorruptError unless exactly the announced pictures come, in the expected size."""
        import av
        import av.error

        num_frames, height, width = shape
        access_units = self.access_units(bitstream, num_frames)
        expected = len(access_units)
        num_decoded = 0
        try:
            decoder = self._open(access_units, height, width)
            out = np.empty((num_frames, 3, height, width), np.uint8)
            for packet in [*map(av.Packet, access_units), None]:
                for frame in decoder.decode(packet):
                    if num_decoded == expected:
                        raise CorruptError(f"{self.name} bitstream decodes to more than {expected} pictures")
                    found = (frame.format.name, frame.width, frame.height)
                    if found != (self.pixel_format, width, height):
                        raise CorruptError(
                            f"{self.name} picture is {found}, expected {(self.pixel_format, width, height)}"
                        )
                    self._from_picture(frame, num_decoded, out)
                    num_decoded += 1
        except av.error.FFmpegError as e:
            raise CorruptError(f"{self.name} bitstream does not decode: {e}") from e
        if num_decoded != expected:
            raise CorruptError(f"{self.name} bitstream decodes to {num_decoded} pictures, expected {expected}")
        return torch.from_numpy(out)

    def access_units(self, bitstream: bytes | memoryview, num_frames: int) -> list[memoryview]:
        """Return the access units, one a picture. Raises CorruptError if ``num_frames`` need another number of them, or
        if one has more than ``_MOST_NAL_UNITS``."""
        expected = num_frames * 3 // self.planes_a_picture
        # Before they are listed: a table may name as many empty ones as a quarter of the bitstream's bytes.
        if (found := _num_access_units(memoryview(bitstream))) != expected:
            raise CorruptError(f"{self.name} bitstream has {found} pictures, expected {expected}")
        access_units = split_access_units(bitstream)
        for unit in access_units:
            if (found := bytes(unit).count(b"\0\0\1")) > _MOST_NAL_UNITS:
                raise CorruptError(f"{self.name} picture has {found} NAL units, more than {_MOST_NAL_UNITS}")
        return access_units

    def _open(self, access_units: Sequence[memoryview], height: int, width: int) -> av.VideoCodecContext:
        """Return a decoder for pictures of this size. Raises CorruptError unless the bitstream states this size.

        libavcodec would allocate gigabytes for a larger stated size, even if the pictures are then cropped to ours.
        """
        import av

        first = bytes(access_units[0])
        # Otherwise libavcodec would look for something else than start codes, and find parameter sets that we do not.
        if not first.startswith((b"\0\0\1", b"\0\0\0\1")):
            raise CorruptError(f"{self.name} bitstream does not begin with a start code")
        sets = {found.rstrip(b"\0") for unit in access_units for found in _SEQUENCE_PARAMETER_SET.findall(unit)}
        if len(sets) != 1:
            raise CorruptError(f"{self.name} bitstream has {len(sets)} sequence parameter sets, expected one")
        decoder = av.CodecContext.create("hevc", "r")
        assert isinstance(decoder, av.VideoCodecContext)
        decoder.thread_count = 1
        decoder.extradata = first  # opening it reads the parameter sets in it, and no picture
        decoder.open()
        # Before PyAV 18, `decoder.pix_fmt` is unknown here. A frame of another format has at most twice as many bytes.
        if (decoder.width, decoder.height) != (width, height):
            raise CorruptError(f"{self.name} pictures have {decoder.width}x{decoder.height}, expected {width}x{height}")
        if max(decoder.coded_width - width, decoder.coded_height - height) >= _LARGEST_UNIT:
            raise CorruptError(
                f"{self.name} pictures are coded as {decoder.coded_width}x{decoder.coded_height} and cropped to "
                f"{width}x{height}"
            )
        return decoder

    def to_pictures(self, frames: np.ndarray) -> list[np.ndarray]:
        """Convert ``(frames, 3, height, width)`` into pictures, one an access unit. A picture's planes are stacked
        vertically. The chroma of 4:2:0 takes half as many rows as the luma."""
        return list(frames)

    def _from_picture(self, picture: av.VideoFrame, index: int, out: np.ndarray) -> None:
        for plane in range(3):
            out[index, plane] = _plane(picture, plane)


class Hevc420Codec(HevcCodec):
    """4:2:0 HEVC with constant chroma, for decoders without 4:4:4.

    Each layer fills the luma of its own pictures. All frames of the first layer come before those of the second, so
    that frames next to each other in time stay neighbours."""

    name = "hevc420"
    decode_cost = 5
    pixel_format = "yuv420p"
    planes_a_picture = 1

    def to_pictures(self, frames: np.ndarray) -> list[np.ndarray]:
        num_frames, _, height, width = frames.shape
        chroma = np.full((height // 2, width), FILL, np.uint8)
        lumas = frames.swapaxes(0, 1).reshape(3 * num_frames, height, width)
        return [np.concatenate((luma, chroma)) for luma in lumas]

    def _from_picture(self, picture: av.VideoFrame, index: int, out: np.ndarray) -> None:
        plane, frame = divmod(index, out.shape[0])
        out[frame, plane] = _plane(picture, 0)


HEVC_CODECS = {codec.name: codec for codec in (HevcCodec(), Hevc420Codec())}  # those that video engines support


def _with_known_level(access_unit: bytes) -> bytes:
    """Return an access unit whose parameter sets signal level 5.1, if they signalled none."""
    patched = bytearray(access_unit)
    start = access_unit.find(b"\0\0\1") + 3
    while start >= 3 and (kind := access_unit[start] >> 1 & 63) >= min(_LEVEL_AT):  # up to the first slice
        if kind in _LEVEL_AT:
            position = _raw_offset(access_unit, start, _LEVEL_AT[kind])
            if patched[position] == _NO_LEVEL:
                patched[position] = _LEVEL_5_1
        start = access_unit.find(b"\0\0\1", start) + 3
    return bytes(patched)


def _raw_offset(data: bytes, start: int, offset: int) -> int:
    """Return where byte ``offset`` of the NAL unit at ``start`` is, not counting bytes of emulation prevention."""
    position = start
    for _ in range(offset):
        position += 1
        if data[position - 2 : position + 1] == b"\0\0\3":
            position += 1
    return position


def _plane(picture: av.VideoFrame, index: int) -> np.ndarray:
    plane = picture.planes[index]
    rows = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)
    return rows[: plane.height, : plane.width]


def join_access_units(access_units: list[bytes]) -> bytes:
    """Return a bitstream: the table of access units, then the access units."""
    sizes = b"".join(_U32.pack(len(unit)) for unit in access_units)
    return _U32.pack(len(access_units)) + sizes + b"".join(access_units)


def split_access_units(bitstream: bytes | memoryview) -> list[memoryview]:
    """Return the access units. Raises CorruptError unless the table accounts for every byte."""
    view = memoryview(bitstream)
    count = _num_access_units(view)
    start = _U32.size * (1 + count)
    if start > len(view):
        raise CorruptError(f"bitstream of {len(view)} bytes claims {count} access units: its table is cut")
    offsets = list(accumulate((size for (size,) in _U32.iter_unpack(view[_U32.size : start])), initial=start))
    if offsets[-1] != len(view):
        raise CorruptError(f"bitstream has {len(view)} bytes, but its table accounts for {offsets[-1]}")
    return [view[start:end] for start, end in pairwise(offsets)]


def _num_access_units(view: memoryview) -> int:
    """Return how many access units a bitstream claims to have. Raises CorruptError if it is too short to say so."""
    if len(view) < _U32.size:
        raise CorruptError(f"bitstream has {len(view)} bytes, too few for its table")
    (count,) = _U32.unpack_from(view)
    return int(count)
