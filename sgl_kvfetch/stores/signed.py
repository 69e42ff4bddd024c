"""A store whose manifests count only with a valid signature."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from sgl_kvfetch.codec import ManifestKeys, decode_manifest, split_signature
from sgl_kvfetch.errors import FormatError, StoreError
from sgl_kvfetch.keys import MANIFEST_SUFFIX
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.stores.base import Lookup, Store, WrappedStore

_limited = LimitedLogger(logging.getLogger(__name__))


class SignedStore(WrappedStore):
    """Signs manifests that are put into ``store``, and treats those without a valid signature as missing."""

    signs = True

    def __init__(self, store: Store, keys: ManifestKeys) -> None:
        super().__init__(store)
        self._keys = keys

    async def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        if not name.endswith(MANIFEST_SUFFIX):
            return await self._store.get(name, start, length)
        if start or length is not None:
            raise StoreError("invalid", f"{name}: only a whole manifest can be verified")
        data = await self._store.get(name)
        return data if data is not None and self._is_good(data) else None

    async def put(self, name: str, data: bytes) -> None:
        await self._store.put(name, self._signed(data) if name.endswith(MANIFEST_SUFFIX) else data)

    async def replace(self, name: str, data: bytes, expected_digest: str) -> bool:
        return await self._store.replace(name, self._signed(data), expected_digest)

    async def lookup(self, namespace: str, page_hashes: Sequence[bytes]) -> Lookup:
        """Look up a run, which ends at the first segment without a valid signature."""
        found = await self._store.lookup(namespace, page_hashes)
        bad = (i for i, hit in enumerate(found.hits) if not self._is_good(hit.manifest))
        return replace(found, hits=found.hits[: next(bad, len(found.hits))])

    def _signed(self, data: bytes) -> bytes:
        manifest, _ = split_signature(data)
        try:
            decoded = decode_manifest(manifest)
        except FormatError as e:
            raise StoreError("invalid", f"not a manifest: {e}") from e
        assert all(each.chunk_digests for each in decoded.data), "a signature would not cover the data"
        return self._keys.sign(manifest)

    def _is_good(self, data: bytes) -> bool:
        manifest, signature = split_signature(data)
        if not signature or not self._keys.is_signed(manifest, signature):
            _limited.warning("signature", "the store has a manifest without a valid signature; it is not used")
            return False
        return True
