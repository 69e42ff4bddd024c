"""Segments that live for a limited time, in every kind of store."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.redis_server import RedisProcess
from harness.s3_server import BUCKET, S3Server
from harness.small_segments import (
    FOLDER,
    NAMESPACE,
    data_object,
    expiring,
    head_slice,
    make_segment,
    page_hashes,
    parts,
    put_segment,
)
from harness.waiting import WAIT_S
from sgl_kvfetch.codec.container.pages import RawPages
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.plane.store import StoreClient, open_client
from sgl_kvfetch.plane.write.gather import PageBatch
from sgl_kvfetch.protocol.config import KVFetchConfig
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.run import RunningServer, running_server
from sgl_kvfetch.stores.base import AdminStore, Store, object_digest
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.stores.indexed_s3 import IndexedS3Store
from sgl_kvfetch.stores.notes import Pin, put_pin
from sgl_kvfetch.stores.redis_index import IndexOptions
from sgl_kvfetch.stores.s3 import S3Store
from sgl_kvfetch.stores.upkeep import plan_sweep, sweep_segments
from tests.directory.conftest import rebuild
from tests.segments import names

pytestmark = pytest.mark.process

CHAIN = page_hashes(8)
LEFT, RIGHT = make_segment(CHAIN, 0, 4), make_segment(CHAIN, 4, 4)
WHOLE = make_segment(CHAIN, 0, 8)
NAME = LEFT.manifest.key.manifest_name
HOUR = 3600.0
# Shorter than what is needed for data without a manifest to count as left behind: files have the real time.
TTL_S = 100.0
KINDS = ["directory", "writer's token", "admin's token", "bucket", "bucket with index"]
URL = f"s3://{BUCKET}/kv"

Later = Callable[[float], None]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RunningServer]:
    (tmp_path / "tokens").write_text("write w\nadmin a\n")
    config = ServerConfig(tmp_path / "root", port=0, grace_s=1, token_file=tmp_path / "tokens")
    async with running_server(config) as server:
        yield server


@pytest.fixture(params=KINDS)
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, server: RunningServer, s3: S3Server
) -> AsyncIterator[AdminStore]:
    store: AdminStore
    match request.param:
        case "directory":
            store = LocalStore(tmp_path / "directory")
        case "bucket":
            store = S3Store(URL, config=s3.config)
        case "bucket with index":
            redis: RedisProcess = request.getfixturevalue("index")
            store = IndexedS3Store(URL, IndexOptions(redis.url, timeout_s=WAIT_S), config=s3.config)
        case token:
            store = HttpStore(server.url, token=token[0])
    yield store
    await store.close()


async def found(store: Store) -> list[tuple[int, int]]:
    return parts(await store.lookup(FOLDER, CHAIN))


async def test_an_expired_segment_is_not_found_until_it_is_written_again(store: AdminStore, later: Later) -> None:
    now = time.time()
    await put_segment(store, expiring(LEFT, now + TTL_S))
    later(TTL_S - 10)
    assert await found(store) == [(0, 4)]
    later(TTL_S + 10)
    assert await found(store) == []
    await put_segment(store, expiring(LEFT, now + 3 * TTL_S))
    assert await found(store) == [(0, 4)]
    later(3 * TTL_S + 10)
    assert await found(store) == []


async def test_the_latest_manifest_says_when_a_segment_expires(store: AdminStore, later: Later) -> None:
    now = time.time()
    await put_segment(store, expiring(LEFT, now + TTL_S))
    manifest = expiring(LEFT, now + 2 * TTL_S).manifest.encode()
    assert await store.replace(NAME, manifest, object_digest(expiring(LEFT, now + TTL_S).manifest.encode()))
    later(TTL_S + 10)
    assert await found(store) == [(0, 4)]
    await put_segment(store, LEFT)
    later(2 * TTL_S + 10)
    assert await found(store) == [(0, 4)]
    await put_segment(store, expiring(LEFT, now + 3 * TTL_S))
    later(3 * TTL_S + 10)
    assert await found(store) == []


async def test_a_shorter_segment_is_found_behind_an_expired_one(store: AdminStore, later: Later) -> None:
    await put_segment(store, LEFT)
    await put_segment(store, expiring(WHOLE, time.time() + TTL_S))
    assert await found(store) == [(0, 8)]
    later(TTL_S + 10)
    assert await found(store) == [(0, 4)]


@pytest.mark.parametrize("store", KINDS[:3], indirect=True)
async def test_expired_segments_are_deleted_by_the_next_write(store: AdminStore, later: Later) -> None:
    await put_segment(store, expiring(LEFT, time.time() + TTL_S))
    later(TTL_S + 70)  # not while its data are new
    other = data_object(b"other")
    await store.put(other, b"other")
    assert await names(store) == {other}


@pytest.mark.parametrize("store", [KINDS[0], *KINDS[3:]], indirect=True)
async def test_gc_deletes_expired_segments_before_all_others(store: AdminStore, later: Later) -> None:
    now = time.time()
    for segment in (LEFT, expiring(RIGHT, now + HOUR), expiring(WHOLE, now + 2 * HOUR)):
        await put_segment(store, segment)
    if isinstance(store, LocalStore):
        await store.collect()  # behind the one that the first write began, which would delete what expires
    keys = [segment.manifest.key for segment in (LEFT, RIGHT, WHOLE)]
    later(HOUR - 60)
    assert (await plan_sweep(store, None)).evicted == []
    later(HOUR + 60)
    plan = await plan_sweep(store, None)
    assert ([segment.key for segment in plan.evicted], plan.num_expired) == ([keys[1]], 1)
    plan = await plan_sweep(store, plan.stored_bytes - plan.freed_bytes)  # what has expired is enough
    assert [segment.key for segment in plan.evicted] == [keys[1]]
    plan = await plan_sweep(store, plan.stored_bytes - plan.freed_bytes - 1)
    assert (len(plan.evicted), plan.evicted[0].key, plan.num_expired) == (2, keys[1], 1)
    later(2 * HOUR + 60)
    plan = await plan_sweep(store, None)
    assert {segment.key for segment in plan.evicted} == {*keys[1:]}
    assert (await sweep_segments(store, plan.doomed, grace_s=0)).num_bytes == plan.freed_bytes
    assert await names(store) == {NAME, LEFT.data_name}


@pytest.mark.parametrize("store", [KINDS[0], *KINDS[3:]], indirect=True)
async def test_gc_keeps_what_is_being_written_again(store: AdminStore) -> None:
    await put_segment(store, expiring(LEFT, time.time() - HOUR))
    assert (await plan_sweep(store, None)).evicted == []


@pytest.mark.parametrize("store", KINDS[:3], indirect=True)
async def test_data_that_is_put_again_waits_for_its_manifest(store: AdminStore, later: Later) -> None:
    await put_segment(store, expiring(LEFT, time.time() + TTL_S))
    later(2 * TTL_S)
    await store.put(LEFT.data_name, LEFT.data)
    await put_segment(store, RIGHT)  # another's write
    await store.put(NAME, LEFT.manifest.encode())
    assert await found(store) == [(0, 4), (0, 4)]


async def test_pinned_segments_expire_too(tmp_path: Path, later: Later) -> None:
    store = LocalStore(tmp_path)
    await put_segment(store, expiring(LEFT, time.time() + TTL_S))
    await put_pin(store, Pin("a prompt", 1, b"".join(CHAIN)))
    later(HOUR)
    plan = await plan_sweep(store, None)
    assert (plan.num_expired, plan.num_pinned_evicted) == (1, 0)  # it is no lack of room
    later(TTL_S + 70)
    await put_segment(store, RIGHT)
    assert not any(name.startswith(LEFT.manifest.key.stem) for name in await names(store))
    await store.close()


async def test_a_catalog_that_is_made_anew_knows_the_expiry(tmp_path: Path, later: Later) -> None:
    store = LocalStore(tmp_path)
    await put_segment(store, expiring(LEFT, time.time() + TTL_S))
    await rebuild(store)
    assert await found(store) == [(0, 4)]
    later(2 * TTL_S)
    assert await found(store) == []
    await store.close()


@pytest.fixture(params=["server", "bucket"])
async def client(
    request: pytest.FixtureRequest, server: RunningServer, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[StoreClient]:
    """What a server with ``ttl_s`` in its config reads and writes with."""
    urls = {"server": server.url, "bucket": URL}
    fields: dict[str, Any] = {"store": urls[request.param], "codec": "zstd", "ttl_s": TTL_S}
    if request.param == "server":
        monkeypatch.setenv("KVFETCH_TOKEN", "w")
    fields["s3"] = {**s3.config} if request.param == "bucket" else None
    config = KVFetchConfig.model_validate(fields)
    client = open_client(config, head_slice(NAMESPACE.model), make_quantiser("exact"))
    yield client
    await client.close(10.0)


async def test_the_config_sets_the_time(client: StoreClient, later: Later) -> None:
    async def write() -> None:
        values = torch.zeros(4, 1, 1, 1, 48, dtype=torch.bfloat16)
        batch = PageBatch(0, None, CHAIN[:4], [RawPages(values, values)])
        client.writer.add(batch)
        await client.writer.drain()

    await write()
    assert await found(client.store) == [(0, 4)]
    later(TTL_S - 10)
    await write()  # which changes nothing: the store has it
    later(TTL_S + 10)
    assert await found(client.store) == []
    await write()
    assert await found(client.store) == [(0, 4)]
    later(2 * TTL_S + 20)
    assert await found(client.store) == []
