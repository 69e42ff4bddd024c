"""The files of a local store: names, atomic writes, reads. Blocking: call from a worker thread.

An object ``<namespace>/<rest>`` is the file of that name under the root. Symbolic links below the root are never
followed. Anything other than a regular file with an object's name is ignored. Only the owner may read files and
directories that are made here.

A file in use is locked (``flock``): shared by each reader, exclusively by its writer. So any process can tell what is
still read or written, and a dead process leaves no lock. Nobody waits for these locks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from sgl_kvfetch.errors import StoreError, StoreErrorReason
from sgl_kvfetch.keys import is_object_name
from sgl_kvfetch.stores import ObjectInfo, is_namespace

TEMP_PREFIX = ".tmp-"  # no object's name starts like this
_OPEN_ATTEMPTS = 16
_NO_LINKS = os.O_NOFOLLOW | os.O_CLOEXEC
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Errors of open() that mean a missing object. With O_NOFOLLOW, symbolic links and non-directories raise them too.
_ABSENT = frozenset({errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO})


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
            return [e.name for e in entries if is_namespace(e.name) and e.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []


@contextmanager
def namespace_dir(root: Path, namespace: str) -> Iterator[int]:
    """Open a namespace's directory and yield its descriptor. Raises FileNotFoundError if there is none, and OSError."""
    try:
        fd = os.open(root / namespace, os.O_RDONLY | os.O_DIRECTORY | _NO_LINKS)
    except OSError as e:
        if e.errno in _ABSENT:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(root / namespace)) from e
        raise
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
    with suppress(FileNotFoundError), namespace_dir(root, namespace) as directory:
        for _ in range(_OPEN_ATTEMPTS):
            try:
                # Without O_NONBLOCK, opening a FIFO would wait for its writer.
                fd = os.open(file_name, os.O_RDONLY | os.O_NONBLOCK | _NO_LINKS, dir_fd=directory)
            except OSError as e:
                if e.errno in _ABSENT:
                    return None
                raise
            is_locked, status = _lock(fd, fcntl.LOCK_SH), os.fstat(fd)
            if is_locked and status.st_nlink and stat.S_ISREG(status.st_mode):
                return OpenObject(FileIO(fd), ObjectInfo(name, status.st_size, status.st_mtime))
            os.close(fd)
            if not stat.S_ISREG(status.st_mode):
                return None
            # It was deleted or replaced since it was opened. There may be another file of this name.
    return None


def _lock(fd: int, kind: int) -> bool:
    """Take a lock unless somebody holds a conflicting one. Return whether that worked. Closing the file releases it."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks
    return True


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


def read_object(root: Path, name: str, most: int) -> bytes | None:
    """Read an object, at most ``most`` bytes of it; None if it is missing. Raises OSError."""
    opened = open_object(root, name)
    if opened is None:
        return None
    with opened.file as file:
        return read_fully(file, 0, min(opened.info.size_bytes, most))


def stat_object(root: Path, name: str) -> ObjectInfo | None:
    """Return an object's size and modification time, or None if it is missing. Raises OSError."""
    namespace, _, file_name = name.partition("/")
    try:
        with namespace_dir(root, namespace) as directory:
            status = os.stat(file_name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return ObjectInfo(name, status.st_size, status.st_mtime) if stat.S_ISREG(status.st_mode) else None


def set_aside(root: Path, name: str, temp: str) -> bool:
    """Rename an object's file to ``temp``, for `remove_temp`. Return True if it existed. Raises OSError."""
    namespace, _, file_name = name.partition("/")
    try:
        with namespace_dir(root, namespace) as directory:
            os.replace(file_name, temp, src_dir_fd=directory, dst_dir_fd=directory)
    except FileNotFoundError:
        return False
    return True


def remove_temp(root: Path, namespace: str, temp: str) -> bool:
    """Remove a temporary file unless somebody reads or writes it. Return True if it is gone. Raises OSError."""
    absent = suppress(FileNotFoundError)
    with absent, namespace_dir(root, namespace) as directory, _locked(directory, temp) as is_locked:
        if is_locked:
            os.unlink(temp, dir_fd=directory)
        return is_locked
    return True


def is_in_use(root: Path, namespace: str, temp: str) -> bool:
    """Return whether somebody reads or writes a temporary file. Raises OSError."""
    absent = suppress(FileNotFoundError)
    with absent, namespace_dir(root, namespace) as directory, _locked(directory, temp) as is_locked:
        return not is_locked
    return False


@contextmanager
def _locked(directory: int, file_name: str) -> Iterator[bool]:
    """Lock a file exclusively unless it is in use. Yield whether that worked; True if it is missing."""
    try:
        fd = os.open(file_name, os.O_RDONLY | os.O_NONBLOCK | _NO_LINKS, dir_fd=directory)
    except OSError as e:
        if e.errno not in _ABSENT:
            raise
        fd = -1
    try:
        yield fd < 0 or _lock(fd, fcntl.LOCK_EX)
    finally:
        if fd >= 0:
            os.close(fd)


def file_names(root: Path, namespace: str) -> Iterator[str]:
    """Iterate over the names of all files in a namespace's directory. Raises OSError."""
    with suppress(FileNotFoundError), namespace_dir(root, namespace) as directory, os.scandir(directory) as entries:
        for entry in entries:
            yield entry.name


def objects(root: Path, namespace: str, prefix: str = "") -> Iterator[ObjectInfo]:
    """Iterate over the objects of a namespace whose name starts with ``prefix``. Raises OSError."""
    with suppress(FileNotFoundError), namespace_dir(root, namespace) as directory, os.scandir(directory) as entries:
        for entry in entries:
            name = f"{namespace}/{entry.name}"
            if name.startswith(prefix) and is_object_name(name) and entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):  # deleted meanwhile
                    status = entry.stat(follow_symlinks=False)
                    yield ObjectInfo(name, status.st_size, status.st_mtime)


class TempFile:
    """Writes a new object's temporary file. Readers do not see it before ``commit``. Every method may raise OSError."""

    def __init__(self, root: Path, namespace: str, temp: str) -> None:
        """Create the file, and the namespace's directory if it is missing. Raises FileExistsError if the name is taken,
        or was taken for what a dead writer has left, before the file was locked."""
        (root / namespace).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._temp = temp
        self._directory = os.open(root / namespace, os.O_RDONLY | os.O_DIRECTORY | _NO_LINKS)
        try:
            flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | _NO_LINKS
            self._fd = os.open(temp, flags, 0o600, dir_fd=self._directory)
        except BaseException:
            os.close(self._directory)
            raise
        self.is_open = True  # until it is committed or discarded
        if not (_lock(self._fd, fcntl.LOCK_EX) and os.fstat(self._fd).st_nlink):  # `remove_temp` was sooner
            self.discard()
            raise FileExistsError(errno.EEXIST, "another process removes it", temp)

    def write(self, data: memoryview) -> int:
        """Append some of ``data``, and return how many bytes."""
        return os.write(self._fd, data)

    def write_at(self, data: memoryview, start: int) -> int:
        """Write some of ``data`` from byte ``start`` on, and return how many bytes."""
        return os.pwrite(self._fd, data, start)

    def read_at(self, start: int, length: int) -> bytes:
        return os.pread(self._fd, length, start)

    def resize(self, num_bytes: int) -> None:
        """Set the file's size. What is larger than what is written counts as taken, without a byte on the disk."""
        os.truncate(self._fd, num_bytes)

    def sync(self) -> None:
        """Make the bytes durable. Call it before ``commit``, so that no object has bytes that a crash can lose."""
        os.fsync(self._fd)

    def commit(self, file_name: str, old_temp: str | None) -> None:
        """Rename the file to the object's name. An older object of that name stays as ``old_temp``, for its readers.

        The directory itself is not synced: if a power cut undoes the rename, the result is a miss, never a torn object.
        """
        _lock(self._fd, fcntl.LOCK_SH)  # readers may open it from now on
        here = {"src_dir_fd": self._directory, "dst_dir_fd": self._directory}
        if old_temp is not None:
            with suppress(OSError):  # it is gone, or the file system has no links
                os.link(file_name, old_temp, follow_symlinks=False, **here)
        os.replace(self._temp, file_name, **here)
        self._close()

    def discard(self) -> None:
        """Remove the file if it is not committed. Idempotent."""
        if self.is_open:
            try:
                with suppress(FileNotFoundError):
                    os.unlink(self._temp, dir_fd=self._directory)
            finally:
                self._close()

    def _close(self) -> None:
        self.is_open = False
        os.close(self._fd)
        os.close(self._directory)
