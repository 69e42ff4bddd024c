from __future__ import annotations

import asyncio
import errno
import os
import struct
import threading
from pathlib import Path

import pytest
import xxhash

from harness.small_segments import FOLDER, data_object, make_segment, page_hashes, parts, put_segment
from harness.waiting import WAIT_S, until
from sgl_kvfetch.directory import LocalStore
from sgl_kvfetch.directory.notes import NoteWriter
from sgl_kvfetch.directory.room import DiskRoom, NewFile
from sgl_kvfetch.stores import PINS, Lookup, Pin
from tests.directory.conftest import MakeStore, age, unfinished
from tests.segments import names
from tests.stores.conformance import failing


async def test_corrupt_manifests_are_skipped(store: LocalStore, tmp_path: Path) -> None:
    chain = page_hashes(8)
    for first in (0, 4):
        await put_segment(store, make_segment(chain, first, 4))
    path = tmp_path / make_segment(chain, 4, 4).manifest.key.manifest_name
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)
    assert parts(await store.lookup(FOLDER, chain)) == [(0, 4)]


async def test_a_newer_manifest_keeps_its_data(make: MakeStore, tmp_path: Path) -> None:
    """This version cannot read the manifest and skips it, but must not collect its data as orphans."""
    chain = page_hashes(4)
    segment = make_segment(chain, 0, 4)
    first = make()
    await put_segment(first, segment)
    await first.close()
    path = tmp_path / segment.manifest.key.manifest_name
    newer = bytearray(path.read_bytes()[:-16])
    struct.pack_into("<H", newer, 4, 99)
    path.write_bytes(newer + xxhash.xxh3_128_digest(newer))
    for file in (path, tmp_path / segment.data_name):
        age(file)
    store = make(orphan_age_s=60)
    await store.collect()
    assert await store.lookup(FOLDER, chain) == Lookup(())
    assert await store.get(segment.data_name) == segment.data
    assert path.exists()


async def test_orphans_are_collected_once_old(store: LocalStore, tmp_path: Path) -> None:
    chain = page_hashes(8)
    kept, orphan, young = (make_segment(chain, first, n) for first, n in ((0, 4), (4, 2), (6, 2)))
    await put_segment(store, kept)
    for segment in (orphan, young):
        await store.put(segment.data_name, segment.data)
    broken = make_segment(page_hashes(4, "broken"), 0, 4)
    await put_segment(store, broken)
    await store.delete(broken.data_name)
    assert await store.lookup(FOLDER, page_hashes(4, "broken")) == Lookup(())
    for path in (kept.data_name, orphan.data_name, broken.manifest.key.manifest_name):
        age(tmp_path / path, seconds=120)
    await store.collect()
    assert await names(store) == {kept.data_name, kept.manifest.key.manifest_name, young.data_name}


async def test_other_file_system_errors(store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    name = data_object(b"x")
    with monkeypatch.context() as patch, failing("io"):
        patch.setattr("sgl_kvfetch.directory.files.os.replace", broken)
        await store.put(name, b"x")
    assert unfinished(tmp_path) == []
    await store.put(name, b"x")
    with monkeypatch.context() as patch, failing("io"):
        patch.setattr("sgl_kvfetch.directory.files.os.pread", broken)
        await store.get(name)


async def test_only_regular_files_are_objects_and_links_are_not_followed(make: MakeStore, tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "store"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (root / FOLDER).mkdir(parents=True)
    name, pipe, directory = (data_object(content) for content in (b"secret", b"pipe", b"directory"))
    (root / name).symlink_to(outside / "secret")
    os.mkfifo(root / pipe)
    (root / directory).mkdir()
    store = make("store")
    for other in (name, pipe, directory):
        assert await store.get(other) is None
        assert await store.head(other) is None
    assert await names(store) == set()
    await store.put(name, b"secret")  # replaces the link, not what it points to
    assert await store.get(name) == b"secret"
    assert not (root / name).is_symlink()

    linked_space = "f" * 32 + ".0-1"
    (root / linked_space).symlink_to(outside, target_is_directory=True)
    linked = name.replace(FOLDER, linked_space)
    (outside / Path(linked).name).write_bytes(b"secret")
    assert await store.get(linked) is None
    assert await store.delete(linked) is False
    assert await store.lookup(linked_space, page_hashes(2)) == Lookup(())
    assert linked not in await names(store)
    with failing("io"):
        await store.put(linked, b"secret")
    assert sorted(path.name for path in outside.iterdir()) == sorted(["secret", Path(linked).name])


async def test_a_pin_that_was_given_up_is_not_committed(store: LocalStore, tmp_path: Path) -> None:
    pin = Pin("", 1, bytes(32))
    writer = NoteWriter(tmp_path, PINS, pin.name, len(pin.encode()), None)
    writer.discard()
    with failing("invalid", "was given up"):
        store._pin(pin, writer)
    await put_segment(store, make_segment([bytes(32)], 0, 1))
    assert [each.is_pinned for each in await store.segment_usages(FOLDER, 2)] == [False]


async def test_an_upload_that_is_cancelled_while_it_reserves_room_leaves_nothing(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, begun, go_on = DiskRoom.reserve, threading.Event(), threading.Event()

    def slow(room: DiskRoom, name: str, num_bytes: int) -> NewFile:
        begun.set()
        assert go_on.wait(WAIT_S)
        return reserve(room, name, num_bytes)

    monkeypatch.setattr(DiskRoom, "reserve", slow)
    opening = asyncio.create_task(store.upload(data_object(b"half"), 1 << 20).__aenter__())
    await until(begun.is_set)
    opening.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert unfinished(tmp_path) == []
    assert (await store.usage()).stored_bytes == 0
