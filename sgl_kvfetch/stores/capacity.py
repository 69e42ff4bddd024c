"""The capacity of a local store: reservations, and eviction of the least recently used segments.

Blocking, and not thread-safe: callers hold the store's lock.
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

# An eviction frees this extra fraction of the capacity, so that the next writes do not each sort all segments.
SPARE_PART = 1 / 50


class Capacity:
    def __init__(self, catalog: Catalog, scanner: Scanner, capacity_bytes: int | None, orphan_age_s: float) -> None:
        """``orphan_age_s``: how long data is protected from eviction while it waits for its manifest."""
        self.num_evicted = 0  # segments
        self._catalog = catalog
        self._scanner = scanner
        self._capacity_bytes = capacity_bytes
        self._orphan_age_s = orphan_age_s
        self._reserved_bytes = 0
        self._writing: Counter[str] = Counter()  # manifest's name -> number of running writes
        self._awaits_manifest: dict[str, float] = {}  # manifest's name -> last commit of its data, monotonic seconds

    @property
    def is_bounded(self) -> bool:
        return self._capacity_bytes is not None

    def reserve_if_free(self, num_bytes: int) -> bool:
        """Reserve space for a write if that needs no eviction. Return whether it was reserved."""
        if self._short_bytes(num_bytes) > 0:
            return False
        self._reserved_bytes += num_bytes
        return True

    def reserve(self, num_bytes: int) -> None:
        """Reserve space for a write, and evict segments if needed. Raises StoreError (``full``), OSError."""
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
        """End a reservation: its bytes are committed, and counted as stored, or were discarded."""
        self._reserved_bytes -= num_bytes
        assert self._reserved_bytes >= 0

    def start_writing(self, manifest_name: str) -> None:
        """Protect a segment from eviction until ``stop_writing``."""
        self._writing[manifest_name] += 1

    def stop_writing(self, manifest_name: str) -> None:
        self._writing[manifest_name] -= 1
        if not self._writing[manifest_name]:
            del self._writing[manifest_name]

    def data_committed(self, manifest_name: str) -> None:
        """Protect the segment from eviction until its manifest is committed or ``forget_late`` gives it up."""
        self._awaits_manifest[manifest_name] = time.monotonic()

    def manifest_committed(self, manifest_name: str) -> None:
        self._awaits_manifest.pop(manifest_name, None)

    def forget_late(self) -> None:
        """Stop protecting segments that have waited for their manifest longer than ``orphan_age_s``."""
        now = time.monotonic()
        for name, since in list(self._awaits_manifest.items()):
            if now - since > self._orphan_age_s:
                del self._awaits_manifest[name]

    def delete(self, name: str) -> bool:
        """Delete an object's file and its catalog entry. Return True if the file existed. Raises OSError."""
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
        # The manifest goes first, so that a reader finds the whole segment or none of it.
        data = list(self._catalog.data_of(stored.name))
        self.delete(stored.name)
        for name in data:
            # Data that the manifest does not name may belong to a newer one that another process is about to put.
            if stored.needs is None or name in stored.needs:
                self.delete(name)
        self.num_evicted += 1
        logger.debug("evicted %s", stored.name)
