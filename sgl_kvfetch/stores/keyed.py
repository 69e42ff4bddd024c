"""A store whose segments count only if holders of our keys wrote them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from sgl_kvfetch.codec import Content, StoreKeys, bytes_of
from sgl_kvfetch.codec.container.manifest import encryption_keys_of
from sgl_kvfetch.errors import FormatError, StoreError
from sgl_kvfetch.keys import MANIFEST_SUFFIX
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.stores.base import Lookup, Store, WrappedStore
from sgl_kvfetch.user_files import FreshFiles

_limited = LimitedLogger(logging.getLogger(__name__))
_FEW_BYTES = 64 << 10  # of manifests: the event loop checks so many itself


class KeyedStore(WrappedStore):
    """Treats segments of ``store`` as missing that are not encrypted with one of our keys."""

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
        if name.endswith(MANIFEST_SUFFIX):
            self._require_encrypted(bytes_of(data))
        await self._store.put(name, data)

    async def replace(self, name: str, data: bytes, expected_digest: str) -> bool:
        self._require_encrypted(data)
        return await self._store.replace(name, data, expected_digest)

    async def lookup(self, namespace: str, page_hashes: Sequence[bytes]) -> Lookup:
        """Look up a run, which ends at the first segment that does not count."""
        if self._files is not None:
            await self._files.follow()
            self.keys = self._files.value
        found = await self._store.lookup(namespace, page_hashes)
        manifests = [hit.manifest for hit in found.hits]
        is_few = sum(map(len, manifests)) <= _FEW_BYTES
        num_good = self._count_good(manifests) if is_few else await asyncio.to_thread(self._count_good, manifests)
        return replace(found, hits=found.hits[:num_good])

    def _count_good(self, manifests: Sequence[bytes]) -> int:
        """Return how many manifests count, from the first on."""
        return next((i for i, each in enumerate(manifests) if not self._is_good(each)), len(manifests))

    def _require_encrypted(self, manifest: bytes) -> None:
        try:
            is_encrypted = bool(encryption_keys_of(manifest))
        except FormatError as e:
            raise StoreError("invalid", f"not a manifest: {e}") from e
        assert is_encrypted or not self.keys, "the store would see what must be encrypted"

    def _is_good(self, manifest: bytes) -> bool:
        if not self.keys:
            return True
        try:
            ids = encryption_keys_of(manifest)
        except FormatError:
            return True  # the reader says what is wrong with it
        if ids and all(key in self.keys for key in ids):
            return True
        what = f"encrypted with the keys {', '.join(sorted(ids))}" if ids else "without encryption"
        ours = ", ".join(self.keys.ids)
        _limited.warning("encryption", f"the store has a segment {what}; key_file has {ours}. It is not used")
        return False


def with_keys(store: Store, keys: StoreKeys | FreshFiles[StoreKeys]) -> Store:
    """Return the store with these keys; itself without any."""
    return KeyedStore(store, keys) if (keys.value if isinstance(keys, FreshFiles) else keys) else store
