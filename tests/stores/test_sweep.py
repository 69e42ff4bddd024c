"""Sweeps of stores that do not evict by themselves: a bucket with and without an index, and a directory."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import boto3
import pytest

from harness.engine import free_port
from harness.redis_server import RedisProcess
from harness.s3_server import BUCKET, S3Server
from harness.small_segments import FOLDER, data_object, make_segment, page_hashes, parts, put_segment
from harness.waiting import WAIT_S, until
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.keys import SegmentKey
from sgl_kvfetch.stores import indexed_s3 as indexed, redis_index as page_index, upkeep
from sgl_kvfetch.stores.base import Lookup
from sgl_kvfetch.stores.indexed_s3 import IndexedS3Store
from sgl_kvfetch.stores.redis_index import IndexOptions
from sgl_kvfetch.stores.s3 import S3Store
from sgl_kvfetch.stores.upkeep import StoredSegment, plan_sweep
from tests.segments import names

URL = f"s3://{BUCKET}/kv"
CHAIN = page_hashes(48)
SEGMENTS = [make_segment(CHAIN, first, 16) for first in (0, 16, 32)]
KEYS = [segment.manifest.key for segment in SEGMENTS]
SIZE = len(SEGMENTS[0].data) + len(SEGMENTS[0].manifest.encode())


def opened(s3: S3Server, index_url: str) -> IndexedS3Store:
    return IndexedS3Store(URL, IndexOptions(index_url, timeout_s=WAIT_S), config=s3.config)


@pytest.fixture
async def store(s3: S3Server, index: RedisProcess) -> AsyncIterator[IndexedS3Store]:
    store = opened(s3, index.url)
    for segment in SEGMENTS:
        await put_segment(store, segment)
    yield store
    await store.close()


def keys(segments: list[StoredSegment]) -> list[object]:
    return [segment.key for segment in segments]


@pytest.mark.process
async def test_the_least_recently_used_go_first(store: IndexedS3Store, index: RedisProcess) -> None:
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


@pytest.mark.process
async def test_a_lookup_is_a_use(
    s3: S3Server, index: RedisProcess, store: IndexedS3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed, "SAVE_USES_EVERY_S", 0.01)
    reader = opened(s3, index.url)
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


@pytest.mark.process
async def test_a_use_is_saved_that_comes_while_others_are_saved(
    s3: S3Server, index: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed, "SAVE_USES_EVERY_S", 0.01)
    store = opened(s3, index.url)
    record_uses, saved = store._index.record_uses, []

    async def note_another(uses: Mapping[SegmentKey, float]) -> None:
        saved.append(list(uses))
        if len(saved) == 1:
            store._record_use(KEYS[1])
        await record_uses(uses)

    monkeypatch.setattr(store._index, "record_uses", note_another)
    store._record_use(KEYS[0])
    await until(lambda: len(saved) == 2)
    assert saved[1] == [KEYS[1]]
    await store.close()


@pytest.mark.process
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


@pytest.mark.process
async def test_what_writers_left_is_deleted_once_it_is_old(
    store: IndexedS3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphan = data_object(b"left")
    await store.put(orphan, b"left")
    await store.delete(SEGMENTS[1].data_name)
    plan = await plan_sweep(store, 100 * SIZE)
    assert plan.freed_bytes == 0
    monkeypatch.setattr(upkeep, "ORPHAN_AGE_S", -60.0)  # all is old
    plan = await plan_sweep(store, 100 * SIZE)
    assert plan.evicted == []
    await upkeep.sweep_segments(store, plan.doomed, grace_s=0)
    assert await names(store) == {name for i in (0, 2) for name in (KEYS[i].manifest_name, SEGMENTS[i].data_name)}


@pytest.mark.process
async def test_unfinished_writes_count_but_stay(store: IndexedS3Store) -> None:
    await store.delete(KEYS[0].manifest_name)
    plan = await plan_sweep(store, 1)
    assert plan.stored_bytes > 2 * SIZE
    assert set(keys(plan.evicted)) == {KEYS[1], KEYS[2]}
    assert plan.broken == []


@pytest.mark.process
async def test_data_outlives_its_manifest_for_readers(store: IndexedS3Store) -> None:
    plan = await plan_sweep(store, 1)
    sweeping = asyncio.create_task(upkeep.sweep_segments(store, plan.doomed, grace_s=1e6))

    async def has_no_manifests() -> bool:
        return await names(store) == {segment.data_name for segment in SEGMENTS}

    await until(has_no_manifests)
    assert await store.lookup(FOLDER, CHAIN) == Lookup(())
    sweeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sweeping


@pytest.mark.process
async def test_a_segment_that_is_written_again_meanwhile_stays(
    store: IndexedS3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def write_again(seconds: float) -> None:
        await put_segment(store, SEGMENTS[1])

    plan = await plan_sweep(store, 1)
    monkeypatch.setattr(asyncio, "sleep", write_again)
    await upkeep.sweep_segments(store, plan.doomed, grace_s=60)
    monkeypatch.undo()
    assert await names(store) == {KEYS[1].manifest_name, SEGMENTS[1].data_name}
    assert parts(await store.lookup(FOLDER, CHAIN[16:])) == [(0, 16)]


@pytest.mark.process
async def test_an_object_that_cannot_be_deleted_does_not_stop_the_rest(
    store: IndexedS3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = IndexedS3Store.delete

    async def refuse_one(self: IndexedS3Store, name: str) -> bool:
        if name == KEYS[1].manifest_name:
            raise StoreError("invalid", "held")
        return await delete(self, name)

    monkeypatch.setattr(IndexedS3Store, "delete", refuse_one)
    swept = await upkeep.sweep_segments(store, (await plan_sweep(store, 1)).doomed, grace_s=0)
    assert swept.failures == {KEYS[1].manifest_name: "held"}
    assert await names(store) == {KEYS[1].manifest_name, SEGMENTS[1].data_name}


@pytest.mark.process
async def test_one_sweeper_at_a_time(s3: S3Server, index: RedisProcess, store: IndexedS3Store) -> None:
    other = opened(s3, index.url)
    async with store.sweeping():
        assert 0 < index.client.ttl(store._index._key(b"lease")) <= page_index._LEASE_S  # that of a dead one ends, too
        with pytest.raises(StoreError, match="another gc run holds the lock"):
            async with other.sweeping():
                pytest.fail("two at a time")
    async with other.sweeping():
        pass
    with pytest.raises(ZeroDivisionError):
        async with store.sweeping():
            raise ZeroDivisionError
    async with other.sweeping():  # given back after a failure, too
        pass
    await other.close()


@pytest.mark.process
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


@pytest.mark.process
async def test_an_index_that_does_not_answer_is_no_reason_to_guess(s3: S3Server) -> None:
    store = opened(s3, f"redis://127.0.0.1:{free_port()}")
    await put_segment(store, SEGMENTS[0])
    with pytest.raises(StoreError, match="reading uses"):
        await plan_sweep(store, 1)
    await store.close()


@pytest.mark.process
def test_the_documented_lifecycle_rule_is_accepted(s3: S3Server) -> None:
    text = (Path(__file__).parents[2] / "docs" / "stores.md").read_text()
    rules = json.loads(text.split("```json")[1].split("```")[0])
    options = {"endpoint_url": s3.config["endpoint"], "region_name": "us-east-1"}
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    client = boto3.client("s3", **options, **keys)
    client.put_bucket_lifecycle_configuration(Bucket=BUCKET, LifecycleConfiguration=rules)
    (stored,) = client.get_bucket_lifecycle_configuration(Bucket=BUCKET)["Rules"]
    assert (stored["Expiration"], stored["Filter"]) == ({"Days": 14}, {"Prefix": "production/"})
