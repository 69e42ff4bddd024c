from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.redis_server import REDIS, REDIS_MISSING, RedisProcess
from harness.s3_server import BUCKET, S3Server
from harness.small_segments import FOLDER, expiring, head_slice, make_segment, page_hashes, parts
from harness.waiting import WAIT_S
from sgl_kvfetch.stores.base import Lookup
from sgl_kvfetch.stores.indexed_s3 import IndexedS3Store
from sgl_kvfetch.stores.redis_index import IndexOptions
from sgl_kvfetch.stores.s3 import S3Store
from tests.segments import put_all, using
from tests.tools.conftest import kvfetch, kvfetch_json

pytestmark = [pytest.mark.process, pytest.mark.skipif(REDIS is None, reason=REDIS_MISSING)]

URL = f"s3://{BUCKET}/kv"
CHAIN = page_hashes(24)
KEY = make_segment(CHAIN, 16, 8).manifest.key


@pytest.fixture
def s3(s3: S3Server) -> S3Server:
    """Its bucket has three segments of two namespaces."""
    segments = make_segment(CHAIN, 0, 16), make_segment(CHAIN, 16, 8), make_segment(CHAIN, 0, 4, model="another")
    put_all(S3Store(URL), *segments)
    return s3


@pytest.fixture
def redis() -> Iterator[RedisProcess]:
    with RedisProcess() as server:
        yield server


def look_up(redis: RedisProcess, namespace: str, first_page: int) -> Lookup:
    store = IndexedS3Store(URL, IndexOptions(redis.url, timeout_s=WAIT_S))
    return using(store, lambda store: store.lookup(namespace, CHAIN[first_page:]))


def rebuild(redis_url: str, *options: str, exit_code: int = 0) -> str:
    result = kvfetch("reindex", URL + "/", "--index", redis_url, *options)
    assert result.exit_code == exit_code, result.output
    return result.output


def test_rebuild_enters_all_pages(s3: S3Server, redis: RedisProcess) -> None:
    assert parts(look_up(redis, FOLDER, 5)) == []
    assert rebuild(redis.url) == "3 segments with 28 pages entered, 0 failed\n"
    assert redis.client.dbsize() == 28
    assert parts(look_up(redis, FOLDER, 5)) == [(5, 11), (0, 8)]

    redis.client.flushall()
    namespace = head_slice("another").folder
    tally = kvfetch_json("reindex", f"{URL}/#{namespace}", "--index", redis.url)
    assert tally == {"num_segments": 1, "num_pages": 4, "failures": {}}
    assert redis.client.ttl(next(redis.client.scan_iter())) > 6 * 86400
    assert parts(look_up(redis, namespace, 1)) == [(1, 3)]


def test_expired_segments_are_left_out_and_bad_manifests_reported(s3: S3Server, redis: RedisProcess) -> None:
    put_all(S3Store(URL), expiring(make_segment(CHAIN, 0, 16), 1))
    using(S3Store(URL), lambda store: store.put(KEY.manifest_name, b"nonsense"))
    output = rebuild(redis.url, exit_code=1)
    assert f"FAILED {KEY.manifest_name}: " in output
    assert "1 segments with 4 pages entered, 1 failed" in output


def test_an_index_that_is_down_is_an_error(s3: S3Server, redis: RedisProcess) -> None:
    redis.kill()
    assert "index redis://" in rebuild(redis.url, exit_code=2)
