"""The catalog of a local store: sizes of objects, last uses of segments, and the page index.

All of it is derived from the files; ``scanning`` can rebuild it at any time. Not thread-safe: callers hold the store's
lock.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sgl_kvfetch.container.manifest import MAX_MANIFEST_BYTES, Manifest, decode_manifest
from sgl_kvfetch.errors import FormatError
from sgl_kvfetch.keys import parse_object_name
from sgl_kvfetch.stores.base import ObjectInfo
from sgl_kvfetch.stores.index import PageIndex

logger = logging.getLogger(__name__)

# A segment's last use is saved as its manifest's atime at most this often. A restart reads it from there.
SAVE_USE_EVERY_S = 60.0


@dataclass(slots=True, eq=False)
class StoredManifest:
    """A manifest's file. ``needs`` has the data objects that complete its segment; None if it cannot be decoded."""

    name: str
    size_bytes: int
    stamp: tuple[int, int]  # inode and mtime in ns; it changes when the file is replaced
    needs: dict[str, int] | None  # data object's name -> bytes
    last_used_s: float  # seconds since the epoch
    saved_use_s: float


@dataclass(slots=True, eq=False)
class NamespaceFiles:
    manifests: dict[str, StoredManifest] = field(default_factory=dict)
    data: dict[str, dict[str, int]] = field(default_factory=dict)  # manifest's name -> data name -> bytes
    changed: set[str] | None = None  # names noted or forgotten since the running scan began


@dataclass(frozen=True, slots=True)
class KnownNames:
    """The names in the catalog when a scan starts. The scan compares the directory with them."""

    stamps: dict[str, tuple[int, int]]  # by manifest's name
    data: frozenset[str]


@dataclass(frozen=True, slots=True)
class FoundManifest:
    """A manifest's file that was read. If it cannot be decoded, ``manifest`` is None and ``problem`` says why."""

    status: os.stat_result
    content: bytes
    manifest: Manifest | None
    problem: str = ""


class Catalog:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.index = PageIndex()
        self.stored_bytes = 0
        self.num_unreadable = 0  # manifests skipped since the start, each counted once
        self._namespaces: dict[str, NamespaceFiles] = {}

    # Findings of a scan. Names that this process changed since the scan began are skipped: their entries are newer.

    def start_scan(self, namespace: str) -> KnownNames:
        known = self._namespaces.setdefault(namespace, NamespaceFiles())
        known.changed = set()
        return KnownNames(
            {name: stored.stamp for name, stored in known.manifests.items()},
            frozenset(name for sizes in known.data.values() for name in sizes),
        )

    def end_scan(self, namespace: str) -> None:
        known = self._namespaces.get(namespace)
        if known is not None:
            known.changed = None

    def found_data(self, name: str, size_bytes: int) -> None:
        if not self._is_newer(name):
            self.note_data(name, size_bytes)

    def found_manifest(self, name: str, found: FoundManifest | None) -> None:
        if not self._is_newer(name):
            self._note_found(name, found)

    def lost(self, name: str) -> None:
        if not self._is_newer(name):
            self.forget(name)

    def _is_newer(self, name: str) -> bool:
        known = self._namespaces.get(name.partition("/")[0])
        return known is not None and known.changed is not None and name in known.changed

    def _note_found(self, name: str, found: FoundManifest | None) -> None:
        if found is None:
            self.forget(name)
        elif found.manifest is None:
            self.num_unreadable += 1
            logger.warning("skipping unreadable manifest %s: %s", name, found.problem)
            self._note_manifest(name, found.status, None)
        else:
            self.note_manifest(found.content, found.manifest, found.status)

    # Changes to the files.

    def note_data(self, name: str, size_bytes: int) -> None:
        """Record a data object that was written or found, and update the index."""
        self._note_data(name, size_bytes)
        namespace, owner = _owner(name)
        stored = self._namespaces[namespace].manifests.get(owner)
        if stored is not None:
            self._offer(stored)

    def note_manifest(self, content: bytes, manifest: Manifest, status: os.stat_result) -> None:
        """Record a manifest that was written or found. Add its segment to the index if all its data is there."""
        needs = {manifest.data_name(v): manifest.data_bytes(v) for v in manifest.variants}
        stored = self._note_manifest(manifest.key.manifest_name, status, needs)
        if self._is_whole(stored):
            self.index.add(stored.name, content, manifest)

    def forget(self, name: str) -> None:
        """Remove an object that is gone. A segment that loses its manifest or any of its data leaves the index."""
        namespace, owner = _owner(name)
        known = self._namespaces.get(namespace)
        if known is None:
            return
        _note_change(known, name)
        if name == owner:
            stored = known.manifests.pop(name, None)
            self.stored_bytes -= stored.size_bytes if stored else 0
            self.index.remove(name)
            return
        sizes = known.data.get(owner, {})
        self.stored_bytes -= sizes.pop(name, 0)
        if not sizes:
            known.data.pop(owner, None)
        stored = known.manifests.get(owner)
        if stored is not None and not self._is_whole(stored):
            self.index.remove(owner)

    def touch(self, manifest_names: Iterable[str]) -> None:
        """Record that these segments are used now. Save it in the manifest's atime at most once a minute."""
        now = time.time()
        for name in manifest_names:
            stored = self._manifest(name)
            if stored is None:
                continue
            stored.last_used_s = now
            if now - stored.saved_use_s > SAVE_USE_EVERY_S:
                stored.saved_use_s = now
                _save_use(self.root / name, now, stored.stamp[1])

    # Queries.

    def manifests(self) -> Iterator[StoredManifest]:
        for known in self._namespaces.values():
            yield from known.manifests.values()

    def data_of(self, manifest_name: str) -> dict[str, int]:
        """Return the sizes of a segment's stored data objects by name, including those that the manifest lacks."""
        known = self._namespaces.get(_owner(manifest_name)[0])
        return known.data.get(manifest_name, {}) if known else {}

    def orphans(self) -> Iterator[str]:
        """Iterate over data that no manifest needs, and readable manifests that lack some of their data.

        Data of an unreadable manifest counts as needed: a newer version may have written that manifest.
        """
        for known in self._namespaces.values():
            for owner, sizes in known.data.items():
                stored = known.manifests.get(owner)
                if stored is None:
                    yield from sizes
                elif stored.needs is not None:
                    yield from (name for name in sizes if name not in stored.needs)
            for name, stored in known.manifests.items():
                if stored.needs is not None and not _holds(known.data.get(name, {}), stored.needs):
                    yield name

    def is_orphan(self, name: str) -> bool:
        """Return whether ``orphans`` includes this name."""
        stored = self._manifest(_owner(name)[1])
        if stored is None:
            return self._has_data(name)
        if stored.needs is None:
            return False
        return not self._is_whole(stored) if name == stored.name else name not in stored.needs

    def orphan_since_s(self, info: ObjectInfo) -> float:
        """Return the latest time at which this object can have become an orphan, in seconds since the epoch. Even old
        data may have been in use until the current manifest replaced another."""
        stored = self._manifest(_owner(info.name)[1])
        return info.modified_s if stored is None else max(info.modified_s, stored.stamp[1] / 1e9)

    def _manifest(self, name: str) -> StoredManifest | None:
        known = self._namespaces.get(_owner(name)[0])
        return known.manifests.get(name) if known else None

    def _has_data(self, name: str) -> bool:
        return name in self.data_of(_owner(name)[1])

    def _is_whole(self, stored: StoredManifest) -> bool:
        return stored.needs is not None and _holds(self.data_of(stored.name), stored.needs)

    def _offer(self, stored: StoredManifest) -> None:
        """Add the segment to the index if all its data is there; otherwise remove it."""
        if self._is_whole(stored) == (stored.name in self.index):
            return
        if stored.name in self.index:
            self.index.remove(stored.name)
        else:
            try:
                status = os.stat(self.root / stored.name, follow_symlinks=False)
            except FileNotFoundError:
                return
            self._note_found(stored.name, read_manifest(self.root, stored.name, status))

    def _note_data(self, name: str, size_bytes: int) -> None:
        namespace, owner = _owner(name)
        known = self._namespaces.setdefault(namespace, NamespaceFiles())
        _note_change(known, name)
        sizes = known.data.setdefault(owner, {})
        self.stored_bytes += size_bytes - sizes.get(name, 0)
        sizes[name] = size_bytes

    def _note_manifest(self, name: str, status: os.stat_result, needs: dict[str, int] | None) -> StoredManifest:
        self.forget(name)
        used_s = max(status.st_atime, status.st_mtime)
        stored = StoredManifest(name, status.st_size, _stamp(status), needs, used_s, used_s)
        known = self._namespaces.setdefault(_owner(name)[0], NamespaceFiles())
        _note_change(known, name)
        known.manifests[name] = stored
        self.stored_bytes += stored.size_bytes
        return stored

    def forget_namespace(self, namespace: str) -> None:
        """Remove all objects of a namespace, since its directory is gone."""
        known = self._namespaces.get(namespace)
        if known is None:
            return
        for name in [*known.manifests, *(name for sizes in known.data.values() for name in sizes)]:
            self.forget(name)
        del self._namespaces[namespace]


def read_manifest(root: Path, name: str, status: os.stat_result) -> FoundManifest | None:
    """Read and decode a manifest's file. ``status`` is its state before the read. None if gone. Raises OSError."""
    content = _read_quietly(root / name)
    if content is None:
        return None
    try:
        manifest = decode_manifest(content)
        if manifest.key.manifest_name != name:
            raise FormatError(f"manifest belongs under the name {manifest.key.manifest_name}")
    except FormatError as e:
        return FoundManifest(status, b"", None, str(e))
    return FoundManifest(status, content, manifest)


def _note_change(known: NamespaceFiles, name: str) -> None:
    if known.changed is not None:
        known.changed.add(name)


def _holds(present: dict[str, int], needs: dict[str, int]) -> bool:
    return all(present.get(name) == size for name, size in needs.items())


def _owner(name: str) -> tuple[str, str]:
    """Return the namespace and the manifest's name of the segment that an object belongs to."""
    segment = parse_object_name(name).segment
    return segment.namespace, segment.manifest_name


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_mtime_ns


def _read_quietly(path: Path) -> bytes | None:
    """Read a manifest. If the system allows it, keep the atime unchanged: it holds the last use."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        try:
            fd = os.open(path, flags | getattr(os, "O_NOATIME", 0))
        except PermissionError:  # only the file's owner may use O_NOATIME
            fd = os.open(path, flags)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        return file.read(MAX_MANIFEST_BYTES + 1)


def _save_use(path: Path, used_s: float, mtime_ns: int) -> None:
    try:
        os.utime(path, ns=(int(used_s * 1e9), mtime_ns), follow_symlinks=False)
    except OSError as e:
        logger.debug("cannot save the last use of %s: %s", path.name, e)
