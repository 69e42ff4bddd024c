"""What is on the disk stays within the capacity, whatever writers and readers do."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sqlite3
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import xxhash

from harness.small_segments import FOLDER, data_object, make_segment, page_hashes, parts, put_segment
from sgl_kvfetch.codec import decode_manifest
from sgl_kvfetch.directory import LocalStore, catalog
from sgl_kvfetch.directory.room import DiskRoom
from sgl_kvfetch.errors import StoreError
from tests.directory.conftest import MakeStore, disk_bytes
from tests.segments import names
from tests.stores.conformance import failing

SIZE = len(make_segment(page_hashes(4), 0, 4).data) + len(make_segment(page_hashes(4), 0, 4).manifest.encode())
CAPACITY = 16 * SIZE


@pytest.fixture
def make(make: MakeStore) -> MakeStore:
    """Bounded unless told otherwise."""
    return partial(make, capacity_bytes=CAPACITY)


def chain(number: int) -> list[bytes]:
    return page_hashes(4, f"chain {number}")


async def put(store: LocalStore, number: int) -> None:
    await put_segment(store, make_segment(chain(number), 0, 4, content=number))


async def fill(store: LocalStore, numbers: range) -> None:
    for number in numbers:
        await put(store, number)


async def found(store: LocalStore, numbers: range) -> int:
    return sum([len((await store.lookup(FOLDER, chain(number))).hits) for number in numbers])


async def fits(store: LocalStore, number: int) -> bool:
    """Put a segment if the store has room for it."""
    try:
        await put(store, number)
    except StoreError as e:
        if e.reason != "full":
            raise
        return False
    return True


async def until_room(store: LocalStore, number: int) -> None:
    """Put a segment as soon as the store has room for it."""
    for _ in range(6000):
        if await fits(store, number):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("no room in a minute")


def orphan(number: int, size: int = SIZE) -> bytes:
    return number.to_bytes(4, "little") * (size // 4)


async def test_lookups_go_on_during_an_eviction(make: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make()
    await fill(store, range(16))
    reached, go_on = threading.Event(), threading.Event()
    unlink = os.unlink

    def slow(*args: object, **kwargs: object) -> None:
        reached.set()
        assert go_on.wait(60)
        unlink(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("sgl_kvfetch.directory.files.os.unlink", slow)
    writing = asyncio.create_task(put(store, 16))
    try:
        assert await asyncio.to_thread(reached.wait, 60)
        async with asyncio.timeout(30):
            assert parts(await store.lookup(FOLDER, chain(15))) == [(0, 4)]
            assert parts(await store.lookup(FOLDER, chain(0))) == []  # it is being evicted
    finally:
        go_on.set()
        await writing


async def test_uploads_without_a_manifest_neither_empty_nor_wedge_the_store(make: MakeStore) -> None:
    store = make()
    await fill(store, range(12))
    for number in range(40):
        content = orphan(number)
        await store.put(data_object(content), content)
    assert (await store.usage()).stored_bytes <= CAPACITY
    assert await found(store, range(12)) >= 11
    await put(store, 12)
    assert await found(store, range(13)) >= 11
    assert await found(store, range(12, 13)) == 1


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        # Too large at all, and too large beside what is there.
        ({"min_free_bytes": 0}, (CAPACITY + 1, CAPACITY - SIZE)),
        # The disk is the limit, less what others have of it: more than that, and more than a tenth of it.
        ({"capacity_bytes": None, "min_free_bytes": 4 * SIZE}, (16 * SIZE + 1, 5 * SIZE)),
    ],
)
async def test_a_body_that_cannot_fit_evicts_nothing(
    make: MakeStore, disk: Disk, options: dict[str, Any], sizes: tuple[int, int]
) -> None:
    store = make(**options)
    await fill(store, range(1, 12))
    await store.put(data_object(orphan(0)), orphan(0))
    for size in sizes:
        with failing("too_large", retriable=False):
            async with store.upload(data_object(b"large"), size):
                raise AssertionError("room was reserved")
    async with store.upload(data_object(b"small"), SIZE // 2):  # fits
        pass
    assert await found(store, range(12)) == 12
    usage = await store.usage()
    assert (usage.num_evicted, usage.write_problem) == (0, None)


async def test_nothing_is_evicted_for_a_body_of_unknown_size_beyond_a_tenth(make: MakeStore) -> None:
    """Its pieces are small, and each would fit after an eviction."""
    store = make()
    await fill(store, range(16))
    async with store.upload(data_object(b"large")) as upload:
        await upload.write(bytes(SIZE))
        with failing("too_large", "more than a tenth of a store", retriable=False):
            await upload.write(bytes(SIZE))
    assert await found(store, range(16)) >= 14
    assert await fits(store, 16)


async def test_a_disk_that_frees_nothing_costs_one_write_a_tenth_of_the_store(
    make: MakeStore, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where snapshots keep what is deleted."""
    store = make(capacity_bytes=None, min_free_bytes=4 * SIZE)
    await fill(store, range(1, 16))
    before = (await store.usage()).num_evicted
    monkeypatch.setattr(Disk, "f_bavail", 4 * SIZE)
    monkeypatch.setattr(DiskRoom, "_taken_bytes", lambda self: 0)
    assert not await fits(store, 16)
    usage = await store.usage()
    assert 1 <= usage.num_evicted - before <= 2
    assert "were evicted, a tenth of the store" in (usage.write_problem or "")


async def test_data_of_others_is_deleted_only_for_a_body_that_fits_then(make: MakeStore) -> None:
    store = make()
    waiting = [orphan(number, CAPACITY // 16) for number in range(2)]
    for content in waiting:
        await store.put(data_object(content), content)
    async with store.upload(data_object(b"first"), CAPACITY // 8 - 1):
        with failing("full", "wait for their manifest", retriable=True):
            async with store.upload(data_object(b"second"), CAPACITY // 8 + SIZE):
                raise AssertionError("room was reserved")
    assert [await store.get(data_object(content)) for content in waiting] == waiting


async def test_files_that_are_read_slowly_count(make: MakeStore, tmp_path: Path) -> None:
    store = make()
    await fill(store, range(14))
    opened = [await store.open_object(make_segment(chain(n), 0, 4, content=n).data_name) for n in range(14)]
    for number in range(14, 40):
        await until_room(store, number)
        assert disk_bytes(tmp_path) <= CAPACITY
    for number, reading in enumerate(opened):
        assert reading is not None
        assert os.fstat(reading.file.fileno()).st_nlink == 1
        with reading.file as file:
            assert file.read() == make_segment(chain(number), 0, 4, content=number).data
    await until_room(store, 40)
    assert disk_bytes(tmp_path) <= CAPACITY
    assert await found(store, range(40, 41)) == 1


async def test_a_full_disk_makes_room(make: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store has no capacity: the disk is the limit."""
    store, size, write = make(capacity_bytes=None), 8 * SIZE, os.pwrite

    def limited(fd: int, data: bytes, start: int) -> int:
        return no_space(fd, data, start) if disk_bytes(tmp_path) + len(data) > size else write(fd, data, start)

    monkeypatch.setattr("sgl_kvfetch.directory.files.os.pwrite", limited)
    await fill(store, range(20))
    assert await found(store, range(17, 20)) == 3
    usage = await store.usage()
    assert usage.num_evicted >= 12
    assert usage.stored_bytes == disk_bytes(tmp_path) <= size


class Disk:
    """A file system with room for 20 segments beside the catalog."""

    f_frsize = 1

    def __init__(self, root: Path) -> None:
        self.others_bytes = 0
        self._root = root
        self.f_blocks = 20 * SIZE

    @property
    def f_bavail(self) -> int:
        return max(0, self.f_blocks - disk_bytes(self._root) - self.others_bytes)

    f_bfree = f_bavail


@pytest.fixture
async def disk(make: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    first = make()
    await put(first, 0)  # the catalog is there
    await first.close()
    disk = Disk(tmp_path)
    monkeypatch.setattr("sgl_kvfetch.directory.room.os.statvfs", lambda path: disk)
    monkeypatch.setattr(catalog.Catalog, "disk_bytes", lambda self: 0)
    return disk


async def test_some_of_the_disk_stays_free_and_others_may_take_as_much(make: MakeStore, disk: Disk) -> None:
    store = make(capacity_bytes=None, min_free_bytes=4 * SIZE)
    for number in range(1, 20):
        await put(store, number)
        assert disk.f_bavail >= 4 * SIZE
    assert await found(store, range(20)) >= 15
    disk.others_bytes = 4 * SIZE
    await fill(store, range(20, 40))
    assert disk.f_bavail >= 4 * SIZE
    assert 11 <= await found(store, range(40)) <= 12
    assert (await store.usage()).write_problem is None


@pytest.mark.parametrize("step", [SIZE, 20 * SIZE])
async def test_nothing_is_evicted_for_what_others_take_over_the_reserve(make: MakeStore, disk: Disk, step: int) -> None:
    """Whether they fill the disk slowly or at once: then the store is read only, and says so."""
    store = make(capacity_bytes=None, min_free_bytes=4 * SIZE)
    await fill(store, range(1, 20))
    number, refused = 20, 0
    while disk.others_bytes < 40 * SIZE:
        disk.others_bytes += step
        wrote = await fits(store, number)
        number, refused = number + 1, refused + (not wrote)
        problem = (await store.usage()).write_problem
        assert (problem is None) == wrote, problem
    assert refused
    assert "others took" in (problem or "")
    evicted = (await store.usage()).num_evicted
    for _ in range(20):
        assert not await fits(store, number)
    assert (await store.usage()).num_evicted == evicted
    assert await found(store, range(number)) >= 9  # it held 16; others got the reserve's four, and two had no manifest
    disk.others_bytes = 0  # they have gone
    assert (await store.usage()).write_problem is None
    await put(store, number)


@pytest.mark.usefixtures("tiny_stores")
async def test_what_others_had_yesterday_is_theirs(
    make: MakeStore, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logs that grow slowly get their room."""
    store = make(capacity_bytes=None, min_free_bytes=4 * SIZE)
    await fill(store, range(1, 20))
    monotonic = time.monotonic
    for day in range(1, 4):
        disk.others_bytes = day * 4 * SIZE
        monkeypatch.setattr("sgl_kvfetch.directory.room.time.monotonic", lambda day=day: monotonic() + day * 90_000)
        for number in range(day * 20, (day + 1) * 20):
            await put(store, number)
        assert disk.f_bavail >= 4 * SIZE
    assert await found(store, range(100)) >= 3


async def test_a_full_disk_costs_one_eviction(make: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a quota, which only a failed write shows: what is freed is gone at once."""
    store = make(capacity_bytes=None)
    await fill(store, range(10))
    monkeypatch.setattr("sgl_kvfetch.directory.files.os.pwrite", no_space)
    monkeypatch.setattr(DiskRoom, "_free_bytes", lambda room: 1 << 40)  # whatever else uses this machine's disk
    for number in range(10, 20):
        assert not await fits(store, number)
        assert "the last write failed" in ((await store.usage()).write_problem or "")
    assert (await store.usage()).num_evicted == 1
    monkeypatch.undo()
    await put(store, 20)
    assert (await store.usage()).write_problem is None


def no_space(fd: int, data: bytes, start: int) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_no_write_reads_a_whole_table(make: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes and evictions must not slow down as a store grows."""
    statements: set[str] = set()
    connect = sqlite3.connect

    def traced(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        db = connect(*args, **kwargs)
        db.set_trace_callback(statements.add)
        return db

    monkeypatch.setattr(sqlite3, "connect", traced)
    store = make()
    await put(store, 0)
    await store.collect()  # this does compare everything
    statements.clear()
    for number in range(20):
        await put(store, number)
        await found(store, range(number, number + 1))
    await store.delete(make_segment(chain(19), 0, 4, content=19).data_name)
    assert (await store.usage()).num_evicted > 0
    await store.close()
    # These are read in their order, a few rows each time; of pinned pages, one.
    few = {"SCAN segments USING INDEX segments_by_use", "SCAN files USING INDEX files_pending", "SCAN pinned_pages"}
    with contextlib.closing(connect(tmp_path / ".catalog" / "catalog.sqlite")) as db:
        for statement in statements:
            if statement.strip().startswith(("SELECT", "UPDATE", "DELETE")):
                plan = [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {statement}")]
                whole = {step for step in plan if step.startswith("SCAN") or "rowid>?" in step}
                assert whole <= {"SCAN totals"} | few, (statement, plan)


async def test_writers_at_once_stay_within_the_capacity(make: MakeStore, tmp_path: Path) -> None:
    store = make()

    async def write(first: int) -> None:
        for number in range(first, first + 10):
            await until_room(store, number)

    async with asyncio.TaskGroup() as tasks:
        for i in range(4):
            tasks.create_task(write(10 * i))
    usage = await store.usage()
    assert usage.stored_bytes == disk_bytes(tmp_path) <= CAPACITY
    assert await found(store, range(40)) == usage.num_segments >= 8


async def test_an_eviction_that_a_full_disk_undoes_does_not_leave_a_segment_without_files(
    make: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction is undone; the files that have lost their names by then are not."""
    store, evict_segment = make(), DiskRoom._evict_segment
    failed = False

    def fail_once(*args: Any) -> int:
        nonlocal failed
        num_bytes = evict_segment(*args)
        if not failed:
            failed = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return num_bytes

    monkeypatch.setattr(DiskRoom, "_evict_segment", fail_once)
    await fill(store, range(40))
    assert failed
    assert await found(store, range(36, 40)) == 4
    assert (await store.usage()).num_segments == await found(store, range(40))


@pytest.mark.usefixtures("tiny_stores")
async def test_a_segment_that_is_written_again_counts_as_used(make: MakeStore) -> None:
    """Or its data would be evicted before its manifest is put."""
    store = make(capacity_bytes=int(4.5 * SIZE))
    await fill(store, range(4))
    again = make_segment(chain(0), 0, 4, content=0)
    await store.put(again.data_name, again.data)
    await put(store, 4)
    await store.put(again.manifest.key.manifest_name, again.manifest.encode())
    left = await names(store)  # without a lookup, which would be a use
    manifests = [make_segment(chain(number), 0, 4, content=number).manifest.key.manifest_name for number in (0, 1, 4)]
    assert [name in left for name in manifests] == [True, False, True]


@pytest.mark.usefixtures("tiny_stores")
async def test_segments_being_written_are_not_evicted(make: MakeStore) -> None:
    store = make(capacity_bytes=4 * SIZE)
    await put(store, 0)
    # The oldest segment is about to get a new variant: its data is there, its manifest will come.
    rewrite = make_segment(chain(0), 0, 4, codec="deflate", content=0)
    await store.put(rewrite.data_name, rewrite.data)
    content = bytes(int(3.5 * SIZE))
    with failing("full"):
        await store.put(data_object(content), content)
    await store.put(rewrite.manifest.key.manifest_name, rewrite.manifest.encode())
    assert await found(store, range(1)) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_stores")
async def test_eviction_never_tears(make: MakeStore) -> None:
    """Readers see a whole segment or none, and data that is already open stays readable."""
    store, num_whole = make(capacity_bytes=int(6.5 * SIZE)), 0

    async def write() -> None:
        for turn in range(6):
            for number in range(24):
                await put_segment(store, make_segment(chain(number), 0, 4, content=number + turn % 2))

    async def read(number: int, writing: asyncio.Task[None]) -> None:
        nonlocal num_whole
        while not writing.done():
            number = (number + 5) % 24
            for hit in (await store.lookup(FOLDER, chain(number))).hits:
                manifest = decode_manifest(hit.manifest)
                data = await store.get(manifest.data_name(manifest.variants[0]))
                if data is not None:  # or it was evicted since the lookup: a miss
                    assert xxhash.xxh3_128_hexdigest(data) == manifest.variants[0].data_digest
                    num_whole += 1

    async with asyncio.TaskGroup() as tasks:
        writing = tasks.create_task(write())
        for number in range(4):
            tasks.create_task(read(number, writing))
    assert (await store.usage()).num_evicted > 50
    assert num_whole > 0
    left = await names(store)
    for name in left:
        if name.endswith(".kvm"):
            assert decode_manifest(await store.get(name) or b"").data_names <= left
