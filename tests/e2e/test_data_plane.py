"""Real SGLang while its data plane is killed, stopped and slowed at random moments; and two servers that share a store
on their node, in front of one behind a slow link, while that is killed."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.children import data_planes
from harness.engine import SGLangServer
from harness.store_process import StoreProcess
from harness.waiting import WAIT_S, wait_until
from tests.e2e.conftest import NUM_STORED, Expected, ask, from_storage, make_prompt, same_answer
from tests.e2e.faults import DEADLINE_S, SLACK_S, fetch_again
from tests.e2e.shared import Shared

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

NUM_HARMS = int(os.environ.get("KVFETCH_HARMS", "6"))
BACK_S = float(os.environ.get("KVFETCH_BACK_S", str(WAIT_S)))  # on an idle machine it is back within 5 s
WORKERS = 4
NUM_KILLS = int(os.environ.get("KVFETCH_NODE_KILLS", "10"))  # of a node's store
TOKENS = 640
LINK_GBPS = 0.1


@pytest.fixture(scope="module")
def store_url(filled: Path) -> Iterator[str]:
    with StoreProcess(filled, link_gbps=0.05) as store:
        yield store.url


@pytest.mark.parametrize("mode", ["device", "host"])
def test_harm_at_random_moments_under_load(
    mode: str, store_url: str, expected: Expected, request: pytest.FixtureRequest
) -> None:
    """KVFETCH_HARMS sets how often."""
    shared: Shared = request.getfixturevalue(mode)
    config: dict[str, Any] = {"mode": "read_only", "fetch_timeout_s": DEADLINE_S, "lookup_timeout_s": 1.0}
    with shared.attached(store_url, **config) as server:
        fetch_again(server, 0)
        over = threading.Event()
        with ThreadPoolExecutor(WORKERS + 1) as pool:
            asking = [pool.submit(_ask_on, server, expected, seed, over) for seed in range(WORKERS)]
            flushing = pool.submit(_flush_on, server, over)
            rng = random.Random(NUM_HARMS)
            try:
                for _ in range(NUM_HARMS):
                    time.sleep(rng.uniform(0.0, 1.0))
                    _harm(rng)
            finally:
                over.set()
            num_asked = sum(future.result(WAIT_S) for future in asking)
            flushing.result(WAIT_S)
        assert num_asked >= WORKERS
        _await_service(server)
        server.flush()  # which a lock, a slot or a row on the board that is left over makes fail
        assert same_answer(ask(server, make_prompt(1)), expected[1])


def _ask_on(server: SGLangServer, expected: Expected, first_seed: int, over: threading.Event) -> int:
    num_asked = 0
    while not over.is_set():
        seed = (first_seed + num_asked * WORKERS) % NUM_STORED
        started_s = time.monotonic()
        answer = ask(server, make_prompt(seed))
        assert same_answer(answer, expected[seed])
        assert time.monotonic() - started_s < DEADLINE_S + SLACK_S
        num_asked += 1
    return num_asked


def _flush_on(server: SGLangServer, over: threading.Event) -> None:
    """So that there is something to fetch. It fails while requests run, and then there is something yet."""
    while not over.wait(0.2):
        with contextlib.suppress(Exception):
            server.request("POST", "/flush_cache")


def _harm(rng: random.Random) -> None:
    for pid in data_planes():
        with contextlib.suppress(ProcessLookupError):
            match rng.choice(("kill", "stop", "slow")):
                case "kill":
                    os.kill(pid, signal.SIGKILL)
                case "stop":
                    os.kill(pid, signal.SIGSTOP)
                case "slow":
                    for _ in range(10):
                        os.kill(pid, signal.SIGSTOP)
                        time.sleep(0.05)
                        os.kill(pid, signal.SIGCONT)
                        time.sleep(0.02)


def _await_service(server: SGLangServer) -> None:
    """Pages come from the store again."""
    seeds = itertools.cycle(range(NUM_STORED))

    def is_back() -> bool:
        server.flush()
        return from_storage(ask(server, make_prompt(next(seeds)))) >= 0.9 * 640

    # Lookups pause for up to 30 s after failures.
    wait_until(is_back, timeout_s=BACK_S + 30, poll_s=0.2, found=server.log_tail)


def test_a_store_that_is_killed_costs_hits_and_no_answer(
    host: Shared, device: Shared, filled: Path, expected: Expected, tmp_path: Path
) -> None:
    """Both servers read through it, and one writes, while it is killed again and again."""
    choose = random.Random(0)
    before = sorted(path.name for path in filled.rglob("*.kv?"))
    others = [make_prompt(seed) for seed in range(NUM_STORED, NUM_STORED + 3)]
    with host.detached() as server:
        computed = [ask(server, prompt) for prompt in others]
    is_over = threading.Event()

    def serve(server: SGLangServer, seed: int) -> tuple[int, int]:
        """Ask until it is over. Return how many answers there were, and how many of them were hits."""
        draw, num, num_hits = random.Random(seed), 0, 0
        while not is_over.is_set():
            server.flush()
            index = draw.randrange(NUM_STORED + len(others))
            prompt, right = make_prompt(index), None if index < NUM_STORED else computed[index - NUM_STORED]
            answer = ask(server, prompt)
            assert same_answer(answer, right or expected[index]), index
            num, num_hits = num + 1, num_hits + (from_storage(answer) > 0)
        return num, num_hits

    with (
        StoreProcess(filled, link_gbps=LINK_GBPS) as far,
        StoreProcess(tmp_path / "near", extra_args=["--upstream", far.url, "--capacity", "1MiB"]) as node,
        host.attached(node.url, codec="zstd") as one,
        device.attached(node.url, mode="read_only") as other,
        ThreadPoolExecutor(2) as pool,
    ):
        serving = [pool.submit(serve, server, seed) for seed, server in enumerate((one, other))]
        try:
            for _ in range(NUM_KILLS):
                time.sleep(choose.uniform(1, 5))
                node.kill()
                node.start()
        finally:
            is_over.set()
        counts = [each.result() for each in serving]
        assert all(num_hits > 0 for _, num_hits in counts)
        print(f"{NUM_KILLS} kills; answers and hits of each server: {counts}")
        assert set(before) <= {path.name for path in filled.rglob("*.kv?")}
        for store in (far, node):
            command = [sys.executable, "-m", "sgl_kvfetch.tools", "verify", store.url]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
