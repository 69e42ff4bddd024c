"""A directory that is served belongs to its server, and others are told where it is served.

Whoever uses a store's directory holds a lock (``flock``) on the directory itself, which the system releases when the
process ends, however it ends. A server's excludes all others, and it writes its URL into the file ``.served``.
"""

from __future__ import annotations

import fcntl
import os
import threading
from contextlib import suppress
from pathlib import Path

from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.log import printable

_SERVED = ".served"  # no namespace is called like this
_MAX_BYTES = 1000


class Owner:
    """The right of one store to use a directory. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._fd: int | None = None
        self._is_served = False
        self._lock = threading.Lock()

    def require(self, alone: bool = False) -> None:
        """Use the directory from now on, if there is one. ``alone``: nobody else may, until `release`.

        Raises StoreError (``io``) if it belongs to a server, or others use what is to be used alone, and OSError.
        """
        if self._fd is not None:
            return
        with self._lock:
            if self._fd is not None or not self._root.is_dir():
                return
            fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                raise StoreError("io", self._who()) from None
            except OSError:
                pass  # a file system without locks
            self._fd = fd
            if alone:
                with suppress(OSError):  # of a server that was killed
                    os.unlink(self._root / _SERVED)

    def _who(self) -> str:
        try:
            with (self._root / _SERVED).open("rb") as file:
                pid, url = file.read(_MAX_BYTES).decode(errors="replace").split()
        except (OSError, ValueError):  # another store, or a server that has not said it yet
            return f"other processes use {self._root}: end them first"
        return f"process {printable(pid)} serves {self._root}: use {printable(url)} instead"

    def say_url(self, url: str) -> None:
        """Let others know where a directory that is used alone is served."""
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
