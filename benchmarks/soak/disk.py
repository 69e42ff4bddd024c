"""A small disk for a store, which can be filled while the store runs."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FILL_BYTES = 1 << 20


class Disk:
    """Has the store's files in ``folder``. Another file takes all the room that is left."""

    def __init__(self, mount: Path) -> None:
        self.folder = mount / "store"
        self._other = mount / "other"

    def fill(self) -> None:
        fd, size = os.open(self._other, os.O_CREAT | os.O_WRONLY, 0o600), 0
        try:
            while True:
                os.posix_fallocate(fd, size, _FILL_BYTES)
                size += _FILL_BYTES
        except OSError as e:
            if e.errno != errno.ENOSPC:
                raise
        finally:
            os.close(fd)

    def free(self) -> None:
        self._other.unlink(missing_ok=True)


@contextmanager
def small_disk(size_bytes: int) -> Iterator[Disk]:
    """Mount a tmpfs of this size. Raises subprocess.CalledProcessError if that is not allowed."""
    with tempfile.TemporaryDirectory(prefix="kvfetch-soak-") as mount:
        options = f"size={size_bytes},mode=700"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "kvfetch-soak", mount], check=True)
        try:
            yield Disk(Path(mount))
        finally:
            subprocess.run(["umount", mount], check=True)


@contextmanager
def any_disk() -> Iterator[Disk]:
    with tempfile.TemporaryDirectory(prefix="kvfetch-soak-") as folder:
        yield Disk(Path(folder))
