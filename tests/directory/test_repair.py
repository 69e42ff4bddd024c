"""A catalog that differs from the disk: after power cuts, after changes by other means, or when it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.small_segments import FOLDER, make_segment, page_hashes, parts, put_segment
from harness.waiting import WAIT_S, until
from sgl_kvfetch.directory import rows
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.directory.repair import Repair
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.stores.base import Lookup
from tests.directory.conftest import MakeStore, age, disk_bytes, rebuild, write_files

CHAIN = page_hashes(8)
FIRST, SECOND = make_segment(CHAIN, 0, 4), make_segment(CHAIN, 4, 4)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Manifests that are found on the disk are not read before this is set."""
    gate = threading.Event()
    read_manifests = Repair._read_manifests

    def held(repair: Repair) -> None:
        assert gate.wait(60)
        read_manifests(repair)

    monkeypatch.setattr(Repair, "_read_manifests", held)
    yield gate
    gate.set()


def entries(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()} - {".unfinished"}


async def until_found(store: LocalStore, expected: list[tuple[int, int]]) -> None:
    async def is_found() -> bool:
        return parts(await store.lookup(FOLDER, CHAIN)) == expected

    await until(is_found)


async def test_a_restart_reads_no_manifest(make: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    before = make()
    await put_segment(before, FIRST)
    usage = await before.usage()
    await before.close()
    monkeypatch.setattr(rows, "decode_named_manifest", None)
    store = make()
    assert await store.warm_up() == 1
    assert await store.usage() == usage
    assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 4)]


async def test_reading_makes_no_catalog(store: LocalStore, tmp_path: Path) -> None:
    empty = LocalStore(tmp_path / "new")
    assert await empty.lookup(FOLDER, CHAIN) == Lookup(())
    assert (await empty.usage()).stored_bytes == 0
    await empty.collect()
    assert not empty.root.exists()
    await empty.close()
    write_files(tmp_path, FIRST)
    assert await store.get(FIRST.data_name) == FIRST.data
    assert len([info async for info in store.list()]) == 2
    assert entries(tmp_path) == {FOLDER}


async def test_files_without_a_catalog_are_found_in_the_background(
    store: LocalStore, tmp_path: Path, gate: threading.Event
) -> None:
    write_files(tmp_path, FIRST, SECOND)
    assert await store.lookup(FOLDER, CHAIN) == Lookup(())  # does not wait
    own = page_hashes(4, "own")
    segment = make_segment(own, 0, 4)
    await put_segment(store, segment)  # written and found meanwhile
    assert parts(await store.lookup(FOLDER, own)) == [(0, 4)]
    gate.set()
    await until_found(store, [(0, 4), (0, 4)])
    assert (await store.usage()).stored_bytes == disk_bytes(tmp_path)


async def test_a_bounded_store_counts_all_files_before_it_writes(make: MakeStore, tmp_path: Path) -> None:
    segments = [make_segment(page_hashes(4, f"chain {i}"), 0, 4, content=i) for i in range(16)]
    write_files(tmp_path, *segments)
    capacity = disk_bytes(tmp_path)
    store = make(capacity_bytes=capacity)
    await put_segment(store, FIRST)
    assert disk_bytes(tmp_path) <= capacity
    assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 4)]
    assert 1 <= (await store.usage()).num_evicted <= 4


def in_database(script: str) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        db = sqlite3.connect(path, isolation_level=None)
        db.executescript(script)
        db.close()

    return spoil


@pytest.mark.parametrize("is_read", [True, False], ids=["by a reader", "by a writer"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b"not a database" * 1000),
        lambda path: os.truncate(path, path.stat().st_size - 1000),  # the last page is cut
        lambda path: shutil.rmtree(path.parent),
        in_database(
            "DROP INDEX segments_by_expiry; ALTER TABLE segments DROP COLUMN expires; PRAGMA user_version = 999"
        ),
        in_database("DELETE FROM totals"),
    ],
    ids=["overwritten", "cut", "removed", "another version", "without totals"],
)
async def test_a_catalog_that_is_unusable_is_rebuilt(
    make: MakeStore, tmp_path: Path, spoil: Callable[[Path], None], is_read: bool
) -> None:
    before = make()
    for segment in (FIRST, SECOND):
        await put_segment(before, segment)
    usage = await before.usage()
    await before.close()
    spoil(tmp_path / ".catalog" / "catalog.sqlite")
    store = make(capacity_bytes=1 << 30)
    if is_read:
        await store.warm_up()
    else:
        await put_segment(store, FIRST)
    await until_found(store, [(0, 4), (0, 4)])
    assert await store.usage() == usage
    assert entries(tmp_path) == {FOLDER, ".catalog"}


async def test_a_catalog_that_becomes_corrupt_is_rebuilt(store: LocalStore, make: MakeStore, tmp_path: Path) -> None:
    for segment in (FIRST, SECOND):
        await put_segment(store, segment)
    await store.close()
    path = tmp_path / ".catalog" / "catalog.sqlite"
    content = bytearray(path.read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)  # the first page is sound: it opens
    path.write_bytes(content)
    again = make()
    with contextlib.suppress(StoreError):  # the call that comes upon the corrupt part
        await put_segment(again, FIRST)
    await put_segment(again, FIRST)
    await until_found(again, [(0, 4), (0, 4)])


async def test_a_manifest_is_found_while_a_writer_replaces_it(store: LocalStore, tmp_path: Path) -> None:
    """The file has its name a moment before the writer's transaction ends; the lookup waits for no transaction."""
    chain = page_hashes(4)
    old, new = make_segment(chain, 0, 4), make_segment(chain, 0, 4, codec="deflate")
    await store.put(new.data_name, new.data)
    await put_segment(store, old)
    writer = sqlite3.connect(tmp_path / ".catalog" / "catalog.sqlite", isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    (tmp_path / new.manifest.key.manifest_name).write_bytes(new.manifest.encode())
    async with asyncio.timeout(WAIT_S):
        (hit,) = (await store.lookup(FOLDER, chain)).hits
    assert hit.manifest == new.manifest.encode()
    writer.close()


async def test_an_upload_outlives_the_catalog(store: LocalStore) -> None:
    async with store.upload(FIRST.data_name, len(FIRST.data)) as upload:
        await upload.write(FIRST.data[:10])
        await rebuild(store)
        await upload.write(FIRST.data[10:])
        await upload.commit()
    await put_segment(store, FIRST)
    assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 4)]


async def test_collect_adds_files_that_were_put_by_other_means(store: LocalStore, tmp_path: Path) -> None:
    await put_segment(store, FIRST)
    write_files(tmp_path, SECOND)
    await store.collect()
    assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 4), (0, 4)]
    assert (await store.usage()).stored_bytes == disk_bytes(tmp_path)


async def test_collect_forgets_files_that_were_removed_by_other_means(store: LocalStore, tmp_path: Path) -> None:
    for segment in (FIRST, SECOND):
        await put_segment(store, segment)
    (tmp_path / SECOND.data_name).unlink()
    await store.collect()
    assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 4)]
    assert (await store.usage()).stored_bytes == disk_bytes(tmp_path)
    await store.put(SECOND.data_name, SECOND.data)
    assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 4), (0, 4)]


async def test_a_manifest_that_was_replaced_by_other_means_is_found(store: LocalStore, tmp_path: Path) -> None:
    await put_segment(store, FIRST)
    other = make_segment(CHAIN, 0, 4, codec="deflate")
    write_files(tmp_path, other)
    (hit,) = (await store.lookup(FOLDER, CHAIN)).hits
    assert hit.manifest == other.manifest.encode()


async def test_old_data_of_a_rebuilt_store_is_kept(store: LocalStore, tmp_path: Path) -> None:
    write_files(tmp_path, FIRST, SECOND)
    age(*(tmp_path / FOLDER).iterdir())
    await store.collect()
    assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 4), (0, 4)]


async def test_a_long_deletion_runs_in_turns(store: LocalStore) -> None:
    for i in range(20):
        await put_segment(store, make_segment(page_hashes(4, f"chain {i}"), 0, 4, content=i))
    assert await store.delete_some("", 0.0) == (16, True)
    names = {info.name async for info in store.list()}
    assert sum(name.endswith(".kvm") for name in names) == 4  # manifests go first
    assert await store.delete_prefix("") == 24


async def test_create_puts_a_manifest_only_once(store: LocalStore) -> None:
    old, new = FIRST, make_segment(CHAIN, 0, 4, codec="deflate")
    name = old.manifest.key.manifest_name
    for segment in (old, new):
        await store.put(segment.data_name, segment.data)
    assert await store.create(name, old.manifest.encode())
    assert await store.create(name, old.manifest.encode())  # as after a lost answer
    assert not await store.create(name, new.manifest.encode())
    assert await store.get(name) == old.manifest.encode()
    await store.delete(name)
    done = await asyncio.gather(*(store.create(name, s.manifest.encode()) for s in (old, new)))
    assert done.count(True) == 1


async def test_a_directory_that_cannot_have_a_catalog(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / ".catalog").write_bytes(b"in the way")
    with pytest.raises(StoreError, match="catalog"):
        await put_segment(store, FIRST)
    assert "catalog" in ((await store.usage()).write_problem or "")
