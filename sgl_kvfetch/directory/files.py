"""The files of a local store: names, atomic writes, reads. Blocking: call from a worker thread.

An object ``<namespace>/<rest>`` is the file of that name under the root. Symbolic links below the root are never
followed. Anything other than a regular file with an object's name is ignored. Only the owner may read files and
directories that are made here.

What is being written or deleted is in a folder of its own, ``.unfinished``. So what a killed owner leaves costs the
next one no search. A deleted file stays there while somebody reads it, since it takes room until then.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from sgl_kvfetch.errors import StoreError, StoreErrorReason
from sgl_kvfetch.keys import is_object_name
from sgl_kvfetch.stores import ObjectInfo, is_namespace

UNFINISHED = ".unfinished"  # no namespace is called like this
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


_read: Counter[tuple[int, int]] = Counter()  # which files this process reads, by device and inode
_reading = threading.RLock()  # a file that nobody has closed is closed wherever memory is freed


class _ReadFile(FileIO):
    """A file that counts as read until it is closed."""

    def __init__(self, fd: int, status: os.stat_result) -> None:
        super().__init__(fd)
        self._place = status.st_dev, status.st_ino
        with _reading:
            _read[self._place] += 1

    def close(self) -> None:
        if not self.closed:
            super().close()
            with _reading:
                _read[self._place] -= 1
                if not _read[self._place]:
                    del _read[self._place]


@dataclass(frozen=True, slots=True)
class OpenObject:
    """An object open for reading. Its bytes stay readable until it is closed, even if it is deleted meanwhile."""

    file: FileIO
    info: ObjectInfo


def open_object(root: Path, name: str) -> OpenObject | None:
    """Open an object; the caller closes it. None if it is missing. Raises OSError."""
    namespace, _, file_name = name.partition("/")
    with suppress(FileNotFoundError), namespace_dir(root, namespace) as directory:
        try:
            # Without O_NONBLOCK, opening a FIFO would wait for its writer.
            fd = os.open(file_name, os.O_RDONLY | os.O_NONBLOCK | _NO_LINKS, dir_fd=directory)
        except OSError as e:
            if e.errno in _ABSENT:
                return None
            raise
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode):
            return OpenObject(_ReadFile(fd, status), ObjectInfo(name, status.st_size, status.st_mtime))
        os.close(fd)
    return None


def in_memory(name: str, content: bytes) -> OpenObject:
    """Return an object that is in no directory. Raises OSError."""
    file = FileIO(os.memfd_create("kvfetch"), "r+")
    file.write(content)
    return OpenObject(file, ObjectInfo(name, len(content), time.time()))


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


def set_aside(root: Path, name: str) -> str | None:
    """Take an object's name from its file. Return what `remove_aside` needs; None if there is no file. Raises OSError.

    Unlinking a large file takes long, and renaming it does not.
    """
    namespace, _, file_name = name.partition("/")
    temp = secrets.token_hex(8)
    try:
        with namespace_dir(root, namespace) as source, _unfinished_dir(root) as target:
            os.replace(file_name, temp, src_dir_fd=source, dst_dir_fd=target)
    except FileNotFoundError:
        return None
    return temp


def remove_aside(root: Path, temp: str) -> int:
    """Delete a file that has lost its name, unless somebody reads it. Return how many bytes it still takes. Raises
    OSError."""
    path = root / UNFINISHED / temp
    with suppress(FileNotFoundError):
        status = os.stat(path)
        with _reading:
            if (status.st_dev, status.st_ino) in _read:
                return status.st_size
        os.unlink(path)
    return 0


def remove_unfinished(root: Path) -> None:
    """Delete what a killed owner was writing or deleting. Raises OSError."""
    for temp in list(file_names(root, UNFINISHED)):
        remove_aside(root, temp)


@contextmanager
def _unfinished_dir(root: Path) -> Iterator[int]:
    (root / UNFINISHED).mkdir(mode=0o700, parents=True, exist_ok=True)
    with namespace_dir(root, UNFINISHED) as directory:
        yield directory


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
    """Writes a new file. Readers do not see it before ``commit``. Every method may raise OSError."""

    def __init__(self, root: Path, owner: str = "") -> None:
        """Create the file. ``owner``: what its temporary name begins with."""
        self._root = root
        self._temp = f"{owner}{secrets.token_hex(8)}"
        with _unfinished_dir(root) as directory:
            flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | _NO_LINKS
            self._fd = os.open(self._temp, flags, 0o600, dir_fd=directory)
        self.is_open = True  # until it is committed or discarded

    def write_at(self, data: memoryview, start: int) -> None:
        """Write ``data`` from byte ``start`` on. After an error, it may be written once more."""
        while data:
            num_bytes = os.pwrite(self._fd, data, start)
            data, start = data[num_bytes:], start + num_bytes

    def read_at(self, start: int, length: int) -> bytes:
        return os.pread(self._fd, length, start)

    def resize(self, num_bytes: int) -> None:
        """Set the file's size. What is larger than what is written counts as taken, without a byte on the disk."""
        os.truncate(self._fd, num_bytes)

    def disk_bytes(self) -> int:
        """Return how many bytes of the disk the file takes, which is more than it has; 0 once it is closed."""
        with suppress(FileNotFoundError), _unfinished_dir(self._root) as directory:
            return os.stat(self._temp, dir_fd=directory).st_blocks * 512
        return 0

    def sync(self) -> None:
        """Make the bytes durable. Call it before ``commit``, so that no object has bytes that a crash can lose."""
        os.fsync(self._fd)

    def commit(self, folder: str, file_name: str) -> None:
        """Give the file its name in a folder of the root, which is created if it is missing.

        The directory itself is not synced: if a power cut undoes the rename, the result is a miss, never a torn object.
        """
        (self._root / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        with namespace_dir(self._root, folder) as target, _unfinished_dir(self._root) as source:
            os.replace(self._temp, file_name, src_dir_fd=source, dst_dir_fd=target)
        self._close()

    def discard(self) -> None:
        """Remove the file if it is not committed. Idempotent."""
        if self.is_open:
            try:
                remove_aside(self._root, self._temp)
            finally:
                self._close()

    def _close(self) -> None:
        self.is_open = False
        os.close(self._fd)
