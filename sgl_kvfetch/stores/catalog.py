"""What a local store's directory holds: sizes, last uses and the page index.

All of it is derived from the files and may be rebuilt at any time. Other processes may write to the directory too, so
a namespace is scanned again when its directory changed. Blocking, and not thread-safe: the store holds its lock.
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
from sgl_kvfetch.keys import MANIFEST_SUFFIX, parse_object_name
from sgl_kvfetch.stores import files
from sgl_kvfetch.stores.index import PageIndex

logger = logging.getLogger(__name__)

# A directory's mtime is coarse: one that was this young when it was read may stand for later changes too.
YOUNG_S = 1.0
# A scan that took long is not repeated before this many times its length, so that scanning takes a tenth of the time.
REST_FACTOR = 10
LONG_SCAN_S = 0.02
# How often a segment's last use is written to its file's atime, from where a restart reads it.
SAVE_USE_EVERY_S = 60.0


@dataclass(slots=True, eq=False)
class StoredManifest:
    """A manifest's file. ``needs`` is what its segment needs to be whole, or None if it cannot be read."""

    name: str
    size_bytes: int
    stamp: tuple[int, int]  # inode and mtime in ns: a replaced file has another
    needs: dict[str, int] | None  # bytes by data object's name
    last_used_s: float  # seconds since the epoch
    saved_use_s: float


@dataclass(slots=True, eq=False)
class NamespaceFiles:
    manifests: dict[str, StoredManifest] = field(default_factory=dict)
    data: dict[str, dict[str, int]] = field(default_factory=dict)  # manifest's name -> data name -> bytes
    scanned_mtime_ns: int = -1
    scanned_s: float = 0.0  # seconds since the epoch
    rest_until: float = 0.0  # monotonic seconds


class Catalog:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.index = PageIndex()
        self.stored_bytes = 0
        self.num_unreadable = 0  # manifests skipped since the start, each counted once
        self._namespaces: dict[str, NamespaceFiles] = {}

    # Reading the directory. Raises OSError.

    def refresh_all(self, *, rest: bool = True) -> None:
        for namespace in {*self._namespaces, *files.namespaces(self.root)}:
            self.refresh(namespace, rest=rest)

    def refresh(self, namespace: str, *, rest: bool = True) -> None:
        """Scan a namespace's directory if it may have changed; with ``rest``, not right after a long scan."""
        with files.namespace_dir(self.root, namespace) as directory:
            if directory is None:
                self._forget_namespace(namespace)
                return
            known = self._namespaces.setdefault(namespace, NamespaceFiles())
            mtime_ns = os.fstat(directory).st_mtime_ns
            settled = mtime_ns == known.scanned_mtime_ns and known.scanned_s - mtime_ns / 1e9 > YOUNG_S
            started = time.monotonic()
            if settled or (rest and started < known.rest_until):
                return
            known.scanned_mtime_ns, known.scanned_s = mtime_ns, time.time()
            self._scan(namespace, known, directory)
            took_s = time.monotonic() - started
            known.rest_until = started + REST_FACTOR * took_s if took_s > LONG_SCAN_S else 0.0

    def _scan(self, namespace: str, known: NamespaceFiles, directory: int) -> None:
        manifests: dict[str, os.stat_result] = {}
        data: set[str] = set()
        with os.scandir(directory) as entries:
            for entry in entries:
                name = f"{namespace}/{entry.name}"
                if not files.is_object(name, entry):
                    continue
                try:
                    if name.endswith(MANIFEST_SUFFIX):
                        manifests[name] = entry.stat(follow_symlinks=False)
                    else:
                        # Data never changes under its name, so a size once known stays.
                        if not self._has_data(name):
                            self._note_data(name, entry.stat(follow_symlinks=False).st_size)
                        data.add(name)
                except FileNotFoundError:
                    continue  # deleted meanwhile
        gone = [name for sizes in known.data.values() for name in sizes if name not in data]
        gone += [name for name in known.manifests if name not in manifests]
        for name in gone:
            self.forget(name)
        for name, status in manifests.items():
            stored = known.manifests.get(name)
            if stored is None or stored.stamp != _stamp(status):
                self._read_manifest(name, status)
            else:
                self._offer(stored)

    def _read_manifest(self, name: str, status: os.stat_result) -> None:
        content = _read_quietly(self.root / name)
        if content is None:
            self.forget(name)
            return
        try:
            manifest = decode_manifest(content)
            if manifest.key.manifest_name != name:
                raise FormatError(f"manifest belongs under the name {manifest.key.manifest_name}")
        except FormatError as e:
            self.num_unreadable += 1
            logger.warning("skipping unreadable manifest %s: %s", name, e)
            self._note_manifest(name, status, None)
            return
        self.note_manifest(content, manifest, status)

    # What the store itself does to the files.

    def note_data(self, name: str, size_bytes: int) -> None:
        """A data object was written."""
        self._note_data(name, size_bytes)
        namespace, owner = _owner(name)
        stored = self._namespaces[namespace].manifests.get(owner)
        if stored is not None:
            self._offer(stored)

    def note_manifest(self, content: bytes, manifest: Manifest, status: os.stat_result) -> None:
        """A manifest was written or found: offer its segment to lookups if its data is there."""
        needs = {manifest.data_name(v): manifest.data_bytes(v) for v in manifest.variants}
        stored = self._note_manifest(manifest.key.manifest_name, status, needs)
        if self._is_whole(stored):
            self.index.add(stored.name, content, manifest)

    def forget(self, name: str) -> None:
        """An object is gone. A segment that loses its manifest or some of its data is no longer offered."""
        namespace, owner = _owner(name)
        known = self._namespaces.get(namespace)
        if known is None:
            return
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
        """Note a use. It reaches the file's atime at most once a minute."""
        now = time.time()
        for name in manifest_names:
            stored = self._manifest(name)
            if stored is None:
                continue
            stored.last_used_s = now
            if now - stored.saved_use_s > SAVE_USE_EVERY_S:
                stored.saved_use_s = now
                _save_use(self.root / name, now, stored.stamp[1])

    # Questions.

    def manifests(self) -> Iterator[StoredManifest]:
        for known in self._namespaces.values():
            yield from known.manifests.values()

    def data_of(self, manifest_name: str) -> dict[str, int]:
        """Sizes of the data objects that are there, needed by the manifest or not."""
        known = self._namespaces.get(_owner(manifest_name)[0])
        return known.data.get(manifest_name, {}) if known else {}

    def unreferenced_data(self) -> Iterator[str]:
        """Data objects that no manifest needs. Those of an unreadable manifest count as needed: it may be newer."""
        for known in self._namespaces.values():
            for owner, sizes in known.data.items():
                stored = known.manifests.get(owner)
                if stored is None:
                    yield from sizes
                elif stored.needs is not None:
                    yield from (name for name in sizes if name not in stored.needs)

    def is_broken(self, stored: StoredManifest) -> bool:
        """Readable, but some of its data is missing."""
        return stored.needs is not None and not self._is_whole(stored)

    def _manifest(self, name: str) -> StoredManifest | None:
        known = self._namespaces.get(_owner(name)[0])
        return known.manifests.get(name) if known else None

    def _has_data(self, name: str) -> bool:
        return name in self.data_of(_owner(name)[1])

    def _is_whole(self, stored: StoredManifest) -> bool:
        if stored.needs is None:
            return False
        present = self.data_of(stored.name)
        return all(present.get(name) == size for name, size in stored.needs.items())

    def _offer(self, stored: StoredManifest) -> None:
        """Bring the index in line with the data that is there."""
        if self._is_whole(stored) == (stored.name in self.index):
            return
        if stored.name in self.index:
            self.index.remove(stored.name)
        else:
            try:
                status = os.stat(self.root / stored.name, follow_symlinks=False)
            except FileNotFoundError:
                return
            self._read_manifest(stored.name, status)

    def _note_data(self, name: str, size_bytes: int) -> None:
        namespace, owner = _owner(name)
        sizes = self._namespaces.setdefault(namespace, NamespaceFiles()).data.setdefault(owner, {})
        self.stored_bytes += size_bytes - sizes.get(name, 0)
        sizes[name] = size_bytes

    def _note_manifest(self, name: str, status: os.stat_result, needs: dict[str, int] | None) -> StoredManifest:
        self.forget(name)
        used_s = max(status.st_atime, status.st_mtime)
        stored = StoredManifest(name, status.st_size, _stamp(status), needs, used_s, used_s)
        self._namespaces.setdefault(_owner(name)[0], NamespaceFiles()).manifests[name] = stored
        self.stored_bytes += stored.size_bytes
        return stored

    def _forget_namespace(self, namespace: str) -> None:
        known = self._namespaces.get(namespace)
        if known is None:
            return
        for name in [*known.manifests, *(name for sizes in known.data.values() for name in sizes)]:
            self.forget(name)
        del self._namespaces[namespace]


def _owner(name: str) -> tuple[str, str]:
    """The namespace and the manifest's name that an object belongs to."""
    segment = parse_object_name(name).segment
    return segment.namespace, segment.manifest_name


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_mtime_ns


def _read_quietly(path: Path) -> bytes | None:
    """A manifest's bytes, its atime left as it is where the system allows: it holds the last use."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        try:
            fd = os.open(path, flags | getattr(os, "O_NOATIME", 0))
        except PermissionError:  # O_NOATIME is the owner's privilege
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
