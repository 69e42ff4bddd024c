"""Replacing a manifest: tests of single stores, which the conformance suite cannot contain."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from harness.small_segments import make_segment, page_hashes, put_segment
from harness.waiting import WAIT_S
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.server.run import RunningServer
from sgl_kvfetch.stores.base import object_digest
from sgl_kvfetch.stores.http import HttpStore


@pytest.mark.process
async def test_data_objects_are_never_replaced(tmp_path: Path, server: RunningServer) -> None:
    segment = make_segment(page_hashes(4), 0, 4)
    for store in (LocalStore(tmp_path / "other"), HttpStore(server.url)):
        await put_segment(store, segment)
        with pytest.raises(StoreError, match="is not a manifest") as caught:
            await store.replace(segment.data_name, segment.data, object_digest(segment.data))
        assert caught.value.reason == "invalid"
        await store.close()


async def test_a_manifest_does_not_come_back_without_its_data(tmp_path: Path) -> None:
    chain = page_hashes(4)
    old, new = make_segment(chain, 0, 4), make_segment(chain, 0, 4, codec="deflate")
    store = LocalStore(tmp_path)
    await put_segment(store, old)
    with pytest.raises(StoreError, match="is missing") as caught:
        await store.replace(old.manifest.key.manifest_name, new.manifest.encode(), object_digest(old.manifest.encode()))
    assert caught.value.reason == "invalid"
    assert await store.get(old.manifest.key.manifest_name) == old.manifest.encode()
    await store.close()


async def test_writers_that_replace_a_manifest_take_turns(tmp_path: Path) -> None:
    """Two writers replace each other's manifest, equally often. If one lost an update, the other would wait
    forever."""
    segments = [make_segment(page_hashes(4), 0, 4, codec=codec) for codec in ("zstd", "deflate")]
    name, (one, other) = segments[0].manifest.key.manifest_name, (each.manifest.encode() for each in segments)
    store = LocalStore(tmp_path)
    for segment in segments:
        await put_segment(store, segment)

    async def replace(mine: bytes, others: bytes) -> None:
        done = 0
        while done < 20:
            if await store.get(name) == others:
                done += await store.replace(name, mine, object_digest(others))

    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(replace(one, other))
        tasks.create_task(replace(other, one))
    await store.close()
