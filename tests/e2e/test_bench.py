"""`kvfetch bench` measures a running server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.store_process import StoreProcess
from tests.e2e.conftest import PAGE_SIZE, make_prompt
from tests.e2e.shared import Shared
from tests.tools.conftest import kvfetch, kvfetch_json

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


def test_computed_and_fetched(
    host: Shared, store: StoreProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", "admin")
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in (make_prompt(0), [3] * 5000)))
    with host.attached(store.url, codec="zstd") as server:
        measure = ("bench", "--server", server.url, "--flush")
        found = kvfetch_json(*measure, "--lengths", "320,640", "--prompts", "3")
        itself = server.url.replace("127.0.0.1", "localhost")
        few = ("--lengths", "320", "--prompts", "1")
        same = kvfetch_json("bench", "--server", server.url, "--reader", itself, *few, exit_code=1)
        table = kvfetch(*measure, "--file", str(file)).output
    assert (found["page_size"], [group["prompt_tokens"] for group in found["groups"]]) == (PAGE_SIZE, [320, 640])
    for group in found["groups"]:
        computed, fetched = group["computed"], group["fetched"]
        assert computed["cached_tokens"] == computed["wire_bytes"] == 0
        assert group["not_fetched"] == {}
        assert fetched["cached_tokens"] == fetched["stored_tokens"] >= 0.9 * group["prompt_tokens"]
        assert fetched["wire_bytes"] > 0
        for measured in computed, fetched:
            assert len(measured["all_s"]) == group["num_prompts"] == 3
            assert 0 < min(measured["all_s"]) <= measured["p50_s"] <= max(measured["all_s"])
    # It fetches nothing from a server that has all in its memory, which --reader does not empty.
    assert (same["groups"][0]["fetched"], same["groups"][0]["not_fetched"]) == (None, {"in_memory": 1})
    assert "fetched, p50" in table
    assert "1 prompts were left out: they are longer than the server takes" in table
    with host.attached(store.url, codec="zstd", mode="read_only") as server:
        monkeypatch.setattr("sgl_kvfetch.tools.bench._WRITE_WAIT_S", 0.0)
        result = kvfetch("bench", "--server", server.url, "--flush", "--lengths", "320")
    assert result.exit_code == 2
    assert "wrote 0 of 20 pages" in result.stderr
    assert "nothing waits in its write queue: a server writes with --hicache-write-policy" in result.stderr
