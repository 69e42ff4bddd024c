"""Pipeline parallelism: each stage stores its own layers."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from harness.engine import SGLangServer, hicache_args
from harness.metrics import wait_until_written
from harness.store_process import StoreProcess
from tests.e2e.conftest import PAGE_SIZE, ask, from_storage, make_prompt, same_answer
from tests.e2e.faults import Proxy, assert_stored_once_the_store_works

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

TWO_STAGES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


def test_what_two_stages_store_they_restore(model: Path, store: StoreProcess) -> None:
    with closing(Proxy(store)) as link, SGLangServer(model, extra_args=flags(link), env=TWO_STAGES) as server:
        computed = ask(server, make_prompt(0))
        wait_until_written(server, 2 * 640 // PAGE_SIZE)
        server.flush()
        ask(server, make_prompt(1))  # in the same slots, of which nothing is left
        wait_until_written(server, 2 * 2 * 640 // PAGE_SIZE)
        server.flush()
        restored = ask(server, make_prompt(0))
        assert_stored_once_the_store_works(server, link, num_ranks=2)
    assert from_storage(restored) >= 0.9 * 640
    assert same_answer(restored, computed)
    assert len({path.parent for path in store.directory.rglob("*.kvm")}) == 2


def flags(link: Proxy) -> list[str]:
    return [*hicache_args(link.url, fetch_timeout_s=600), "--pp-size", "2"]
