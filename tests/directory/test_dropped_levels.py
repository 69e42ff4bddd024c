"""A full directory drops the last levels of what was used least before it evicts segments."""

from __future__ import annotations

import asyncio
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
from sgl_kvfetch.stores.upkeep import plan_sweep, sweep_segments
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


async def test_without_being_told_no_level_is_dropped(make: MakeStore) -> None:
    store = make()
    await fill(store, range(12))
    assert {await lost(store, number) for number in range(12)} == {0, None}


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


async def test_a_segment_written_again_while_it_loses_a_level_stays_whole(make: MakeStore, tmp_path: Path) -> None:
    """Its manifest names the level again, before the level's data is deleted."""
    store = make(drop_levels=1)
    await fill(store, range(6))
    await store.collect()  # so that none is under way
    written = write_before_deletions(store)
    await fill(store, [6])
    assert written == [0]
    assert await lost(store, 0) is not None
    for number in range(7):
        content = await store.peek(chain(number).manifest.key.manifest_name)
        assert content is None or all((tmp_path / name).exists() for name in decode_manifest(content).data_names)


@pytest.mark.parametrize("drop_levels", [0, 1])
async def test_a_segment_that_is_written_again_while_gc_deletes_stays_whole(tmp_path: Path, drop_levels: int) -> None:
    store = LocalStore(tmp_path)
    await fill(store, range(2))
    plan = await plan_sweep(store, 2 * WHOLE - 1, drop_levels=drop_levels)
    assert (len(plan.evicted), len(plan.coarser)) == (1 - drop_levels, drop_levels)
    await store.collect()
    written = write_before_deletions(store)
    await sweep_segments(store, plan.doomed, 0, plan.coarser)
    assert len(written) == 1
    for number in range(2):
        assert await lost(store, number) == 0
        assert all((tmp_path / name).exists() for name in chain(number).manifest.data_names)
    await store.close()


def write_before_deletions(store: LocalStore) -> list[int]:
    """Write the first segment again just before its data is deleted, from another thread. Return its number then."""
    written: list[int] = []
    delete = store._room.delete
    store._collected_at = float("inf")  # or the collection of orphans would delete at the same time

    def write_and_delete(names: Iterable[str], *condition: Callable[..., bool]) -> object:
        names = list(names)
        for number in range(8):
            if not written and chain(number).manifest.data_names & set(names):
                capacity = store._room.capacity_bytes
                store._room.capacity_bytes = None  # or it would wait for the eviction that calls this
                asyncio.run(fill(store, [number]))
                store._room.capacity_bytes = capacity
                written.append(number)
        return delete(names, *condition)

    store._room.delete = write_and_delete  # type: ignore[method-assign, assignment]
    return written
