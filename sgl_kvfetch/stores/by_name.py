"""Look pages up by the names of their segments, in a store that can do no more than return objects by name.

A reader knows the hashes of all its pages; a segment's name has its length and the hash of its last page; lengths are
powers of two that divide the segment's position. So few names are possible at each page. All of them are requested at
once, and the longest segment wins: a run of s segments takes s round trips, and one more if the last requested page is
not its end.

This does not find a segment that starts before the requested pages, nor one whose last page is not among them. For
those, a store needs an index of pages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from sgl_kvfetch.codec import MAX_SEGMENT_PAGES, Manifest, decode_manifest
from sgl_kvfetch.errors import FormatError, StoreError
from sgl_kvfetch.keys import SegmentKey
from sgl_kvfetch.side_by_side import together
from sgl_kvfetch.stores.base import Lookup, SegmentHit
from sgl_kvfetch.stores.wire import MAX_LOOKUP_ANSWER_BYTES

GetObject = Callable[[str], Coroutine[Any, Any, bytes | None]]


async def lookup_by_name(get: GetObject, namespace: str, page_hashes: Sequence[bytes]) -> Lookup:
    """Find segments as ``Store.lookup`` does, as far as names allow. ``get`` reads a whole object.

    Raises StoreError if the first round trip fails. A later failure only ends the run, as do manifests of more than
    `MAX_LOOKUP_ANSWER_BYTES`.
    """
    hits: list[SegmentHit] = []
    room = MAX_LOOKUP_ANSWER_BYTES
    page = 0
    position: int | None = None  # of `page` in the sequence; unknown until a segment is found
    while page < len(page_hashes):
        lengths = possible_lengths(len(page_hashes) - page, position)
        keys = [SegmentKey(namespace, length, page_hashes[page + length - 1]) for length in lengths]
        try:
            contents = await together(get(key.manifest_name) for key in keys)
        except StoreError:
            if not hits:
                raise
            break
        for key, content in zip(keys, contents, strict=True):
            manifest = None if content is None else await asyncio.to_thread(decode_expected, content, key)
            if (
                content is not None
                and manifest is not None
                and len(content) <= room
                and position in (None, manifest.first_page)
                and manifest.page_hashes == tuple(page_hashes[page : page + key.num_pages])
            ):
                hits.append(SegmentHit(content, 0, key.num_pages))
                room -= len(content)
                page += key.num_pages
                position = manifest.first_page + key.num_pages
                break
        else:
            break
    return Lookup(tuple(hits))


def possible_lengths(num_pages: int, position: int | None) -> list[int]:
    """Return the lengths, longest first, of segments that may start at ``position`` and have at most ``num_pages``."""
    aligned = MAX_SEGMENT_PAGES if not position else position & -position
    longest = min(num_pages, aligned, MAX_SEGMENT_PAGES)
    return [1 << order for order in reversed(range(longest.bit_length()))]


def decode_expected(content: bytes, key: SegmentKey) -> Manifest | None:
    """Decode a manifest. Return None if it is malformed, expired, or another segment's."""
    try:
        manifest = decode_manifest(content)
    except FormatError:
        return None
    return manifest if manifest.key == key and not manifest.is_expired(time.time()) else None
