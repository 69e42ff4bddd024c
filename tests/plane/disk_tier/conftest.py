from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness.waiting import WAIT_S
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.plane import disk_tier
from sgl_kvfetch.plane.disk_tier import DiskTier
from sgl_kvfetch.stores.base import Store
from sgl_kvfetch.testing import put_segment
from tests.plane.disk_tier.tiers import CAPACITY, SEGMENT, Events, MakeTier, RemoteStore


@pytest.fixture
async def remote(tmp_path: Path) -> AsyncIterator[RemoteStore]:
    store = RemoteStore(tmp_path / "remote")
    await put_segment(store, SEGMENT)
    yield store
    await store.close()


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
async def make(
    tmp_path: Path, remote: RemoteStore, events: Events, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[MakeTier]:
    """Makes tiers on one directory, and closes them. Store and disk may take their time, as on a slow machine."""
    made: list[DiskTier] = []
    monkeypatch.setattr(disk_tier, "_READ_S", WAIT_S)
    monkeypatch.setattr(disk_tier, "_count_outage", lambda error: events.outages.append(error.reason))

    def make(
        store: Store = remote,
        *,
        capacity: int = CAPACITY,
        lookup_timeout_s: float = WAIT_S,
        heads: range | None = None,
    ) -> DiskTier:
        disk = LocalStore(tmp_path / "disk", capacity_bytes=capacity)
        made.append(DiskTier(store, disk, lookup_timeout_s, heads))
        return made[-1]

    yield make
    for tier in made:
        await tier.close()


@pytest.fixture
def tier(make: MakeTier) -> DiskTier:
    return make()


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    """The file of the segment's data on the disk."""
    return tmp_path / "disk" / SEGMENT.data_name
