"""What `kvfetch verify` found in a store, as the store keeps it for its page."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sgl_kvfetch.errors import DECODE_ERRORS, FormatError

MAX_DAMAGED = 100  # objects that are named
MAX_VERIFIED_BYTES = 256 << 10

_Count = Annotated[int, Meta(ge=0, le=1 << 62)]


class Damaged(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An object that is corrupt or missing. ``name`` is an object's, or ``profile WEIGHTS/DIGEST``."""

    name: Annotated[str, Meta(max_length=200)]
    what: Annotated[str, Meta(max_length=500)]


class Verified(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of one run on a whole store. The store replaces ``at_s`` by its own time, in seconds since the epoch.

    ``num_damaged`` counts damaged objects; ``damaged`` names the first of them.
    """

    num_segments: _Count
    read_bytes: _Count
    num_damaged: _Count
    damaged: Annotated[tuple[Damaged, ...], Meta(max_length=MAX_DAMAGED)]
    at_s: float = 0.0

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


def decode_verified(data: bytes) -> Verified:
    """Decode a result. Raises FormatError."""
    try:
        return msgspec.json.decode(data, type=Verified)
    except DECODE_ERRORS as e:
        raise FormatError(f"a result of kvfetch verify is malformed: {e}") from e
