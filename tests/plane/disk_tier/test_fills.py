"""The disk tier: which objects are copied to the disk, and when that is given up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from harness.reading import read_bytes
from harness.waiting import until
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.plane import disk_tier
from sgl_kvfetch.plane.disk_tier import DiskTier
from sgl_kvfetch.testing import FOLDER, make_segment, page_hashes, parts, put_segment
from tests.plane.disk_tier.tiers import CHAIN, PIECE, SEGMENT, Events, MakeTier, RemoteStore, content, fetch, fill, read


async def test_a_segment_of_which_some_heads_are_read_is_not_kept(
    make: MakeTier, remote: RemoteStore, events: Events
) -> None:
    """A rank of a larger TP size reads the bytes of its own heads: the object would never be complete."""
    tier = make(heads=range(1, 2))
    assert await fetch(tier) == SEGMENT.data
    await tier.close()
    assert not events.fills
    await fill(make(RemoteStore(remote.root), heads=range(1)), events)


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
        await read_bytes(tier, SEGMENT.data_name, start, end - start)
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
    tier: DiskTier, events: Events, on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "_FILL_IDLE_S", 0.01)
    await tier.lookup(FOLDER, CHAIN)
    await read(tier, end=2 * PIECE)
    await until(lambda: events.fills["incomplete"] == 1)
    assert await tier._disk.get(SEGMENT.data_name) is None

    async def is_filled() -> bool:  # as soon as it may be begun again
        await read(tier)
        return content(on_disk) is not None

    await until(is_filled)


async def test_memory_for_bytes_that_wait_is_bounded(
    tier: DiskTier, events: Events, on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "_FILL_BYTES", 1000)
    await tier.lookup(FOLDER, CHAIN)
    for start in (400, 800, 1200):  # the bytes before them do not come
        await read_bytes(tier, SEGMENT.data_name, start, 400)
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


@pytest.mark.usefixtures("tiny_stores")
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
    events.forget()
    for segment in segments[:1] + segments[-2:]:
        assert await fetch(tier, segment) == segment.data
    assert events.bytes == {"store": len(segments[0].data), "disk": sum(len(s.data) for s in segments[-2:])}


async def test_segments_in_several_variants(tier: DiskTier, remote: RemoteStore, events: Events) -> None:
    """The manifest on the disk names only what is there, so that the local store takes it."""
    other = make_segment(CHAIN, 0, 64, codec="deflate")
    variants = SEGMENT.manifest.variants + other.manifest.variants
    both = CodedSegment(msgspec.structs.replace(SEGMENT.manifest, variants=variants), SEGMENT.data, (other.data,))
    await put_segment(remote, both)
    for variant, here in ((1, 1), (0, 2)):
        events.forget()
        assert await fetch(tier, both, variant) == both.variant_data(variant)
        await until(lambda: events.fills["stored"] == 1)
        (hit,) = (await tier._disk.lookup(FOLDER, CHAIN)).hits
        assert len(decode_manifest(hit.manifest).variants) == here
    assert hit.manifest == both.manifest.encode()
    assert not events.failures
