"""Device mode while the store is slow or fails: requests are parked, others go on, and every slot comes back."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sgl_kvfetch.testing.engine import Generation, ServerError, SGLangServer, device_args
from sgl_kvfetch.testing.faults import Fault
from sgl_kvfetch.testing.metrics import wait_until_written
from sgl_kvfetch.testing.store_process import StoreProcess
from tests.e2e.conftest import PAGE_SIZE, Expected, ask, from_storage, make_prompt, same_answer
from tests.e2e.test_faults import DEADLINE_S, FAULTS, NUM_STORED, SLACK_S, Proxy, counted, is_data

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PAGES = 640 // PAGE_SIZE
HANG = Fault("hang", only=is_data)


@pytest.fixture(scope="module")
def link(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """The way to a store that holds the first prompts."""
    with StoreProcess(tmp_path_factory.mktemp("device") / "store") as store:
        with SGLangServer(model, extra_args=device_args(store.url, codec="hevc")) as writer:
            for seed in range(NUM_STORED):
                ask(writer, make_prompt(seed))
            wait_until_written(writer, NUM_STORED * PAGES)
        proxy = Proxy(store)
        yield proxy
        proxy.close()


@pytest.fixture(scope="module")
def server(model: Path, link: Proxy) -> Iterator[SGLangServer]:
    """SGLang itself counts the pool's slots whenever it is idle, and dies if some are missing."""
    flags = device_args(
        link.url, mode="read_only", fetch_timeout_s=DEADLINE_S, lookup_timeout_s=1.0, read_bytes=64 << 10
    )
    with SGLangServer(model, extra_args=flags) as server:
        ask(server, make_prompt(NUM_STORED))  # warm
        yield server


@pytest.fixture(autouse=True)
def as_before(server: SGLangServer, link: Proxy) -> Iterator[None]:
    yield
    link.set(None)
    fetch_again(server, NUM_STORED - 1)


def fetch_again(server: SGLangServer, seed: int) -> Generation:
    """All is well again, once the pause after failures is over."""
    deadline_s = time.monotonic() + 30
    while True:
        server.flush()
        answer = ask(server, make_prompt(seed))
        if from_storage(answer) >= 0.9 * 640:
            return answer
        assert time.monotonic() < deadline_s
        time.sleep(0.5)


@pytest.mark.parametrize(
    ("seed", "fault", "stage", "reasons"), [(i, *case[1:]) for i, case in enumerate(FAULTS)], ids=[c[0] for c in FAULTS]
)
def test_a_store_that(
    seed: int,
    fault: Fault,
    stage: str,
    reasons: set[str],
    link: Proxy,
    server: SGLangServer,
    expected: Expected,
) -> None:
    before = counted(server, stage, reasons)
    link.set(fault)
    started_s = time.monotonic()
    answer = ask(server, make_prompt(seed))
    took_s = time.monotonic() - started_s
    link.set(None)
    assert same_answer(answer, expected[seed])
    assert from_storage(answer) < 640 // 2
    assert took_s < DEADLINE_S + SLACK_S
    assert counted(server, stage, reasons) > before
    assert same_answer(fetch_again(server, seed), expected[seed])


def begin(server: SGLangServer, pool: ThreadPoolExecutor, seed: int, rid: str) -> Future[str]:
    """A request whose fetch hangs."""
    body: dict[str, Any] = {
        "input_ids": make_prompt(seed),
        "rid": rid,
        "sampling_params": {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True},
    }
    return pool.submit(server.request, "POST", "/generate", body)


def wait_until_parked(server: SGLangServer, num_requests: int) -> None:
    deadline_s = time.monotonic() + 10
    while True:
        (load,) = json.loads(server.request("GET", "/v1/loads"))["loads"]
        if load["num_waiting_reqs"] == num_requests:
            return
        assert time.monotonic() < deadline_s, load
        time.sleep(0.05)


def test_others_go_on_and_see_the_parked(server: SGLangServer, link: Proxy, expected: Expected) -> None:
    link.set(HANG)
    with ThreadPoolExecutor(2) as pool:
        parked = [begin(server, pool, seed, f"parked {seed}") for seed in range(2)]
        wait_until_parked(server, 2)
        started_s = time.monotonic()
        answer = ask(server, make_prompt(NUM_STORED + 1)[:64])
        took_s = time.monotonic() - started_s
        assert len(answer.output_ids) == 12
        server.request("GET", "/health_generate")
        assert not any(future.done() for future in parked)
        assert took_s < DEADLINE_S
        for seed, future in enumerate(parked):
            output_ids = json.loads(future.result(DEADLINE_S + SLACK_S))["output_ids"]
            assert output_ids == expected[seed].output_ids[:4]


def test_an_abort(server: SGLangServer, link: Proxy) -> None:
    link.set(HANG)
    with ThreadPoolExecutor(2) as pool:
        parked = [begin(server, pool, seed, f"aborted {seed}") for seed in range(2)]
        wait_until_parked(server, 2)
        started_s = time.monotonic()
        server.request("POST", "/abort_request", {"abort_all": True})
        for future in parked:
            with contextlib.suppress(ServerError):
                assert json.loads(future.result(2))["meta_info"]["finish_reason"]["type"] == "abort"
        assert time.monotonic() - started_s < DEADLINE_S - 0.5
    wait_until_parked(server, 0)
    server.flush(timeout_s=2)


def test_a_client_that_goes_away(server: SGLangServer, link: Proxy) -> None:
    link.set(HANG)
    body = {"input_ids": make_prompt(0), "sampling_params": {"max_new_tokens": 4}, "stream": True}
    request = urllib.request.Request(
        server.url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=5):
        wait_until_parked(server, 1)
    started_s = time.monotonic()
    wait_until_parked(server, 0)
    assert time.monotonic() - started_s < DEADLINE_S - 0.5
    server.flush(timeout_s=2)


def test_aborts_at_random_moments(server: SGLangServer, link: Proxy, expected: Expected) -> None:
    link.set(Fault("slow", bytes_per_s=400e3, only=is_data))
    with ThreadPoolExecutor(4) as pool:
        for turn in range(20):
            if turn % 5 == 0:
                server.flush()
            futures = [begin(server, pool, (turn + i) % NUM_STORED, f"{turn} {i}") for i in range(4)]
            time.sleep(0.02 * (turn % 7))
            server.request("POST", "/abort_request", {"rid": f"{turn} "})
            for future in futures:
                with contextlib.suppress(ServerError):
                    future.result(DEADLINE_S + SLACK_S)
    link.set(None)
    assert same_answer(fetch_again(server, 0), expected[0])


def test_shutdown_while_a_request_is_parked(model: Path, link: Proxy, expected: Expected) -> None:
    """SGLang lets the requests that it has end first, and this one ends with its fetch's deadline."""
    link.set(HANG)
    flags = device_args(link.url, mode="read_only", fetch_timeout_s=DEADLINE_S, lookup_timeout_s=1.0)
    with SGLangServer(model, extra_args=flags) as server, ThreadPoolExecutor(1) as pool:
        parked = begin(server, pool, 0, "parked")
        wait_until_parked(server, 1)
        server.stop()
        assert json.loads(parked.result(1))["output_ids"] == expected[0].output_ids[:4]
