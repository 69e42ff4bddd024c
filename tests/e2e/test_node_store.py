"""Two SGLang servers on one node share a store there, in front of one behind a slow link.

``KVFETCH_NODE_KILLS=50`` kills it more often.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.engine import SGLangServer
from harness.metrics import read_metric, wait_until_written
from harness.store_process import StoreProcess
from harness.waiting import wait_until
from tests.e2e.conftest import NUM_STORED, PAGE_SIZE, Expected, ask, from_storage, make_prompt, same_answer
from tests.e2e.shared import Shared

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

NUM_KILLS = int(os.environ.get("KVFETCH_NODE_KILLS", "10"))
TOKENS = 640
LINK_GBPS = [0.1]


def over_the_link(node: StoreProcess) -> float:
    """Return how many bytes of data the node's store has read from the other one."""
    with urllib.request.urlopen(f"{node.url}/metrics") as answer:
        return read_metric(answer.read().decode(), "kvfetch_server_upstream_bytes_total")


def test_the_second_hit_comes_from_the_node(host: Shared, device: Shared, tmp_path: Path) -> None:
    prompt = make_prompt(0, TOKENS)
    with StoreProcess(tmp_path / "far", link_gbps=LINK_GBPS) as far:
        with host.attached(far.url, codec="zstd") as server:
            computed = ask(server, prompt)
            wait_until_written(server, TOKENS // PAGE_SIZE)

        def hits(server: SGLangServer) -> float:
            """Ask, and return the bytes that came over the link."""
            server.flush()
            before = over_the_link(node)
            answer = ask(server, prompt)
            assert from_storage(answer) >= 0.9 * TOKENS
            assert same_answer(answer, computed)
            return over_the_link(node) - before

        with (
            StoreProcess(tmp_path / "near", extra_args=["--upstream", far.url]) as node,
            host.attached(node.url, mode="read_only") as one,
            device.attached(node.url, mode="read_only") as other,
        ):
            assert hits(one) > 0
            wait_until(lambda: bool(list((tmp_path / "near").rglob("*.kvm"))))
            assert (hits(other), hits(one)) == (0, 0)
            far.stop()
            assert (hits(other), hits(one)) == (0, 0)


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
