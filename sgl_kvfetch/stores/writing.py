"""Write objects to a local store. Blocking and thread-safe."""

from __future__ import annotations

import os
import threading

import xxhash

from sgl_kvfetch.container.manifest import Manifest, decode_manifest
from sgl_kvfetch.errors import FormatError, StoreError
from sgl_kvfetch.keys import ObjectName
from sgl_kvfetch.stores import files
from sgl_kvfetch.stores.base import object_digest
from sgl_kvfetch.stores.directory import Directory


class IncompleteSegmentError(StoreError):
    """A manifest was put before its data."""

    def __init__(self, message: str) -> None:
        super().__init__("invalid", message)


def write_manifest(directory: Directory, name: str, content: bytes, expected_digest: str | None = None) -> bool:
    """Commit a segment; with ``expected_digest``, only if the stored manifest has this digest. Return whether the store
    holds ``content`` now. Raises StoreError (``invalid`` if it is malformed, misnamed or its data is missing)."""
    try:
        manifest = decode_manifest(content)
    except FormatError as e:
        raise StoreError("invalid", f"{name}: {e}") from e
    key = manifest.key
    if key.manifest_name != name:
        raise StoreError("invalid", f"{name}: the manifest belongs under the name {key.manifest_name}")
    with files.os_errors(f"writing {name}"):
        with directory.lock:
            directory.capacity.start_writing(name)
        try:
            return _write_manifest(directory, name, content, manifest, expected_digest)
        finally:
            with directory.lock:
                directory.capacity.stop_writing(name)


def _write_manifest(
    directory: Directory, name: str, content: bytes, manifest: Manifest, expected_digest: str | None
) -> bool:
    namespace = manifest.key.namespace
    directory.reserve(len(content))
    try:
        with directory.scanner.own_change(namespace):
            temp = files.TempFile(directory.root, name)
        try:
            temp.write(content)
            temp.sync()
            with directory.lock, temp.directory_locked():
                if expected_digest is not None:
                    current = _current_digest(directory, name)
                    if current != expected_digest:
                        return current == object_digest(content)
                _require_data(directory, manifest)
                with directory.scanner.own_change(namespace):
                    temp.commit()
                status = os.stat(directory.root / name, follow_symlinks=False)
                directory.catalog.note_manifest(content, manifest, status)
                directory.capacity.manifest_committed(name)
                return True
        finally:
            if temp.is_open:
                with directory.scanner.own_change(namespace):
                    temp.discard()
    finally:
        with directory.lock:
            directory.capacity.release(len(content))


def _current_digest(directory: Directory, name: str) -> str | None:
    """Return the digest of the stored manifest, or None if there is none. Raises OSError."""
    opened = files.open_object(directory.root, name)
    if opened is None:
        return None
    with opened.file as file:
        return object_digest(files.read_fully(file, 0, opened.info.size_bytes))


def _require_data(directory: Directory, manifest: Manifest) -> None:
    for variant in manifest.variants:
        name, size_bytes = manifest.data_name(variant), manifest.data_bytes(variant)
        info = files.stat_object(directory.root, name)
        if info is None:
            raise IncompleteSegmentError(f"data object {name} is missing; put the data before the manifest")
        if info.size_bytes != size_bytes:
            raise IncompleteSegmentError(
                f"data object {name} has {info.size_bytes} bytes, expected {size_bytes} as in the manifest"
            )
        directory.catalog.note_data(name, size_bytes)  # another process may have written it


class DataWriter:
    """Write one data object in pieces. Readers do not see it before ``commit``.

    The content is checked against the digest in the name: data is never replaced, so wrong bytes would stay forever.
    """

    def __init__(self, directory: Directory, name: ObjectName) -> None:
        assert name.content_digest is not None
        self._directory = directory
        self._owner = name.segment.manifest_name
        self._namespace = name.segment.namespace
        self._digest = name.content_digest
        self.name = name.segment.data_name(name.content_digest)
        self._hasher = xxhash.xxh3_128()
        self._size_bytes = 0
        self._temp: files.TempFile | None = None
        self._finished = False
        # A cancelled await leaves its thread running, so discard must not close the file during a write.
        self._lock = threading.Lock()

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``. Raises StoreError (``full``, ``io``)."""
        with self._lock, files.os_errors(f"writing {self.name}"):
            if self._finished:
                return  # discarded meanwhile
            temp = self._opened()
            self._directory.reserve(len(data))
            self._size_bytes += len(data)
            self._hasher.update(data)
            temp.write(data)

    def commit(self) -> None:
        """Make the object visible. Raises StoreError (``invalid`` if the digest does not match; ``full``, ``io``)."""
        with self._lock, files.os_errors(f"writing {self.name}"):
            if self._finished:
                return
            temp = self._opened()
            if self._hasher.hexdigest() != self._digest:
                raise StoreError(
                    "invalid",
                    f"{self.name}: the content has digest {self._hasher.hexdigest()}, expected the one in the name",
                )
            temp.sync()
            with self._directory.lock:
                with self._directory.scanner.own_change(self._namespace):
                    temp.commit()
                self._directory.catalog.note_data(self.name, self._size_bytes)
                self._directory.capacity.data_committed(self._owner)
                self._finish()

    def discard(self) -> None:
        """Remove the written bytes unless they are committed. Idempotent. Raises StoreError (``io``)."""
        with self._lock, files.os_errors(f"discarding {self.name}"):
            if self._finished:
                return
            opened = self._temp
            try:
                if opened is not None:
                    with self._directory.scanner.own_change(self._namespace):
                        opened.discard()
            finally:
                with self._directory.lock:
                    self._finish()

    def _opened(self) -> files.TempFile:
        if self._temp is None:
            with self._directory.scanner.own_change(self._namespace):
                self._temp = files.TempFile(self._directory.root, self.name)
            with self._directory.lock:
                self._directory.capacity.start_writing(self._owner)
        return self._temp

    def _finish(self) -> None:
        self._finished = True
        self._directory.capacity.release(self._size_bytes)
        if self._temp is not None:
            self._directory.capacity.stop_writing(self._owner)
