"""An S3 store with an index of its pages, and what happens when the two do not agree."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from harness.faults import Fault, FaultyProxy
from harness.redis_server import REDIS, REDIS_MISSING, RedisProcess
from harness.s3_server import BUCKET, S3Server, s3_config
from harness.small_segments import FOLDER, make_segment, page_hashes, parts, put_segment
from harness.waiting import WAIT_S, until
from sgl_kvfetch.codec import StoreKeys
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.stores import Breaker, HttpOptions, Lookup, Store
from sgl_kvfetch.stores.indexed_s3 import IndexedS3Store
from sgl_kvfetch.stores.keyed import KeyedStore
from sgl_kvfetch.stores.redis_index import Entry, IndexOptions, PageIndex
from sgl_kvfetch.stores.s3 import S3Store
from tests.stores.conformance import failing

pytestmark = pytest.mark.process

URL = f"s3://{BUCKET}/kv"
CHAIN = page_hashes(32)


@pytest.fixture
async def store(s3: S3Server, index: RedisProcess, s3_proxy: FaultyProxy) -> AsyncIterator[IndexedS3Store]:
    """Its requests to S3 go through ``s3_proxy``."""
    options = HttpOptions(timeout_s=20, max_attempts=2, backoff_s=0.01)
    config = s3_config(s3_proxy.url)
    store = IndexedS3Store(URL, IndexOptions(index.url, timeout_s=WAIT_S), options=options, config=config)
    yield store
    await store.close()


@pytest.fixture
async def pages(index: RedisProcess) -> AsyncIterator[PageIndex]:
    """The same index, for the test's own looks."""
    pages = PageIndex(IndexOptions(index.url, timeout_s=WAIT_S), URL)
    yield pages
    await pages.close()


async def put(store: Store, *segments: tuple[int, int]) -> None:
    for first_page, num_pages in segments:
        await put_segment(store, make_segment(CHAIN, first_page, num_pages))


def manifest_name(first_page: int, num_pages: int) -> str:
    return make_segment(CHAIN, first_page, num_pages).manifest.key.manifest_name


async def test_a_hit_takes_a_get_a_segment_and_a_miss_one_a_length(
    store: IndexedS3Store, index: RedisProcess, pages: PageIndex, s3_proxy: FaultyProxy
) -> None:
    assert await store.lookup(FOLDER, CHAIN) == Lookup(())
    assert len(s3_proxy.requests) == 6  # lengths 1 to 32
    await put(store, (0, 16), (16, 8))
    gets = [("GET", f"/{BUCKET}/kv/{manifest_name(*segment)}") for segment in ((0, 16), (16, 8))]
    for is_flushed in (False, True):
        if is_flushed:
            index.client.flushall()
            assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 16), (0, 8)]  # by their names

            async def are_known() -> bool:  # pages are entered again
                return None not in await pages.find(FOLDER, CHAIN[:24])

            await until(are_known)
        s3_proxy.requests.clear()
        assert parts(await store.lookup(FOLDER, CHAIN[3:20])) == [(3, 13), (0, 4)]
        assert sorted(s3_proxy.requests) == sorted(gets)


async def test_a_page_that_the_index_lost_does_not_hide_the_others(store: IndexedS3Store, pages: PageIndex) -> None:
    await put(store, (0, 16), (16, 8))
    known = await pages.find(FOLDER, CHAIN[:24])
    for lost in (0, 7, 15, 16, 20):
        entry = known[lost]
        assert entry is not None
        await pages.remove(FOLDER, {CHAIN[lost]: entry})
    found = await store.lookup(FOLDER, CHAIN)
    assert found.num_pages >= 15
    for (skipped, num_pages), (first, end) in zip(parts(found), ((0, 16), (16, 24)), strict=False):
        assert 0 <= skipped < skipped + num_pages <= end - first


async def test_what_is_gone_behind_the_index_is_a_miss(s3: S3Server, store: IndexedS3Store, pages: PageIndex) -> None:
    plain = S3Store(URL, config=s3.config)

    async def until_known(*expected: int | None) -> None:
        """Wait until the index leads to segments of these orders."""

        async def are_known() -> bool:
            found = await pages.find(FOLDER, CHAIN[: len(expected)])
            return [entry and entry.order for entry in found] == list(expected)

        await until(are_known)

    await put(store, (0, 16), (16, 8), (0, 4))
    await plain.delete(manifest_name(16, 8))
    assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 16)]
    await until_known(*[4] * 16, *[None] * 16)
    await plain.delete(manifest_name(0, 16))
    assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 4)]  # the shorter one
    await until_known(*[2] * 4, *[None] * 28)
    await plain.delete(manifest_name(0, 4))
    assert await store.lookup(FOLDER, CHAIN) == Lookup(())
    await until_known(*[None] * 32)


async def test_lying_entries_give_no_wrong_pages(store: IndexedS3Store, index: RedisProcess, pages: PageIndex) -> None:
    other = page_hashes(8, "another", branch_at=4)
    segments = [make_segment(chain, 0, 8) for chain in (CHAIN, other)]
    for segment in segments:
        await put_segment(store, segment)
    manifests = {segment.manifest.encode(): segment.manifest for segment in segments}
    keys = pages._page_keys(FOLDER, CHAIN[:8])
    for lie in (
        Entry(0, 3, other[7]),  # the segment of another branch
        Entry(8, 3, CHAIN[7]),  # at another position
        Entry(2, 3, CHAIN[7]),
        Entry(0, 2, CHAIN[7]),  # of another length
        Entry(0, 20, b"\0" * 32),  # of no segment
        Entry((1 << 64) - 1, 3, CHAIN[7]),
    ):
        for key in keys:
            index.client.set(key, lie.encode())
        found: list[bytes] = []
        for hit in (await store.lookup(FOLDER, CHAIN[:8])).hits:
            found += manifests[hit.manifest].page_hashes[hit.first_page : hit.first_page + hit.num_pages]
        assert found == CHAIN[: len(found)]
        await store._mending.join()
        for page, key in enumerate(keys):
            index.client.set(key, Entry(page, 3, CHAIN[7]).encode())
        assert parts(await store.lookup(FOLDER, CHAIN[:8])) == [(0, 8)]


async def test_a_manifest_with_other_pages_is_not_used(s3: S3Server, store: IndexedS3Store) -> None:
    await put(store, (0, 8))
    for content in (make_segment(page_hashes(8, "another"), 0, 8).manifest.encode(), b"nonsense"):
        await S3Store(URL, config=s3.config).put(manifest_name(0, 8), content)
        assert await store.lookup(FOLDER, CHAIN) == Lookup(())


@pytest.mark.skipif(REDIS is None, reason=REDIS_MISSING)
async def test_a_dead_index_costs_nothing_but_round_trips(s3: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    failures: list[StoreError] = []
    with RedisProcess() as redis:
        options = IndexOptions(redis.url, timeout_s=WAIT_S, on_failure=failures.append)
        store = IndexedS3Store(URL, options, config=s3.config)
        store._index._breaker = Breaker(first_pause_s=10 * WAIT_S)
        await put(store, (0, 16))
    await put(store, (16, 8))
    for _ in range(8):
        assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 16), (0, 8)]
    await store._mending.join()
    assert 3 <= len(failures) <= 4  # then it is left alone; two may fail at the same time
    assert sum("is used without it" in record.message for record in caplog.records) == 1
    await store.close()


async def test_a_hanging_index_is_given_up_in_time(s3: S3Server, index: RedisProcess) -> None:
    async with FaultyProxy("127.0.0.1", index.port) as proxy:
        await proxy.set(Fault("silent"))
        options = IndexOptions(f"redis://127.0.0.1:{proxy.port}", timeout_s=0.1)
        store = IndexedS3Store(URL, options, config=s3.config)
        async with asyncio.timeout(WAIT_S):
            await put(store, (0, 16))
            assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 16)]
        await store.close()


async def test_failures_of_s3_are_errors_and_the_index_forgets_nothing(
    store: IndexedS3Store, pages: PageIndex, s3_proxy: FaultyProxy
) -> None:
    await put(store, (0, 16))
    await s3_proxy.set(Fault("error", status=503, times=1))
    assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 16)]
    for fault, reason in (
        (Fault("error", status=503), "server"),
        (Fault("error", status=404), "protocol"),  # which is not S3's
        (Fault("close", after_bytes=20), "truncated"),
    ):
        await s3_proxy.set(fault)
        with failing(reason):
            await store.lookup(FOLDER, CHAIN)
        await store._mending.join()
        assert None not in await pages.find(FOLDER, CHAIN[:16])
        await s3_proxy.set(None)
        assert parts(await store.lookup(FOLDER, CHAIN)) == [(0, 16)]


async def test_encrypted_manifests_are_entered_too(store: IndexedS3Store, s3_proxy: FaultyProxy) -> None:
    keyed = KeyedStore(store, StoreKeys(b"k" * 32))
    await put(keyed, (0, 16))
    s3_proxy.requests.clear()
    assert parts(await keyed.lookup(FOLDER, CHAIN[5:12])) == [(5, 7)]
    assert len(s3_proxy.requests) == 1
