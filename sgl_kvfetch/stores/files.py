"""The files of a local store: names, atomic writes, reads. Blocking: call from a worker thread.

An object ``<namespace>/<rest>`` is the file of that name under the root. Symbolic links below the root are never
followed. Anything other than a regular file with an object's name is ignored.
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
# Errors of open() that mean a missing object. With O_NOFOLLOW, symbolic links and non-directories raise them too.
_ABSENT = frozenset({errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO})


def require_name(name: str) -> ObjectName:
    """Parse an object's name. Raises StoreError (``invalid``) for any other text."""
    try:
        return parse_object_name(name)
    except FormatError as e:
        raise StoreError("invalid", str(e)) from e


def require_namespace(namespace: str) -> None:
    """Raise StoreError (``invalid``) unless ``namespace`` is the name of a namespace's folder."""
    if _NAMESPACE.fullmatch(namespace) is None:
        raise StoreError("invalid", f"not a namespace: {namespace[:120]!r}")


@contextmanager
def os_errors(what: str) -> Iterator[None]:
    """Translate OSError to StoreError: ``full`` if no space is left, otherwise ``io``."""
    try:
        yield
    except OSError as e:
        reason: StoreErrorReason = "full" if e.errno in _NO_ROOM else "io"
        raise StoreError(reason, f"{what}: {e.strerror or e}", retriable=reason == "full") from e


def namespaces(root: Path) -> list[str]:
    """List the namespaces that have a directory. Return an empty list if the root does not exist yet."""
    try:
        with os.scandir(root) as entries:
            return [e.name for e in entries if _NAMESPACE.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []


@contextmanager
def namespace_dir(root: Path, namespace: str) -> Iterator[int | None]:
    """Open a namespace's directory and yield its descriptor, or None if there is no directory. Raises OSError."""
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
    """Read bytes ``[start, start + length)``; fewer only if the file ends before. Raises OSError."""
    pieces = []
    while length > 0:
        piece = os.pread(file.fileno(), length, start)  # one call returns at most 2 GiB
        if not piece:
            break
        pieces.append(piece)
        start, length = start + len(piece), length - len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def stat_object(root: Path, name: str) -> ObjectInfo | None:
    """Return an object's size and modification time, or None if it is missing. Raises OSError."""
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
    """Delete an object's file. Return True if it existed. Raises OSError."""
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
    """List the objects of a namespace whose name starts with ``prefix``. Raises OSError."""
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
    """List old temporary files that dead writers left, as names for ``delete_object``. Raises OSError."""
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
    """The temporary file of a new object. Readers do not see it before ``commit``. Every method may raise OSError."""

    def __init__(self, root: Path, name: str) -> None:
        """Create the file, and the namespace's directory if it is missing."""
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
        """True until the file is committed or discarded."""
        return self._open

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def sync(self) -> None:
        """Make the bytes durable. Call it before ``commit``, so that no object has bytes that a crash can lose."""
        os.fsync(self._fd)

    @contextmanager
    def directory_locked(self) -> Iterator[None]:
        """Exclude other processes that take this lock, if the file system supports locks."""
        with suppress(OSError):
            fcntl.flock(self._directory, fcntl.LOCK_EX)
        yield  # commit and discard close the directory, which releases the lock

    def commit(self) -> None:
        """Rename the file to the object's name. An older object of that name is replaced.

        The directory itself is not synced: if a power cut undoes the rename, the result is a miss, never a torn object.
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
