"""Pins: prompts whose segments are evicted last.

A pin has the hashes of a prompt's pages. It holds for every segment with one of these pages: of any namespace and
rank, stored before or after it, merged or not.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated

import msgspec
from msgspec import Meta

from sgl_kvfetch.codec import decode_manifest
from sgl_kvfetch.errors import DECODE_ERRORS, FormatError, StoreError
from sgl_kvfetch.keys import PAGE_HASH_BYTES, SegmentKey, split_hashes
from sgl_kvfetch.stores.base import AdminStore

MAX_LABEL = 200  # characters
MAX_PIN_PAGES = 1 << 16
MAX_PIN_BYTES = MAX_PIN_PAGES * PAGE_HASH_BYTES + 4096
MAX_PINNED_PART = 1 / 2  # of a capacity: a pin that needs more is refused

_NAME = re.compile(r"[0-9a-f]{64}")


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    label: Annotated[str, Meta(max_length=MAX_LABEL)]  # for people
    page_size: Annotated[int, Meta(ge=1)]  # in tokens
    hashes: Annotated[bytes, Meta(min_length=PAGE_HASH_BYTES, max_length=MAX_PIN_PAGES * PAGE_HASH_BYTES)]

    @property
    def name(self) -> str:
        """The hash of the last page, which stands for the whole prompt."""
        return self.hashes[-PAGE_HASH_BYTES:].hex()

    @property
    def page_hashes(self) -> list[bytes]:
        return split_hashes(self.hashes)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


_pins = msgspec.msgpack.Decoder(Pin)  # made before there are threads: see `codec/container/manifest.py`


def decode_pin(content: bytes) -> Pin:
    """Decode a stored pin. Raises FormatError."""
    try:
        pin = _pins.decode(content)
    except DECODE_ERRORS as e:
        raise FormatError(f"malformed pin: {e}") from e
    if len(pin.hashes) % PAGE_HASH_BYTES:
        raise FormatError(f"malformed pin: {len(pin.hashes)} bytes of page hashes are no multiple of {PAGE_HASH_BYTES}")
    return pin


def require_pin_name(name: str) -> str:
    """Return the name, which then is also safe as a file's. Raises StoreError (``invalid``) for any other text."""
    if _NAME.fullmatch(name) is None:
        raise StoreError("invalid", f"not the name of a pin: {name[:120]!r}")
    return name


async def pinned_segments(store: AdminStore, folders: Collection[str]) -> set[SegmentKey]:
    """Return the segments in these folders that lookups of the pinned prompts find. Raises StoreError."""
    found: set[SegmentKey] = set()
    for name in await store.pins():
        pin = await store.get_pin(name)
        if pin is None:
            continue  # deleted meanwhile
        for folder in folders:
            hits = (await store.lookup(folder, pin.page_hashes)).hits
            found.update(decode_manifest(hit.manifest).key for hit in hits)
    return found
