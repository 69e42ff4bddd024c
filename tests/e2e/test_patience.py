"""A request in host mode waits for its stored prefix, by default, and no longer than ``fetch_timeout_s``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.engine import SGLangServer, hicache_args
from harness.faults import Fault
from harness.metrics import read_metric
from harness.store_process import StoreProcess
from harness.waiting import WAIT_S
from tests.e2e.conftest import Expected, ask, from_storage, make_prompt, same_answer
from tests.e2e.faults import DEADLINE_S, SLACK_S, Proxy, is_data, misses
from tests.e2e.shared import Shared

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

LINK_S = 6.0  # about what the link takes for a prompt; SGLang's own budget for it is 1.16 s
ONE_BY_ONE: dict[str, Any] = {"mode": "read_only", "max_connections": 1}  # each answer is as slow as the link
STORED = 0.9 * 640
POLICY = "timeout"  # SGLang's default, as the first test shows


@pytest.fixture(scope="module")
def slow(filled: Path) -> Iterator[tuple[Proxy, float]]:
    """A link to a store that has the first prompts, and how many bytes a second it is to carry."""
    with StoreProcess(filled) as store:
        largest = max(path.stat().st_size for path in store.directory.rglob("*.kvd"))
        proxy = Proxy(store)
        yield proxy, largest / LINK_S
        proxy.close()


@pytest.fixture
def link(slow: tuple[Proxy, float]) -> Proxy:
    """The same, at that speed."""
    proxy, bytes_per_s = slow
    proxy.set(Fault("slow", bytes_per_s=bytes_per_s, only=is_data))
    return proxy


def test_a_prefix_that_takes_longer_than_sglangs_budget_is_a_hit(model: Path, link: Proxy, expected: Expected) -> None:
    flags = hicache_args(link.url, prefetch_policy=None, **ONE_BY_ONE)
    with SGLangServer(model, extra_args=flags) as reader:
        started_s = time.monotonic()
        answer = ask(reader, make_prompt(0))
        assert time.monotonic() - started_s > LINK_S / 2
        assert from_storage(answer) >= STORED
        assert same_answer(answer, expected[0])
        assert f"prefetch policy is timeout: a request waits for its stored prefix at most {WAIT_S:g} s" in reader.log()


def test_a_prefix_that_is_computed_sooner_is_not_waited_for(
    host: Shared, slow: tuple[Proxy, float], expected: Expected
) -> None:
    """The first prompt measures the engine, and the next one the link, for as long as computing takes."""
    link, bytes_per_s = slow
    link.set(Fault("slow", bytes_per_s=bytes_per_s / 20, only=is_data))
    config: dict[str, Any] = {"recompute": "auto", **ONE_BY_ONE}
    with host.attached(link.url, policy=POLICY, **config) as reader:
        ask(reader, make_prompt(100))
        before = partial(read_metric, reader.metrics())
        for seed in range(3):
            answer = ask(reader, make_prompt(seed))
            assert from_storage(answer) < STORED
            assert same_answer(answer, expected[seed])
        counted = partial(read_metric, reader.metrics())
        num_tried, num_computed = (
            counted("sgl_kvfetch_decisions_total", decision=each) - before("sgl_kvfetch_decisions_total", decision=each)
            for each in ("fetch", "recompute")
        )
        assert num_tried + num_computed == 3
        assert num_computed >= 1  # both of the others, unless the machine is so slow that the link is tried again
        assert counted("sgl_kvfetch_recomputed_tokens_total") >= num_computed * STORED


def test_a_budget_of_the_users_own_is_kept(host: Shared, link: Proxy, expected: Expected) -> None:
    """Much the same as SGLang's default, which would lose the prefix."""
    own: dict[str, Any] = {"prefetch_timeout_base": 1.0, "prefetch_timeout_per_ki_token": 0.2}
    with host.attached(link.url, policy=POLICY, **ONE_BY_ONE, **own) as reader:
        with misses(reader, "fetch", {"timeout", "late", "policy"}):
            answer = ask(reader, make_prompt(0))
        assert from_storage(answer) < STORED
        assert same_answer(answer, expected[0])
        assert "and 1 s + 0.2 s per 1,024 tokens (prefetch_timeout_*)" in reader.log()


def test_a_store_that_hangs_costs_no_more_than_the_timeout(host: Shared, link: Proxy, expected: Expected) -> None:
    """tests/e2e/test_faults.py has the same with the policy `wait_complete`."""
    link.set(Fault("hang", only=is_data))
    with host.attached(link.url, policy=POLICY, mode="read_only", fetch_timeout_s=DEADLINE_S) as reader:
        ask(reader, make_prompt(100))  # warm
        with misses(reader, "fetch", {"timeout"}):
            started_s = time.monotonic()
            answer = ask(reader, make_prompt(1))
            took_s = time.monotonic() - started_s
        assert took_s < DEADLINE_S + SLACK_S
        assert same_answer(answer, expected[1])
