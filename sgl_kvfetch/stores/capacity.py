"""Room in a local store: reservations, and eviction of the least recently used segments.

Blocking, and not thread-safe: whoever uses it holds the store's lock.
"""

from __future__ import annotations

import logging
import time
from collections import Counter

from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.stores import files
from sgl_kvfetch.stores.catalog import Catalog, StoredManifest
from sgl_kvfetch.stores.scanning import Scanner

logger = logging.getLogger(__name__)

# An eviction frees this part of the capacity beyond the need, so that the next writes do not each sort all segments.
SPARE_PART = 1 / 50


class Capacity:
    def __init__(self, catalog: Catalog, scanner: Scanner, capacity_bytes: int | None, orphan_age_s: float) -> None:
        """``orphan_age_s``: how long data may wait for its manifest."""
        self.num_evicted = 0  # segments
        self._catalog = catalog
        self._scanner = scanner
        self._capacity_bytes = capacity_bytes
        self._orphan_age_s = orphan_age_s
        self._reserved_bytes = 0
        self._writing: Counter[str] = Counter()  # by manifest's name
        self._awaits_manifest: dict[str, float] = {}  # manifest's name -> when its data came, monotonic

    @property
    def is_bounded(self) -> bool:
        return self._capacity_bytes is not None

    def reserve_if_free(self, num_bytes: int) -> bool:
        """Reserve room for bytes that are about to be written if nothing needs to go for it."""
        if self._short_bytes(num_bytes) > 0:
            return False
        self._reserved_bytes += num_bytes
        return True

    def reserve(self, num_bytes: int) -> None:
        """Make room for bytes that are about to be written. Raises StoreError (``full``), OSError."""
        if self._short_bytes(num_bytes) > 0:
            self._evict(num_bytes)
            if self._short_bytes(num_bytes) > 0:
                raise StoreError(
                    "full",
                    f"no room for {num_bytes} bytes: {self._catalog.stored_bytes} stored and "
                    f"{self._reserved_bytes} being written, of {self._capacity_bytes}",
                    retriable=True,
                )
        self._reserved_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Reserved bytes were committed, and are counted as stored, or were given up."""
        self._reserved_bytes -= num_bytes
        assert self._reserved_bytes >= 0

    def start_writing(self, manifest_name: str) -> None:
        """Keeps a segment from eviction until ``stop_writing``."""
        self._writing[manifest_name] += 1

    def stop_writing(self, manifest_name: str) -> None:
        self._writing[manifest_name] -= 1
        if not self._writing[manifest_name]:
            del self._writing[manifest_name]

    def data_committed(self, manifest_name: str) -> None:
        """The segment stays while its writer comes back with the manifest, for as long as an orphan may live."""
        self._awaits_manifest[manifest_name] = time.monotonic()

    def manifest_committed(self, manifest_name: str) -> None:
        self._awaits_manifest.pop(manifest_name, None)

    def forget_late(self) -> None:
        """Stop waiting for manifests whose data came longer ago than an orphan may live."""
        now = time.monotonic()
        for name, since in list(self._awaits_manifest.items()):
            if now - since > self._orphan_age_s:
                del self._awaits_manifest[name]

    def delete(self, name: str) -> bool:
        """Delete an object's file, and the catalog's knowledge of it. True if it was there. Raises OSError."""
        with self._scanner.own_change(name.partition("/")[0]):
            found = files.delete_object(self._catalog.root, name)
        self._catalog.forget(name)
        return found

    def _short_bytes(self, num_bytes: int) -> int:
        if self._capacity_bytes is None:
            return 0
        return self._catalog.stored_bytes + self._reserved_bytes + num_bytes - self._capacity_bytes

    def _evict(self, num_bytes: int) -> None:
        assert self._capacity_bytes is not None
        spare = int(self._capacity_bytes * SPARE_PART)
        for stored in sorted(self._catalog.manifests(), key=lambda m: m.last_used_s):
            if self._short_bytes(num_bytes + spare) <= 0:
                return
            if stored.name not in self._writing and stored.name not in self._awaits_manifest:
                self._evict_segment(stored)

    def _evict_segment(self, stored: StoredManifest) -> None:
        # The manifest first: a reader finds the whole segment, or none.
        data = list(self._catalog.data_of(stored.name))
        self.delete(stored.name)
        for name in data:
            # Data that the manifest does not know may be another process's, on its way to a newer manifest.
            if stored.needs is None or name in stored.needs:
                self.delete(name)
        self.num_evicted += 1
        logger.debug("evicted %s", stored.name)
