"""Whatever the store does, requests end in their deadline, with the answers they would have without a cache. In host
mode they wait for a stored prefix by default, and no longer than ``fetch_timeout_s``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.faults import Fault
from harness.metrics import read_metric
from harness.store_process import StoreProcess
from tests.e2e.conftest import NUM_STORED, Expected, ask, from_storage, make_prompt, same_answer
from tests.e2e.faults import (
    DEADLINE_S,
    FAULTS,
    LOOKUP_S,
    Proxy,
    assert_a_miss_in_time,
    assert_stored_once_the_store_works,
    is_data,
)
from tests.e2e.shared import Shared

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

Slow = Callable[..., Proxy]
LINK_S = 6.0  # about what the slow link takes for a prompt; SGLang's own budget for it is 1.16 s
ONE_BY_ONE: dict[str, Any] = {"mode": "read_only", "max_connections": 1}  # each answer is as slow as the link
STORED = 0.9 * 640
POLICY = "timeout"  # SGLang's default, as test_round_trip.py shows


@pytest.fixture(scope="module")
def filled_store(filled: Path) -> Iterator[StoreProcess]:
    with StoreProcess(filled) as store:
        yield store


@pytest.fixture(scope="module")
def proxy(filled_store: StoreProcess) -> Iterator[Proxy]:
    proxy = Proxy(filled_store)
    yield proxy
    proxy.close()


@pytest.fixture
def slow(filled_store: StoreProcess, proxy: Proxy) -> Iterator[Slow]:
    """Makes the link slow: it takes ``times`` `LINK_S` for a prompt."""
    largest = max(path.stat().st_size for path in filled_store.directory.rglob("*.kvd"))

    def slow(times: float = 1.0) -> Proxy:
        proxy.set(Fault("slow", bytes_per_s=largest / LINK_S / times, only=is_data))
        return proxy

    yield slow
    proxy.set(None)


def test_a_store_that_fails_costs_no_more_than_the_timeout(host: Shared, proxy: Proxy, expected: Expected) -> None:
    """test_device_ends.py has all faults: what fails is the data plane, which both modes have."""
    config: dict[str, Any] = {"mode": "read_only", "fetch_timeout_s": DEADLINE_S, "lookup_timeout_s": LOOKUP_S}
    for policy, names in (("wait_complete", ("hangs", "returns other bytes")), (POLICY, ("hangs in mid-fetch",))):
        with host.attached(proxy.url, policy=policy, **config) as reader:
            ask(reader, make_prompt(NUM_STORED))  # warm
            for seed, (name, fault, stage, reasons) in enumerate(FAULTS):
                if name in names:
                    assert_a_miss_in_time(reader, proxy, seed, fault, stage, reasons, expected)


@pytest.mark.parametrize("mode", ["device", "host"])
def test_what_a_store_has_not_taken_is_stored_once_it_works(
    request: pytest.FixtureRequest, tmp_path: Path, mode: str
) -> None:
    """A system prompt stays in SGLang's tree, which offers it to the store once."""
    shared: Shared = request.getfixturevalue(mode)
    with (
        StoreProcess(tmp_path / "store") as store,
        closing(Proxy(store)) as link,
        shared.attached(link.url, fetch_timeout_s=600) as server,
    ):
        assert_stored_once_the_store_works(server, link)


def test_a_fetch_that_hangs_does_not_keep_the_cache_from_being_flushed(
    host: Shared, proxy: Proxy, expected: Expected
) -> None:
    """SGLang joins the fetching thread for 10 s when it flushes, and dies if it does not end."""
    proxy.set(Fault("hang", only=is_data))
    budget: dict[str, Any] = {"prefetch_timeout_base": 1.0, "prefetch_timeout_per_ki_token": 0.2}
    with host.attached(proxy.url, policy="timeout", mode="read_only", fetch_timeout_s=60, **budget) as reader:
        assert same_answer(ask(reader, make_prompt(0)), expected[0])
        reader.flush()
        assert same_answer(ask(reader, make_prompt(1)), expected[1])
    proxy.set(None)


def test_a_prefix_that_takes_longer_than_sglangs_budget_is_a_hit(host: Shared, slow: Slow, expected: Expected) -> None:
    link = slow()
    with host.attached(link.url, policy=POLICY, **ONE_BY_ONE) as reader:
        started_s = time.monotonic()
        answer = ask(reader, make_prompt(0))
        assert time.monotonic() - started_s > LINK_S / 2
        assert from_storage(answer) >= STORED
        assert same_answer(answer, expected[0])


def test_a_prefix_that_is_computed_sooner_is_not_waited_for(host: Shared, slow: Slow, expected: Expected) -> None:
    """The first prompt measures the engine, and the next one the link, for as long as computing takes."""
    link = slow(20)
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
