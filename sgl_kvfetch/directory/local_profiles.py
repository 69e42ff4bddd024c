"""Keep the profiles of a local store in files beside its segments. Blocking. All may raise OSError.

A profile is ``.profiles/WEIGHTS/DIGEST``. It is no row of the catalog: nothing evicts it, and a scan of the few files
says how much of the capacity they take.
"""

from __future__ import annotations

import os
import secrets
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from sgl_kvfetch.directory import files
from sgl_kvfetch.errors import FormatError, StoreError
from sgl_kvfetch.stores import (
    MAX_HEAD_BYTES,
    MAX_PROFILE_BYTES,
    MAX_PROFILES,
    MAX_PROFILES_OF_WEIGHTS,
    MAX_PROFILES_PART,
    ObjectInfo,
    is_profile_name,
    parse_head,
)

_FOLDER = ".profiles"  # no namespace is called like this
_beginning = threading.Lock()  # held until a new file counts: uploads that begin at once count each other


def list_profiles(root: Path) -> list[ObjectInfo]:
    return [info for info in _all_files(root / _FOLDER) if is_profile_name(info.name)]


def stored_bytes(root: Path) -> int:
    """Return the size of all profiles, and of what is written of others."""
    return sum(info.size_bytes for info in _all_files(root / _FOLDER))


def _all_files(folder: Path) -> Iterator[ObjectInfo]:
    for weights in _entries(folder):
        for entry in _entries(Path(weights.path)) if weights.is_dir(follow_symlinks=False) else ():
            with suppress(FileNotFoundError):  # deleted meanwhile
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield ObjectInfo(f"{weights.name}/{entry.name}", status.st_size, status.st_mtime)


def _entries(path: Path) -> Iterator[os.DirEntry[str]]:
    with suppress(FileNotFoundError), os.scandir(path) as entries:
        yield from entries


def open_profile(root: Path, name: str) -> files.OpenObject | None:
    """Open a profile; the caller closes it. None if it is missing."""
    return files.open_object(root / _FOLDER, name)


def delete_profile(root: Path, name: str) -> bool:
    """Delete a profile. Return True if it existed. Whoever reads it reads on."""
    try:
        os.unlink(root / _FOLDER / name)
    except FileNotFoundError:
        return False
    return True


class ProfileWriter:
    """Writes one profile in pieces. Readers do not see it before ``commit``. Methods raise StoreError, too."""

    def __init__(self, root: Path, name: str, size_bytes: int, capacity_bytes: int | None) -> None:
        self._root = root / _FOLDER
        self._name = name
        self._size_bytes = size_bytes
        self._most_bytes = None if capacity_bytes is None else int(capacity_bytes * MAX_PROFILES_PART)
        self._head = b""
        self._written_bytes = 0
        self._file: files.TempFile | None = None
        self._finished = False
        # A cancelled await leaves its thread running, so discard must not close the file during a write.
        self._lock = threading.Lock()

    def open(self) -> None:
        """Create the file, and remove what dead writers have left. Raises StoreError: ``too_large``, and ``full`` if
        all profiles would take too much of the store's capacity."""
        with self._lock:
            if self._finished:
                return  # discarded meanwhile
            weights = self._name.partition("/")[0]
            for file_name in files.file_names(self._root, weights):
                if file_name.startswith(files.TEMP_PREFIX):
                    files.remove_temp(self._root, weights, file_name)
            with _beginning:
                self._require_fits()
                self._file = files.TempFile(self._root, weights, f"{files.TEMP_PREFIX}{secrets.token_hex(8)}")
                self._file.resize(self._size_bytes)

    def _require_fits(self) -> None:
        if self._size_bytes > MAX_PROFILE_BYTES:
            raise StoreError("too_large", f"a profile of {self._size_bytes} bytes; the limit is {MAX_PROFILE_BYTES}")
        others = [info for info in _all_files(self._root) if info.name != self._name]
        needed = self._size_bytes + sum(info.size_bytes for info in others)
        if self._most_bytes is not None and needed > self._most_bytes:
            part = f"{self._most_bytes}, {MAX_PROFILES_PART:g} of the capacity"
            raise StoreError("full", f"profiles would take {needed} bytes; the limit is {part}")
        if len(others) >= MAX_PROFILES:
            raise StoreError("full", f"the store has {len(others)} profiles, which is the limit")
        weights = self._name.partition("/")[0]
        of_weights = sum(info.name.startswith(f"{weights}/") for info in others)
        if of_weights >= MAX_PROFILES_OF_WEIGHTS:
            raise StoreError("full", f"the store has {of_weights} profiles of weights {weights}, which is the limit")

    def write(self, data: bytes) -> None:
        with self._lock:
            if self._finished:
                return
            assert self._file is not None
            self._head += data[: MAX_HEAD_BYTES - len(self._head)]
            self._written_bytes += len(data)
            if self._written_bytes > self._size_bytes:
                raise StoreError("invalid", f"more than the {self._size_bytes} bytes that were announced")
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]

    def commit(self) -> None:
        """Give the file its name. Raises StoreError (``invalid``) if it is not the profile of this name."""
        with self._lock:
            if self._finished:
                return
            assert self._file is not None
            try:
                parse_head(self._name, self._head, self._written_bytes)
            except FormatError as e:
                raise StoreError("invalid", f"not the profile {self._name}: {e}") from e
            self._file.resize(self._written_bytes)
            self._file.sync()
            self._file.commit(self._name.partition("/")[2], None)
            self._finished = True

    def discard(self) -> None:
        """Remove what is written unless it is committed. Idempotent."""
        with self._lock:
            self._finished = True
            if self._file is not None:
                self._file.discard()
