"""The order that makes a segment visible whole or not at all."""

from __future__ import annotations

from sgl_kvfetch.container.segment import CodedSegment
from sgl_kvfetch.stores.base import Store


async def commit_segment(store: Store, segment: CodedSegment) -> int:
    """Put the data, then the manifest, which is the commit. Returns the bytes put.

    Raises StoreError; what was put until then is garbage that nobody sees.
    """
    manifest = segment.manifest.encode()
    await store.put(segment.data_name, segment.data)
    await store.put(segment.manifest.key.manifest_name, manifest)
    return len(segment.data) + len(manifest)
