"""What is stored comes back, and answers do not change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sgl_kvfetch.testing.engine import SGLangServer, hicache_args
from sgl_kvfetch.testing.metrics import read_metric, wait_until_written
from sgl_kvfetch.testing.store_process import StoreProcess
from tests.e2e.conftest import PAGE_SIZE, Expected, ask, from_storage, make_prompt, same_answer

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PAGES = 640 // PAGE_SIZE


def test_exact(model: Path, store: StoreProcess, expected: Expected) -> None:
    flags = hicache_args(store.url, quantiser="exact", codec="hevc")
    with SGLangServer(model, extra_args=flags) as writer:
        for seed in range(2):
            answer = ask(writer, make_prompt(seed))
            assert from_storage(answer) == 0
            assert same_answer(answer, expected[seed])
        wait_until_written(writer, 2 * PAGES)
        assert read_metric(writer.metrics(), "sgl_kvfetch_written_pages_total", result="stored") == 2 * PAGES

    with SGLangServer(model, extra_args=flags) as reader:
        for seed in range(2):
            answer = ask(reader, make_prompt(seed))
            assert from_storage(answer) >= 0.9 * 640
            assert same_answer(answer, expected[seed])

        # A prefix that ends inside a stored segment, and goes on differently.
        half = make_prompt(0)[:416] + make_prompt(7)[:224]
        assert from_storage(ask(reader, half)) == 0  # the reader has this half on its device already
        reader.flush()
        answer = ask(reader, half)
        assert from_storage(answer) == 416
        metrics = reader.metrics()
        assert read_metric(metrics, "sgl_kvfetch_misses_total") == 0
        assert read_metric(metrics, "sgl_kvfetch_wire_bytes_total", direction="read") > 0

        # Cleared through SGLang's own endpoint, the store has nothing left for anyone.
        reader.flush()
        reader.request("POST", "/hicache/storage-backend/clear")
        answer = ask(reader, make_prompt(1))
        assert from_storage(answer) == 0
        assert same_answer(answer, expected[1])


@pytest.mark.parametrize(("quantiser", "tolerance"), [("uint8", 0.05)])
def test_quantised(model: Path, store: StoreProcess, expected: Expected, quantiser: str, tolerance: float) -> None:
    """``uint8`` moves a value by at most half a step: 1/254 of the largest in its head."""
    flags = hicache_args(store.url, quantiser=quantiser, codec="hevc420")
    with SGLangServer(model, extra_args=flags) as writer:
        ask(writer, make_prompt(0))
        wait_until_written(writer, PAGES)
    with SGLangServer(model, extra_args=flags) as reader:
        answer = ask(reader, make_prompt(0))
        assert from_storage(answer) >= 0.9 * 640
        # Tokens may part where two are nearly equally likely; up to there the logprobs are comparable.
        same = [a == b for a, b in zip(answer.output_ids, expected[0].output_ids, strict=True)]
        num_same = same.index(False) if False in same else len(same)
        assert num_same >= 1
        assert answer.logprobs[:num_same] == pytest.approx(expected[0].logprobs[:num_same], abs=tolerance)


def test_two_ranks(model: Path, store: StoreProcess) -> None:
    flags = [*hicache_args(store.url, codec="hevc"), "--tp-size", "2"]
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with SGLangServer(model, extra_args=flags, env=env) as writer:
        computed = ask(writer, make_prompt(0))
        assert from_storage(computed) == 0
        wait_until_written(writer, 2 * PAGES)
    with SGLangServer(model, extra_args=flags, env=env) as reader:
        answer = ask(reader, make_prompt(0))
        assert from_storage(answer) >= 0.9 * 640
        assert same_answer(answer, computed)


def test_attach_and_detach_at_run_time(model: Path, store: StoreProcess, expected: Expected) -> None:
    flags = hicache_args(store.url)
    with SGLangServer(model, extra_args=flags) as writer:
        ask(writer, make_prompt(0))
        wait_until_written(writer, PAGES)
        without_storage = flags[: flags.index("--hicache-storage-backend")]
    with SGLangServer(model, extra_args=without_storage, admin_api_key="admin") as server:
        assert from_storage(ask(server, make_prompt(0))) == 0
        server.flush()
        server.request("PUT", "/hicache/storage-backend", _attachment(store.url))
        answer = ask(server, make_prompt(0))
        assert from_storage(answer) >= 0.9 * 640
        assert same_answer(answer, expected[0])
        server.flush()
        server.request("DELETE", "/hicache/storage-backend")
        assert from_storage(ask(server, make_prompt(0))) == 0
        server.flush()
        server.request("PUT", "/hicache/storage-backend", _attachment(store.url))
        assert from_storage(ask(server, make_prompt(0))) >= 0.9 * 640


def _attachment(url: str) -> dict[str, str]:
    extra = {"store": url, "prefetch_threshold": PAGE_SIZE}
    return {
        "hicache_storage_backend": "kvfetch",
        "hicache_storage_backend_extra_config_json": json.dumps(extra),
        "hicache_storage_prefetch_policy": "wait_complete",
    }
