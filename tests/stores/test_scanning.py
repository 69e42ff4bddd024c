"""Scans of a directory, with concurrent lookups and writes."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from sgl_kvfetch.stores import scanning
from sgl_kvfetch.stores.base import Lookup
from sgl_kvfetch.stores.catalog import Catalog, FoundManifest, read_manifest
from sgl_kvfetch.stores.local import SCAN_WAIT_S, LocalStore
from sgl_kvfetch.testing.small_segments import FOLDER, make_segment, page_hashes, parts, put_segment

SPACE = FOLDER
CHAIN = page_hashes(8)
FIRST, SECOND = make_segment(CHAIN, 0, 4), make_segment(CHAIN, 4, 4)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LocalStore]:
    store = LocalStore(tmp_path)
    yield store
    await store.close()


class Gate:
    """Blocks reads of manifests until it is opened, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()
        self.num_read = 0
        monkeypatch.setattr(scanning, "read_manifest", self._read)

    def _read(self, root: Path, name: str, status: os.stat_result) -> FoundManifest | None:
        found = read_manifest(root, name, status)
        self.num_read += 1
        self.reached.set()
        assert self.open.wait(30)
        return found


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    listed: list[str] = []
    list_names = scanning._list

    def counted(namespace: str, *args: object) -> object:
        listed.append(namespace)
        return list_names(namespace, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(scanning, "_list", counted)
    return listed


async def fill(root: Path, *segments: object) -> None:
    other = LocalStore(root)
    for segment in segments:
        await put_segment(other, segment)  # type: ignore[arg-type]
    await other.close()


def stored_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*.kv?"))


def settle(root: Path) -> None:
    """Make the last change look old."""
    then = time.time() - 60
    os.utime(root / SPACE, (then, then))


async def test_own_changes_cause_no_scan(store: LocalStore, tmp_path: Path, scans: list[str]) -> None:
    await fill(tmp_path, make_segment(page_hashes(4, "old"), 0, 4))
    settle(tmp_path)
    assert await store.warm_up() == 1
    scans.clear()
    await store.put(FIRST.data_name, FIRST.data)
    scans.clear()  # of the first write's collection of orphans
    for _ in range(3):
        await put_segment(store, FIRST)
        assert parts(await store.lookup(SPACE, CHAIN)) == [(0, 4)]
        await store.delete(FIRST.manifest.key.manifest_name)
        assert await store.lookup(SPACE, CHAIN) == Lookup(())
        async with store.upload(SECOND.data_name) as upload:
            await upload.write(b"given up")
        await store.usage()
    assert scans == []
    await asyncio.sleep(0.05)  # coarse clocks of file systems
    await fill(tmp_path, SECOND)
    assert parts(await store.lookup(SPACE, CHAIN[4:])) == [(0, 4)]
    assert scans


async def test_lookups_and_writes_go_on_during_a_scan(store: LocalStore, tmp_path: Path, gate: Gate) -> None:
    await put_segment(store, FIRST)
    await fill(tmp_path, SECOND, make_segment(page_hashes(4, "third"), 0, 4))
    gate.open.clear()
    scan = asyncio.create_task(store.usage())
    await asyncio.to_thread(gate.reached.wait, 10)
    started = time.monotonic()
    assert parts(await store.lookup(SPACE, CHAIN)) == [(0, 4)]  # the last complete index
    assert time.monotonic() - started < SCAN_WAIT_S + 1
    await store.delete(FIRST.manifest.key.manifest_name)
    own = page_hashes(4, "own")
    await put_segment(store, make_segment(own, 0, 4))
    # What the scan has read of this one is out of date by now.
    await store.delete(SECOND.manifest.key.manifest_name)
    assert not scan.done()
    gate.open.set()
    await scan
    assert await store.lookup(SPACE, CHAIN) == Lookup(())
    assert await store.lookup(SPACE, CHAIN[4:]) == Lookup(())
    assert parts(await store.lookup(SPACE, own)) == [(0, 4)]
    assert (await store.usage()).stored_bytes == stored_bytes(tmp_path)


async def test_a_segment_replaced_by_another_process_is_always_found(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its old data is already gone when the scan runs, and the scan records that."""
    await put_segment(store, FIRST)
    assert parts(await store.lookup(SPACE, CHAIN)) == [(0, 4)]
    new = make_segment(CHAIN, 0, 4, codec="deflate")
    await fill(tmp_path, new)
    (tmp_path / FIRST.data_name).unlink()
    offered = []
    for method in ("found_data", "found_manifest", "lost"):
        note = getattr(Catalog, method)

        def watched(catalog: Catalog, name: str, *args: object, note: Callable[..., None] = note) -> None:
            note(catalog, name, *args)
            offered.append(FIRST.manifest.key.manifest_name in catalog.index)

        monkeypatch.setattr(Catalog, method, watched)
    (hit,) = (await store.lookup(SPACE, CHAIN)).hits
    assert hit.manifest == new.manifest.encode()
    assert offered == [True] * 3


async def test_a_lookup_does_not_wait_for_a_long_scan(
    store: LocalStore, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(tmp_path, FIRST)
    monkeypatch.setattr(scanning, "LONG_SCAN_S", -1.0)  # all are
    monkeypatch.setattr(scanning, "REST_FACTOR", 0)
    await store.warm_up()
    await fill(tmp_path, SECOND)
    gate.open.clear()
    gate.reached.clear()
    assert parts(await store.lookup(SPACE, CHAIN)) == [(0, 4)]
    await asyncio.to_thread(gate.reached.wait, 10)
    started = time.monotonic()
    assert parts(await store.lookup(SPACE, CHAIN)) == [(0, 4)]
    assert time.monotonic() - started < SCAN_WAIT_S / 2
    gate.open.set()
    await store.usage()
    assert parts(await store.lookup(SPACE, CHAIN)) == [(0, 4), (0, 4)]


async def test_a_cancelled_lookup_does_not_cancel_the_scan(store: LocalStore, tmp_path: Path, gate: Gate) -> None:
    await fill(tmp_path, FIRST)
    gate.open.clear()
    lookups = [asyncio.create_task(store.lookup(SPACE, CHAIN)) for _ in range(2)]
    await asyncio.to_thread(gate.reached.wait, 10)
    lookups[0].cancel()
    await asyncio.gather(lookups[0], return_exceptions=True)
    gate.open.set()
    assert parts(await lookups[1]) == [(0, 4)]
    assert gate.num_read == 1


async def test_missing_namespaces_are_not_remembered(store: LocalStore, scans: list[str]) -> None:
    for i in range(5):
        assert await store.lookup(f"{i:032x}.0-1", CHAIN) == Lookup(())
    assert scans == []
    assert store._directory.scanner._seen == {}


async def test_a_failed_scan_raises(store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await fill(tmp_path, FIRST)

    def broken(*args: object) -> None:
        raise PermissionError(13, "no")

    with monkeypatch.context() as patch:
        patch.setattr(scanning, "_list", broken)
        with pytest.raises(Exception, match="scanning"):
            await store.lookup(SPACE, CHAIN)
    assert parts(await store.lookup(SPACE, CHAIN)) == [(0, 4)]


async def test_a_long_deletion_runs_in_turns(store: LocalStore) -> None:
    for i in range(20):
        await put_segment(store, make_segment(page_hashes(4, f"chain {i}"), 0, 4, content=i))
    assert await store.delete_some("", 0.0) == (16, True)
    names = {info.name async for info in store.list()}
    assert sum(name.endswith(".kvm") for name in names) == 4  # manifests go first
    assert await store.delete_prefix("") == 24
