"""Device mode: from the store straight into the token-to-KV pool, with the answers of an engine without a cache.
A stored prompt for which the pool has no room yet does not keep others from running."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from harness.engine import SGLangServer, device_args
from harness.metrics import read_metric, wait_until_written
from harness.otlp_receiver import OtlpReceiver
from harness.store_process import StoreProcess
from harness.waiting import WAIT_S, wait_until
from tests.e2e.conftest import (
    ANSWER_TOKENS,
    PAGE_SIZE,
    Expected,
    ask,
    assert_computed,
    from_storage,
    make_prompt,
    same_answer,
)
from tests.e2e.device import assert_fetched_in_parts, load_of
from tests.e2e.faults import PAGES, compute_and_store, fetch_again
from tests.e2e.shared import Shared

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

STORED = 960
# By SGLang's own estimate, the stored prompt has no room as long as the first request runs; a short one has.
POOL, RUNNING_TOKENS = 1600, 1200


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def own(model: Path, receiver: OtlpReceiver) -> Iterator[Shared]:
    """A server that traces, with a small pool, and with SGLang's tree in Python; others have it in Rust."""
    # SGLang takes its endpoint from the flag, and its protocol from the environment.
    flags = ["--enable-trace", "--otlp-traces-endpoint", f"{receiver.url}/v1/traces", "--max-total-tokens", str(POOL)]
    env = {
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    with closing(Shared(model, [*device_args("http://nowhere"), *flags], None, env)) as shared:
        yield shared


def test_exact(device: Shared, store: StoreProcess, expected: Expected) -> None:
    with device.attached(store.url, quantiser="exact", codec="hevc") as server:
        assert "Using the Python TreeCore" not in server.log()  # SGLang falls back to it, and says so
        compute_and_store(server, expected)
        assert_fetched_in_parts(server, expected)
        server.flush()
        # SGLang compiles a grammar, and forms a batch in the step in which it is there.
        assert from_storage(server.generate(input_ids=make_prompt(1), json_schema='{"type": "object"}')) >= 0.9 * 640
        assert read_metric(server.metrics(), "sgl_kvfetch_misses_total") == 0
        server.flush()

        # Cleared through SGLang's own endpoint, the store has nothing left.
        server.request("POST", "/hicache/storage-backend/clear")
        assert_computed(server, 1, expected[1])
        fetch_again(server, 1)
        server.flush()

        # A store that is gone costs answers nothing.
        store.stop()
        assert_computed(server, 1, expected[1])


def test_a_fetch_is_in_sglangs_trace_of_its_request(own: Shared, receiver: OtlpReceiver, store: StoreProcess) -> None:
    with own.attached(store.url) as server:
        before = len(receiver.named("kvfetch.fetch"))
        ask(server, make_prompt(0))
        wait_until_written(server, PAGES)
        server.flush()
        assert from_storage(ask(server, make_prompt(0))) >= 0.9 * 640
        wait_until(lambda: len(receiver.named("kvfetch.fetch")) == before + 2)
        fetched = receiver.named("kvfetch.fetch")[-1]
        rid = fetched.attributes["rid"]
        assert fetched.attributes["kvfetch.end"] == "landed"
        wait_until(lambda: len(receiver.children(fetched)) == 4, found=lambda: receiver.spans)
        wait_until(lambda: any(span.span_id == fetched.parent_id for span in receiver.spans))
        (whole,) = (span for span in receiver.spans if span.span_id == fetched.parent_id)
        assert (whole.trace_id, whole.attributes["rid"], whole.parent_id) == (fetched.trace_id, rid, "")
        # Each process has its own offset to the wall clock.
        assert whole.start_s - 0.1 <= fetched.start_s <= fetched.end_s <= whole.end_s + 0.1


def test_others_run_while_a_stored_prompt_waits_for_room(own: Shared, store: StoreProcess) -> None:
    with own.attached(store.url, fetch_timeout_s=600) as server, ThreadPoolExecutor(2) as pool:
        computed = ask(server, make_prompt(0, STORED))
        wait_until_written(server, STORED // PAGE_SIZE)

        def have_others_run() -> bool:
            """Whether a short request ended while the stored prompt waited. The first one may end before that, if the
            machine is slow to fetch."""
            server.flush()
            staged = num_staged(server)
            running = pool.submit(generate, server, make_prompt(1, 64), RUNNING_TOKENS)
            wait_until(lambda: running.done() or load_of(server)["num_running_reqs"] == 1)
            stored = pool.submit(ask, server, make_prompt(0, STORED))
            wait_until(lambda: running.done() or num_staged(server) > staged)
            short = ask(server, make_prompt(2, 64))
            is_waiting = not stored.done() and not running.done()
            assert len(short.output_ids) == ANSWER_TOKENS
            assert len(running.result(WAIT_S)["output_ids"]) == RUNNING_TOKENS
            answer = stored.result(WAIT_S)
            assert from_storage(answer) >= 0.9 * STORED
            assert same_answer(answer, computed)
            return is_waiting

        wait_until(have_others_run, poll_s=0)


def num_staged(server: SGLangServer) -> float:
    return read_metric(server.metrics(), "sgl_kvfetch_fetched_pages_total", result="hit")


def generate(server: SGLangServer, prompt: list[int], num_tokens: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
    answer: dict[str, Any] = json.loads(
        server.request("POST", "/generate", {"input_ids": prompt, "sampling_params": sampling})
    )
    return answer
