"""The disk tier: nothing that happens to the disk is a wrong answer, or a miss."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from harness.reading import read_bytes
from harness.waiting import WAIT_S, until
from sgl_kvfetch.plane import disk_tier
from sgl_kvfetch.plane.disk_tier import DiskTier
from sgl_kvfetch.stores.base import Lookup
from sgl_kvfetch.stores.remote import Breaker
from sgl_kvfetch.testing import FOLDER
from tests.plane.disk_tier.tiers import CHAIN, PIECE, SEGMENT, Events, MakeTier, RemoteStore, content, fetch, fill


def flip(path: Path, at: int = -1) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[at] ^= 1
    path.write_bytes(damaged)


@pytest.mark.parametrize("damage", ["flipped", "cut"])
async def test_a_damaged_file_is_read_from_the_store_at_once(
    damage: str, tier: DiskTier, events: Events, on_disk: Path
) -> None:
    await fill(tier, events)
    if damage == "flipped":
        flip(on_disk)
    else:
        os.truncate(on_disk, len(SEGMENT.data) // 2)
    assert await fetch(tier) == SEGMENT.data
    assert content(on_disk) in (None, SEGMENT.data)  # it may have been filled again
    assert events.bytes["store"] > len(SEGMENT.data)
    assert events.failures.total() >= 1


async def test_a_file_that_somebody_deleted_is_filled_again(tier: DiskTier, events: Events, on_disk: Path) -> None:
    await fill(tier, events)
    os.unlink(on_disk)
    await fill(tier, events)
    assert content(on_disk) == SEGMENT.data
    assert not events.failures


async def test_a_damaged_copy_is_filled_again(tier: DiskTier, events: Events, on_disk: Path) -> None:
    await fill(tier, events)
    flip(on_disk, 0)
    assert await read_bytes(tier, SEGMENT.data_name, 0, PIECE) == SEGMENT.data[:PIECE]
    assert events.failures == {"read io": 1}
    await fill(tier, events)
    assert content(on_disk) == SEGMENT.data


async def test_bytes_that_arrive_damaged_are_not_kept(
    tier: DiskTier, remote: RemoteStore, events: Events, on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader finds out by itself."""
    get = remote.get

    async def garble(name: str, start: int = 0, length: int | None = None) -> bytes | None:
        data = await get(name, start, length)
        return data if data is None or start else bytes([data[0] ^ 1]) + data[1:]

    monkeypatch.setattr(remote, "get", garble)
    assert await fetch(tier) != SEGMENT.data
    await until(lambda: events.fills["failed"] == 1)
    assert events.failures == {"fill invalid": 1}
    assert content(on_disk) is None


async def test_a_full_disk_is_no_miss(tier: DiskTier, events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("sgl_kvfetch.directory.files.os.write", full)
    for _ in range(3):
        assert await fetch(tier) == SEGMENT.data
    await until(lambda: events.fills["failed"] == 1)  # not once a read
    assert events.failures == {"fill full": 1}
    assert events.bytes == {"store": 3 * len(SEGMENT.data)}


async def test_a_directory_that_cannot_be_used_is_no_miss(tmp_path: Path, make: MakeTier, events: Events) -> None:
    (tmp_path / "disk").write_text("not a directory")
    tier = make()
    for _ in range(3):
        assert await fetch(tier) == SEGMENT.data
    await until(lambda: events.fills["failed"] == 1)
    assert events.failures["fill io"] == 1
    assert await tier.delete_prefix(FOLDER) == 2
    assert await tier.lookup(FOLDER, CHAIN) == Lookup(())


async def test_a_disk_that_does_not_answer_is_no_miss(
    tier: DiskTier, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(tier, events)
    tier._disk_health = Breaker(first_pause_s=WAIT_S)
    monkeypatch.setattr(disk_tier, "_READ_S", 0.01)

    async def hang(name: str, start: int = 0, length: int | None = None) -> bytes | None:
        await asyncio.Event().wait()
        return None

    monkeypatch.setattr(tier._disk, "get", hang)
    assert await fetch(tier) == SEGMENT.data
    num_failures = events.failures["read timeout"]
    assert num_failures >= 3
    assert await read_bytes(tier, SEGMENT.data_name, 0, PIECE) == SEGMENT.data[:PIECE]
    assert events.failures == {"read timeout": num_failures}  # it was not asked
