"""Commit and delete segments in an order in which readers see a whole segment or none."""

from __future__ import annotations

import contextlib

from sgl_kvfetch.codec import CodedSegment, Manifest, decode_manifest, with_chunk_digests
from sgl_kvfetch.errors import FormatError
from sgl_kvfetch.stores import Store


async def commit_segment(store: Store, segment: CodedSegment) -> int:
    """Put the data, then the manifest, which is the commit. Return the number of bytes put.

    Raises StoreError; objects put before are then garbage that no reader sees.
    """
    if store.signs:
        segment = with_chunk_digests(segment)
    manifest = segment.manifest.encode()
    num_bytes = len(manifest)
    for name, data in segment.data_objects():
        await store.put(name, data)
        num_bytes += len(data)
    await store.put(segment.manifest.key.manifest_name, manifest)
    return num_bytes


async def delete_segment(store: Store, known: Manifest) -> None:
    """Delete a segment with the data of all variants in its stored manifest and in ``known``.

    Raises StoreError; some of its objects may be deleted then. Data that is left is garbage that no reader sees.
    """
    names = set(known.data_names)
    stored = await store.get(known.key.manifest_name)
    if stored is not None:
        with contextlib.suppress(FormatError):
            names |= decode_manifest(stored).data_names
    await store.delete(known.key.manifest_name)
    for name in names:
        await store.delete(name)
