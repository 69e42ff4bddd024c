"""With a disk on the SGLang machine: what was read once is read from there, also when the store is gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.engine import SGLangServer
from harness.metrics import read_metric, wait_until_written
from harness.store_process import StoreProcess
from harness.waiting import wait_until
from tests.e2e.conftest import PAGE_SIZE, ask, from_storage, make_prompt, same_answer
from tests.e2e.shared import Shared

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

TOKENS = 640


def read_bytes(server: SGLangServer, tier: str) -> float:
    return read_metric(server.metrics(), "sgl_kvfetch_local_cache_read_bytes_total", tier=tier)


def test_what_was_read_comes_from_the_disk(host: Shared, store: StoreProcess, tmp_path: Path) -> None:
    config: dict[str, Any] = {"codec": "hevc", "local_cache": {"path": str(tmp_path / "cache"), "capacity": "1GiB"}}
    prompt = make_prompt(0, TOKENS)
    with host.attached(store.url, **config) as server:
        computed = ask(server, prompt)
        wait_until_written(server, TOKENS // PAGE_SIZE)

        def is_on_disk() -> bool:
            server.flush()
            before = read_bytes(server, "store"), read_bytes(server, "disk")
            answer = ask(server, prompt)
            assert from_storage(answer) >= 0.9 * TOKENS
            assert same_answer(answer, computed)
            after = read_bytes(server, "store"), read_bytes(server, "disk")
            return after[0] == before[0] and after[1] > before[1]

        assert not is_on_disk()
        assert read_bytes(server, "store") > 0
        wait_until(is_on_disk)  # the copy is made in the background

        store.kill()
        server.flush()
        answer = ask(server, prompt)
        assert from_storage(answer) >= 0.9 * TOKENS
        assert same_answer(answer, computed)
        metrics = server.metrics()
        assert read_metric(metrics, "sgl_kvfetch_local_cache_lookups_total") >= 1
        assert read_metric(metrics, "sgl_kvfetch_store_down") == 1
        assert read_metric(metrics, "sgl_kvfetch_local_cache_failures_total") == 0

    with host.attached(store.url, **config) as server:  # with a new data plane; the store is still gone
        answer = ask(server, prompt)
        assert from_storage(answer) >= 0.9 * TOKENS
        assert same_answer(answer, computed)
