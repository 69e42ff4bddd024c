"""The index of pages, while its Redis fails over or restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from harness.engine import free_port
from harness.faults import FaultyProxy
from harness.redis_server import REDIS, REDIS_MISSING, RedisProcess, RedisService, fail_over
from harness.s3_server import BUCKET, S3Server, s3_config
from harness.small_segments import FOLDER, make_segment, page_hashes, parts, put_segment
from harness.waiting import WAIT_S
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.stores.indexed_s3 import IndexedS3Store
from sgl_kvfetch.stores.redis_index import Entry, IndexOptions, PageIndex
from sgl_kvfetch.stores.remote import Breaker
from tests.stores.conformance import failing

pytestmark = pytest.mark.process

URL = f"s3://{BUCKET}/kv"
CHAIN = page_hashes(24)
SEGMENT = make_segment(CHAIN, 0, 16)
KEY = SEGMENT.manifest.key
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


class Lookups:
    """Lookups of a store whose index is asked each time, however often it has failed."""

    def __init__(self, options: IndexOptions, s3_proxy: FaultyProxy) -> None:
        self.store = IndexedS3Store(URL, options, config=s3_config(s3_proxy.url))
        self.store._index._breaker = Breaker(threshold=1 << 30)
        self._requests = s3_proxy.requests

    async def num_gets(self, *expected: tuple[int, int]) -> int:
        """Return how many requests to S3 a lookup takes: with the index, one for each segment that it finds."""
        await self.store._mending.join()
        self._requests.clear()
        assert parts(await self.store.lookup(FOLDER, CHAIN)) == list(expected)
        return len(self._requests)


@pytest.fixture
async def lookups(s3: S3Server, s3_proxy: FaultyProxy, options: IndexOptions) -> AsyncIterator[Lookups]:
    lookups = Lookups(options, s3_proxy)
    await put_segment(lookups.store, SEGMENT)
    assert await lookups.num_gets((0, 16)) == 1
    yield lookups
    await lookups.store.close()


async def test_the_index_is_done_without_while_its_address_leads_to_a_replica(
    lookups: Lookups,
    pair: tuple[RedisProcess, RedisProcess],
    service: RedisService,
    failures: list[StoreError],
    caplog: pytest.LogCaptureFixture,
) -> None:
    await asyncio.to_thread(fail_over, *pair)
    for _ in range(3):
        assert await lookups.num_gets((0, 16)) > 1
    assert {error.reason for error in failures} == {"server"}
    (record,) = caplog.records
    assert "is used without it" in record.message
    service.lead_to(pair[1])
    assert await lookups.num_gets((0, 16)) == 1


async def test_the_index_is_done_without_while_its_server_loads(
    lookups: Lookups, pair: tuple[RedisProcess, RedisProcess], failures: list[StoreError]
) -> None:
    await asyncio.to_thread(pair[0].restart)
    await put_segment(lookups.store, make_segment(CHAIN, 16, 8))  # which is not entered
    assert await lookups.num_gets((0, 16), (0, 8)) > 2
    assert {error.reason for error in failures} == {"refused"}
    assert "Redis is loading the dataset in memory" in str(failures[0])
    await lookups.store._mending.join()
    await asyncio.to_thread(pair[0].end_loading)
    num_failures = len(failures)
    assert await lookups.num_gets((0, 16)) == 1  # as with any entry that is missing, until a lookup goes by names
    assert len(failures) == num_failures


async def _uses(index: PageIndex) -> object:
    return await index.last_uses([KEY])


async def _entries(index: PageIndex) -> object:
    return await index.find(FOLDER, CHAIN[:16])


@pytest.mark.parametrize(
    ("call", "expected", "has_primary"),
    [(_entries, ENTRIES, True), (_uses, [5.0], False)],
    ids=["READONLY", "MASTERDOWN"],
)
async def test_calls_follow_a_failover(
    call: Callable[[PageIndex], Awaitable[object]],
    expected: list[object],
    has_primary: bool,
    pages: PageIndex,
    pair: tuple[RedisProcess, RedisProcess],
    service: RedisService,
    failures: list[StoreError],
) -> None:
    """Many at the same time, each on a connection of its own that the old primary keeps. It is a replica now, and
    answers reads, too, with an error if it has lost its primary."""
    await pages.add(SEGMENT.manifest)
    await pages.record_uses({KEY: 5.0})
    await asyncio.gather(*(call(pages) for _ in range(20)))
    assert service.num_connections > 1
    await asyncio.to_thread(fail_over, *pair)
    if not has_primary:
        pair[0].client.config_set("replica-serve-stale-data", "no")
        pair[0].client.execute_command("REPLICAOF", "127.0.0.1", free_port())
    service.lead_to(pair[1])
    for _ in range(3):
        assert await asyncio.gather(*(call(pages) for _ in range(20))) == [expected] * 20
    assert not failures


async def test_after_a_failure_no_connection_is_kept(
    pages: PageIndex, pair: tuple[RedisProcess, RedisProcess], service: RedisService, failures: list[StoreError]
) -> None:
    """The server that refused a command goes on, and would answer the next."""
    full, other = pair
    other.promote()
    await asyncio.gather(*(pages.find(FOLDER, CHAIN) for _ in range(20)))
    full.client.config_set("maxmemory", 1)
    with failing("full", "'maxmemory'"):
        await pages.add(SEGMENT.manifest)
    service.lead_to(other)
    await pages.add(SEGMENT.manifest)
    assert await pages.find(FOLDER, CHAIN[:16]) == ENTRIES
    assert other.client.dbsize() == 16
