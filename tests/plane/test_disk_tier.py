"""The disk tier: what was read comes from the disk, and nothing that happens to the disk or the store is a wrong answer
or, where the other one can answer, a miss."""

from __future__ import annotations

import asyncio
import errno
import os
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest

from harness.metrics import read_metric
from harness.small_segments import FOLDER, expiring, make_segment, page_hashes, parts, put_segment
from harness.store_process import StoreProcess
from harness.waiting import WAIT_S, until
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.codec.container.signing import ManifestKeys
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.plane import disk_tier
from sgl_kvfetch.plane.disk_tier import DiskTier, DiskTierOptions
from sgl_kvfetch.plane.write.writer import commit_segment
from sgl_kvfetch.stores.base import Lookup, Store
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.stores.keyed import KeyedStore
from sgl_kvfetch.stores.remote import HttpOptions
from tests.codec.container import test_levels as laddered

CAPACITY = 100 << 20
CHAIN = page_hashes(64)
SEGMENT = make_segment(CHAIN, 0, 64)
MANIFEST_NAME = SEGMENT.manifest.key.manifest_name
PIECE = 512  # bytes of a read


class Events:
    """What a tier reports."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.fills: Counter[str] = Counter()
        self.failures: Counter[tuple[str, str]] = Counter()
        self.outages: list[str] = []
        self.options = DiskTierOptions(
            on_read=lambda tier, num_bytes: self.bytes.update({tier: num_bytes}),
            on_fill=lambda result: self.fills.update([result]),
            on_failure=lambda operation, error: self.failures.update([(operation, error.reason)]),
            on_outage=lambda error: self.outages.append(error.reason),
        )


class RemoteStore(LocalStore):
    """A store that fails, hangs and counts reads as a test tells it to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.error: StoreError | None = None
        self.hangs = False
        self.num_reads = self.num_lookups = 0

    async def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        self.num_reads += 1
        if self.error is not None:
            raise self.error
        return await super().get(name, start, length)

    async def lookup(self, namespace: str, page_hashes: Sequence[bytes]) -> Lookup:
        self.num_lookups += 1
        if self.error is not None:
            raise self.error
        if self.hangs:
            await asyncio.Event().wait()
        return await super().lookup(namespace, page_hashes)


@pytest.fixture
async def remote(tmp_path: Path) -> AsyncIterator[RemoteStore]:
    store = RemoteStore(tmp_path / "remote")
    await put_segment(store, SEGMENT)
    yield store
    await store.close()


@pytest.fixture
def events() -> Events:
    return Events()


MakeTier = Callable[..., DiskTier]


@pytest.fixture
async def make(tmp_path: Path, remote: RemoteStore, events: Events) -> AsyncIterator[MakeTier]:
    """Makes tiers on one directory, and closes them."""
    made: list[DiskTier] = []

    def make(store: Store = remote, *, capacity: int = CAPACITY, **options: object) -> DiskTier:
        disk = LocalStore(tmp_path / "disk", capacity_bytes=capacity)
        made.append(DiskTier(store, disk, replace(events.options, **options)))  # type: ignore[arg-type]
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


async def read(store: Store, segment: CodedSegment = SEGMENT, variant: int = 0, end: int | None = None) -> bytes:
    """Read data in pieces, all at once, up to byte ``end``."""
    name, size = segment.manifest.data_name(segment.manifest.variants[variant]), len(segment.variant_data(variant))
    starts = range(0, size if end is None else end, PIECE)
    pieces = await asyncio.gather(*(store.get(name, start, min(PIECE, size - start)) for start in starts))
    return b"".join(piece for piece in pieces if piece is not None)


async def fetch(store: Store, segment: CodedSegment = SEGMENT, variant: int = 0) -> bytes:
    """Look a segment up and read its data, as a fetch does."""
    found = await store.lookup(FOLDER, segment.manifest.page_hashes)
    assert parts(found) == [(0, segment.manifest.num_pages)]
    assert found.hits[0].manifest == segment.manifest.encode()
    return await read(store, segment, variant)


async def fill(tier: DiskTier, events: Events, segment: CodedSegment = SEGMENT) -> None:
    before = events.fills.total()
    assert await fetch(tier, segment) == segment.data
    await until(lambda: events.fills.total() > before)
    assert events.fills["stored"] == events.fills.total()


def content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def flip(path: Path, at: int = -1) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[at] ^= 1
    path.write_bytes(damaged)


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


async def test_a_segment_of_which_some_heads_are_read_is_not_kept(
    make: MakeTier, remote: RemoteStore, events: Events
) -> None:
    """A rank of a larger TP size reads the bytes of its own heads: the object would never be complete."""
    tier = make(heads=range(1, 2))
    assert await fetch(tier) == SEGMENT.data
    await tier.close()
    assert not events.fills
    await fill(make(RemoteStore(remote.root), heads=range(1)), events)


async def test_a_killed_server(tmp_path: Path, make: MakeTier, events: Events) -> None:
    with StoreProcess(tmp_path / "served") as server:
        tier = make(HttpStore(server.url, options=HttpOptions(timeout_s=5, max_attempts=1)))
        await put_segment(tier, SEGMENT)
        await fill(tier, events)
        server.kill()
        for _ in range(5):
            found = await tier.lookup(FOLDER, CHAIN)
            assert found.from_cache
            assert await read(tier) == SEGMENT.data
        assert events.outages[-1] == "skipped"
        server.start()
        await until(lambda: _is_answered_by_the_store(tier))


async def _is_answered_by_the_store(tier: DiskTier) -> bool:
    return not (await tier.lookup(FOLDER, CHAIN)).from_cache


async def test_after_a_restart(make: MakeTier, remote: RemoteStore, events: Events) -> None:
    first = make()
    await fill(first, events)
    await first.close()
    await put_segment(again := RemoteStore(remote.root), SEGMENT)
    assert await fetch(make(again)) == SEGMENT.data
    assert again.num_reads == 0


async def test_two_tiers_fill_one_directory_at_once(make: MakeTier, remote: RemoteStore, events: Events) -> None:
    tiers = [make(), make()]
    assert await asyncio.gather(*map(fetch, tiers)) == [SEGMENT.data] * 2
    await until(lambda: events.fills["stored"] == 2)
    num_reads = remote.num_reads
    assert await fetch(make()) == SEGMENT.data
    assert remote.num_reads == num_reads
    assert not events.failures


async def test_pieces_may_come_in_any_order_overlap_and_come_twice(
    tier: DiskTier, events: Events, on_disk: Path
) -> None:
    await tier.lookup(FOLDER, CHAIN)
    size = len(SEGMENT.data)
    for start, end in ((100, 200), (size - 50, size), (50, 150), (50, 60), (0, 55), (0, 55), (190, size - 10)):
        assert content(on_disk) is None
        await tier.get(SEGMENT.data_name, start, end - start)
    await until(lambda: events.fills["stored"] == 1)
    assert content(on_disk) == SEGMENT.data


async def test_only_segments_of_which_all_spans_are_found_are_filled(tier: DiskTier, events: Events) -> None:
    assert SEGMENT.manifest.span_pages == 8
    for first, end in ((0, 56), (8, 64)):
        assert parts(await tier.lookup(FOLDER, CHAIN[first:end])) == [(first, end - first)]
        assert await read(tier) == SEGMENT.data
    assert events.bytes == {"store": 2 * len(SEGMENT.data)}
    await tier.lookup(FOLDER, CHAIN[7:57])  # a page of each span: all spans are read
    assert await read(tier) == SEGMENT.data
    await until(lambda: events.fills == {"stored": 1})


async def test_an_object_of_which_the_rest_is_not_read_is_given_up(
    make: MakeTier, events: Events, on_disk: Path
) -> None:
    tier = make(fill_idle_s=0.01)
    await tier.lookup(FOLDER, CHAIN)
    await read(tier, end=2 * PIECE)
    await until(lambda: events.fills["incomplete"] == 1)
    assert await tier._disk.get(SEGMENT.data_name) is None

    async def is_filled() -> bool:  # as soon as it may be begun again
        await read(tier)
        return content(on_disk) is not None

    await until(is_filled)


async def test_memory_for_bytes_that_wait_is_bounded(make: MakeTier, events: Events, on_disk: Path) -> None:
    tier = make(fill_bytes=1000)
    await tier.lookup(FOLDER, CHAIN)
    for start in (400, 800, 1200):  # the bytes before them do not come
        await tier.get(SEGMENT.data_name, start, 400)
    await until(lambda: events.fills["dropped"] == 1)
    assert await read(tier) == SEGMENT.data
    assert content(on_disk) is None
    assert events.fills == {"dropped": 1}


async def test_the_object_that_waits_longest_makes_way(
    make: MakeTier, remote: RemoteStore, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "_MAX_FILLS", 2)
    tier = make()
    segments = [make_segment(page_hashes(64, f"{i}"), 0, 64, content=i) for i in range(3)]
    for segment in segments:
        await put_segment(remote, segment)
        await tier.lookup(FOLDER, segment.manifest.page_hashes)
        await read(tier, segment, end=PIECE)
    await until(lambda: events.fills["dropped"] == 1)
    for segment in segments[1:]:
        await read(tier, segment)
    await until(lambda: events.fills["stored"] == 2)


async def test_what_is_on_the_disk_stays_within_the_capacity(
    make: MakeTier, remote: RemoteStore, events: Events, tmp_path: Path
) -> None:
    capacity = 5 * len(SEGMENT.data)
    tier = make(capacity=capacity)
    segments = [make_segment(page_hashes(64, f"{i}"), 0, 64, content=i) for i in range(8)]
    for segment in segments:
        await put_segment(remote, segment)
        await fill(tier, events, segment)
        assert sum(path.stat().st_size for path in (tmp_path / "disk" / FOLDER).iterdir()) <= capacity
    events.bytes.clear()
    for segment in segments[:1] + segments[-2:]:
        assert await fetch(tier, segment) == segment.data
    assert events.bytes == {"store": len(segments[0].data), "disk": sum(len(s.data) for s in segments[-2:])}


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
    events.bytes.clear()
    assert await fetch(second, segments[0]) == segments[0].data
    assert events.bytes == {"disk": len(segments[0].data)}


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
    assert content(on_disk) is None
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
    assert await tier.get(SEGMENT.data_name, 0, PIECE) == SEGMENT.data[:PIECE]
    assert events.failures == {("read", "io"): 1}
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
    assert events.failures == {("fill", "invalid"): 1}
    assert content(on_disk) is None


async def test_a_full_disk_is_no_miss(tier: DiskTier, events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("sgl_kvfetch.directory.files.os.write", full)
    for _ in range(3):
        assert await fetch(tier) == SEGMENT.data
    await until(lambda: events.fills["failed"] == 1)  # not once a read
    assert events.failures == {("fill", "full"): 1}
    assert events.bytes == {"store": 3 * len(SEGMENT.data)}


async def test_a_directory_that_cannot_be_used_is_no_miss(tmp_path: Path, make: MakeTier, events: Events) -> None:
    (tmp_path / "disk").write_text("not a directory")
    tier = make()
    for _ in range(3):
        assert await fetch(tier) == SEGMENT.data
    await until(lambda: events.fills["failed"] == 1)
    assert events.failures[("fill", "io")] == 1
    assert await tier.delete_prefix(FOLDER) == 2
    assert await tier.lookup(FOLDER, CHAIN) == Lookup(())


async def test_a_disk_that_does_not_answer_is_no_miss(
    tier: DiskTier, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(tier, events)
    monkeypatch.setattr(disk_tier, "_READ_S", 0.01)

    async def hang(name: str, start: int = 0, length: int | None = None) -> bytes | None:
        await asyncio.Event().wait()
        return None

    monkeypatch.setattr(tier._disk, "get", hang)
    assert await fetch(tier) == SEGMENT.data
    num_failures = events.failures[("read", "timeout")]
    assert num_failures >= 3
    assert await tier.get(SEGMENT.data_name, 0, PIECE) == SEGMENT.data[:PIECE]
    assert events.failures == {("read", "timeout"): num_failures}  # it was not asked


@pytest.mark.parametrize("reason", ["server", "timeout", "protocol"])
async def test_lookups_are_answered_from_the_disk_while_the_store_fails(
    reason: str, tier: DiskTier, remote: RemoteStore, events: Events
) -> None:
    await fill(tier, events)
    remote.error = StoreError(reason, "as told")  # type: ignore[arg-type]
    for _ in range(5):
        found = await tier.lookup(FOLDER, CHAIN)
        assert parts(found) == [(0, 64)]
        assert found.from_cache
    assert events.outages == [reason] * 3 + ["skipped"] * 2
    assert (await tier.lookup(FOLDER, page_hashes(3, "other"))) == Lookup((), from_cache=True)
    assert await read(tier) == SEGMENT.data
    # What the disk does not have fails as it would without a tier.
    await tier._disk.delete(SEGMENT.data_name)
    with pytest.raises(StoreError, match="as told"):
        await tier.get(SEGMENT.data_name, 0, PIECE)


async def test_expired_segments_are_not_found_while_the_store_fails(
    tier: DiskTier, remote: RemoteStore, events: Events, later: Callable[[float], None]
) -> None:
    segment = expiring(SEGMENT, time.time() + 3600)
    await put_segment(remote, segment)
    await fill(tier, events, segment)
    remote.error = StoreError("server", "as told")
    later(3500)
    assert parts(await tier.lookup(FOLDER, CHAIN)) == [(0, 64)]
    later(3700)
    assert await tier.lookup(FOLDER, CHAIN) == Lookup((), from_cache=True)


async def test_a_store_that_hangs_leaves_time_for_the_disk(make: MakeTier, remote: RemoteStore, events: Events) -> None:
    tier = make(lookup_timeout_s=0.01)
    await fill(make(), events)
    remote.hangs = True
    assert (await tier.lookup(FOLDER, CHAIN)).from_cache
    assert events.outages == ["timeout"]


@pytest.mark.parametrize("reason", ["unauthorised", "invalid"])
async def test_what_the_store_refuses_is_refused(
    reason: str, tier: DiskTier, remote: RemoteStore, events: Events
) -> None:
    await fill(tier, events)
    for _ in range(5):
        remote.error = StoreError(reason, "as told")  # type: ignore[arg-type]
        with pytest.raises(StoreError, match="as told"):
            await tier.lookup(FOLDER, CHAIN)
    assert not events.outages


async def test_the_disk_does_not_answer_for_a_store_that_has_nothing(
    tier: DiskTier, remote: RemoteStore, events: Events
) -> None:
    await fill(tier, events)
    await remote.delete(MANIFEST_NAME)
    assert await tier.lookup(FOLDER, CHAIN) == Lookup(())


async def test_if_both_fail_the_stores_error_is_raised(
    tier: DiskTier, remote: RemoteStore, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(namespace: str, page_hashes: Sequence[bytes]) -> Lookup:
        raise StoreError("io", "the disk")

    monkeypatch.setattr(tier._disk, "lookup", fail)
    remote.error = StoreError("refused", "the store")
    with pytest.raises(StoreError, match="the store"):
        await tier.lookup(FOLDER, CHAIN)
    assert events.failures == {("lookup", "io"): 1}
    assert not events.outages


@pytest.mark.parametrize("is_prefix", [False, True])
async def test_deletes_go_to_both(
    is_prefix: bool, tier: DiskTier, remote: RemoteStore, events: Events, tmp_path: Path
) -> None:
    await fill(tier, events)
    if is_prefix:
        assert await tier.delete_prefix(FOLDER) == 2
    else:
        assert await tier.delete(MANIFEST_NAME)
        assert await tier.delete(SEGMENT.data_name)
    for directory in ("remote", "disk"):
        assert not list((tmp_path / directory / FOLDER).iterdir())
    # Those of the disk go even if the store does not answer.
    await put_segment(remote, SEGMENT)
    await fill(tier, events)

    async def refuse(name: str) -> int:
        raise StoreError("refused", "as told")

    remote.delete_prefix = refuse  # type: ignore[assignment, method-assign]
    with pytest.raises(StoreError, match="as told"):
        await tier.delete_prefix(FOLDER)
    await until(lambda: not list((tmp_path / "disk" / FOLDER).iterdir()))


async def test_what_is_cleared_while_it_is_filled_is_not_kept(tier: DiskTier, events: Events, on_disk: Path) -> None:
    await tier.lookup(FOLDER, CHAIN)
    await read(tier, end=2 * PIECE)
    await tier.delete_prefix(FOLDER)
    await until(lambda: events.fills["dropped"] == 1)
    assert content(on_disk) is None


async def test_closing_ends_fills(tier: DiskTier, events: Events, tmp_path: Path) -> None:
    await tier.lookup(FOLDER, CHAIN)
    await read(tier, end=2 * PIECE)
    folder = tmp_path / "disk" / FOLDER
    await until(lambda: folder.is_dir() and bool(list(folder.iterdir())))
    await tier.close()
    assert events.fills == {"dropped": 1}
    assert not os.listdir(folder)


async def test_segments_in_several_variants(tier: DiskTier, remote: RemoteStore, events: Events) -> None:
    """The manifest on the disk names only what is there, so that the local store takes it."""
    other = make_segment(CHAIN, 0, 64, codec="deflate")
    variants = SEGMENT.manifest.variants + other.manifest.variants
    both = CodedSegment(msgspec.structs.replace(SEGMENT.manifest, variants=variants), SEGMENT.data, (other.data,))
    await put_segment(remote, both)
    for variant, here in ((1, 1), (0, 2)):
        events.fills.clear()
        assert await fetch(tier, both, variant) == both.variant_data(variant)
        await until(lambda: events.fills["stored"] == 1)
        (hit,) = (await tier._disk.lookup(FOLDER, CHAIN)).hits
        assert len(decode_manifest(hit.manifest).variants) == here
    assert hit.manifest == both.manifest.encode()
    assert not events.failures


async def test_manifests_from_the_disk_need_a_signature(make: MakeTier, remote: RemoteStore, events: Events) -> None:
    """The tier is below the signatures, and keeps them."""
    signed = KeyedStore(tier := make(), ManifestKeys([b"k" * 32]), None)
    await put_segment(signed, SEGMENT)
    (before,) = (await signed.lookup(FOLDER, CHAIN)).hits
    assert await read(signed) == SEGMENT.data
    await until(lambda: events.fills["stored"] == 1)
    remote.error = StoreError("refused", "as told")
    found = await signed.lookup(FOLDER, CHAIN)
    assert found.hits == (before,)
    assert found.from_cache
    await tier._disk.put(MANIFEST_NAME, SEGMENT.manifest.encode())  # without one
    assert (await signed.lookup(FOLDER, CHAIN)).hits == ()


async def test_whole_data_comes_from_the_store(tier: DiskTier, remote: RemoteStore, events: Events) -> None:
    """Others get what is made of it, so it must not pass through this machine's disk."""
    await fill(tier, events)
    num_reads = remote.num_reads
    assert await tier.get(SEGMENT.data_name) == SEGMENT.data
    assert remote.num_reads == num_reads + 1


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


def _has_stored(events: Events, count: int) -> bool:
    return events.fills["stored"] == count


@pytest.mark.parametrize("order", [(0,), (1, 0), (0, 1, 2), (2, 1, 0)], ids=str)
async def test_levels_are_kept_as_far_as_they_were_read(
    make: MakeTier, remote: RemoteStore, events: Events, order: Sequence[int]
) -> None:
    """The disk's own manifest says which are not there, in whatever order the others have come."""
    segment = laddered.segment()
    folder, hashes = laddered.SPEC.heads.folder, segment.manifest.page_hashes
    await commit_segment(remote, segment)
    tier = make()
    await tier.lookup(folder, hashes)
    objects = list(segment.data_objects())
    for count, level in enumerate(order, 1):
        name, content = objects[level]
        assert await tier.get(name, 0, len(content)) == content
        await until(partial(_has_stored, events, count))
    remote.error = StoreError("refused", "as told")
    (hit,) = (await tier.lookup(folder, hashes)).hits
    (variant,) = decode_manifest(hit.manifest).variants
    kept = next(count for count in range(laddered.LEVELS + 1) if count not in order)
    assert (1 + len(variant.levels), variant.num_dropped) == (kept, laddered.LEVELS - kept)
    for name, content in objects[:kept]:
        assert await tier.get(name, 0, len(content)) == content
