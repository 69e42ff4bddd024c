"""Codecs by name: the manifest records these names."""

from __future__ import annotations

from collections.abc import Iterable, Set

from sgl_kvfetch.codec.bitstream.ans import AnsCodec, AnsTablesCodec
from sgl_kvfetch.codec.bitstream.base import LADDER, Codec
from sgl_kvfetch.codec.bitstream.entropy import DeflateCodec, RawCodec, ZstdCodec
from sgl_kvfetch.codec.bitstream.hevc import HEVC_CODECS
from sgl_kvfetch.codec.layout.frames import FLAT
from sgl_kvfetch.errors import FormatError

_OTHERS = AnsCodec(), AnsTablesCodec(), ZstdCodec(), DeflateCodec(), RawCodec()
CODECS: dict[str, Codec] = {**HEVC_CODECS, **{codec.name: codec for codec in _OTHERS}}
_READABLE = frozenset({*CODECS, LADDER})  # the codecs of chunks that a reader can decode


def get_codec(name: str) -> Codec:
    """Return the codec of this name. Raises FormatError if there is none."""
    if name not in CODECS:
        raise FormatError(f"codec {name!r} is unknown; known are {', '.join(CODECS)}")
    return CODECS[name]


def can_decode(codecs: Set[str]) -> bool:
    """Return whether a reader can decode chunks of these codecs."""
    return codecs <= _READABLE


def decode_cost(codecs: Iterable[str]) -> int:
    """Return the largest `Codec.decode_cost` of these codecs, which `can_decode` accepts. A ladder is as `ans`."""
    return max(get_codec(AnsCodec.name if name == LADDER else name).decode_cost for name in codecs)


def resolution_for(codec: str, resolution: str) -> str:
    """Return the resolution of layouts for this codec: the given one if it codes pictures, else ``FLAT``."""
    return FLAT if get_codec(codec).is_flat else resolution


def writers_resolution(codec: str, resolution: str) -> str:
    """Return the resolution at which a server writes with this codec: the given one for video, else ``FLAT``. Pictures
    of values that are no video are padded, and larger by a twentieth in zstd."""
    return resolution if get_codec(codec).is_video else FLAT
