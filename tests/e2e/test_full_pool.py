"""A full pool: a stored prompt that has no room yet does not keep others from running."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.engine import SGLangServer, device_args
from harness.metrics import read_metric, wait_until_written
from harness.store_process import StoreProcess
from harness.waiting import WAIT_S, wait_until
from tests.e2e.conftest import ANSWER_TOKENS, PAGE_SIZE, ask, from_storage, make_prompt, same_answer
from tests.e2e.device import load_of

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

STORED = 960
# By SGLang's own estimate, the stored prompt has no room as long as the first request runs; a short one has.
POOL, RUNNING_TOKENS = 1600, 1200


def test_others_run_while_a_stored_prompt_waits_for_room(model: Path, store: StoreProcess) -> None:
    flags = [*device_args(store.url, fetch_timeout_s=600), "--max-total-tokens", str(POOL)]
    with SGLangServer(model, extra_args=flags) as server, ThreadPoolExecutor(2) as pool:
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
