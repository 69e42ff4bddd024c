"""A store whose segments count only if holders of our keys wrote them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from sgl_kvfetch.codec import Content, StoreKeys, bytes_of, decode_manifest, is_vouched_for
from sgl_kvfetch.codec.container.manifest import encryption_keys_of, split_signature
from sgl_kvfetch.errors import FormatError, StoreError
from sgl_kvfetch.keys import MANIFEST_SUFFIX
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.stores.base import Lookup, Store, WrappedStore
from sgl_kvfetch.user_files import FreshFiles

_limited = LimitedLogger(logging.getLogger(__name__))
_FEW_BYTES = 64 << 10  # of manifests: the event loop checks so many itself


class KeyedStore(WrappedStore):
    """Signs manifests that are put into ``store``, if there are manifest keys. Treats segments as missing if their
    manifests have no valid signature, and those that are not encrypted with one of our keys, if there are any."""

    def __init__(self, store: Store, keys: StoreKeys | FreshFiles[StoreKeys]) -> None:
        """``keys``: those of files are read again when they change, with the next lookup."""
        super().__init__(store)
        self._files = keys if isinstance(keys, FreshFiles) else None
        self.keys = keys.value if isinstance(keys, FreshFiles) else keys

    async def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        if not name.endswith(MANIFEST_SUFFIX):
            return await self._store.get(name, start, length)
        if length is not None:
            raise StoreError("invalid", f"{name}: only a whole manifest can be verified")
        data = await self._store.get(name)
        return data if data is not None and self._is_good(data) else None

    async def read(
        self,
        name: str,
        start: int,
        into: Sequence[memoryview],
        received: Callable[[int], None] = lambda num_bytes: None,
    ) -> bool:
        if name.endswith(MANIFEST_SUFFIX):
            raise StoreError("invalid", f"{name}: only a whole manifest can be verified")
        return await self._store.read(name, start, into, received)

    async def put(self, name: str, data: Content) -> None:
        await self._store.put(name, self._signed(bytes_of(data)) if name.endswith(MANIFEST_SUFFIX) else data)

    async def replace(self, name: str, data: bytes, expected_digest: str) -> bool:
        return await self._store.replace(name, self._signed(data), expected_digest)

    async def lookup(self, namespace: str, page_hashes: Sequence[bytes]) -> Lookup:
        """Look up a run, which ends at the first segment that does not count."""
        if self._files is not None:
            await self._files.follow()
            self.keys = self._files.value
        found = await self._store.lookup(namespace, page_hashes)
        manifests = [hit.manifest for hit in found.hits]
        is_few = sum(map(len, manifests)) <= _FEW_BYTES
        args = manifests, found.from_cache
        num_good = self._count_good(*args) if is_few else await asyncio.to_thread(self._count_good, *args)
        return replace(found, hits=found.hits[:num_good])

    def _count_good(self, manifests: Sequence[bytes], is_cached: bool) -> int:
        """Return how many manifests count, from the first on."""
        return next((i for i, each in enumerate(manifests) if not self._is_good(each, is_cached)), len(manifests))

    def _signed(self, data: bytes) -> bytes:
        manifest, _ = split_signature(data)
        try:
            decoded = decode_manifest(manifest)
        except FormatError as e:
            raise StoreError("invalid", f"not a manifest: {e}") from e
        assert self.keys.encryption is None or decoded.is_encrypted, "the store would see what must be encrypted"
        if self.keys.manifest is None:
            return manifest
        assert all(each.chunk_digests for each in decoded.data), "a signature would not cover the data"
        return self.keys.manifest.sign(manifest)

    def _is_good(self, data: bytes, is_cached: bool = False) -> bool:
        manifest, _ = split_signature(data)
        if self.keys.manifest is not None and not is_vouched_for(data, self.keys.manifest, is_cached):
            _limited.warning("signature", "the store has a manifest without a valid signature; it is not used")
            return False
        if self.keys.encryption is None:
            return True
        try:
            names = encryption_keys_of(manifest)
        except FormatError:
            return True  # the reader says what is wrong with it
        if names and all(name in self.keys.encryption for name in names):
            return True
        what = f"encrypted with the keys {', '.join(map(repr, sorted(names)))}" if names else "without encryption"
        _limited.warning("encryption", f"the store has a segment {what}; encryption_key_file has no key for it")
        return False


def with_keys(store: Store, keys: StoreKeys | FreshFiles[StoreKeys]) -> Store:
    """Return the store with these keys; itself without any."""
    return KeyedStore(store, keys) if (keys.value if isinstance(keys, FreshFiles) else keys) else store
