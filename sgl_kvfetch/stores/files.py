"""The files of a local store: names, atomic writes, reads. Blocking: callers are in a worker thread.

An object ``<namespace>/<rest>`` is the file of that name under the root. Symbolic links below the root are never
followed, and anything that is not a regular file with an object's name is left alone, and not seen.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from sgl_kvfetch.errors import FormatError, StoreError, StoreErrorReason
from sgl_kvfetch.keys import NAMESPACE_PATTERN, ObjectName, parse_object_name
from sgl_kvfetch.stores.base import ObjectInfo

TEMP_PREFIX = ".tmp-"  # no object's name starts like this
_NAMESPACE = re.compile(NAMESPACE_PATTERN)
_NO_LINKS = os.O_NOFOLLOW | os.O_CLOEXEC
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# What opening gives for a link under O_NOFOLLOW, or for a directory that is none: the object is not there.
_ABSENT = frozenset({errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO})


def require_name(name: str) -> ObjectName:
    """Raises StoreError (``invalid``) for anything but an object's name."""
    try:
        return parse_object_name(name)
    except FormatError as e:
        raise StoreError("invalid", str(e)) from e


def require_namespace(namespace: str) -> None:
    """Raises StoreError (``invalid``) for anything but the name of a namespace's folder."""
    if _NAMESPACE.fullmatch(namespace) is None:
        raise StoreError("invalid", f"not a namespace: {namespace[:120]!r}")


@contextmanager
def os_errors(what: str) -> Iterator[None]:
    """Translate OSError: ``full`` where there is no room, ``io`` for the rest."""
    try:
        yield
    except OSError as e:
        reason: StoreErrorReason = "full" if e.errno in _NO_ROOM else "io"
        raise StoreError(reason, f"{what}: {e.strerror or e}", retriable=reason == "full") from e


def namespaces(root: Path) -> list[str]:
    """Namespaces that have a directory. Empty if the root does not exist yet."""
    try:
        with os.scandir(root) as entries:
            return [e.name for e in entries if _NAMESPACE.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []


@contextmanager
def namespace_dir(root: Path, namespace: str) -> Iterator[int | None]:
    """The open directory of a namespace, or None if there is none. Raises OSError."""
    try:
        fd = os.open(root / namespace, os.O_RDONLY | os.O_DIRECTORY | _NO_LINKS)
    except OSError as e:
        if e.errno not in _ABSENT:
            raise
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class OpenObject:
    """An object open for reading. Its bytes stay readable until it is closed, even if it is deleted meanwhile."""

    file: FileIO
    info: ObjectInfo


def open_object(root: Path, name: str) -> OpenObject | None:
    """Open an object; the caller closes it. None if it is missing. Raises OSError."""
    namespace, _, file_name = name.partition("/")
    with namespace_dir(root, namespace) as directory:
        if directory is None:
            return None
        try:
            # Without O_NONBLOCK, opening a FIFO would wait for its writer.
            fd = os.open(file_name, os.O_RDONLY | os.O_NONBLOCK | _NO_LINKS, dir_fd=directory)
        except OSError as e:
            if e.errno in _ABSENT:
                return None
            raise
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        return None
    return OpenObject(FileIO(fd), ObjectInfo(name, status.st_size, status.st_mtime))


def read_fully(file: FileIO, start: int, length: int) -> bytes:
    """Bytes ``[start, start + length)``, fewer only where the file ends. Raises OSError."""
    pieces = []
    while length > 0:
        piece = os.pread(file.fileno(), length, start)  # one call returns at most 2 GiB
        if not piece:
            break
        pieces.append(piece)
        start, length = start + len(piece), length - len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def stat_object(root: Path, name: str) -> ObjectInfo | None:
    """None if it is missing. Raises OSError."""
    namespace, _, file_name = name.partition("/")
    with namespace_dir(root, namespace) as directory:
        if directory is None:
            return None
        try:
            status = os.stat(file_name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return None
    return ObjectInfo(name, status.st_size, status.st_mtime) if stat.S_ISREG(status.st_mode) else None


def delete_object(root: Path, name: str) -> bool:
    """True if it was there. Raises OSError."""
    namespace, _, file_name = name.partition("/")
    with namespace_dir(root, namespace) as directory:
        if directory is None:
            return False
        try:
            os.unlink(file_name, dir_fd=directory)
        except FileNotFoundError:
            return False
    return True


def list_objects(root: Path, namespace: str, prefix: str = "") -> list[ObjectInfo]:
    """The objects of a namespace whose name starts with ``prefix``. Raises OSError."""
    found = []
    with namespace_dir(root, namespace) as directory:
        if directory is None:
            return []
        with os.scandir(directory) as entries:
            for entry in entries:
                name = f"{namespace}/{entry.name}"
                if name.startswith(prefix) and is_object(name, entry):
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # deleted meanwhile
                    found.append(ObjectInfo(name, status.st_size, status.st_mtime))
    return found


def is_object(name: str, entry: os.DirEntry[str]) -> bool:
    try:
        parse_object_name(name)
    except FormatError:
        return False
    return entry.is_file(follow_symlinks=False)


def stale_temps(root: Path, namespace: str, older_than_s: float) -> list[str]:
    """What writers left that died: names as for ``delete_object``. Raises OSError."""
    limit = time.time() - older_than_s
    found = []
    with namespace_dir(root, namespace) as directory:
        if directory is None:
            return []
        for file_name in os.listdir(directory):
            if file_name.startswith(TEMP_PREFIX):
                try:
                    if os.stat(file_name, dir_fd=directory, follow_symlinks=False).st_mtime < limit:
                        found.append(f"{namespace}/{file_name}")
                except FileNotFoundError:
                    pass  # committed or removed meanwhile
    return found


class TempFile:
    """A new object's bytes, which nobody sees before ``commit``. Raises OSError from everything."""

    def __init__(self, root: Path, name: str) -> None:
        """Makes the namespace's directory if it is missing."""
        namespace, _, self._file_name = name.partition("/")
        (root / namespace).mkdir(parents=True, exist_ok=True)
        self._directory = os.open(root / namespace, os.O_RDONLY | os.O_DIRECTORY | _NO_LINKS)
        self._temp_name = TEMP_PREFIX + secrets.token_hex(8)
        try:
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | _NO_LINKS
            self._fd = os.open(self._temp_name, flags, 0o666, dir_fd=self._directory)
        except BaseException:
            os.close(self._directory)
            raise
        self._open = True

    @property
    def is_open(self) -> bool:
        """Neither committed nor discarded."""
        return self._open

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def sync(self) -> None:
        """Make the bytes durable. Before ``commit``, so that no name ever stands for bytes that a crash can lose."""
        os.fsync(self._fd)

    @contextmanager
    def directory_locked(self) -> Iterator[None]:
        """Keeps out other processes that do the same, where the file system has locks."""
        with suppress(OSError):
            fcntl.flock(self._directory, fcntl.LOCK_EX)
        yield  # closing the directory, which commit and discard do, unlocks it

    def commit(self) -> None:
        """Give the bytes their name, replacing an older object.

        The directory itself is not synced: a rename that a power cut undoes costs a miss, never a torn object.
        """
        try:
            os.replace(self._temp_name, self._file_name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        except BaseException:
            self.discard()
            raise
        self._close()

    def discard(self) -> None:
        """Remove the file if it is not committed. Idempotent."""
        if self._open:
            try:
                os.unlink(self._temp_name, dir_fd=self._directory)
            except FileNotFoundError:
                pass  # another process collected it
            finally:
                self._close()

    def _close(self) -> None:
        self._open = False
        os.close(self._fd)
        os.close(self._directory)
