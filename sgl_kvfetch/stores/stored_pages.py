"""How much of a prompt a store has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from sgl_kvfetch.codec import decode_manifest
from sgl_kvfetch.stores.base import Store


async def pages_stored(store: Store, hashes: Sequence[bytes]) -> dict[str, int]:
    """Return, by namespace, how many of a prompt's pages a lookup finds with all heads. Raises StoreError.

    Ranks store their own heads, in folders of their own.
    """
    heads_of_page: defaultdict[str, list[set[int]]] = defaultdict(lambda: [set() for _ in hashes])
    num_heads: dict[str, int] = {}
    for folder in await store.folders():
        page = 0
        for hit in (await store.lookup(folder, hashes)).hits:
            manifest = decode_manifest(hit.manifest)
            namespace = manifest.namespace.digest()
            num_heads[namespace] = manifest.namespace.num_heads
            for heads in heads_of_page[namespace][page : page + hit.num_pages]:
                heads.update(manifest.heads.heads)
            page += hit.num_pages
    return {
        namespace: next((i for i, heads in enumerate(found) if len(heads) < num_heads[namespace]), len(found))
        for namespace, found in heads_of_page.items()
    }
