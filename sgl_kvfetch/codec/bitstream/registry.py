"""Codecs by name: the manifest records these names.

Installed packages bring further ones: an entry point in the group ``sgl_kvfetch.codecs``, named like the codec, loads a
`Codec` (docs/extending.md). It codes rows of integers, or pictures that are no video. Readers without it leave
out what it has coded. Bytes that it decodes may come from anybody who can write to the store.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Set
from functools import cache
from typing import Literal, get_args

from sgl_kvfetch.codec.bitstream.ans import AnsCodec, AnsTablesCodec
from sgl_kvfetch.codec.bitstream.base import LADDER, Codec
from sgl_kvfetch.codec.bitstream.entropy import DeflateCodec, RawCodec, ZstdCodec
from sgl_kvfetch.codec.bitstream.hevc import HEVC_CODECS
from sgl_kvfetch.codec.layout.frames import FLAT
from sgl_kvfetch.doors import brought_by_others, label_of, load_brought, require_made
from sgl_kvfetch.errors import ConfigError, FormatError

CodecName = Literal["ans", "hevc", "hevc420", "zstd", "deflate", "raw"]

_OTHERS = AnsCodec(), AnsTablesCodec(), ZstdCodec(), DeflateCodec(), RawCodec()
CODECS: dict[str, Codec] = {**HEVC_CODECS, **{codec.name: codec for codec in _OTHERS}}
_READABLE = frozenset({*CODECS, LADDER})  # of ours, the codecs of chunks that a reader can decode
logger = logging.getLogger(__name__)


def get_codec(name: str) -> Codec:
    """Return the codec of this name. Raises FormatError if there is none, or if it cannot be used."""
    if name in CODECS:
        return CODECS[name]
    if name not in brought_by_others("codecs"):
        known = ", ".join((*CODECS, *brought_by_others("codecs")))
        raise FormatError(f"codec {name!r} is unknown; known are {known}")
    try:
        return _brought(name)
    except ConfigError as e:
        raise FormatError(str(e)) from e


@cache
def _brought(name: str) -> Codec:
    codec = load_brought("codecs", name)
    require_made("codecs", name, codec, Codec)
    if codec.name != name or codec.is_video:
        raise ConfigError(
            f"{label_of('codecs', name)}: expected the codec's name {name!r}, and no video; "
            f"found {codec.name!r}{', a video codec' if codec.is_video else ''}"
        )
    assert isinstance(codec, Codec)
    return codec


def require_writable(name: str) -> str:
    """Return the name of a codec that a user may choose. Raises ConfigError for any other."""
    known = (*get_args(CodecName), *brought_by_others("codecs"))
    if name not in known:
        raise ConfigError(f"codec {name!r} is unknown; known are {', '.join(known)}")
    try:
        get_codec(name)
    except FormatError as e:
        raise ConfigError(str(e)) from e
    return name


def can_decode(codecs: Set[str]) -> bool:
    """Return whether a reader can decode chunks of these codecs."""
    return all(_is_there(name) for name in codecs - _READABLE)


def _is_there(name: str) -> bool:
    return name in brought_by_others("codecs") and _loads(name)


@cache
def _loads(name: str) -> bool:
    try:
        get_codec(name)
    except FormatError as e:
        logger.warning("%s; segments in this codec are passed over", e)
        return False
    return True


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
