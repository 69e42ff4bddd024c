"""Device mode while the store is slow or fails: requests are parked, others go on, and every slot comes back."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.attaching import ATTACH, attach, detach
from harness.engine import ServerError, SGLangServer
from harness.faults import Fault
from harness.metrics import read_metric, written
from harness.store_process import StoreProcess
from harness.waiting import WAIT_S, wait_until
from tests.e2e.conftest import ANSWER_TOKENS, NUM_STORED, Expected, ask, make_prompt, same_answer
from tests.e2e.device import attached, begin, load_of, num_connections, wait_until_parked
from tests.e2e.faults import PAGES, Proxy, fetch_again, is_data
from tests.e2e.shared import Shared

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

HANG = Fault("hang", only=is_data)
# No test waits for these deadlines.
PATIENT: dict[str, Any] = {"mode": "read_only", "fetch_timeout_s": 600, "lookup_timeout_s": 600}
HELD = ("sgl_kvfetch_parked_requests", "sgl_kvfetch_queued_bytes")
NUM_ABORTS = int(os.environ.get("KVFETCH_ABORTS", "30"))
ABORTS_A_ROUND = 5


@pytest.fixture(scope="module")
def link(filled: Path) -> Iterator[Proxy]:
    """The way to a store that holds the first prompts."""
    with StoreProcess(filled) as store:
        proxy = Proxy(store.port)
        yield proxy
        proxy.close()


@pytest.fixture(scope="module")
def attached_server(device: Shared, link: Proxy) -> Iterator[SGLangServer]:
    """SGLang itself counts the pool's slots whenever it is idle, and dies if some are missing."""
    with device.attached(link.url, **PATIENT) as server:
        yield server


@pytest.fixture
def server(attached_server: SGLangServer, link: Proxy) -> Iterator[SGLangServer]:
    """All is well with it after each test."""
    yield attached_server
    link.set(None)
    fetch_again(attached_server, NUM_STORED - 1)


def test_others_go_on_and_see_the_parked(server: SGLangServer, link: Proxy, expected: Expected) -> None:
    link.set(HANG)
    with ThreadPoolExecutor(2) as pool:
        parked = [begin(server, pool, seed, f"parked {seed}") for seed in range(2)]
        wait_until_parked(server, 2)
        answer = ask(server, make_prompt(NUM_STORED + 1)[:64])
        assert len(answer.output_ids) == ANSWER_TOKENS
        server.request("GET", "/health_generate")
        assert not any(future.done() for future in parked)
        link.reset()
        for seed, future in enumerate(parked):
            output_ids = json.loads(future.result(WAIT_S))["output_ids"]
            assert output_ids == expected[seed].output_ids[:4]


def test_detaching_and_attaching(server: SGLangServer, link: Proxy, tmp_path: Path, expected: Expected) -> None:
    link.set(HANG)
    with ThreadPoolExecutor(1) as pool:
        parked = begin(server, pool, 0, "parked")
        wait_until_parked(server, 1)
        with pytest.raises(ServerError, match=r"not idle[\s\S]*queue-req=1"):  # SGLang's rule
            server.request("DELETE", ATTACH)
        server.request("POST", "/abort_request", {"rid": "parked"})
        with contextlib.suppress(ServerError):
            parked.result(WAIT_S)
    # Whatever there is left of the fetch ends.
    assert "detached" in detach(server)
    assert attached(server) is None
    wait_until_quiet(server, link)
    computed = ask(server, make_prompt(0))
    assert computed.cached_tokens == 0
    assert same_answer(computed, expected[0])
    wait_until_quiet(server, link)

    # Another store, which gets what was computed while there was none.
    with StoreProcess(tmp_path / "store") as store:
        attach(server, store.url)
        assert attached(server) == "kvfetch"
        with written(server, PAGES):
            ask(server, make_prompt(0))
        assert same_answer(fetch_again(server, 0), expected[0])
        with pytest.raises(ServerError, match="another config"):
            attach(server, link.url, **PATIENT)
        detach(server)
    link.set(None)
    attach(server, link.url, **PATIENT)
    assert same_answer(fetch_again(server, 1), expected[1])


@pytest.mark.timeout(300 + 4 * NUM_ABORTS)
def test_aborts_at_random_moments(server: SGLangServer, link: Proxy, expected: Expected) -> None:
    """Of requests that share a slow link, so that there are some in every phase. KVFETCH_ABORTS sets how many."""
    rng = random.Random(NUM_ABORTS)
    total = 0
    link.set(Fault("slow", bytes_per_s=4e6, only=is_data))
    started_s = time.monotonic()
    fetch_again(server, 0)
    longest_s = 2 * (time.monotonic() - started_s)  # so that some land before they are aborted
    before = server.metrics()
    ends = dict.fromkeys(("aborted", "landed"), 0.0)

    def count_ends() -> None:
        now = server.metrics()
        for end in ends:
            both = [read_metric(each, "sgl_kvfetch_device_requests_total", end=end) for each in (now, before)]
            ends[end] = both[0] - both[1]

    with ThreadPoolExecutor(ABORTS_A_ROUND) as pool:
        while total < NUM_ABORTS or not min(ends.values()):
            server.flush()  # which a lock, a slot or a row on the board that is left over makes fail
            seeds = rng.sample(range(NUM_STORED), ABORTS_A_ROUND)
            aborts = [
                pool.submit(leave, server, seed, f"{total}-{seed}-", longest_s * rng.random(), rng.random() < 0.5)
                for seed in seeds
            ]
            for future in aborts:
                future.result(WAIT_S)
            total += len(aborts)
            count_ends()
            # The first fetch may have taken much longer or shorter than the others, as the machine's speed varies.
            longest_s *= 1.5 if ends["aborted"] > ends["landed"] else 0.7
    link.set(None)
    wait_until_quiet(server, link)
    server.flush()
    assert same_answer(fetch_again(server, 0), expected[0])


def leave(server: SGLangServer, seed: int, rid: str, after_s: float, aborts: bool) -> None:
    """Ask, and abort the request by its name, or close the connection."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    sampling = {"max_new_tokens": 16, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": make_prompt(seed), "rid": rid, "stream": True, "sampling_params": sampling}
    with contextlib.closing(connection):
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        time.sleep(after_s)
        if aborts:
            server.request("POST", "/abort_request", {"rid": rid})
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection.getresponse().read()


def wait_until_quiet(server: SGLangServer, link: Proxy) -> None:
    """Nothing is held by anyone: no slot, lock, buffer or connection."""
    held: dict[str, float] = {}

    def is_quiet() -> bool:
        text = server.metrics()
        held.update({name: read_metric(text, name) for name in HELD})
        held["connections"] = num_connections(link.url)
        held["slots"] = load_of(server)["num_used_tokens"]  # those that are neither free nor evictable
        return not any(held.values())

    wait_until(is_quiet, poll_s=0.1, found=lambda: f"{held}\n{server.log_tail()}")
