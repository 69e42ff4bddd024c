"""A directory, and what tests of every part of it look at or change behind the store."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from harness.small_segments import FOLDER
from sgl_kvfetch.codec import CodedSegment
from sgl_kvfetch.directory import LocalStore

MakeStore = Callable[..., LocalStore]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[MakeStore]:
    """Makes stores on one directory, or on folders in it, and closes them at the end."""
    stores = []

    def make(folder: str = "", **options: Any) -> LocalStore:
        stores.append(LocalStore(tmp_path / folder, **options))
        return stores[-1]

    yield make
    for store in stores:
        await store.close()


@pytest.fixture
def store(make: MakeStore) -> LocalStore:
    return make(orphan_age_s=60)


def disk_bytes(root: Path) -> int:
    """Return the size of all objects in the folder, and of what is being written."""
    return sum(path.stat().st_size for path in [*root.glob(f"{FOLDER}/*"), *unfinished(root)])


def unfinished(root: Path) -> list[Path]:
    return list(root.glob(".unfinished/*"))


def age(*paths: Path, seconds: float = 1000) -> None:
    for path in paths:
        os.utime(path, (time.time() - seconds,) * 2)


def write_files(root: Path, *segments: CodedSegment) -> None:
    """Write segments as files, as if a store that does not check had taken them."""
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    for segment in segments:
        (root / segment.data_name).write_bytes(segment.data)
        (root / segment.manifest.key.manifest_name).write_bytes(segment.manifest.encode())


async def rebuild(store: LocalStore) -> None:
    """Make the catalog anew from the files, and wait until that is done."""

    def open_anew() -> None:
        store._catalog.discard()
        store._catalog.open()

    await store.workers.run("writes", open_anew)
    await store.workers.run("upkeep", lambda: None)  # behind the sweep that opening has started
