"""The order that makes a segment visible whole or not at all, and gone whole."""

from __future__ import annotations

import contextlib

from sgl_kvfetch.container.manifest import Manifest, decode_manifest
from sgl_kvfetch.container.segment import CodedSegment
from sgl_kvfetch.errors import FormatError
from sgl_kvfetch.stores.base import Store


async def commit_segment(store: Store, segment: CodedSegment) -> int:
    """Put the data, then the manifest, which is the commit. Returns the bytes put.

    Raises StoreError; what was put until then is garbage that nobody sees.
    """
    manifest = segment.manifest.encode()
    num_bytes = len(manifest)
    for name, data in segment.data_objects():
        await store.put(name, data)
        num_bytes += len(data)
    await store.put(segment.manifest.key.manifest_name, manifest)
    return num_bytes


async def delete_segment(store: Store, known: Manifest) -> None:
    """Delete a segment, with the data of the variants that it has now and of those that ``known`` lists.

    Raises StoreError; some of its objects are deleted then. Data that is left is garbage that nobody sees.
    """
    names = set(known.data_names)
    stored = await store.get(known.key.manifest_name)
    if stored is not None:
        with contextlib.suppress(FormatError):
            names |= decode_manifest(stored).data_names
    await store.delete(known.key.manifest_name)
    for name in names:
        await store.delete(name)
