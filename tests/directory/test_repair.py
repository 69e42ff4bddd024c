"""A catalog that differs from the disk, and damage that readers report."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.small_segments import FOLDER, data_object, make_segment, page_hashes, parts, put_segment
from harness.waiting import WAIT_S, until
from sgl_kvfetch.directory import LocalStore, files, rows
from sgl_kvfetch.directory.repair import Repair
from sgl_kvfetch.directory.room import DiskRoom
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.stores import Lookup
from sgl_kvfetch.tools.encoder import make_targets, transcode
from tests.directory.conftest import MakeStore, age, disk_bytes, rebuild, write_files
from tests.segments import names
from tests.stores.conformance import failing

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
    assert len(await names(store)) == 2
    assert entries(tmp_path) == {FOLDER}


async def test_files_without_a_catalog_are_found(store: LocalStore, tmp_path: Path, gate: threading.Event) -> None:
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
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.executescript(script)

    return spoil


@pytest.mark.parametrize("is_read", [True, False], ids=["by a reader", "by a writer"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b"not a database" * 1000),
        lambda path: shutil.rmtree(path.parent),
        in_database("ALTER TABLE segments RENAME COLUMN expires TO other; PRAGMA user_version = 999"),
        in_database("DELETE FROM totals"),
    ],
    ids=["overwritten", "removed", "another version", "without totals"],
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
    await (store.usage() if is_read else put_segment(store, FIRST))
    await until_found(store, [(0, 4), (0, 4)])
    assert await store.usage() == usage
    assert entries(tmp_path) == {FOLDER, ".catalog"}


async def test_a_catalog_that_becomes_corrupt_is_rebuilt(make: MakeStore, tmp_path: Path) -> None:
    before, store = make(), make()
    for segment in (FIRST, SECOND):
        await put_segment(before, segment)
    await before.close()
    path = tmp_path / ".catalog" / "catalog.sqlite"
    content = path.read_bytes()
    path.write_bytes(content[:4096] + os.urandom(len(content) - 4096))  # the first page is sound: it opens
    with contextlib.suppress(StoreError):  # the call that comes upon the corrupt part
        await put_segment(store, FIRST)
    await put_segment(store, FIRST)
    await until_found(store, [(0, 4), (0, 4)])


@pytest.mark.parametrize("is_being_written", [True, False])
async def test_a_manifest_unlike_its_row_is_found(store: LocalStore, tmp_path: Path, is_being_written: bool) -> None:
    """The file has its name a moment before the writer's transaction ends; the lookup waits for no transaction."""
    new = make_segment(CHAIN, 0, 4, codec="deflate")
    await put_segment(store, FIRST)
    with contextlib.closing(sqlite3.connect(tmp_path / ".catalog" / "catalog.sqlite", isolation_level=None)) as writer:
        if is_being_written:
            writer.execute("BEGIN IMMEDIATE")
        write_files(tmp_path, new)
        async with asyncio.timeout(WAIT_S):
            (hit,) = (await store.lookup(FOLDER, CHAIN)).hits
    assert hit.manifest == new.manifest.encode()


async def test_an_upload_outlives_the_catalog(store: LocalStore) -> None:
    async with store.upload(FIRST.data_name, len(FIRST.data)) as upload:
        await upload.write(FIRST.data[:10])
        await rebuild(store)
        await upload.write(FIRST.data[10:])
        await upload.commit()
    await put_segment(store, FIRST)
    assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 4)]


async def test_collect_forgets_files_that_were_removed_by_other_means(store: LocalStore, tmp_path: Path) -> None:
    for segment in (FIRST, SECOND):
        await put_segment(store, segment)
    (tmp_path / SECOND.data_name).unlink()
    await store.collect()
    assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 4)]
    assert (await store.usage()).stored_bytes == disk_bytes(tmp_path)
    await store.put(SECOND.data_name, SECOND.data)
    assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 4), (0, 4)]


@pytest.mark.parametrize("has_catalog", [True, False])
async def test_old_files_put_by_other_means_are_kept(store: LocalStore, tmp_path: Path, has_catalog: bool) -> None:
    if has_catalog:
        await put_segment(store, FIRST)
    write_files(tmp_path, FIRST, SECOND)
    age(*(tmp_path / FOLDER).iterdir())
    await store.collect()
    assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 4), (0, 4)]
    assert (await store.usage()).stored_bytes == disk_bytes(tmp_path)


async def test_a_long_deletion_runs_in_turns_and_leaves_no_folder(store: LocalStore) -> None:
    for i in range(20):
        await put_segment(store, make_segment(page_hashes(4, f"chain {i}"), 0, 4, content=i))
    assert await store.delete_some("", 0.0) == (16, True)
    assert sum(name.endswith(".kvm") for name in await names(store)) == 4  # manifests go first
    assert await store.delete_prefix("") == 24
    await store.collect()
    assert await store.folders() == frozenset()


async def test_one_of_those_that_create_a_manifest_succeeds(store: LocalStore) -> None:
    old, new = FIRST, make_segment(CHAIN, 0, 4, codec="deflate")
    for segment in (old, new):
        await store.put(segment.data_name, segment.data)
    name = old.manifest.key.manifest_name
    done = await asyncio.gather(*(store.create(name, s.manifest.encode()) for s in (old, new)))
    assert done.count(True) == 1


async def test_a_directory_that_cannot_have_a_catalog(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / ".catalog").write_bytes(b"in the way")
    with pytest.raises(StoreError, match="catalog"):
        await put_segment(store, FIRST)
    assert "catalog" in ((await store.usage()).write_problem or "")


MANIFEST = FIRST.manifest.key.manifest_name


@pytest.fixture
async def filled(store: LocalStore) -> LocalStore:
    await put_segment(store, FIRST)
    return store


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(content)


async def test_a_sound_or_a_missing_segment_is_no_damage(filled: LocalStore) -> None:
    assert not await filled.report_damage(MANIFEST)
    assert await names(filled) == {MANIFEST, FIRST.data_name}
    await filled.delete_prefix("")
    assert not await filled.report_damage(MANIFEST)
    with failing("invalid"):
        await filled.report_damage(data_object(b"x"))


@pytest.mark.parametrize("change", [flip, lambda path: path.write_bytes(b"short"), Path.unlink])
async def test_a_segment_with_broken_data_is_deleted(filled: LocalStore, tmp_path: Path, change: object) -> None:
    change(tmp_path / FIRST.data_name)  # type: ignore[operator]
    assert await filled.report_damage(MANIFEST)
    assert await filled.lookup(FOLDER, CHAIN) == Lookup(())
    assert await names(filled) == set()
    await put_segment(filled, FIRST)
    assert parts(await filled.lookup(FOLDER, CHAIN)) == [(0, 4)]
    assert not await filled.report_damage(MANIFEST)


async def test_sound_data_of_a_broken_segment_stays(filled: LocalStore, tmp_path: Path) -> None:
    flip(tmp_path / MANIFEST)
    assert await filled.report_damage(MANIFEST)
    assert await names(filled) == {FIRST.data_name}
    await filled.delete_prefix("")
    segment = transcode(FIRST.manifest, FIRST.data, make_targets(["deflate", "zstd"], ["240p"]))
    await put_segment(filled, segment)
    broken, sound = [segment.manifest.data_name(variant) for variant in segment.manifest.variants]
    flip(tmp_path / broken)
    assert await filled.report_damage(MANIFEST)
    assert await names(filled) == {sound}


async def test_reports_are_one_check_each_and_bounded(filled: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    read, go_on, read_object = list[str](), threading.Event(), files.read_object

    def counted(root: Path, name: str, most: int) -> bytes | None:
        assert go_on.wait(60)
        read.append(name)
        return read_object(root, name, most)

    monkeypatch.setattr(files, "read_object", counted)
    others = [make_segment(page_hashes(4, str(i)), 0, 4).manifest.key.manifest_name for i in range(100)]
    reports = [asyncio.create_task(filled.report_damage(name)) for name in [MANIFEST] * 20 + others]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sum(report.done() for report in reports) >= 80  # ignored
    reports[0].cancel()  # does not end the check for the others
    go_on.set()
    assert not any(await asyncio.gather(*reports[1:]))
    assert not await filled.report_damage(MANIFEST)  # it was found sound
    assert read.count(MANIFEST) == 1
    assert len(read) <= 20


async def test_a_segment_that_is_replaced_during_the_check_stays(
    filled: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(tmp_path / FIRST.data_name)
    read, go_on, delete = threading.Event(), threading.Event(), DiskRoom.delete

    def slow(*args: Any) -> object:
        read.set()
        assert go_on.wait(60)
        return delete(*args)

    with monkeypatch.context() as patch:
        patch.setattr(DiskRoom, "delete", slow)
        report = asyncio.create_task(filled.report_damage(MANIFEST))
        assert await asyncio.to_thread(read.wait, 60)
        await put_segment(filled, FIRST)
        go_on.set()
        assert not await report
    assert parts(await filled.lookup(FOLDER, CHAIN)) == [(0, 4)]
    assert await filled.get(FIRST.data_name) == FIRST.data
