"""State that all calls on a local store share, and the operations that need all of it. Blocking and thread-safe."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from sgl_kvfetch.keys import MANIFEST_SUFFIX
from sgl_kvfetch.stores import files
from sgl_kvfetch.stores.capacity import Capacity
from sgl_kvfetch.stores.catalog import Catalog
from sgl_kvfetch.stores.scanning import Scanner

# How many objects are deleted before the lock is released for other threads.
_DELETED_AT_ONCE = 16
_LET_OTHERS_S = 1e-5


class Directory:
    """``lock`` guards the catalog and the capacity. Do not list a directory or wait for a scan while holding it."""

    def __init__(self, root: Path, capacity_bytes: int | None, orphan_age_s: float) -> None:
        """``orphan_age_s``: how old unreferenced data and temporary files must be before they are collected."""
        self.root = root
        self.lock = threading.RLock()
        self.catalog = Catalog(root)
        self.scanner = Scanner(self.catalog, self.lock)
        self.capacity = Capacity(self.catalog, self.scanner, capacity_bytes, orphan_age_s)
        self.num_collected = 0  # objects and temporary files
        self._orphan_age_s = orphan_age_s
        self._collected_at = float("-inf")

    def reserve(self, num_bytes: int) -> None:
        """Reserve space for a write, evict if needed. Call without the lock. Raises StoreError (``full``), OSError."""
        with self.lock:
            collect = time.monotonic() - self._collected_at > self._orphan_age_s
            if collect:
                self._collected_at = time.monotonic()  # so that only one writer collects
        if collect:
            self.collect()
        elif self.capacity.is_bounded and not self.scanner.has_scanned_all:
            self.scanner.refresh_all()  # files that no scan has found yet take space too
        with self.lock:
            if self.capacity.reserve_if_free(num_bytes):
                return
        self.scanner.refresh_all()  # other processes may have used segments, or freed space
        with self.lock:
            self.capacity.reserve(num_bytes)

    def collect(self) -> None:
        """Remove old orphans: data that no manifest needs, manifests that lack data, temporary files.

        Call without the lock. Raises StoreError, OSError.
        """
        self.scanner.refresh_all(force=True)
        with self.lock:
            self._collected_at = time.monotonic()
            self.capacity.forget_late()
            orphans = list(self.catalog.orphans())
        limit = time.time() - self._orphan_age_s
        for name in orphans:
            info = files.stat_object(self.root, name)
            if info is not None and info.modified_s < limit:
                with self.lock:
                    # Check again under the lock: its manifest may have been put since.
                    if self.catalog.is_orphan(name) and self.catalog.orphan_since_s(info) < limit:
                        self.num_collected += self.capacity.delete(name)
        for namespace in files.namespaces(self.root):
            for name in files.stale_temps(self.root, namespace, self._orphan_age_s):
                with self.scanner.own_change(namespace):
                    self.num_collected += files.delete_object(self.root, name)

    def delete_some(self, prefix: str, until: float) -> tuple[int, bool]:
        """Delete objects whose name starts with ``prefix``, manifests first, until ``until`` (monotonic seconds).

        Return how many were deleted, and whether some may be left. Call without the lock. Raises OSError.
        """
        names = [
            info.name
            for namespace in files.namespaces(self.root)
            if namespace.startswith(prefix[: len(namespace)])
            for info in files.list_objects(self.root, namespace, prefix)
        ]
        names.sort(key=lambda name: not name.endswith(MANIFEST_SUFFIX))
        count = 0
        for first in range(0, len(names), _DELETED_AT_ONCE):
            if first and time.monotonic() > until:  # each call deletes one batch at least
                return count, True
            with self.lock:
                for name in names[first : first + _DELETED_AT_ONCE]:
                    count += self.capacity.delete(name)
            time.sleep(_LET_OTHERS_S)
        return count, False
