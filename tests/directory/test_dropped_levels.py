"""A full directory drops the last levels of what was used least before it evicts segments."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest

from harness.memory_pool import MemoryPool
from harness.waiting import WAIT_S
from sgl_kvfetch.codec import CodedSegment, Decoders, decode_manifest
from sgl_kvfetch.directory import LocalStore
from sgl_kvfetch.plane.fetch.fetcher import PoolPages
from sgl_kvfetch.plane.fetch.finder import PageFinder
from sgl_kvfetch.plane.fetch.offers import Tolerance
from sgl_kvfetch.plane.fetch.pool import DecodePool
from sgl_kvfetch.plane.write.writer import commit_segment
from sgl_kvfetch.stores import Store
from tests.codec.container.test_levels import GEOMETRY, KLT, SPEC, segment
from tests.directory.conftest import MakeStore
from tests.fetchers import make_fetcher
from tests.segments import page_hashes

pytestmark = pytest.mark.usefixtures("tiny_stores")

WHOLE = len(segment().manifest.encode()) + sum(len(data) for _, data in segment().data_objects())
FOLDER = SPEC.heads.folder


@pytest.fixture
def make(make: MakeStore) -> MakeStore:
    """With room for six whole segments."""
    return partial(make, capacity_bytes=6 * WHOLE)


def chain(number: int) -> CodedSegment:
    hashes = tuple(page_hashes(4, f"chain {number}"))
    return replace(segment(), manifest=msgspec.structs.replace(segment().manifest, page_hashes=hashes))


async def fill(store: Store, numbers: Iterable[int]) -> None:
    for number in numbers:
        await commit_segment(store, chain(number))


async def lost(store: LocalStore, number: int) -> int | None:
    """Return how many levels a segment has lost, None if it is not found."""
    hits = (await store.lookup(FOLDER, chain(number).manifest.page_hashes)).hits
    return decode_manifest(hits[0].manifest).variants[0].num_dropped if hits else None


async def test_all_variants_lose_levels_alike(make: MakeStore) -> None:
    store = make(drop_levels=1)
    (variant,) = segment().manifest.variants
    variants = variant, msgspec.structs.replace(variant, codec="raw")
    manifest = msgspec.structs.replace(chain(0).manifest, variants=variants)
    levels = chain(0).level_data * 2
    await commit_segment(store, replace(chain(0), manifest=manifest, more_data=(chain(0).data,), level_data=levels))
    await fill(store, range(1, 6))
    (hit,) = (await store.lookup(FOLDER, chain(0).manifest.page_hashes)).hits
    assert [variant.num_dropped for variant in decode_manifest(hit.manifest).variants] == [1, 1]


async def test_a_broken_manifest_costs_a_line(
    make: MakeStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = make(drop_levels=1)
    await fill(store, range(4))
    (tmp_path / chain(0).manifest.key.manifest_name).write_bytes(b"broken")
    await fill(store, range(4, 10))
    assert sum("coarser" in record.message for record in caplog.records) <= 1


async def test_a_level_that_is_dropped_between_lookup_and_fetch(make: MakeStore) -> None:
    """The levels before it count."""
    store = make(drop_levels=1)
    await fill(store, [0])
    hashes = list(chain(0).manifest.page_hashes)
    with closing(DecodePool[Decoders]([{}])) as pool:
        fetcher = make_fetcher(store, pool, may_delete=True, tolerance=Tolerance(1, 1e9))
        finder = PageFinder(store, SPEC.heads, KLT, print, tolerance=Tolerance(1))
        sources = await finder.find_pages(hashes, WAIT_S)
        await fill(store, range(1, 7))
        assert await lost(store, 0) == 1
        memory = MemoryPool(GEOMETRY, 4, 0.0)
        result = await fetcher.fetch(sources, PoolPages(memory, range(4)), WAIT_S)
        assert (result.num_pages, result.failures) == (4, ())
    assert await lost(store, 0) == 1  # reported, and found sound


async def test_a_segment_written_again_while_it_loses_a_level_stays_whole(
    make: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest names the level again, just before another thread deletes the level's data."""
    store, has_written = make(drop_levels=1), threading.Event()
    await fill(store, range(6))
    await store.collect()  # so that none is under way, and none comes:
    store._collected_at = float("inf")
    room, delete = store._room, store._room.delete

    def write_and_delete(names: Iterable[str], *condition: Callable[..., bool]) -> object:
        names = list(names)
        if not has_written.is_set() and chain(0).manifest.data_names & {*names}:
            capacity, room.capacity_bytes = room.capacity_bytes, None  # or it would wait for its caller's eviction
            asyncio.run(fill(store, [0]))
            room.capacity_bytes = capacity
            has_written.set()
        return delete(names, *condition)

    monkeypatch.setattr(room, "delete", write_and_delete)
    await fill(store, [6])
    assert has_written.is_set()
    assert await lost(store, 0) is not None
    for number in range(7):
        content = await store.peek(chain(number).manifest.key.manifest_name)
        assert content is None or all((tmp_path / name).exists() for name in decode_manifest(content).data_names)
