"""Sweeps of stores that do not evict by themselves, and what goes wrong in them: `test_life` has what they drop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.engine import free_port
from harness.redis_server import RedisProcess
from harness.s3_server import BUCKET, S3Server
from harness.small_segments import FOLDER, data_object, make_segment, page_hashes, parts, put_segment
from harness.waiting import WAIT_S, until
from sgl_kvfetch.directory import LocalStore
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.keys import SegmentKey
from sgl_kvfetch.plane.write.writer import commit_segment
from sgl_kvfetch.stores import AdminStore, Lookup, indexed_s3 as indexed, redis_index as page_index, upkeep
from sgl_kvfetch.stores.indexed_s3 import IndexedS3Store
from sgl_kvfetch.stores.redis_index import IndexOptions
from sgl_kvfetch.stores.s3 import S3Store
from sgl_kvfetch.stores.upkeep import ORPHAN_AGE_S, StoredSegment, plan_sweep, sweep_segments
from tests.directory.test_dropped_levels import WHOLE, chain, fill
from tests.segments import names, using
from tests.stores.conftest import opened
from tests.tools.conftest import kvfetch_json

pytestmark = pytest.mark.process

URL = f"s3://{BUCKET}/kv"
CHAIN = page_hashes(48)
SEGMENTS = [make_segment(CHAIN, first, 16) for first in (0, 16, 32)]
KEYS = [segment.manifest.key for segment in SEGMENTS]
SIZE = len(SEGMENTS[0].data) + len(SEGMENTS[0].manifest.encode())


def client(s3: S3Server, index_url: str) -> IndexedS3Store:
    return IndexedS3Store(URL, IndexOptions(index_url, timeout_s=WAIT_S), config=s3.config)


@pytest.fixture
async def store(s3: S3Server, index: RedisProcess) -> AsyncIterator[IndexedS3Store]:
    store = client(s3, index.url)
    for segment in SEGMENTS:
        await put_segment(store, segment)
    yield store
    await store.close()


def keys(segments: list[StoredSegment]) -> list[object]:
    return [segment.key for segment in segments]


async def test_the_least_recently_used_go_first(store: IndexedS3Store) -> None:
    now = time.time()
    await store._index.record_uses({KEYS[0]: now + 300, KEYS[1]: now + 100, KEYS[2]: now + 200})
    plan = await plan_sweep(store, 2 * SIZE + SIZE // 2)
    assert keys(plan.evicted) == [KEYS[1]]
    assert plan.oldest_use_s == pytest.approx(now + 200, abs=1)
    plan = await plan_sweep(store, SIZE + SIZE // 2)
    assert keys(plan.evicted) == [KEYS[1], KEYS[2]]
    swept = await upkeep.sweep_segments(store, plan.doomed, grace_s=0)
    assert (swept.num_objects, swept.num_bytes, swept.failures) == (4, plan.freed_bytes, {})
    assert await names(store) == {KEYS[0].manifest_name, SEGMENTS[0].data_name}
    assert [entry is not None for entry in await store._index.find(FOLDER, CHAIN)] == [True] * 16 + [False] * 32
    assert (await plan_sweep(store, SIZE + SIZE // 2)).freed_bytes == 0


async def test_a_lookup_is_a_use(
    s3: S3Server, index: RedisProcess, store: IndexedS3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed, "SAVE_USES_EVERY_S", 0.01)
    reader = client(s3, index.url)
    before = time.time()
    assert parts(await reader.lookup(FOLDER, CHAIN[20:24])) == [(4, 4)]

    async def is_noted() -> bool:
        (used,) = await store.last_uses([KEYS[1]])
        return used is not None and used >= int(before)

    await until(is_noted)
    assert await reader.last_uses([KEYS[0], KEYS[2]]) == [None, None]
    # By its name, too; and what was not saved yet is saved at the end.
    index.client.flushall()
    monkeypatch.setattr(indexed, "SAVE_USES_EVERY_S", 3600.0)
    assert parts(await reader.lookup(FOLDER, CHAIN[:16])) == [(0, 16)]
    await reader.close()
    assert [used is not None for used in await store.last_uses(KEYS)] == [True, False, False]


@pytest.mark.usefixtures("store")
async def test_a_use_is_saved_that_comes_while_others_are_saved(
    s3: S3Server, index: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed, "SAVE_USES_EVERY_S", 0.01)
    reader = client(s3, index.url)
    record_uses, saved = reader._index.record_uses, list[list[SegmentKey]]()

    async def note_another(uses: Mapping[SegmentKey, float]) -> None:
        if not saved:
            await reader.lookup(FOLDER, CHAIN[16:32])
        await record_uses(uses)
        saved.append(list(uses))

    monkeypatch.setattr(reader._index, "record_uses", note_another)
    await reader.lookup(FOLDER, CHAIN[:16])
    await until(lambda: saved == [[KEYS[0]], [KEYS[1]]])
    await reader.close()


async def test_without_an_index_the_oldest_go_first(s3: S3Server) -> None:
    store = S3Store(URL, config=s3.config)
    for segment in SEGMENTS[:2]:
        await put_segment(store, segment)
        second = int(time.time())

        async def is_later(second: int = second) -> bool:
            return int(time.time()) > second

        await until(is_later)  # moto's times are in whole seconds
    await put_segment(store, SEGMENTS[2])
    await put_segment(store, SEGMENTS[0])
    plan = await plan_sweep(store, 2 * SIZE + SIZE // 2)
    assert keys(plan.evicted) == [KEYS[1]]
    await store.close()


async def test_what_writers_left_is_deleted_once_old(store: IndexedS3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    orphan = data_object(b"left")
    await store.put(orphan, b"left")
    await store.delete(SEGMENTS[1].data_name)
    await store.delete(KEYS[2].manifest_name)
    plan = await plan_sweep(store, 1)  # what is unfinished counts, but stays
    assert plan.stored_bytes > 2 * SIZE
    assert (keys(plan.evicted), plan.broken) == ([KEYS[0]], [])
    monkeypatch.setattr(upkeep, "ORPHAN_AGE_S", -60.0)  # all is old
    plan = await plan_sweep(store, 100 * SIZE)
    assert plan.evicted == []
    await upkeep.sweep_segments(store, plan.doomed, grace_s=0)
    assert await names(store) == {KEYS[0].manifest_name, SEGMENTS[0].data_name}


async def test_data_outlives_a_manifest_written_again(store: IndexedS3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    async def write_again(seconds: float) -> None:
        assert seconds == 60
        assert await names(store) == {segment.data_name for segment in SEGMENTS}
        assert await store.lookup(FOLDER, CHAIN) == Lookup(())
        await put_segment(store, SEGMENTS[1])

    plan = await plan_sweep(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "sleep", write_again)
        await upkeep.sweep_segments(store, plan.doomed, grace_s=60)
    assert await names(store) == {KEYS[1].manifest_name, SEGMENTS[1].data_name}
    assert parts(await store.lookup(FOLDER, CHAIN[16:])) == [(0, 16)]


async def test_a_sweeper_that_lost_its_lease_is_stopped(
    store: IndexedS3Store, index: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_index, "_LEASE_S", 1)

    async def sweep_for_ever() -> None:
        async with store.sweeping():
            index.client.set(store._index._key(b"lease"), b"another")
            await asyncio.Event().wait()

    with pytest.raises(StoreError, match="another gc run holds the lock"):
        await asyncio.wait_for(sweep_for_ever(), WAIT_S)
    assert index.client.get(store._index._key(b"lease")) == b"another"


async def test_an_index_that_does_not_answer_is_no_reason_to_guess(s3: S3Server) -> None:
    store = client(s3, f"redis://127.0.0.1:{free_port()}")
    await put_segment(store, SEGMENTS[0])
    with pytest.raises(StoreError, match="reading uses"):
        await plan_sweep(store, 1)
    await store.close()


NUM = 3
LAST = len(chain(0).level_data[-1])


@pytest.fixture(params=["directory", "bucket", "bucket with index"])
async def leveled(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AdminStore]:
    """A store of three segments."""
    async with opened(request.param, tmp_path, request) as store:
        await fill(store, range(NUM))
        yield store


async def test_a_segment_that_is_written_again_while_it_loses_a_level_keeps_its_data(leveled: AdminStore) -> None:
    """After its level was dropped, and before the level's data is deleted."""
    plan = await plan_sweep(leveled, NUM * WHOLE - LAST // 2, drop_levels=1)
    (coarser,) = plan.coarser
    number = next(n for n in range(NUM) if chain(n).manifest.key == coarser.segment.key)
    drop_level = leveled.coarsen

    async def drop_and_write(name: str) -> object:
        dropped = await drop_level(name)
        await commit_segment(leveled, chain(number))
        return dropped

    leveled.coarsen = drop_and_write  # type: ignore[method-assign, assignment]
    swept = await sweep_segments(leveled, plan.doomed, 0, plan.coarser)
    assert (swept.num_levels, swept.num_objects) == (1, 0)
    whole = [chain(number).manifest for number in range(NUM)]
    assert await names(leveled) == {name for each in whole for name in (each.key.manifest_name, *each.data_names)}
    for manifest in whole:
        assert await leveled.peek(manifest.key.manifest_name) == manifest.encode()


async def test_a_manifest_that_cannot_be_read_ends_no_sweep(leveled: AdminStore) -> None:
    """Neither while it is planned nor while it runs."""
    broken = chain(0).manifest.key.manifest_name

    def failing(method: Callable[[str], Awaitable[Any]]) -> Callable[[str], Awaitable[Any]]:
        async def fail(name: str) -> Any:
            if name == broken:
                raise StoreError("io", "cannot be read")
            return await method(name)

        return fail

    capacity = NUM * (WHOLE - LAST) + 64 * NUM
    plan = await plan_sweep(leveled, capacity, drop_levels=1)
    leveled.peek = failing(leveled.peek)  # type: ignore[method-assign, assignment]
    leveled.coarsen = failing(leveled.coarsen)  # type: ignore[method-assign, assignment]
    planned = await plan_sweep(leveled, capacity, drop_levels=1)
    assert chain(0).manifest.key not in {each.segment.key for each in planned.coarser}
    assert planned.stored_bytes - planned.freed_bytes <= capacity  # others make room
    swept = await sweep_segments(leveled, (), 0, plan.coarser)
    assert swept.failures == {broken: "cannot be read"}
    assert swept.num_objects == NUM - 1


async def test_levels_that_an_interrupted_sweep_has_left_are_deleted(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    await fill(store, range(NUM))
    name = chain(0).manifest.key.manifest_name
    (left,) = await store.coarsen(name)
    capacity = (await plan_sweep(store, None)).stored_bytes - 1
    assert (await plan_sweep(store, capacity, drop_levels=1)).coarser[0].segment.key != chain(0).manifest.key
    old_s = time.time() - ORPHAN_AGE_S - 60
    os.utime(tmp_path / left, (old_s, old_s))
    plan = await plan_sweep(store, capacity, drop_levels=1)
    swept = await sweep_segments(store, plan.doomed, 0, plan.coarser)
    assert (swept.num_levels, swept.num_objects) == (0, 1)
    assert left not in await names(store)
    await store.close()


def test_gc_says_which_levels_it_drops(tmp_path: Path) -> None:
    using(LocalStore(tmp_path), lambda store: fill(store, range(NUM)))
    options = (str(tmp_path), "--capacity", f"{NUM * WHOLE - 1}B", "--drop-levels", "1", "--grace", "0", "--yes")
    planned = kvfetch_json("gc", *options, "--dry-run")
    assert (list(planned["coarser"].values()), planned["evicted"], planned["planned_bytes"]) == ([1], [], LAST)
    swept = kvfetch_json("gc", *options)["deleted"]
    assert (swept["num_levels"], swept["num_objects"], swept["num_bytes"]) == (1, 1, LAST)
