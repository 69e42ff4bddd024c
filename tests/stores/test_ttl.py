"""Segments that live for a limited time: what is left to see beside `test_life`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

from harness.s3_server import BUCKET, S3Server
from harness.small_segments import (
    FOLDER,
    NAMESPACE,
    expiring,
    head_slice,
    make_segment,
    page_hashes,
    parts,
    put_segment,
)
from sgl_kvfetch.codec.container.pages import RawPages
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.plane.store import StoreClient, open_client
from sgl_kvfetch.plane.write.gather import PageBatch
from sgl_kvfetch.protocol.config import KVFetchConfig
from sgl_kvfetch.server.run import RunningServer
from sgl_kvfetch.stores.base import AdminStore, Store
from sgl_kvfetch.stores.upkeep import plan_sweep

pytestmark = pytest.mark.process

CHAIN = page_hashes(8)
LEFT, RIGHT = make_segment(CHAIN, 0, 4), make_segment(CHAIN, 4, 4)
WHOLE = make_segment(CHAIN, 0, 8)
NAME = LEFT.manifest.key.manifest_name
HOUR = 3600.0
# Shorter than what is needed for data without a manifest to count as left behind: files have the real time.
TTL_S = 100.0
URL = f"s3://{BUCKET}/kv"

Later = Callable[[float], None]


async def found(store: Store) -> list[tuple[int, int]]:
    return parts(await store.lookup(FOLDER, CHAIN))


async def test_a_shorter_segment_is_found_behind_an_expired_one(store: AdminStore, later: Later) -> None:
    await put_segment(store, LEFT)
    await put_segment(store, expiring(WHOLE, time.time() + TTL_S))
    assert await found(store) == [(0, 8)]
    later(TTL_S + 10)
    assert await found(store) == [(0, 4)]


@pytest.mark.parametrize("store", ["directory", "bucket"], indirect=True)
async def test_gc_keeps_what_is_being_written_again(store: AdminStore) -> None:
    await put_segment(store, expiring(LEFT, time.time() - HOUR))
    assert (await plan_sweep(store, None)).evicted == []


@pytest.mark.parametrize("store", ["directory", "served"], indirect=True)
async def test_data_that_is_put_again_waits_for_its_manifest(store: AdminStore, later: Later) -> None:
    await put_segment(store, expiring(LEFT, time.time() + TTL_S))
    later(2 * TTL_S)
    await store.put(LEFT.data_name, LEFT.data)
    await put_segment(store, RIGHT)  # another's write
    await store.put(NAME, LEFT.manifest.encode())
    assert await found(store) == [(0, 4), (0, 4)]


@pytest.fixture(params=["server", "bucket"])
async def client(request: pytest.FixtureRequest, server: RunningServer, s3: S3Server) -> AsyncIterator[StoreClient]:
    """What a server with ``ttl_s`` in its config reads and writes with."""
    places: dict[str, dict[str, Any]] = {"server": {"store": server.url}, "bucket": {"store": URL, "s3": s3.config}}
    config = KVFetchConfig.model_validate({"codec": "zstd", "ttl_s": TTL_S, **places[request.param]})
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
