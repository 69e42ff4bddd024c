"""Lossless codecs between frames and bitstreams: one file a codec, and a registry."""

from sgl_kvfetch.codecs.base import Codec
from sgl_kvfetch.codecs.registry import CODECS, CodecName, EncoderName, get_codec

__all__ = ["CODECS", "Codec", "CodecName", "EncoderName", "get_codec"]
