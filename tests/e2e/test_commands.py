"""Commands that ask a running server: `kvfetch bench`, `compare`, `why` about prompts, and `pin`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.store_process import StoreProcess
from tests.e2e.conftest import PAGE_SIZE, make_prompt
from tests.e2e.shared import Shared
from tests.tools.conftest import kvfetch, kvfetch_json

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", "admin")


def test_bench_of_what_is_computed_and_fetched(host: Shared, store: StoreProcess, tmp_path: Path) -> None:
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
            assert len(measured["all_s"]) == 3
            assert 0 < min(measured["all_s"]) <= measured["p50_s"] <= max(measured["all_s"])
    # It fetches nothing from a server that has all in its memory, which --reader does not empty.
    assert (same["groups"][0]["fetched"], same["groups"][0]["not_fetched"]) == (None, {"in_memory": 1})
    assert "1 prompts were left out: they are longer than the server takes" in table


def compared(url: str, *options: str, exit_code: int = 0) -> dict[str, Any]:
    return kvfetch_json("compare", "--server", url, "--prompts", "3", *options, exit_code=exit_code)


def test_compare_sound_caches_and_values_that_are_too_coarse(
    host: Shared, store: StoreProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgl_kvfetch.tools.compare._ANSWER_TOKENS", 4)
    monkeypatch.setattr("sgl_kvfetch.tools.compare._WRITE_WAIT_S", 2.0)
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": make_prompt(number)}) + "\n" for number in range(3)))
    with host.attached(store.url, codec="zstd") as server:
        (nothing,) = compared(server.url, "--file", str(file), exit_code=1)["groups"]
        (of_server,) = compared(server.url, "--file", str(file))["groups"]
        (stored,) = compared(server.url, "--file", str(file), "--flush")["groups"]
    with host.attached(store.url, codec="zstd", quantiser="cachegen") as server:
        (coarse,) = compared(server.url, "--file", str(file), "--flush", "--most-kl", "1e-6", exit_code=1)["groups"]
        table = kvfetch("compare", "--server", server.url, "--file", str(file), "--prompts", "1", "--most-kl", "0")
    for group, source, num_cached in (nothing, "computed", 0), (of_server, "host", 624), (stored, "storage", 624):
        assert (group["source"], group["cached_tokens"], group["num_prompts"]) == (source, num_cached, 3)
        assert (group["num_positions"], group["same_answers"]) == (3 * 4, 3)
        assert group["kl"] == pytest.approx(0, abs=1e-6)
        assert group["found"] == ("sound" if num_cached else "nothing compared")
    assert (coarse["source"], coarse["found"]) == ("storage", "differs")
    assert coarse["longest_kl"] >= coarse["kl"] > 1000 * max(1e-6, coarse["repeated_kl"])
    assert coarse["same_answers"] < 3
    assert "answers from caches diverge by more than 0 nats beyond chance" in table.output
