"""The index of pages in Redis: by itself, and while its Redis fails over or restarts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from harness.engine import free_port
from harness.faults import FaultyProxy
from harness.redis_server import REDIS, REDIS_MISSING, RedisProcess, RedisService, fail_over
from harness.s3_server import BUCKET, s3_config
from harness.small_segments import FOLDER, make_segment, page_hashes, parts, put_segment
from harness.waiting import WAIT_S
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.stores import Breaker
from sgl_kvfetch.stores.indexed_s3 import IndexedS3Store
from sgl_kvfetch.stores.redis_index import PASSWORD_ENV, Entry, IndexOptions, PageIndex
from tests.stores.conformance import failing

STORE = "s3://bucket/prefix"
CHAIN = page_hashes(16)


@pytest.fixture(scope="module", params=["one", "cluster"])
def redis(request: pytest.FixtureRequest) -> Iterator[RedisProcess]:
    if REDIS is None:
        pytest.skip(REDIS_MISSING)
    with RedisProcess(cluster=request.param == "cluster") as server:
        yield server


@pytest.fixture
def server(redis: RedisProcess) -> RedisProcess:
    """An empty one."""
    redis.client.flushall()
    return redis


def options(server: RedisProcess) -> IndexOptions:
    return IndexOptions(server.url, timeout_s=WAIT_S)


@pytest.fixture
async def pages(server: RedisProcess) -> AsyncIterator[PageIndex]:
    index = PageIndex(options(server), STORE)
    yield index
    await index.close()


def entries(first_page: int, num_pages: int) -> list[Entry]:
    last = CHAIN[first_page + num_pages - 1]
    return [Entry(page, num_pages.bit_length() - 1, last) for page in range(first_page, first_page + num_pages)]


async def add(index: PageIndex, first_page: int, num_pages: int) -> None:
    await index.add(make_segment(CHAIN, first_page, num_pages).manifest)


@pytest.mark.process
async def test_a_page_is_in_the_longest_segment(server: RedisProcess, pages: PageIndex) -> None:
    assert await pages.find(FOLDER, CHAIN) == [None] * 16
    await add(pages, 4, 4)
    assert await pages.find(FOLDER, CHAIN[4:8]) == entries(4, 4)
    assert (await pages.find(FOLDER, CHAIN))[:4] == [None] * 4
    await add(pages, 0, 8)
    await add(pages, 4, 4)  # written again by one who did not find it
    assert await pages.find(FOLDER, CHAIN) == [*entries(0, 8), *[None] * 8]
    await add(pages, 0, 16)
    assert await pages.find(FOLDER, CHAIN) == entries(0, 16)
    assert [entry.first_page for entry in entries(4, 4)] == [4] * 4
    assert await pages.find(FOLDER, []) == []
    assert await pages.find("0" * 32 + ".0-1", CHAIN) == [None] * 16
    other = PageIndex(options(server), STORE + "x")
    assert await other.find(FOLDER, CHAIN) == [None] * 16
    await other.close()


@pytest.mark.process
async def test_only_an_unchanged_entry_is_removed(pages: PageIndex) -> None:
    await add(pages, 4, 4)
    await pages.remove(FOLDER, dict(zip(CHAIN, entries(0, 16), strict=True)))
    assert await pages.find(FOLDER, CHAIN[4:8]) == entries(4, 4)
    await pages.remove(FOLDER, dict(zip(CHAIN[4:6], entries(4, 4), strict=False)))
    assert await pages.find(FOLDER, CHAIN[4:8]) == [None, None, *entries(4, 4)[2:]]


@pytest.mark.process
async def test_entries_expire_unless_they_are_used(server: RedisProcess) -> None:
    index = PageIndex(replace(options(server), ttl_s=1000.0), STORE)
    await add(index, 0, 4)
    keys = list(server.client.scan_iter())
    assert len(keys) == 4
    for key in keys:
        assert 900 < server.client.ttl(key) <= 1000
        server.client.expire(key, 50)
    await index.find(FOLDER, CHAIN[:3])
    assert sorted(server.client.ttl(key) > 900 for key in keys) == [False, True, True, True]
    await index.close()


@pytest.mark.process
async def test_garbage_is_nothing_and_is_replaced(server: RedisProcess, pages: PageIndex) -> None:
    await add(pages, 0, 4)
    one, two, three, four = server.client.scan_iter()
    server.client.set(one, b"garbage")
    server.client.set(two, b"\xff" * 41)
    server.client.delete(three)
    server.client.rpush(three, b"a list")
    server.client.set(four, b"")
    assert await pages.find(FOLDER, CHAIN[:4]) == [None] * 4
    server.client.delete(two)  # it claims a length that no segment has; TTL or a flush ends that
    await add(pages, 0, 4)
    assert await pages.find(FOLDER, CHAIN[:4]) == entries(0, 4)


@pytest.mark.process
async def test_the_password_of_url_or_environment_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    if REDIS is None:
        pytest.skip(REDIS_MISSING)
    with RedisProcess(password="se/cret") as server:
        for password, environment, is_right in (
            ("", "se/cret", True),
            (":se%2Fcret@", "wrong", True),
            (":wr0ng@", "", False),
        ):
            monkeypatch.setenv(PASSWORD_ENV, environment)
            index = PageIndex(IndexOptions(server.url.replace("//", f"//{password}"), timeout_s=WAIT_S), STORE)
            with nullcontext() if is_right else failing("unauthorised") as caught:
                await add(index, 0, 4)
            assert caught is None or "wr0ng" not in str(caught.value)
            await index.close()


@pytest.mark.parametrize("answer", [b"%1\r\n*0\r\n:1\r\n", b"*1\r\n%1\r\n*0\r\n:1\r\n", b"?\r\n"])
async def test_answers_that_no_server_sends_are_an_error_and_end_the_connection(answer: bytes) -> None:
    """The parser of Redis's client fails at maps that have lists as keys. What else was sent answers nothing later."""
    num_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        with closing(writer):
            while await reader.read(1 << 16):
                writer.write(answer)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        index = PageIndex(IndexOptions(f"redis://127.0.0.1:{port}", timeout_s=WAIT_S), STORE)
        for turn in (1, 2):
            with pytest.raises(StoreError):
                await index.find(FOLDER, CHAIN[:1])
            assert num_connections >= turn
        await index.close()


def documented_rights(is_cluster: bool) -> list[str]:
    """Return the rights of the user in docs/stores.md."""
    text = (Path(__file__).parents[2] / "docs" / "stores.md").read_text()
    one, cluster = re.findall(r"^ACL SETUSER kvfetch on >PASSWORD (~kvf1:\*[^#\n]*)", text, re.MULTILINE)
    return (cluster if is_cluster else one).split()


async def use_all(server: RedisProcess, rights: list[str]) -> None:
    """Do whatever the client does, as a user with these rights alone."""
    server.client.execute_command("ACL", "SETUSER", "kvfetch", "reset", "on", ">password", *rights)
    url = server.url.replace("://", "://kvfetch@") + ("" if "+cluster" in server.url else "/2")
    index, other = (PageIndex(IndexOptions(url, timeout_s=WAIT_S), STORE) for _ in range(2))
    try:
        async with index.sweeping():
            await add(index, 0, 4)
            assert await index.find(FOLDER, CHAIN[:4]) == entries(0, 4)
            key = make_segment(CHAIN, 0, 4).manifest.key
            await index.record_uses({key: 7.0})
            assert await index.last_uses([key]) == [7.0]
            await index.remove(FOLDER, dict(zip(CHAIN, entries(0, 4), strict=False)))
            assert await index.find(FOLDER, CHAIN[:4]) == [None] * 4
            with pytest.raises(StoreError, match=r"it has the lock for \d+ s more"):
                await other.sweeping().__aenter__()
    finally:
        await index.close()
        await other.close()


@pytest.mark.process
async def test_a_user_with_the_documented_rights_alone(server: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD_ENV, "password")
    rights = documented_rights("+cluster" in server.url)
    await use_all(server, rights)
    for right in rights:
        with failing("unauthorised", rf"; the index needs .*{re.escape(right)}"):
            await use_all(server, [each for each in rights if each != right])


SEGMENT = make_segment(CHAIN, 0, 16)


class Pair:
    """A primary and its replica, a service whose address leads to one of them, and clients that ask there each time,
    however often that has failed."""

    def __init__(self, primary: RedisProcess, replica: RedisProcess, service: RedisService, s3_url: str) -> None:
        self.primary, self.replica, self.service = primary, replica, service
        self.failures: list[StoreError] = []
        options = IndexOptions(service.url, timeout_s=WAIT_S, on_failure=self.failures.append)
        self.index = PageIndex(options, STORE)
        self.store = IndexedS3Store(f"s3://{BUCKET}/kv", options, config=s3_config(s3_url))
        self.store._index._breaker = Breaker(threshold=1 << 30)


@pytest.fixture
async def pair(s3_proxy: FaultyProxy) -> AsyncIterator[Pair]:
    if REDIS is None:
        pytest.skip(REDIS_MISSING)
    with RedisProcess() as primary, RedisProcess() as replica:
        replica.replicate(primary)
        async with RedisService(primary) as service:
            pair = Pair(primary, replica, service, s3_proxy.url)
            yield pair
            await pair.index.close()
            await pair.store.close()


@pytest.mark.process
async def test_the_index_is_done_without_while_its_address_leads_to_a_replica(
    pair: Pair, s3_proxy: FaultyProxy, caplog: pytest.LogCaptureFixture
) -> None:
    async def num_gets() -> int:
        """Return how many requests to S3 a lookup takes: one with the index."""
        await pair.store._mending.join()
        s3_proxy.requests.clear()
        assert parts(await pair.store.lookup(FOLDER, CHAIN)) == [(0, 16)]
        return len(s3_proxy.requests)

    await put_segment(pair.store, SEGMENT)
    assert await num_gets() == 1
    await asyncio.to_thread(fail_over, pair.primary, pair.replica)
    for _ in range(3):
        assert await num_gets() > 1
    assert {error.reason for error in pair.failures} == {"server"}
    (record,) = caplog.records
    assert "is used without it" in record.message
    pair.service.target = pair.replica
    assert await num_gets() == 1


@pytest.mark.process
@pytest.mark.parametrize("is_read", [False, True], ids=["READONLY", "MASTERDOWN"])
async def test_calls_follow_a_failover(pair: Pair, is_read: bool) -> None:
    """Many at the same time, each on a connection of its own that the old primary keeps. It is a replica now, and
    answers reads, too, with an error if it has lost its primary."""
    key = SEGMENT.manifest.key

    async def call() -> object:
        return await (pair.index.last_uses([key]) if is_read else pair.index.find(FOLDER, CHAIN))

    await pair.index.add(SEGMENT.manifest)
    await pair.index.record_uses({key: 5.0})
    await asyncio.gather(*(call() for _ in range(20)))
    assert pair.service.num_connections > 1
    await asyncio.to_thread(fail_over, pair.primary, pair.replica)
    if is_read:
        pair.primary.client.config_set("replica-serve-stale-data", "no")
        pair.primary.client.execute_command("REPLICAOF", "127.0.0.1", free_port())
    pair.service.target = pair.replica
    for _ in range(3):
        assert await asyncio.gather(*(call() for _ in range(20))) == [[5.0] if is_read else entries(0, 16)] * 20
    assert not pair.failures


@pytest.mark.process
async def test_after_a_failure_no_connection_is_kept(pair: Pair) -> None:
    """The server that refused a command goes on, and would answer the next."""
    pair.replica.promote()
    await asyncio.gather(*(pair.index.find(FOLDER, CHAIN) for _ in range(20)))
    pair.primary.client.config_set("maxmemory", 1)
    with failing("full", "'maxmemory'"):
        await pair.index.add(SEGMENT.manifest)
    pair.service.target = pair.replica
    await pair.index.add(SEGMENT.manifest)
    assert await pair.index.find(FOLDER, CHAIN) == entries(0, 16)
    assert pair.replica.client.dbsize() == 16
