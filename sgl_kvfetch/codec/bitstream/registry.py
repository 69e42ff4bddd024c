"""Codecs by name: the manifest records these names."""

from __future__ import annotations

from typing import Literal

from sgl_kvfetch.codec.bitstream.base import Codec
from sgl_kvfetch.codec.bitstream.entropy import DeflateCodec, RawCodec, ZstdCodec
from sgl_kvfetch.codec.bitstream.hevc import Hevc420Codec, HevcCodec
from sgl_kvfetch.errors import FormatError

CodecName = Literal["hevc", "hevc420", "zstd", "deflate", "raw"]
EncoderName = Literal["auto", "cpu", "nvenc"]  # the encoders of HEVC

CODECS: dict[str, Codec] = {c.name: c for c in (HevcCodec(), Hevc420Codec(), ZstdCodec(), DeflateCodec(), RawCodec())}


def get_codec(name: str) -> Codec:
    """Return the codec of this name. Raises FormatError if there is none."""
    codec = CODECS.get(name)
    if codec is None:
        raise FormatError(f"codec {name!r} is unknown; known are {', '.join(CODECS)}")
    return codec
