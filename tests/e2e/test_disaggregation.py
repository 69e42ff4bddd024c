"""A prefill and a decode server, which share a store. SGLang sends KV from one to the other with Mooncake, over TCP."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.engine import SGLangServer, free_port, hicache_args
from harness.metrics import wait_until_written
from harness.store_process import StoreProcess
from harness.waiting import WAIT_S
from tests.e2e.conftest import ANSWER_TOKENS, PAGE_SIZE, Expected, ask, assert_fetched, make_prompt
from tests.e2e.shared import Shared

pytest.importorskip("mooncake.engine", reason="needs Mooncake", exc_type=ImportError)
pytestmark = [pytest.mark.sglang, pytest.mark.slow]

OVER_TCP = {"MOONCAKE_PROTOCOL": "tcp"}


def disaggregated(mode: str, bootstrap_port: int) -> list[str]:
    """The flags of one side. Without overlap SGLang needs no CUDA events."""
    return [
        *("--disaggregation-mode", mode, "--disaggregation-transfer-backend", "mooncake"),
        *("--disaggregation-bootstrap-port", str(bootstrap_port), "--disable-overlap-schedule"),
    ]


def ask_both(prefill: SGLangServer, decode: SGLangServer, seed: int, bootstrap_port: int) -> list[dict[str, Any]]:
    """Send a prompt to both, as a router does. Return their answers, the prefill server's first."""
    body = {
        "input_ids": make_prompt(seed),
        "sampling_params": {"max_new_tokens": ANSWER_TOKENS, "temperature": 0.0, "ignore_eos": True},
        **{"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap_port, "bootstrap_room": seed + 1},
    }
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(server.request, "POST", "/generate", body) for server in (prefill, decode)]
        return [json.loads(answer.result(WAIT_S)) for answer in answers]


def storage_tokens(answer: dict[str, Any]) -> int:
    return int((answer["meta_info"].get("cached_tokens_details") or {}).get("storage", 0))


def test_both_sides_use_the_store(model: Path, host: Shared, store: StoreProcess, expected: Expected) -> None:
    port, backend = free_port(), hicache_args(store.url)
    with host.attached(store.url) as server:
        ask(server, make_prompt(1))
        wait_until_written(server, 640 // PAGE_SIZE)
    decode_flags = [*backend, *disaggregated("decode", port), "--disaggregation-decode-enable-radix-cache"]
    with (
        SGLangServer(model, extra_args=[*backend, *disaggregated("prefill", port)], env=OVER_TCP) as prefill,
        SGLangServer(model, extra_args=decode_flags, env=OVER_TCP) as decode,
    ):
        computed, received = ask_both(prefill, decode, 0, port)
        assert received["output_ids"] == expected[0].output_ids
        assert storage_tokens(computed) == storage_tokens(received) == 0
        wait_until_written(prefill, 640 // PAGE_SIZE)
        # What a server without disaggregation has stored, each side fetches itself.
        fetched, restored = ask_both(prefill, decode, 1, port)
        assert restored["output_ids"] == expected[1].output_ids
        assert storage_tokens(fetched) >= 0.9 * 640
        assert storage_tokens(restored) >= 0.9 * 640
    with host.attached(store.url) as server:
        assert_fetched(server, 0, expected[0])
