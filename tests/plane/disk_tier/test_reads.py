"""The disk tier: what was read comes from the disk."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from harness.metrics import read_metric
from harness.store_process import StoreProcess
from harness.waiting import WAIT_S, until
from sgl_kvfetch.codec.container.encryption import StoreKeys
from sgl_kvfetch.codec.container.protect import secure_segment
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.plane import disk_tier
from sgl_kvfetch.plane.disk_tier import DiskTier
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.stores.keyed import KeyedStore
from sgl_kvfetch.testing import FOLDER, make_segment, page_hashes, put_segment
from tests.plane.disk_tier.tiers import (
    CHAIN,
    MANIFEST_NAME,
    PIECE,
    SEGMENT,
    Events,
    MakeTier,
    RemoteStore,
    fetch,
    fill,
    read,
)


def sent_bytes(server: StoreProcess) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=WAIT_S) as answer:
        return read_metric(answer.read().decode(), "kvfetch_server_sent_bytes_total")


async def test_what_was_read_comes_from_the_disk(tier: DiskTier, remote: RemoteStore, events: Events) -> None:
    await fill(tier, events)
    size, num_reads = len(SEGMENT.data), remote.num_reads
    assert size > 4 * PIECE
    assert events.bytes == {"store": size}
    assert await fetch(tier) == SEGMENT.data
    assert remote.num_reads == num_reads
    assert events.bytes == {"store": size, "disk": size}
    assert not events.failures


@pytest.mark.process
async def test_a_real_server_sends_data_once(tmp_path: Path, make: MakeTier, events: Events) -> None:
    with StoreProcess(tmp_path / "served") as server:
        tier = make(HttpStore(server.url))
        await put_segment(tier, SEGMENT)
        before = sent_bytes(server)
        await fill(tier, events)
        first = sent_bytes(server) - before
        assert first >= len(SEGMENT.data)
        before = sent_bytes(server)
        assert await fetch(tier) == SEGMENT.data
        second = sent_bytes(server) - before  # the manifest, and this page of metrics
        assert first - second >= len(SEGMENT.data)


async def test_after_a_restart(make: MakeTier, remote: RemoteStore, events: Events) -> None:
    first = make()
    await fill(first, events)
    await first.close()
    await put_segment(again := RemoteStore(remote.root), SEGMENT)
    assert await fetch(make(again)) == SEGMENT.data
    assert again.num_reads == 0


@pytest.mark.usefixtures("tiny_stores")
async def test_reads_from_the_disk_are_uses(make: MakeTier, remote: RemoteStore, events: Events) -> None:
    """Also in a process that has not written anything."""
    segments = [make_segment(page_hashes(64, f"{i}"), 0, 64, content=i) for i in range(3)]
    for segment in segments:
        await put_segment(remote, segment)
    capacity = 3 * len(SEGMENT.data)
    first = make(capacity=capacity)
    await fill(first, events, segments[0])
    await fill(first, events, segments[1])
    await first.close()
    await put_segment(again := RemoteStore(remote.root), segments[0])
    second = make(again, capacity=capacity)
    await second.lookup(FOLDER, segments[0].manifest.page_hashes)
    await until(lambda: second._disk._catalog.is_open)
    assert await fetch(second, segments[0]) == segments[0].data
    assert again.num_reads == 0
    await fill(second, events, segments[2])
    events.forget()
    assert await fetch(second, segments[0]) == segments[0].data
    assert events.bytes == {"disk": len(segments[0].data)}


async def test_whole_data_comes_from_the_store(tier: DiskTier, remote: RemoteStore, events: Events) -> None:
    """Others get what is made of it, so it must not pass through this machine's disk."""
    await fill(tier, events)
    num_reads = remote.num_reads
    assert await tier.get(SEGMENT.data_name) == SEGMENT.data
    assert remote.num_reads == num_reads + 1


async def test_manifests_from_the_disk_need_a_key(make: MakeTier, remote: RemoteStore, events: Events) -> None:
    """The tier keeps what the store has, encrypted."""
    keys = StoreKeys(b"k" * 32)
    keyed, segment = KeyedStore(tier := make(), keys), secure_segment(SEGMENT, keys)
    await put_segment(keyed, segment)
    (before,) = (await keyed.lookup(FOLDER, CHAIN)).hits
    assert await read(keyed, segment) == segment.data
    await until(lambda: events.fills["stored"] == 1)
    remote.error = StoreError("refused", "as told")
    found = await keyed.lookup(FOLDER, CHAIN)
    assert found.hits == (before,)
    assert found.from_cache
    await tier._disk.put(SEGMENT.data_name, SEGMENT.data)
    await tier._disk.put(MANIFEST_NAME, SEGMENT.manifest.encode())  # which is not encrypted
    assert (await keyed.lookup(FOLDER, CHAIN)).hits == ()


async def test_manifests_in_memory_are_bounded(
    tier: DiskTier, remote: RemoteStore, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(SEGMENT.manifest.encode())
    monkeypatch.setattr(disk_tier, "_KNOWN_BYTES", 2 * size)
    for i in range(4):
        await put_segment(remote, make_segment(page_hashes(64, f"{i}"), 0, 64))
        for _ in range(2):
            await tier.lookup(FOLDER, page_hashes(64, f"{i}"))
        assert len(tier._known) == min(i + 1, 2)
        assert tier._known_bytes == sum(len(data.stored) for data in tier._known.values()) <= 2 * size
