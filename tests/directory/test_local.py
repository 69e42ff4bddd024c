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
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.directory.room import DiskRoom, NewFile
from sgl_kvfetch.errors import ConfigError, StoreError
from sgl_kvfetch.stores.base import Lookup
from sgl_kvfetch.tools.encoder import make_targets, transcode
from tests.directory.conftest import MakeStore, age, disk_bytes, unfinished
from tests.stores.conformance import failing

SPACE = FOLDER


def manifests(root: Path) -> list[Path]:
    return list(root.rglob("*.kvm"))


async def test_a_deleted_namespace_directory_is_forgotten(store: LocalStore, tmp_path: Path) -> None:
    chain = page_hashes(4)
    await put_segment(store, make_segment(chain, 0, 4))
    for path in (tmp_path / SPACE).iterdir():
        path.unlink()
    (tmp_path / SPACE).rmdir()
    assert await store.lookup(SPACE, chain) == Lookup(())
    await store.collect()  # the first write started one, which may have seen only some of the files gone
    assert (await store.usage()).stored_bytes == 0


async def test_a_segment_without_its_data_is_hidden_until_the_data_returns(store: LocalStore) -> None:
    chain = page_hashes(4)
    segment = make_segment(chain, 0, 4)
    await put_segment(store, segment)
    await store.delete(segment.data_name)
    assert await store.lookup(SPACE, chain) == Lookup(())
    await store.put(segment.data_name, segment.data)
    assert parts(await store.lookup(SPACE, chain)) == [(0, 4)]


async def test_data_with_a_wrong_digest_is_refused(store: LocalStore, tmp_path: Path) -> None:
    name = data_object(b"right")
    with failing("invalid", "digest"):
        await store.put(name, b"wrong")
    assert await store.get(name) is None
    assert unfinished(tmp_path) == []


async def test_corrupt_manifests_are_skipped(store: LocalStore, tmp_path: Path) -> None:
    chain = page_hashes(8)
    for first in (0, 4):
        await put_segment(store, make_segment(chain, first, 4))
    path = tmp_path / make_segment(chain, 4, 4).manifest.key.manifest_name
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)
    os.utime(path)
    (tmp_path / SPACE / "by somebody else").touch()  # the store's own changes cause no scan
    assert parts(await store.lookup(SPACE, chain)) == [(0, 4)]


async def test_a_newer_manifest_keeps_its_data(make: MakeStore, tmp_path: Path) -> None:
    """This version cannot read the manifest and skips it, but must not collect its data as orphans."""
    chain = page_hashes(4)
    segment = make_segment(chain, 0, 4)
    first = make(orphan_age_s=60)
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
    assert await store.lookup(SPACE, chain) == Lookup(())
    assert await store.get(segment.data_name) == segment.data
    assert path.exists()


async def test_orphans_are_collected_once_old(make: MakeStore, tmp_path: Path) -> None:
    store = make(orphan_age_s=60)
    chain = page_hashes(8)
    kept, orphan, young = (make_segment(chain, first, n) for first, n in ((0, 4), (4, 2), (6, 2)))
    await put_segment(store, kept)
    for segment in (orphan, young):
        await store.put(segment.data_name, segment.data)
    broken = make_segment(page_hashes(4, "broken"), 0, 4)
    await put_segment(store, broken)
    await store.delete(broken.data_name)
    for path in (kept.data_name, orphan.data_name, broken.manifest.key.manifest_name):
        age(tmp_path / path, seconds=120)
    await store.collect()
    assert {info.name async for info in store.list()} == {
        kept.data_name,
        kept.manifest.key.manifest_name,
        young.data_name,
    }


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["write", "fsync"])
async def test_a_full_disk(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    def no_room(*args: object) -> int:
        raise OSError(code, os.strerror(code))

    chain = page_hashes(4)
    segment = make_segment(chain, 0, 4)
    for name, content in (*segment.data_objects(), (segment.manifest.key.manifest_name, segment.manifest.encode())):
        with monkeypatch.context() as patch, failing("full"):
            patch.setattr(f"sgl_kvfetch.directory.files.os.{call}", no_room)
            await store.put(name, content)
        await store.put(segment.data_name, segment.data)
    assert unfinished(tmp_path) == []
    assert await store.lookup(SPACE, chain) == Lookup(())
    await put_segment(store, segment)
    assert parts(await store.lookup(SPACE, chain)) == [(0, 4)]


async def test_other_file_system_errors(store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    name = data_object(b"x")
    with monkeypatch.context() as patch:
        patch.setattr("sgl_kvfetch.directory.files.os.replace", broken)
        with pytest.raises(StoreError) as caught:
            await store.put(name, b"x")
    assert caught.value.reason == "io"
    assert unfinished(tmp_path) == []
    await store.put(name, b"x")
    with monkeypatch.context() as patch:
        patch.setattr("sgl_kvfetch.directory.files.os.pread", broken)
        with pytest.raises(StoreError) as caught:
            await store.get(name)
    assert caught.value.reason == "io"


async def test_links_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    secret = outside / "secret"
    secret.write_bytes(b"secret")
    root = tmp_path / "store"
    (root / SPACE).mkdir(parents=True)
    name = data_object(b"secret")
    (root / name).symlink_to(secret)
    store = LocalStore(root)
    assert await store.get(name) is None
    assert await store.head(name) is None
    assert [info async for info in store.list()] == []
    await store.put(name, b"secret")  # replaces the link, not what it points to
    assert await store.get(name) == b"secret"
    assert not (root / name).is_symlink()

    linked_space = "f" * 32 + ".0-1"
    (root / linked_space).symlink_to(outside, target_is_directory=True)
    linked = name.replace(SPACE, linked_space)
    (outside / Path(linked).name).write_bytes(b"secret")
    assert await store.get(linked) is None
    assert await store.delete(linked) is False
    assert await store.lookup(linked_space, page_hashes(2)) == Lookup(())
    assert linked not in {info.name async for info in store.list()}
    with failing("io"):
        await store.put(linked, b"secret")
    assert sorted(path.name for path in outside.iterdir()) == sorted(["secret", Path(linked).name])
    await store.close()


async def test_only_regular_files_are_objects(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / SPACE).mkdir()
    pipe, directory = data_object(b"pipe"), data_object(b"directory")
    os.mkfifo(tmp_path / pipe)
    (tmp_path / directory).mkdir()
    for name in (pipe, directory):
        assert await store.get(name) is None
        assert await store.head(name) is None
    assert [info async for info in store.list()] == []


async def test_a_closed_store_raises(store: LocalStore) -> None:
    await store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.get(data_object(b"x"))


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


async def test_an_aborted_upload_leaves_nothing(store: LocalStore, tmp_path: Path) -> None:
    content = b"abc" * 1000
    name = data_object(content)
    async with store.upload(name) as upload:
        await upload.write(content)
        assert len(unfinished(tmp_path)) == 1
        assert [info async for info in store.list()] == []
    assert unfinished(tmp_path) == []
    assert await store.get(name) is None
    async with store.upload(name) as upload:
        for start in range(0, len(content), 1000):
            await upload.write(content[start : start + 1000])
        await upload.commit()
    assert await store.get(name) == content


@pytest.mark.usefixtures("tiny_stores")
class TestCapacity:
    SIZE = len(make_segment(page_hashes(4), 0, 4).data) + len(make_segment(page_hashes(4), 0, 4).manifest.encode())

    async def fill(self, store: LocalStore, count: int) -> list[list[bytes]]:
        chains = [page_hashes(4, f"chain {i}") for i in range(count)]
        for i, chain in enumerate(chains):
            await put_segment(store, make_segment(chain, 0, 4, content=i))
        return chains

    async def stored(self, store: LocalStore, chains: list[list[bytes]]) -> list[bool]:
        """Check which segments are stored, without a lookup, since that would count as a use."""
        names = {info.name async for info in store.list()}
        return [
            make_segment(chain, 0, 4, content=i).manifest.key.manifest_name in names for i, chain in enumerate(chains)
        ]

    def test_zero_capacity_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="capacity_bytes is 0"):
            LocalStore(tmp_path, capacity_bytes=0)

    async def test_a_segment_that_is_written_again_counts_as_used(self, make: MakeStore) -> None:
        """Or its data would be evicted before its manifest is put."""
        store = make(capacity_bytes=int(4.5 * self.SIZE))
        chains = await self.fill(store, 4)
        again = make_segment(chains[0], 0, 4, content=0)
        await store.put(again.data_name, again.data)
        chains.append(page_hashes(4, "one more"))
        await put_segment(store, make_segment(chains[-1], 0, 4, content=4))
        await store.put(again.manifest.key.manifest_name, again.manifest.encode())
        first, second, *_, last = await self.stored(store, chains)
        assert (first, second, last) == (True, False, True)

    async def test_all_variants_count_and_are_evicted_together(self, make: MakeStore, tmp_path: Path) -> None:
        old, new = page_hashes(4, "old"), page_hashes(4, "new")
        source = make_segment(old, 0, 4)
        segment = transcode(source.manifest, source.data, make_targets(["deflate", "zstd", "hevc"], ["240p"]))
        assert len(segment.manifest.data_names) == 3
        store = make()
        await put_segment(store, segment)
        size = (await store.usage()).stored_bytes
        assert size == disk_bytes(tmp_path)
        await store.close()
        store = make(capacity_bytes=size + self.SIZE // 2)
        await put_segment(store, make_segment(new, 0, 4))
        names = {info.name async for info in store.list()}
        assert not any(name.startswith(segment.manifest.key.stem) for name in names)
        assert len(names) == 2

    async def test_segments_being_written_are_not_evicted(self, make: MakeStore) -> None:
        store = make(capacity_bytes=int(4 * self.SIZE))
        (old,) = await self.fill(store, 1)
        # The oldest segment is about to get a new variant: its data is there, its manifest will come.
        rewrite = make_segment(old, 0, 4, codec="deflate", content=0)
        await store.put(rewrite.data_name, rewrite.data)
        content = b"y" * int(3.5 * self.SIZE)
        with failing("full"):
            await store.put(data_object(content), content)
        await store.put(rewrite.manifest.key.manifest_name, rewrite.manifest.encode())
        assert (await store.lookup(SPACE, old)).num_pages == 4

    @pytest.mark.slow
    async def test_eviction_never_tears(self, make: MakeStore) -> None:
        """Readers see a whole segment or none, and data that is already open stays readable."""
        store = make(capacity_bytes=int(6.5 * self.SIZE))
        chains = [page_hashes(4, f"chain {i}") for i in range(24)]
        whole = torn = 0

        async def write() -> None:
            for turn in range(6):
                for i, chain in enumerate(chains):
                    await put_segment(store, make_segment(chain, 0, 4, content=i + turn % 2))

        async def read(offset: int, writing: asyncio.Task[None]) -> None:
            nonlocal whole, torn
            i = offset
            while not writing.done():
                i = (i + 5) % len(chains)
                found = await store.lookup(SPACE, chains[i])
                for hit in found.hits:
                    manifest = decode_manifest(hit.manifest)
                    (variant,) = manifest.variants
                    data = await store.get(manifest.data_name(variant))
                    if data is None:
                        torn += 1  # evicted since the lookup: a miss
                    else:
                        assert xxhash.xxh3_128_hexdigest(data) == variant.data_digest
                        whole += 1

        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(write())
            for offset in range(4):
                tasks.create_task(read(offset, writing))
        usage = await store.usage()
        assert usage.num_evicted > 50
        assert whole > 0
        names = {info.name async for info in store.list()}
        for name in names:
            if name.endswith(".kvm"):
                content = await store.get(name)
                assert content is not None
                manifest = decode_manifest(content)
                assert {manifest.data_name(variant) for variant in manifest.variants} <= names


async def test_a_directory_that_cannot_be_looked_at_is_a_store_error(make: MakeStore) -> None:
    store = make("x" * 300)
    with failing("io"):
        await store.usage()
