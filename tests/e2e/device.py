"""What tests of device mode have in common."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness.attaching import ATTACH
from harness.engine import SGLangServer
from harness.waiting import wait_until
from tests.e2e.conftest import Expected, ask, assert_fetched, from_storage, make_half_prompt, make_prompt, same_answer

_HELD = ("01", "02", "08")  # of the states of TCP, those of sockets that a process has not closed


def attached(server: SGLangServer) -> str | None:
    """What SGLang says is attached."""
    name: str | None = json.loads(server.request("GET", ATTACH))["hicache_storage_backend"]
    return name


def begin(server: SGLangServer, pool: ThreadPoolExecutor, seed: int, rid: str) -> Future[str]:
    """A request on a thread of its own."""
    body: dict[str, Any] = {
        "input_ids": make_prompt(seed),
        "rid": rid,
        "sampling_params": {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True},
    }
    return pool.submit(server.request, "POST", "/generate", body)


def load_of(server: SGLangServer) -> dict[str, Any]:
    """What SGLang counts at this moment."""
    (load,) = json.loads(server.request("GET", "/v1/loads"))["loads"]
    return dict(load)


def wait_until_parked(server: SGLangServer, num_requests: int) -> None:
    wait_until(lambda: load_of(server)["num_waiting_reqs"] == num_requests, poll_s=0.05, found=lambda: load_of(server))


def wait_until_disconnected(url: str) -> None:
    wait_until(lambda: num_connections(url) == 0, found=lambda: f"{num_connections(url)} connections to {url}")


def num_connections(url: str) -> int:
    """Sockets of this machine's processes that are connected to an address, or about to be."""
    port = int(url.rpartition(":")[2])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(row[2].rpartition(":")[2], 16) == port and row[3] in _HELD for row in rows)


def assert_fetched_in_parts(server: SGLangServer, expected: Expected) -> None:
    """Ask for prompts 0 and 1, which are stored, once more, and for one of which half is stored."""
    server.flush()
    for seed in range(2):
        assert_fetched(server, seed, expected[seed])
    # In the tree now: nothing is fetched again.
    again = ask(server, make_prompt(0))
    assert from_storage(again) == 0
    assert again.cached_tokens >= 0.9 * 640

    # Half of it is stored; the rest is computed.
    server.flush()
    answer = ask(server, make_half_prompt())
    assert from_storage(answer) == 320
    assert same_answer(answer, expected.half)
