"""A directory belongs to one store at a time. Others are told who has it, and where it is served.

Whoever uses a store's directory holds an exclusive lock (``flock``) on the directory itself, which the system releases
when the process ends, however it ends. A server writes its URL into the file ``.served``.
"""

from __future__ import annotations

import fcntl
import os
import threading
from contextlib import suppress
from pathlib import Path

from sgl_kvfetch.directory import files
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.log import printable

_SERVED = ".served"  # no namespace is called like this
_MAX_BYTES = 1000
_LOCKS = Path("/proc/locks")


class Owner:
    """The right of one store to use a directory. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._fd: int | None = None
        self._is_served = False
        self._lock = threading.Lock()

    def require(self) -> None:
        """Have the directory from now on until `release`, if there is one, and remove what a killed owner has left.

        Raises StoreError (``io``) if somebody else has it, and OSError.
        """
        if self._fd is not None:
            return
        with self._lock:
            if self._fd is not None or not self._root.is_dir():
                return
            fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                who = self._who(os.fstat(fd).st_ino)
                os.close(fd)
                raise StoreError("io", who) from None
            except OSError:
                pass  # a file system without locks
            self._fd = fd
            with suppress(OSError):  # of a disk that may only be read
                os.unlink(self._root / _SERVED)
            with suppress(OSError):
                files.remove_unfinished(self._root)

    def _who(self, inode: int) -> str:
        try:
            with (self._root / _SERVED).open("rb") as file:
                pid, url = file.read(_MAX_BYTES).decode(errors="replace").split()
        except (OSError, ValueError):  # a command, or a server that has not said it yet
            process = f"process {pid}" if (pid := _lock_holder(inode)) else "another process"
            share = f"to share the directory, run `kvfetch serve {self._root}`, and use its URL"
            return f"{process} has {self._root}: wait for its end; {share}"
        return f"process {printable(pid)} serves {self._root}: use {printable(url)} instead"

    def say_url(self, url: str) -> None:
        """Let others know where the directory is served."""
        self._is_served = True
        with suppress(OSError):  # on a full disk, or one that is read only, others are told less
            (self._root / _SERVED).write_text(f"{os.getpid()} {url}\n")

    def release(self) -> None:
        with self._lock:
            if self._fd is not None:
                if self._is_served:
                    with suppress(OSError):
                        os.unlink(self._root / _SERVED)
                os.close(self._fd)
            self._fd = None


def _lock_holder(inode: int) -> str:
    """Return the identifier of the process that has locked a file; "" if the system does not say it."""
    with suppress(OSError):
        for line in _LOCKS.read_text().splitlines():
            match line.split():
                # The device is not compared: some file systems show another one to `fstat`.
                case [_, "FLOCK", _, "WRITE", pid, place, *_] if place.endswith(f":{inode}") and int(pid) > 0:
                    return pid
    return ""
