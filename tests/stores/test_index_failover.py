"""The index of pages, while its Redis fails over: the old primary lives on as a replica, and keeps its connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing

import pytest

from harness.faults import FaultyProxy
from harness.redis_server import REDIS, REDIS_MISSING, RedisProcess, RedisService, fail_over
from harness.s3_server import BUCKET, S3Server, s3_config
from harness.small_segments import FOLDER, make_segment, page_hashes, parts, put_segment
from harness.waiting import WAIT_S, until
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.stores.indexed_s3 import IndexedS3Store
from sgl_kvfetch.stores.redis_index import Entry, IndexOptions, PageIndex

pytestmark = pytest.mark.process

URL = f"s3://{BUCKET}/kv"
CHAIN = page_hashes(16)
SEGMENT = make_segment(CHAIN, 0, 16)
ENTRIES = [Entry(page, 4, CHAIN[15]) for page in range(16)]


@pytest.fixture
def pair() -> Iterator[tuple[RedisProcess, RedisProcess]]:
    """A primary and its replica."""
    if REDIS is None:
        pytest.skip(REDIS_MISSING)
    with RedisProcess() as primary, RedisProcess() as replica:
        replica.replicate(primary)
        yield primary, replica


@pytest.fixture
async def service(pair: tuple[RedisProcess, RedisProcess]) -> AsyncIterator[RedisService]:
    async with RedisService(pair[0]) as service:
        yield service


@pytest.fixture
def failures() -> list[StoreError]:
    return []


@pytest.fixture
def options(service: RedisService, failures: list[StoreError]) -> IndexOptions:
    return IndexOptions(service.url, timeout_s=WAIT_S, on_failure=failures.append)


@pytest.fixture
async def pages(options: IndexOptions) -> AsyncIterator[PageIndex]:
    index = PageIndex(options, URL)
    yield index
    await index.close()


async def test_lookups_follow_a_failover(
    s3: S3Server,
    s3_proxy: FaultyProxy,
    pair: tuple[RedisProcess, RedisProcess],
    service: RedisService,
    options: IndexOptions,
    failures: list[StoreError],
) -> None:
    store = IndexedS3Store(URL, options, config=s3_config(s3_proxy.url))
    await put_segment(store, SEGMENT)
    assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 16)]
    await asyncio.to_thread(fail_over, *pair)
    service.lead_to(pair[1])
    s3_proxy.requests.clear()
    assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 16)]
    assert len(s3_proxy.requests) == 1  # the manifest; by names, there would be more
    assert not failures
    await store.close()


async def test_an_address_that_stays_with_the_replica_is_counted_and_warned_of(
    s3: S3Server,
    s3_proxy: FaultyProxy,
    pair: tuple[RedisProcess, RedisProcess],
    service: RedisService,
    options: IndexOptions,
    failures: list[StoreError],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As soon as the address leads to the primary, lookups take one request again."""
    store = IndexedS3Store(URL, options, config=s3_config(s3_proxy.url))
    await put_segment(store, SEGMENT)
    await asyncio.to_thread(fail_over, *pair)

    async def lookup_requests() -> int:
        s3_proxy.requests.clear()
        assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 16)]
        await store._mending.join()
        return len(s3_proxy.requests)

    async def has_failed(times: int) -> bool:
        assert await lookup_requests() > 1
        return len(failures) >= times

    await until(lambda: has_failed(8))  # far more than after which an index that does not answer is left alone for long
    assert {error.reason for error in failures} == {"server"}
    (record,) = caplog.records
    assert "a replica" in record.message
    assert "is used without it" in record.message

    assert not store._index._breaker.is_open(time.monotonic() + 1.0)
    service.lead_to(pair[1])

    async def is_asked_again() -> bool:
        return await lookup_requests() == 1

    await until(is_asked_again)
    await store.close()


async def _sweep(index: PageIndex) -> None:
    async with index.sweeping():
        pass


CALLS: dict[str, Callable[[PageIndex], Awaitable[object]]] = {
    "find": lambda index: index.find(FOLDER, CHAIN),
    "add": lambda index: index.add(SEGMENT.manifest),
    "remove": lambda index: index.remove(FOLDER, dict(zip(CHAIN, ENTRIES, strict=True))),
    "note uses": lambda index: index.note_uses({SEGMENT.manifest.key: 5.0}),
    "sweep": _sweep,
}


@pytest.mark.parametrize("call", CALLS)
async def test_each_script_follows_a_failover(
    call: str,
    pages: PageIndex,
    pair: tuple[RedisProcess, RedisProcess],
    service: RedisService,
    failures: list[StoreError],
) -> None:
    await pages.add(SEGMENT.manifest)
    await asyncio.to_thread(fail_over, *pair)
    with pytest.raises(StoreError, match="a replica"):
        await CALLS[call](pages)
    assert len(failures) == 1
    service.lead_to(pair[1])
    await CALLS[call](pages)
    assert len(failures) == 1
    expected = [None] * 16 if call == "remove" else ENTRIES
    assert await pages.find(FOLDER, CHAIN) == expected


async def test_calls_at_the_same_time_follow_a_failover(
    pages: PageIndex, pair: tuple[RedisProcess, RedisProcess], service: RedisService, failures: list[StoreError]
) -> None:
    """Each finds out on a connection of its own, and closes those of the others."""
    await pages.add(SEGMENT.manifest)
    await asyncio.gather(*(pages.find(FOLDER, CHAIN) for _ in range(20)))
    assert service.num_connections > 1
    await asyncio.to_thread(fail_over, *pair)
    service.lead_to(pair[1])
    for _ in range(3):
        assert await asyncio.gather(*(pages.find(FOLDER, CHAIN) for _ in range(20))) == [ENTRIES] * 20
    assert not failures


async def test_a_replica_without_its_primary(
    pages: PageIndex, pair: tuple[RedisProcess, RedisProcess], service: RedisService
) -> None:
    """It answers MASTERDOWN to reads, too."""
    primary, replica = pair
    await pages.add(SEGMENT.manifest)
    await asyncio.to_thread(fail_over, primary, replica)
    primary.client.config_set("replica-serve-stale-data", "no")
    replica.kill()
    await until(lambda: primary.client.info("replication")["master_link_status"] == "down")
    with pytest.raises(StoreError, match="a replica"):
        await pages.last_uses([SEGMENT.manifest.key])
    primary.promote()
    assert await pages.find(FOLDER, CHAIN) == ENTRIES


@pytest.mark.parametrize(
    "answer",
    [
        "LOADING Redis is loading the dataset in memory",
        # As Redis 6.2 words what a script's call was refused with.
        "@user_script: 3: -READONLY You can't write against a read only replica.",
    ],
    ids=["loading", "6.2"],
)
async def test_other_answers_of_a_server_that_cannot_serve_yet(answer: str, index: RedisProcess) -> None:
    """The connection is closed, and the next one leads elsewhere."""
    num_refused = 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_refused
        with closing(writer):
            if num_refused:
                their_reader, their_writer = await asyncio.open_connection("127.0.0.1", index.port)
                with closing(their_writer):
                    while command := await reader.read(1 << 16):
                        their_writer.write(command)
                        writer.write(await their_reader.read(1 << 16))
                return
            while command := await reader.read(1 << 16):
                is_script = b"EVAL" in command
                num_refused += is_script
                writer.write(f"-{answer}\r\n".encode() if is_script else b"+OK\r\n" * command.count(b"*"))

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        pages = PageIndex(IndexOptions(f"redis://127.0.0.1:{port}", timeout_s=WAIT_S), URL)
        assert await pages.find(FOLDER, CHAIN) == [None] * 16
        assert num_refused == 1
        await pages.close()


async def test_a_user_who_may_not_run_a_command_is_not_told_that_nothing_is_there(index: RedisProcess) -> None:
    pages = PageIndex(IndexOptions(index.url, timeout_s=WAIT_S), URL)
    await pages.add(SEGMENT.manifest)
    index.client.execute_command("ACL", "SETUSER", "reader", "on", ">secret", "~*", "+eval", "+set", "+get")
    limited = PageIndex(IndexOptions(index.url.replace("//", "//reader:secret@"), timeout_s=WAIT_S), URL)
    try:
        with pytest.raises(StoreError, match=r"permission|can't run"):
            await limited.find(FOLDER, CHAIN)
    finally:
        index.client.execute_command("ACL", "DELUSER", "reader")
        await limited.close()
        await pages.close()
