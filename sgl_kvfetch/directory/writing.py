"""Write objects to a local store. Blocking and thread-safe."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sgl_kvfetch.codec import MAX_MANIFEST_BYTES, Manifest
from sgl_kvfetch.directory import files, rows
from sgl_kvfetch.directory.catalog import Catalog
from sgl_kvfetch.directory.room import DiskRoom, NewFile
from sgl_kvfetch.errors import FormatError, StoreError
from sgl_kvfetch.keys import ContentCheck, ObjectName
from sgl_kvfetch.stores import object_digest
from sgl_kvfetch.stores.upkeep import decode_named_manifest

_CHECKED_AT_ONCE = 4 << 20  # bytes


class IncompleteSegmentError(StoreError):
    """A manifest was put before its data."""

    def __init__(self, message: str) -> None:
        super().__init__("invalid", message)


def write_manifest(
    catalog: Catalog,
    room: DiskRoom,
    name: str,
    content: bytes,
    replaces: Callable[[str | None], bool],
) -> bool:
    """Commit a segment if ``replaces`` accepts the digest of the stored manifest, None if there is none.

    Return whether the store holds ``content`` now. Raises StoreError (``invalid`` if the manifest is malformed or
    misnamed, or its data is missing).
    """
    try:
        manifest = decode_named_manifest(content, name)
        return _write(catalog, room, manifest, content, replaces)
    except FormatError as e:
        raise StoreError("invalid", f"{name}: {e}") from e


def _write(
    catalog: Catalog, room: DiskRoom, manifest: Manifest, content: bytes, replaces: Callable[[str | None], bool]
) -> bool:
    """Write a manifest if ``replaces`` agrees with the digest of the present one. Return whether it is there now."""
    name = manifest.key.manifest_name
    with files.os_errors(f"writing {name}"), room.recording_failure():
        new = room.reserve(name, len(content))
        try:
            new.write(content)
            new.temp.sync()
            with catalog.writing() as db:
                current = files.read_object(catalog.root, name, MAX_MANIFEST_BYTES)
                if not replaces(None if current is None else object_digest(current)):
                    return current == content
                _require_data(db, catalog.root, manifest)
                new.commit(db, partial(rows.index_segment, db, manifest, content))
        finally:
            new.discard()
    room.record_written()
    return True


def _require_data(db: sqlite3.Connection, root: Path, manifest: Manifest) -> None:
    for name, size_bytes in manifest.data_sizes.items():
        found_bytes = rows.add_if_stored(db, root, name)
        if found_bytes is None:
            raise IncompleteSegmentError(f"data object {name} is missing; put the data before the manifest")
        if found_bytes != size_bytes:
            raise IncompleteSegmentError(
                f"data object {name} has {found_bytes} bytes, expected {size_bytes} as in the manifest"
            )


@dataclass(frozen=True, slots=True)
class Upload:
    """An object that is being written in pieces: see `LocalStore.upload`."""

    write: Callable[[bytes], Awaitable[None]]  # appends; raises StoreError (``full``, ``io``)
    commit: Callable[[], Awaitable[None]]  # makes it visible; raises StoreError (also ``invalid``: wrong digest)


class DataWriter:
    """Write one data object in pieces. Readers do not see it before ``commit``.

    The content is checked against the digest in the name: data is never replaced, so wrong bytes would stay forever.
    """

    def __init__(self, catalog: Catalog, room: DiskRoom, name: ObjectName, size_bytes: int | None) -> None:
        """``size_bytes``: the size if it is known, so that room for all of it is reserved at once."""
        assert name.content_digest is not None
        self._catalog = catalog
        self._room = room
        self._owner = name.segment.manifest_name
        self.name = name.segment.data_name(name.content_digest)
        self._size_bytes = size_bytes or 0
        self._check = ContentCheck(self.name)
        self._file: NewFile | None = None
        self._finished = False
        # A cancelled await leaves its thread running, so discard must not close the file during a write.
        self._lock = threading.Lock()

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``. Raises StoreError (``full``, ``io``)."""
        with self._lock, files.os_errors(f"writing {self.name}"), self._room.recording_failure():
            if self._finished:
                return  # discarded meanwhile
            self._check.add(data)
            self._opened().write(data)

    def open(self) -> None:
        """Reserve room. Raises StoreError (``full``, ``io``)."""
        self.write(b"")

    def commit(self) -> None:
        """Make the object visible. Raises StoreError (``invalid`` if the digest does not match; ``full``, ``io``)."""
        with self._lock, files.os_errors(f"writing {self.name}"), self._room.recording_failure():
            if self._finished:
                return
            file = self._opened()
            if not self._is_sound(file):
                raise StoreError("invalid", f"{self.name}: the content does not match the digest in the name")
            file.temp.sync()
            with self._catalog.writing() as db:
                file.commit(db)
                rows.examine_if_unread(db, self._catalog.root, self._owner)
            self._finished = True
            self._room.record_written()

    def discard(self) -> None:
        """Remove the written bytes unless they are committed. Idempotent. Raises StoreError (``io``)."""
        with self._lock, files.os_errors(f"discarding {self.name}"):
            self._finished = True
            if self._file is not None:
                self._file.discard()

    def _is_sound(self, file: NewFile) -> bool:
        return self._check.is_sound

    def _opened(self) -> NewFile:
        if self._file is None:
            self._file = self._room.reserve(self.name, self._size_bytes)
        return self._file


@dataclass(frozen=True, slots=True)
class Parts:
    """An object that is being written in parts of any order: see `LocalStore.upload_parts`."""

    write: Callable[[int, bytes | memoryview], Awaitable[None]]  # from a byte on; raises StoreError
    read: Callable[[int, int], Awaitable[bytes | None]]  # start and length, of what is written; None after the end
    commit: Callable[[], Awaitable[None]]  # makes it visible; raises StoreError (also ``invalid``: wrong digest)


class PartsWriter(DataWriter):
    """Write one data object of a known size, its parts in any order. The file is read once more to check it."""

    def write_at(self, start: int, data: bytes | memoryview) -> None:
        """Write a part, from byte ``start`` on. Raises StoreError (``full``, ``io``)."""
        with self._lock, files.os_errors(f"writing {self.name}"), self._room.recording_failure():
            if not self._finished:
                self._opened().write_at(memoryview(data), start)

    def read_at(self, start: int, length: int) -> bytes | None:
        """Return a part that is written; None once the writer has ended. Raises StoreError."""
        with self._lock, files.os_errors(f"reading {self.name}"):
            return None if self._finished else self._opened().temp.read_at(start, length)

    def _is_sound(self, file: NewFile) -> bool:
        for start in range(0, self._size_bytes, _CHECKED_AT_ONCE):
            self._check.add(file.temp.read_at(start, min(_CHECKED_AT_ONCE, self._size_bytes - start)))
        return self._check.is_sound
