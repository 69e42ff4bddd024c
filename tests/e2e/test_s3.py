"""Servers share a bucket of Ceph (of moto, where Ceph is missing), with an index of its pages in Redis.

Each test has prompts of its own. Those that empty the index fill it again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import obstore
import pytest

from harness.ceph_server import HAS_CEPH, CephProcess
from harness.engine import SGLangServer
from harness.faults import Fault
from harness.metrics import read_metric, wait_until_written
from harness.redis_server import REDIS, REDIS_MISSING, RedisProcess
from harness.s3_server import BUCKET, S3Server, open_bucket, running_s3_server, s3_config
from harness.waiting import wait_until
from tests.e2e.conftest import PAGE_SIZE, Expected, ask, from_storage, make_prompt, same_answer
from tests.e2e.faults import PAGES, Proxy, fetch_again, is_data, is_write, misses
from tests.e2e.shared import Shared

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.skipif(REDIS is None, reason=REDIS_MISSING),
]

NUM_STORED = 8
BY_NAME = 32 * PAGE_SIZE  # a prompt's first segment; SGLang may leave out the last page of the next one


@pytest.fixture(scope="module")
def bucket() -> Iterator[CephProcess | S3Server]:
    with CephProcess() if HAS_CEPH else running_s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def index() -> Iterator[RedisProcess]:
    with RedisProcess() as server:
        yield server


@pytest.fixture
def filled_again(index: RedisProcess, written: None) -> Iterator[None]:
    """What the index has now, it has after the test, too."""
    entries = {key: entry for key in index.client.scan_iter() if (entry := index.client.dump(key))}
    yield
    for key, entry in entries.items():
        index.client.restore(key, 0, entry, replace=True)  # what it lacked, the reader may have written again


@pytest.fixture(scope="module")
def link(bucket: CephProcess | S3Server) -> Iterator[Proxy]:
    """The readers' way to the bucket."""
    proxy = Proxy(bucket)
    yield proxy
    proxy.close()


STORE = f"s3://{BUCKET}/kv"


def config_of(endpoint: str, index: RedisProcess) -> dict[str, Any]:
    return {"s3": s3_config(endpoint), "index": index.url, "lookup_timeout_s": 60, "codec": "zstd"}


@pytest.fixture(scope="module")
def written(host: Shared, bucket: CephProcess | S3Server, index: RedisProcess, expected: Expected) -> None:
    """A server in host mode has stored the first prompts."""
    with host.attached(STORE, **config_of(bucket.config["endpoint"], index)) as writer:
        for seed in range(NUM_STORED):
            answer = ask(writer, make_prompt(seed))
            assert from_storage(answer) == 0
            assert same_answer(answer, expected[seed])
        wait_until_written(writer, NUM_STORED * PAGES)
        stored = read_metric(writer.metrics(), "sgl_kvfetch_written_pages_total", result="stored")
        assert stored == NUM_STORED * PAGES


@pytest.fixture(scope="module")
def reader(device: Shared, link: Proxy, index: RedisProcess, written: None) -> Iterator[SGLangServer]:
    """Another server, in device mode."""
    with device.attached(STORE, **config_of(link.url, index)) as server:
        yield server


def test_what_one_server_wrote_another_finds(reader: SGLangServer, expected: Expected) -> None:
    before = read_metric(reader.metrics(), "sgl_kvfetch_misses_total")
    # A busy machine may miss the half second that the index has for an answer.
    assert same_answer(fetch_again(reader, 0), expected[0])

    def is_found_inside() -> bool:
        """A prefix that ends inside a stored segment: only the index leads to it."""
        reader.flush()
        return from_storage(ask(reader, make_prompt(0)[:416] + make_prompt(7)[:224])) == 416

    wait_until(is_found_inside)
    assert read_metric(reader.metrics(), "sgl_kvfetch_misses_total") == before


def test_the_gateway_is_killed_in_mid_fetch(
    reader: SGLangServer, bucket: CephProcess | S3Server, link: Proxy, expected: Expected
) -> None:
    reasons = {"refused", "truncated", "timeout"}
    link.set(Fault("stall", after_bytes=1000, only=is_data))  # the fetch is under way when the gateway dies

    def kill() -> None:
        link.wait_for_data()
        if isinstance(bucket, CephProcess):
            bucket.kill_gateway()
        link.set(Fault("refuse"))

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with misses(reader, "fetch", reasons):
            answer = ask(reader, make_prompt(3))
    finally:
        killer.join()
        if isinstance(bucket, CephProcess):
            bucket.start_gateway()
        link.set(None)
    assert same_answer(answer, expected[3])
    assert from_storage(answer) < 640 // 2
    assert same_answer(fetch_again(reader, 3), expected[3])


@pytest.mark.parametrize(("seed", "suffix"), [(4, ".kvd"), (5, ".kvm")])
def test_an_object_is_deleted_behind_the_index(
    reader: SGLangServer, bucket: CephProcess | S3Server, link: Proxy, expected: Expected, seed: int, suffix: str
) -> None:
    link.set(Fault("error", only=is_write))  # the reader, too, stores pages behind which it stores others
    try:
        assert same_answer(fetch_again(reader, seed), expected[seed])
        paths = {path.removeprefix(f"/{BUCKET}/") for path in link.paths(suffix)}
        objects = open_bucket(bucket.config)
        stored = {meta["path"] for metas in obstore.list(objects) for meta in metas}
        assert paths & stored
        obstore.delete(objects, sorted(paths & stored))
        reader.flush()
        answer = ask(reader, make_prompt(seed))
    finally:
        link.set(None)
    assert from_storage(answer) < BY_NAME
    assert same_answer(answer, expected[seed])


@pytest.mark.usefixtures("filled_again")
def test_redis_is_killed(reader: SGLangServer, index: RedisProcess, expected: Expected) -> None:
    before = read_metric(reader.metrics(), "sgl_kvfetch_index_failures_total")
    index.kill()
    try:
        answer = ask(reader, make_prompt(2))
    finally:
        index.start()
    assert from_storage(answer) >= BY_NAME
    assert same_answer(answer, expected[2])
    assert read_metric(reader.metrics(), "sgl_kvfetch_index_failures_total") > before


@pytest.mark.usefixtures("filled_again")
def test_a_new_index_and_a_server_that_knows_nothing(
    host: Shared, link: Proxy, index: RedisProcess, expected: Expected
) -> None:
    index.kill()
    index.start()  # empty
    with host.attached(STORE, **config_of(link.url, index)) as server:
        answer = ask(server, make_prompt(6))
        assert from_storage(answer) >= BY_NAME
        assert same_answer(answer, expected[6])
        server.flush()
        assert same_answer(ask(server, make_prompt(6)), expected[6])
        assert read_metric(server.metrics(), "sgl_kvfetch_misses_total") == 0
