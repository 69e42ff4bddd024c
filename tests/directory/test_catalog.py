"""What the catalog does where the disk or the machine disturbs it."""

from __future__ import annotations

import os
import resource
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.small_segments import FOLDER, data_object, make_segment, page_hashes, put_segment
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import StoreError
from tests.directory.conftest import MakeStore
from tests.stores.conformance import failing

CHAIN = page_hashes(4)
LIMIT_BYTES = 32 << 10


@contextmanager
def limited_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_log_that_may_not_grow_means_a_full_store(make: MakeStore) -> None:
    """As with a quota: SQLite says only that there was an I/O error."""
    store = make()
    await put_segment(store, make_segment(CHAIN, 0, 4))

    async def put_many() -> None:
        for number in range(100):
            await store.put(data_object(bytes([number])), bytes([number]))

    with limited_files(), failing("full", "File too large", retriable=True):
        await put_many()
    await store.put(data_object(b"more"), b"more")
    assert (await store.lookup(FOLDER, CHAIN)).num_pages == 4


@contextmanager
def mounted(folder: Path) -> Iterator[None]:
    """Mount a small tmpfs."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "kvfetch-test", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def make_read_only(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize("is_clean", [True, False])
async def test_a_read_only_mount_is_read(tmp_path: Path, is_clean: bool) -> None:
    with mounted(tmp_path):
        store = LocalStore(tmp_path / "store")
        await put_segment(store, make_segment(CHAIN, 0, 4))
        kept = {path: path.read_bytes() for path in (tmp_path / "store" / ".catalog").iterdir()}
        await store.close()
        if not is_clean:
            for path, content in kept.items():
                path.write_bytes(content)
        make_read_only(tmp_path)
        store = LocalStore(tmp_path / "store")
        assert (await store.lookup(FOLDER, CHAIN)).num_pages == 4
        usage = await store.usage()
        assert usage.num_segments == 1
        assert usage.write_problem is not None
        with pytest.raises(StoreError):
            await store.put(data_object(b"new"), b"new")
        await store.close()


class StandstillLock:
    """A lock which the machine stands still for, longer than a write may wait: its first wait is over without it."""

    def __init__(self, standstill_s: float) -> None:
        self._lock = threading.Lock()
        self._standstill_s = standstill_s
        self.release = self._lock.release

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if blocking and self._standstill_s:
            time.sleep(self._standstill_s)
            self._standstill_s = 0.0
            return False
        return self._lock.acquire(blocking, timeout)


async def test_a_write_goes_on_after_the_machine_has_stood_still(
    make: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it waits for has stood still as well."""
    monkeypatch.setattr("sgl_kvfetch.directory.catalog._BUSY_S", 0.5)
    store = make()
    monkeypatch.setattr(store._catalog, "_writer_lock", StandstillLock(1.0))
    await put_segment(store, make_segment(CHAIN, 0, 4))
    assert (await store.lookup(FOLDER, CHAIN)).num_pages == 4
