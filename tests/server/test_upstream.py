"""`kvfetch serve --upstream`: real servers over real sockets, in this process and in their own."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest

from harness.faults import Fault, FaultyProxy
from harness.s3_server import BUCKET, running_s3_server
from harness.small_segments import FOLDER, data_object, make_segment, page_hashes, parts, put_segment
from harness.store_process import StoreProcess
from harness.waiting import until
from sgl_kvfetch.codec import NO_KEYS, CodedSegment
from sgl_kvfetch.directory import FrontStore
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.run import running_server
from sgl_kvfetch.stores import PROFILES, HttpOptions, publish_profile
from sgl_kvfetch.stores.base import bytes_read
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.stores.s3 import S3Store
from tests.server.serving import metric
from tests.stores.test_profiles import save

pytestmark = pytest.mark.process

CHAIN = page_hashes(64)
SEGMENT = make_segment(CHAIN, 0, 64)
NAME = SEGMENT.data_name
SIZE = len(SEGMENT.data)
ONCE = HttpOptions(max_attempts=1)


@dataclass(frozen=True)
class Pair:
    """A store, and another one in front of it, with clients of both. ``proxy`` is between them."""

    root: Path
    proxy: FaultyProxy
    far: HttpStore
    near: HttpStore

    async def metric(self, name: str, **labels: str) -> float:
        async with aiohttp.ClientSession(self.near.url) as session:
            return await metric(session, name, **labels)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with (
        running_server(ServerConfig(tmp_path / "far", port=0, grace_s=0)) as far,
        FaultyProxy(far.host, far.port) as proxy,
        running_server(ServerConfig(tmp_path / "near", port=0, grace_s=0, upstream=proxy.url)) as near,
    ):
        pair = Pair(tmp_path, proxy, HttpStore(far.url), HttpStore(near.url, options=ONCE))
        yield pair
        await pair.near.close()
        await pair.far.close()


async def fetch(store: HttpStore, segment: CodedSegment = SEGMENT, piece: int = 4096) -> None:
    """Look a segment up and read its data in ranges, as a fetch does, and compare all of it."""
    found = await store.lookup(FOLDER, segment.manifest.page_hashes)
    assert parts(found) == [(0, segment.manifest.num_pages)]
    assert found.hits[0].manifest == segment.manifest.encode()
    size = len(segment.data)
    ranges = [(start, min(piece, size - start)) for start in range(0, size, piece)]
    got = await asyncio.gather(*(bytes_read(store, segment.data_name, *each) for each in ranges))
    assert b"".join(each or b"" for each in got) == segment.data


async def test_a_second_fetch_asks_the_upstream_for_nothing(pair: Pair) -> None:
    await put_segment(pair.far, SEGMENT)
    await fetch(pair.near)

    async def is_kept() -> bool:  # in the catalog: files have their names a moment before
        return await pair.metric("segments") == 1

    await until(is_kept)
    pair.proxy.requests.clear()
    await fetch(pair.near)
    assert pair.proxy.requests == []
    for what, num_bytes in (("readers", SIZE), ("keeping", 0)):
        assert await pair.metric("upstream_bytes_total", **{"for": what}) == num_bytes


async def test_whole_objects_open_ranges_and_manifests_are_passed_on(pair: Pair) -> None:
    await put_segment(pair.far, SEGMENT)
    assert await pair.near.get(NAME) == SEGMENT.data
    assert await pair.near.get(SEGMENT.manifest.key.manifest_name) == SEGMENT.manifest.encode()
    assert await pair.near.get("0" * 32 + ".0-1/1-" + "0" * 64 + ".kvm") is None
    assert await bytes_read(pair.near, NAME.replace(FOLDER, "0" * 32 + ".0-1"), 0, 5) is None
    info = await pair.near.head(NAME)
    assert info is not None
    assert info.size_bytes == SIZE
    async with aiohttp.ClientSession() as session:
        url = f"{pair.near.url}/v1/objects/{NAME}"
        for header, expected in (("bytes=-7", SEGMENT.data[-7:]), (f"bytes={SIZE - 9}-", SEGMENT.data[-9:])):
            async with session.get(url, headers={"Range": header}) as answer:
                assert (answer.status, await answer.read()) == (206, expected)
        async with session.get(url, headers={"Range": f"bytes={SIZE}-"}) as answer:
            assert (answer.status, answer.headers["Content-Range"]) == (416, f"bytes */{SIZE}")


async def test_reads_of_many_ranks_at_once_wait_for_each_other(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds 4 MiB of the server's memory for requests, in which 31 of them would fit."""
    content, pass_on = bytes(4 << 20), FrontStore.pass_on

    async def slow(*args: Any) -> bool:
        await asyncio.sleep(0.1)
        return await pass_on(*args)

    monkeypatch.setattr(FrontStore, "pass_on", slow)
    await pair.far.put(data_object(content), content)
    ranks = HttpStore(pair.near.url, options=HttpOptions(max_attempts=1, max_connections=40))
    reads = (bytes_read(ranks, data_object(content), 0, len(content)) for _ in range(40))
    assert await asyncio.gather(*reads) == [content] * 40
    await ranks.close()


async def test_an_upstream_that_breaks_off_breaks_the_answer_off(pair: Pair) -> None:
    await put_segment(pair.far, SEGMENT)
    await pair.proxy.set(Fault("close", after_bytes=100, only=lambda method, path: path.endswith(".kvd")))
    with pytest.raises(StoreError) as e:
        await bytes_read(pair.near, NAME, 0, SIZE)
    assert e.value.reason in ("truncated", "proxy")
    await pair.proxy.set(None)
    await fetch(pair.near)


async def test_reads_go_on_while_the_upstream_is_away_and_writes_fail(pair: Pair) -> None:
    await put_segment(pair.near, SEGMENT)
    await pair.proxy.set(Fault("refuse"))
    await fetch(pair.near)
    more = page_hashes(128)
    for _ in range(5):
        assert parts(await pair.near.lookup(FOLDER, more)) == [(0, 64)]
    other = make_segment(more, 64, 64)
    with pytest.raises(StoreError, match=r"502.*the upstream: putting .* no connection"):
        await put_segment(pair.near, other)
    for operation, number in (("lookup", 3), ("write", 1)):  # lookups leave it alone for a while then
        assert await pair.metric("upstream_failures_total", operation=operation) == number
    assert await pair.metric("read_only") == 1
    await pair.proxy.set(None)

    async def is_back() -> bool:
        return await pair.metric("read_only") == 0

    await until(is_back)
    await put_segment(pair.near, other)
    await fetch(pair.far, other)


async def test_profiles_are_the_upstreams(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = await publish_profile(pair.far, save(tmp_path), NO_KEYS)
    assert [info.name for info in await pair.near.notes(PROFILES)] == [name]
    assert await pair.near.get_note(PROFILES, name, 4) == b"KVFP"
    assert list((pair.root / "near").glob(".profiles/*/*")) == []  # not all of it was fetched for its head
    with monkeypatch.context() as patch:
        full = Mock(side_effect=StoreError("full", "there is no room for a copy"))
        patch.setattr("sgl_kvfetch.directory.notes.NoteWriter.open", full)
        content = await pair.near.get_note(PROFILES, name) or b""
    for store in (pair.near, pair.far):
        assert await store.get_note(PROFILES, name) == content
    assert await pair.near.delete_note(PROFILES, name)
    assert list(await pair.far.notes(PROFILES)) == []
    await pair.near.put_note(PROFILES, name, content)
    assert await pair.far.get_note(PROFILES, name) == content


async def test_a_bucket_as_the_upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_s3_server() as s3:
        s3.make_bucket()
        for key, value in s3.config.items():
            monkeypatch.setenv(f"AWS_{key.upper()}", value)
        bucket = S3Store(f"s3://{BUCKET}/kv", config=s3.config)
        config = ServerConfig(tmp_path / "near", port=0, grace_s=0, upstream=f"s3://{BUCKET}/kv")
        async with running_server(config) as server:
            near = HttpStore(server.url)
            await put_segment(bucket, SEGMENT)
            await fetch(near)
            await until((tmp_path / "near" / SEGMENT.manifest.key.manifest_name).exists)
            more = page_hashes(128)
            await put_segment(near, make_segment(more, 64, 64))
            assert parts(await bucket.lookup(FOLDER, more)) == [(0, 64), (0, 64)]
            await near.close()
        await bucket.close()


async def test_the_token_of_the_upstream(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("wrong\n")
    async with running_server(ServerConfig(tmp_path / "far", port=0, grace_s=0, token="right")) as far:
        near = ServerConfig(
            tmp_path / "near", port=0, grace_s=0, upstream=far.url, upstream_token_file=tmp_path / "token"
        )
        async with running_server(near) as server:
            store = HttpStore(server.url, options=ONCE)
            with pytest.raises(StoreError, match="the store does not know this token") as e:
                await put_segment(store, SEGMENT)
            assert e.value.reason == "proxy"  # not the client's own token
            (tmp_path / "token").write_text("right\n")

            async def has_written() -> bool:  # the file is read again
                with contextlib.suppress(StoreError):
                    await put_segment(store, SEGMENT)
                    return True
                return False

            await until(has_written)
            await store.close()


@pytest.mark.slow
async def test_a_store_that_is_killed_loses_nothing_that_the_upstream_has(tmp_path: Path) -> None:
    """Kill the store in front while segments are read and written through it, at random moments."""
    chain, pause = page_hashes(512), random.Random(0)
    segments = [make_segment(chain, first, 64) for first in range(0, 512, 64)]
    with (
        StoreProcess(tmp_path / "far") as far,
        StoreProcess(tmp_path / "near", extra_args=["--upstream", far.url]) as near,
    ):
        client = HttpStore(far.url)
        for segment in segments[:4]:
            await put_segment(client, segment)
        written: list[CodedSegment] = []

        async def work() -> None:
            store = HttpStore(near.url, options=ONCE)
            try:
                for segment in pause.sample(segments[:4] + written, 2):
                    await fetch(store, segment, 997)
                for segment in segments[4:]:
                    await put_segment(store, segment)
                    if segment not in written:
                        written.append(segment)
            finally:
                await store.close()

        for _ in range(6):
            working = asyncio.ensure_future(work())
            await asyncio.sleep(pause.uniform(0, 0.3))
            near.kill()
            with contextlib.suppress(StoreError):
                await working
            for segment in segments[:4] + written:
                await fetch(client, segment)
            await asyncio.to_thread(near.start)
        store = HttpStore(near.url)
        for segment in segments[:4] + written:
            await fetch(store, segment)
        await store.close()
        await client.close()
