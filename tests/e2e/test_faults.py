"""Whatever the store does, requests end in their deadline, with the answers they would have without a cache. In host
mode they wait for a stored prefix by default, and no longer than ``fetch_timeout_s``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from harness.engine import SGLangServer
from harness.faults import Fault
from harness.store_process import StoreProcess
from harness.waiting import wait_until
from tests.e2e.conftest import NUM_STORED, Expected, ask, assert_fetched, from_storage, make_prompt, same_answer
from tests.e2e.faults import (
    DEADLINE_S,
    LOOKUP_S,
    SLACK_S,
    Proxy,
    assert_stored_once_the_store_works,
    counted,
    fetch_again,
    is_data,
)
from tests.e2e.shared import Shared

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

LINK_S = 6.0  # about what the slow link takes for a prompt; SGLang's own budget for it is 1.16 s
POLICY = "timeout"  # SGLang's default, as test_round_trip.py shows


@pytest.fixture(scope="module")
def filled_store(filled: Path) -> Iterator[StoreProcess]:
    with StoreProcess(filled) as store:
        yield store


@pytest.fixture(scope="module")
def proxy(filled_store: StoreProcess) -> Iterator[Proxy]:
    proxy = Proxy(filled_store.port)
    yield proxy
    proxy.close()


# By name: the fault, the stage that falls short, and the reasons under which it may be counted. test_why.py has others.
FAULTS: dict[str, tuple[Fault, str, set[str]]] = {
    "hangs": (Fault("hang"), "lookup", {"timeout"}),
    "says garbage": (Fault("garbage"), "lookup", {"protocol", "truncated", "timeout"}),
    "hangs in mid-fetch": (Fault("hang", only=is_data), "fetch", {"timeout"}),
    "is slow": (Fault("slow", bytes_per_s=2e3, only=is_data), "fetch", {"timeout"}),
    # By what is noticed first: bytes that lack, or those behind the answer.
    "returns a wrong length": (
        Fault("wrong_length", extra_bytes=-7, only=is_data),
        "fetch",
        {"truncated", "protocol", "timeout"},
    ),
    "returns other bytes": (Fault("flip", after_bytes=500, only=is_data), "fetch", {"corrupt"}),
}


@pytest.mark.parametrize(
    ("mode", "policy", "names"),
    [
        ("device", None, FAULTS),
        ("host", "wait_complete", ("hangs", "returns other bytes")),
        ("host", POLICY, ("hangs in mid-fetch",)),
    ],
    ids=["device", "host", "host by SGLang's default"],
)
def test_a_store_that_fails_costs_no_more_than_the_timeout(
    mode: str,
    policy: str | None,
    names: Iterable[str],
    proxy: Proxy,
    expected: Expected,
    request: pytest.FixtureRequest,
) -> None:
    """What fails is the data plane, which both modes have."""
    shared: Shared = request.getfixturevalue(mode)
    config: dict[str, Any] = {"mode": "read_only", "fetch_timeout_s": DEADLINE_S, "lookup_timeout_s": LOOKUP_S}
    with shared.attached(proxy.url, policy=policy, **config) as reader:
        ask(reader, make_prompt(NUM_STORED))  # warm
        for seed, name in enumerate(names):
            assert_a_miss_in_time(reader, proxy, seed, *FAULTS[name], expected)


def assert_a_miss_in_time(
    server: SGLangServer, link: Proxy, seed: int, fault: Fault, stage: str, reasons: set[str], expected: Expected
) -> None:
    """A stored prompt is computed, within the deadline; and fetched, when all is well again."""

    def count_late() -> float:
        """How often a deadline has passed, or lookups have paused after that."""
        return sum(counted(server, each, {"timeout", "late", "skipped"}) for each in ("lookup", "fetch"))

    def is_met() -> bool:
        """Whether the request has met the fault. Where the machine stands still, a deadline passes before that."""
        server.flush()
        before, num_late = counted(server, stage, reasons), count_late()
        link.set(fault)
        try:
            started_s = time.monotonic()
            answer = ask(server, make_prompt(seed))
            took_s = time.monotonic() - started_s
        finally:
            link.set(None)
        assert same_answer(answer, expected[seed]), fault
        assert from_storage(answer) < 640 // 2, fault
        assert took_s < DEADLINE_S + SLACK_S, (fault, took_s)
        wait_until(
            lambda: counted(server, stage, reasons) > before or count_late() > num_late,
            poll_s=0.1,
            found=server.log_tail,
        )
        return counted(server, stage, reasons) > before

    wait_until(is_met)
    assert same_answer(fetch_again(server, seed), expected[seed])


@pytest.mark.parametrize("mode", ["device", "host"])
def test_what_a_store_has_not_taken_is_stored_once_it_works(
    request: pytest.FixtureRequest, tmp_path: Path, mode: str
) -> None:
    """A system prompt stays in SGLang's tree, which offers it to the store once."""
    shared: Shared = request.getfixturevalue(mode)
    with (
        StoreProcess(tmp_path / "store") as store,
        closing(Proxy(store.port)) as link,
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


def test_a_prefix_that_takes_longer_than_sglangs_budget_is_a_hit(
    host: Shared, filled_store: StoreProcess, proxy: Proxy, expected: Expected
) -> None:
    largest = max(path.stat().st_size for path in filled_store.directory.rglob("*.kvd"))
    proxy.set(Fault("slow", bytes_per_s=largest / LINK_S, only=is_data))
    # With one connection, each answer is as slow as the link.
    with host.attached(proxy.url, policy=POLICY, mode="read_only", max_connections=1) as reader:
        started_s = time.monotonic()
        assert_fetched(reader, 0, expected[0])
        assert time.monotonic() - started_s > LINK_S / 2
    proxy.set(None)
