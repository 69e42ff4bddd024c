"""Servers share a bucket, with an index of its pages in Redis."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any

import pytest

from harness.faults import Fault
from harness.metrics import read_metric
from harness.redis_server import REDIS, REDIS_MISSING, RedisProcess
from harness.s3_server import BUCKET, running_s3_server, s3_config
from harness.waiting import wait_until
from tests.e2e.conftest import Expected, ask, from_storage, make_prompt, same_answer
from tests.e2e.faults import Proxy, compute_and_store, fetch_again, is_data, misses
from tests.e2e.shared import Shared

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.skipif(REDIS is None, reason=REDIS_MISSING)]

STORE = f"s3://{BUCKET}/kv"


def test_servers_share_a_bucket_that_goes_away_in_mid_fetch(host: Shared, device: Shared, expected: Expected) -> None:
    with running_s3_server() as bucket, RedisProcess() as index, closing(Proxy(bucket.port)) as link:
        config: dict[str, Any] = {"index": index.url, "lookup_timeout_s": 60, "codec": "zstd"}
        with host.attached(STORE, s3=s3_config(bucket.config["endpoint"]), **config) as writer:
            compute_and_store(writer, expected)

        with device.attached(STORE, s3=s3_config(link.url), **config) as reader:
            # A busy machine may miss the half second that the index has for an answer.
            assert same_answer(fetch_again(reader, 0), expected[0])

            def is_found_inside() -> bool:
                """A prefix that ends inside a stored segment: only the index leads to it."""
                reader.flush()
                return from_storage(ask(reader, make_prompt(0)[:416] + make_prompt(7)[:224])) == 416

            wait_until(is_found_inside)
            assert read_metric(reader.metrics(), "sgl_kvfetch_misses_total") == 0

            def kill() -> None:
                link.wait_for_data()
                link.set(Fault("refuse"))

            link.set(Fault("stall", after_bytes=1000, only=is_data))  # the fetch is under way then
            killer = threading.Thread(target=kill)
            killer.start()
            try:
                with misses(reader, "fetch", {"refused", "truncated", "timeout"}):
                    answer = ask(reader, make_prompt(1))
            finally:
                killer.join()
                link.set(None)
            assert same_answer(answer, expected[1])
            assert from_storage(answer) < 640 // 2
            assert same_answer(fetch_again(reader, 1), expected[1])
