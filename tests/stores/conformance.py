"""What every store must do: tests that each store of ours passes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from harness.small_segments import (
    FOLDER,
    data_object,
    expiring,
    head_slice,
    make_segment,
    page_hashes,
    parts,
    put_segment,
)
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.stores import NOTE_KINDS, PINS, AdminStore, Lookup, Pin, Store, object_digest
from sgl_kvfetch.stores.notes import get_pin, put_pin


@contextmanager
def failing(
    reason: str, match: str | None = None, *, retriable: bool | None = None
) -> Iterator[pytest.ExceptionInfo[StoreError]]:
    """Require that what is done in the meantime fails for this reason."""
    with pytest.raises(StoreError, match=match) as caught:
        yield caught
    assert caught.value.reason == reason
    assert retriable is None or caught.value.retriable == retriable


BAD_NAMES = (
    "",
    "x",
    "/etc/passwd",
    "../../etc/passwd",
    f"{'0' * 32}/../{'0' * 32}/1-{'0' * 64}.kvm",
    f"{'0' * 32}/1-{'0' * 64}.kvm/..",
    f"{'0' * 32}/1-{'0' * 64}.kvm\n",
    f"{'0' * 32}/%2e%2e/1-{'0' * 64}.kvm",
    f"{'0' * 32}/0-{'0' * 64}.kvm",
    f"{'0' * 32}/1-{'0' * 64}.tmp",
    f"{'0' * 32}\\1-{'0' * 64}.kvm",
)


class StoreConformance:
    """Set ``checks_manifests`` to False for a store that cannot check a manifest when it is put, and ``finds_parts`` to
    False for one that finds a segment only if the requested pages include all of it."""

    checks_manifests = True
    finds_parts = True

    async def test_get_returns_what_was_put_until_it_is_deleted(self, store: Store) -> None:
        content = bytes(range(256)) * 5000
        name, size = data_object(content), len(content)
        for _ in range(2):
            assert await store.get(name) is None
            assert await store.get(name, 5, 10) is None
            assert await store.get(name, 5, 0) is None
            assert await store.delete(name) is False
            await store.put(name, content)
            assert await store.get(name) == content
            for start, length in ((0, 1), (0, size), (size - 1, 1), (50, 100), (0, 0), (7, 0), (size, 0)):
                assert await store.get(name, start, length) == content[start : start + length]
            for start, length in ((0, size + 1), (size - 1, 2), (size, 1), (size + 1, 0), (2 * size, 1)):
                with failing("truncated"):
                    await store.get(name, start, length)
            assert await store.delete(name) is True
        await store.close()
        await store.close()
        with pytest.raises(StoreError, match="closed"):
            await store.get(name)

    async def test_delete_prefix(self, store: Store) -> None:
        assert await store.delete_prefix("") == 0
        chain = page_hashes(8)
        first, second = make_segment(chain, 0, 4), make_segment(chain, 4, 4)
        another = make_segment(chain, 0, 4, model="another")
        for segment in (first, second, another):
            await put_segment(store, segment)
        assert await store.delete_prefix("no such") == 0
        assert await store.delete_prefix(first.manifest.key.stem) == 2
        assert await store.get(first.data_name) is None
        assert await store.get(second.data_name) == second.data
        assert await store.lookup(FOLDER, chain) == Lookup(())
        assert parts(await store.lookup(FOLDER, chain[4:])) == [(0, 4)]
        assert await store.delete_prefix(FOLDER) == 2
        assert await store.lookup(FOLDER, chain[4:]) == Lookup(())
        assert parts(await store.lookup(another.manifest.key.namespace, chain)) == [(0, 4)]
        await put_segment(store, first)
        assert await store.delete_prefix("") == 4
        assert await store.get(first.manifest.key.manifest_name) is None

    async def test_bad_names_are_invalid(self, store: Store) -> None:
        for name in BAD_NAMES:
            for call in (store.get(name), store.put(name, b"x"), store.delete(name)):
                with failing("invalid"):
                    await call
        for namespace in ("", "..", "0" * 31, "A" * 32):
            with failing("invalid"):
                await store.lookup(namespace, page_hashes(1))

    async def test_folders(self, store: Store) -> None:
        namespace = head_slice("conformance").namespace
        assert await store.folders(namespace.digest()) == frozenset()
        chain = page_hashes(4)
        for model in ("conformance", "another"):
            await put_segment(store, make_segment(chain, 0, 4, model=model))
        await store.put(data_object(b"of another rank", heads="1-2"), b"of another rank")
        assert await store.folders(namespace.digest()) == {FOLDER, FOLDER.replace("0-1", "1-2")}
        assert await store.folders("0" * 32) == frozenset()

    async def test_lookup_finds_a_segment_while_its_manifest_is_there(self, store: Store) -> None:
        chain = page_hashes(8)
        segment = make_segment(chain, 0, 8)
        assert await store.lookup(FOLDER, chain) == Lookup(())
        await store.put(segment.data_name, segment.data)
        assert await store.lookup(FOLDER, chain) == Lookup(())
        await put_segment(store, segment)
        found = await store.lookup(FOLDER, chain)
        assert parts(found) == [(0, 8)]
        assert found.hits[0].manifest == segment.manifest.encode()
        assert await store.lookup(FOLDER, []) == Lookup(())
        assert await store.lookup(head_slice("another").folder, chain) == Lookup(())
        assert await store.delete(segment.manifest.key.manifest_name)
        assert await store.lookup(FOLDER, chain) == Lookup(())

    async def test_lookup_uses_parts_of_a_segment(self, store: Store) -> None:
        if not self.finds_parts:
            pytest.skip("this store does not find parts of segments")
        chain = page_hashes(16)
        await put_segment(store, make_segment(chain, 8, 8))
        for first, end, expected in (
            (8, 12, [(0, 4)]),
            (12, 16, [(4, 4)]),
            (10, 13, [(2, 3)]),
            (15, 16, [(7, 1)]),
            (7, 16, []),
        ):
            assert parts(await store.lookup(FOLDER, chain[first:end])) == expected
        other = page_hashes(16, "another question", branch_at=13)
        assert parts(await store.lookup(FOLDER, other[8:])) == [(0, 5)]
        await put_segment(store, make_segment(other, 8, 8))
        for each in (chain, other):
            assert parts(await store.lookup(FOLDER, each[8:])) == [(0, 8)]

    async def test_lookup_joins_segments_of_a_growing_prefix(self, store: Store) -> None:
        chain = page_hashes(16)
        for first, length, expected in (
            (0, 4, [(0, 4)]),
            (4, 2, [(0, 4), (0, 2)]),
            (6, 1, [(0, 4), (0, 2), (0, 1)]),
            (0, 8, [(0, 8)]),  # merged
            (8, 8, [(0, 8), (0, 8)]),
        ):
            await put_segment(store, make_segment(chain, first, length))
            assert parts(await store.lookup(FOLDER, chain)) == expected
        await put_segment(store, make_segment(page_hashes(32), 24, 8))  # behind a gap
        assert parts(await store.lookup(FOLDER, page_hashes(32))) == [(0, 8), (0, 8)]
        if self.finds_parts:
            assert parts(await store.lookup(FOLDER, chain[3:12])) == [(3, 5), (0, 4)]

    async def test_an_expired_segment_is_not_found_until_it_is_written_again(self, store: Store) -> None:
        chain = page_hashes(8)
        whole, half = make_segment(chain, 0, 8), make_segment(chain, 0, 4)
        await put_segment(store, expiring(whole, time.time() - 60))
        assert parts(await store.lookup(FOLDER, chain)) == []
        await put_segment(store, expiring(half, time.time() + 3600))
        assert parts(await store.lookup(FOLDER, chain)) == [(0, 4)]
        await put_segment(store, expiring(whole, time.time() + 3600))
        assert parts(await store.lookup(FOLDER, chain)) == [(0, 8)]

    async def test_replace_requires_the_expected_manifest(self, store: Store) -> None:
        """Replace nothing that another writer has changed; a retry of what succeeded succeeds."""
        await store.require_replace()
        chain = page_hashes(4)
        old, new, other = (make_segment(chain, 0, 4, codec=codec) for codec in ("zstd", "deflate", "hevc"))
        name = old.manifest.key.manifest_name
        manifests = [segment.manifest.encode() for segment in (old, new, other)]
        for segment in (old, new, other):
            await store.put(segment.data_name, segment.data)
        before, after, third = manifests
        assert not await store.replace(name, after, object_digest(before))
        assert await store.get(name) is None
        await store.put(name, before)
        assert not await store.replace(name, third, object_digest(after))
        assert await store.get(name) == before
        assert await store.replace(name, after, object_digest(before))
        assert await store.get(name) == after
        assert [hit.manifest for hit in (await store.lookup(FOLDER, chain)).hits] == [after]
        # A retry, as after a lost answer, succeeds too.
        assert await store.replace(name, after, object_digest(before))
        assert not await store.replace(name, third, object_digest(before))
        assert await store.get(name) == after
        with failing("invalid"):
            await store.replace(old.data_name, old.data, object_digest(old.data))
        if self.checks_manifests:  # it does not come back without its data
            await store.delete(old.data_name)
            with failing("invalid"):
                await store.replace(name, before, object_digest(after))
            assert await store.get(name) == after

    async def test_only_one_of_many_concurrent_replaces_succeeds(self, store: Store) -> None:
        chain = page_hashes(4)
        segments = [make_segment(chain, 0, 4, codec=codec) for codec in ("zstd", "deflate", "hevc", "hevc420")]
        name = segments[0].manifest.key.manifest_name
        first, *others = [segment.manifest.encode() for segment in segments]
        for segment in segments:
            await store.put(segment.data_name, segment.data)
        for _ in range(10):
            await store.put(name, first)
            done = await asyncio.gather(*(store.replace(name, other, object_digest(first)) for other in others))
            assert done.count(True) == 1
            assert await store.get(name) == others[done.index(True)]

    async def test_a_manifest_is_checked(self, store: Store) -> None:
        if not self.checks_manifests:
            pytest.skip("this store does not check manifests")
        chain = page_hashes(8)
        segment, other = make_segment(chain, 0, 4), make_segment(chain, 4, 4)
        name, content = segment.manifest.key.manifest_name, segment.manifest.encode()
        with failing("invalid"):
            await store.put(name, content)
        await store.put(segment.data_name, segment.data)
        for bad in (b"", b"nonsense", content[:-1], content + b"x", other.manifest.encode()):
            with failing("invalid"):
                await store.put(name, bad)
        assert await store.get(name) is None
        await store.put(name, content)

    async def test_replacing_is_atomic(self, store: Store) -> None:
        """Read a manifest while it is replaced again and again."""
        chain = page_hashes(4)
        segments = [make_segment(chain, 0, 4), make_segment(chain, 0, 4, codec="deflate")]
        manifests = [segment.manifest.encode() for segment in segments]
        name = segments[0].manifest.key.manifest_name
        assert segments[0].manifest.key == segments[1].manifest.key
        for segment in segments:
            await put_segment(store, segment)

        async def replace_often() -> None:
            for turn in range(30):
                await store.put(name, manifests[turn % 2])

        async def read_until(writing: asyncio.Task[None]) -> None:
            while not writing.done():
                assert await store.get(name) in manifests
                (hit,) = (await store.lookup(FOLDER, chain)).hits
                assert hit.manifest in manifests

        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(replace_often())
            for _ in range(4):
                tasks.create_task(read_until(writing))
        assert [hit.manifest for hit in (await store.lookup(FOLDER, chain)).hits] == [manifests[1]]
        assert await store.get(segments[0].data_name) == segments[0].data

    async def test_cancelled_calls_leave_a_working_store(self, store: Store) -> None:
        content = b"c" * 3_000_000
        name = data_object(content)
        for delay_s in (0.0, 0.0005, 0.002, 0.01):
            put = asyncio.create_task(store.put(name, content))
            await asyncio.sleep(delay_s)
            put.cancel()
            await asyncio.gather(put, return_exceptions=True)
            assert await store.get(name) in (None, content)
        await store.put(name, content)
        get = asyncio.create_task(store.get(name))
        await asyncio.sleep(0.0005)
        get.cancel()
        await asyncio.gather(get, return_exceptions=True)
        assert await store.get(name) == content


class AdminStoreConformance(StoreConformance):
    """The tests of an `AdminStore`."""

    async def test_list(self, store: AdminStore) -> None:
        assert [info async for info in store.list()] == []
        chain = page_hashes(4)
        segments = [make_segment(chain, 0, 4), make_segment(chain, 0, 4, model="another")]
        for segment in segments:
            await put_segment(store, segment)
        expected = {s.data_name: len(s.data) for s in segments}
        expected |= {s.manifest.key.manifest_name: len(s.manifest.encode()) for s in segments}
        assert {info.name: info.size_bytes async for info in store.list()} == expected
        for name, size in expected.items():
            info = await store.head(name)
            assert info is not None
            assert (info.name, info.size_bytes) == (name, size)
            assert abs(info.modified_s - time.time()) < 3600
        assert await store.head(data_object(b"never put")) is None
        for bad in BAD_NAMES:
            with failing("invalid"):
                await store.head(bad)
        assert await store.folders() == {s.manifest.key.namespace for s in segments}
        key = segments[0].manifest.key
        for prefix in (key.namespace, key.namespace[:5], key.stem, key.manifest_name, "no such"):
            listed = {info.name async for info in store.list(prefix)}
            assert listed == {name for name in expected if name.startswith(prefix)}, prefix
        assert await store.delete_prefix("") == 4
        assert [info async for info in store.list()] == []

    async def test_notes_are_kept_beside_objects(self, store: AdminStore) -> None:
        """Keep notes under their names, where neither listings nor deletions of objects find them."""
        first, second = (Pin("a question", 1, b"".join(page_hashes(n))) for n in (4, 2))
        assert list(await store.notes(PINS)) == []
        assert await get_pin(store, first.name) is None
        assert await store.get_note(PINS, first.name, 1) is None
        assert not await store.delete_note(PINS, first.name)
        for pin in (first, second, first):
            await put_pin(store, pin)
        found = {info.name: info for info in await store.notes(PINS)}
        assert set(found) == {first.name, second.name}
        assert found[first.name].size_bytes == len(first.encode())
        assert abs(found[first.name].modified_s - time.time()) < 3600
        assert await get_pin(store, first.name) == first
        data = first.encode()
        for length in (5, len(data)):
            assert await store.get_note(PINS, first.name, length) == data[:length]
        for length, reason in ((len(data) + 1, "truncated"), (PINS.max_bytes + 1, "too_large")):
            with failing(reason):
                await store.get_note(PINS, first.name, length)

        assert [info async for info in store.list()] == []
        assert await store.folders() == frozenset()
        assert await store.delete_prefix("") == 0
        assert await store.delete_note(PINS, first.name)
        assert [info.name for info in await store.notes(PINS)] == [second.name]

    async def test_other_names_of_notes_are_invalid(self, store: AdminStore) -> None:
        for name in ("", "..", "../" + "a" * 61, "A" * 64, "a" * 65, f"{'a' * 32}/{'a' * 33}", f"../{'a' * 32}"):
            for kind in NOTE_KINDS.values():
                calls = store.get_note(kind, name), store.put_note(kind, name, b"x"), store.delete_note(kind, name)
                for call in calls:
                    with failing("invalid"):
                        await call
