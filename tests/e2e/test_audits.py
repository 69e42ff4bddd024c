"""Audits of real servers: what is stored is compared with what they compute."""

from __future__ import annotations

import json
import urllib.request
from functools import partial
from typing import Any

import pytest

from harness.engine import SGLangServer
from harness.metrics import read_metric, wait_until_written
from harness.store_process import StoreProcess
from harness.waiting import wait_until
from sgl_kvfetch.reasons import Reason
from tests.e2e.conftest import PAGE_SIZE, Expected, ask, from_storage, make_prompt, same_answer
from tests.e2e.shared import Shared
from tests.e2e.test_why import why
from tests.reasons import assert_why

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

TOKENS, AUDITED = 640, 128
COMMON: dict[str, Any] = {"prefetch_threshold": 64}
ALL = COMMON | {"audit_share": 1}


def audits(server: SGLangServer, result: str) -> float:
    return read_metric(server.metrics(), "sgl_kvfetch_audits_total", result=result)


def has_found(server: SGLangServer, count: int) -> bool:
    return audits(server, "beyond") == count


def told_to(store: StoreProcess) -> list[Any]:
    """Return what servers told the store of their audits."""
    with urllib.request.urlopen(f"{store.url}/v1/summary") as answer:
        return [told for folder in json.load(answer)["folders"] for told in folder["audits"]]


@pytest.mark.parametrize("mode", ["host", "device"])
def test_the_end_of_a_hit_is_computed_and_compared(
    mode: str, store: StoreProcess, request: pytest.FixtureRequest, expected: Expected
) -> None:
    shared: Shared = request.getfixturevalue(mode)
    with shared.attached(store.url, **COMMON) as server:
        ask(server, make_prompt(0))
        wait_until_written(server, TOKENS // PAGE_SIZE)
    with shared.attached(store.url, **ALL) as server:
        answer = ask(server, make_prompt(0))
        assert from_storage(answer) == TOKENS - PAGE_SIZE - AUDITED  # SGLang does not look for the last page
        assert same_answer(answer, expected[0])
        wait_until(lambda: audits(server, "sound") == 1)
        assert_why(why(store, server, 0), Reason.AUDIT)
        wait_until(lambda: bool(told_to(store)))
        (told,) = told_to(store)
        assert told["audits"]["num_audits"] == 1
        assert 0 <= told["audits"]["typical"] <= told["audits"]["ratio"] < 4


@pytest.mark.parametrize("mode", ["host", "device"])
def test_a_server_stops_reading_what_other_weights_wrote_under_its_name(
    mode: str, other: Shared, store: StoreProcess, request: pytest.FixtureRequest
) -> None:
    shared: Shared = request.getfixturevalue(mode)
    prompts = [make_prompt(seed) for seed in range(4)]
    with other.attached(store.url, **COMMON, model_id="m") as writer:
        for prompt in prompts:
            ask(writer, prompt)
        wait_until_written(writer, len(prompts) * TOKENS // PAGE_SIZE)
    with shared.attached(store.url, **ALL, model_id="m") as server:
        for count, prompt in enumerate(prompts[:3], start=1):
            assert from_storage(ask(server, prompt)) > 0
            wait_until(partial(has_found, server, count))
        wait_until(lambda: read_metric(server.metrics(), "sgl_kvfetch_audited_off") == 1)
        assert "audits have failed" in server.log()
        wait_until(lambda: any(told["audits"]["off"] for told in told_to(store)))
        assert from_storage(ask(server, prompts[3])) == 0
        assert_why(why(store, server, 3), Reason.AUDITED)
    with shared.attached(store.url, **ALL, model_id="m") as server:  # another data plane remembers it
        assert from_storage(ask(server, prompts[3])) == 0
