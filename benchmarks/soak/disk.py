"""Ways to leave a running store no room on its disk."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import psutil  # type: ignore[import-untyped]

_FILL_BYTES = 1 << 20
_LIMIT_BYTES = 64 << 10


class Disk(Protocol):
    """Where a store keeps its files, in ``folder``."""

    folder: Path

    def fill(self, pid: int) -> None:
        """Leave no room for the store, whose process is ``pid``."""

    def free(self, pid: int) -> None:
        """Undo ``fill``. The store may have been restarted since."""


class SmallDisk:
    """A tmpfs. Another file on it takes all the room that is left. Needs root."""

    def __init__(self, mount: Path) -> None:
        self.folder = mount / "store"
        self._other = mount / "other"

    def fill(self, pid: int) -> None:
        fd = os.open(self._other, os.O_CREAT | os.O_WRONLY, 0o600)
        size = 0
        try:
            while True:
                os.posix_fallocate(fd, size, _FILL_BYTES)
                size += _FILL_BYTES
        except OSError as e:
            if e.errno != errno.ENOSPC:
                raise
        finally:
            os.close(fd)

    def free(self, pid: int) -> None:
        self._other.unlink(missing_ok=True)


class LimitedFiles:
    """A limit on the size of the files that the store's process writes, which it meets as it would a full disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "store"

    def fill(self, pid: int) -> None:
        _, hard = psutil.Process(pid).rlimit(resource.RLIMIT_FSIZE)
        psutil.Process(pid).rlimit(resource.RLIMIT_FSIZE, (_LIMIT_BYTES, hard))

    def free(self, pid: int) -> None:
        _, hard = psutil.Process(pid).rlimit(resource.RLIMIT_FSIZE)
        psutil.Process(pid).rlimit(resource.RLIMIT_FSIZE, (hard, hard))


@contextmanager
def small_disk(size_bytes: int) -> Iterator[Disk]:
    """Mount a tmpfs of this size. Raises subprocess.CalledProcessError if that is not allowed."""
    with tempfile.TemporaryDirectory(prefix="kvfetch-soak-") as mount:
        options = f"size={size_bytes},mode=700"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "kvfetch-soak", mount], check=True)
        try:
            yield SmallDisk(Path(mount))
        finally:
            subprocess.run(["umount", mount], check=True)


@contextmanager
def limited_files() -> Iterator[Disk]:
    with tempfile.TemporaryDirectory(prefix="kvfetch-soak-") as folder:
        yield LimitedFiles(Path(folder))
