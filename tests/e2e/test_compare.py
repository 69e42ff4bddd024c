"""`kvfetch compare` compares what a running server answers from its caches with what it computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.store_process import StoreProcess
from tests.e2e.conftest import make_prompt
from tests.e2e.shared import Shared
from tests.tools.conftest import kvfetch, kvfetch_json

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


def compared(url: str, *options: str, exit_code: int = 0) -> dict[str, Any]:
    return kvfetch_json("compare", "--server", url, "--prompts", "3", *options, exit_code=exit_code)


def test_sound_caches_and_values_that_are_too_coarse(
    host: Shared, store: StoreProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", "admin")
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
        assert group["num_positions"] == 3 * 4
        assert group["same_answers"] == 3
        assert group["kl"] == pytest.approx(0, abs=1e-6)
        assert group["found"] == ("sound" if num_cached else "nothing compared")
    assert coarse["source"] == "storage"
    assert coarse["found"] == "differs"
    assert coarse["longest_kl"] >= coarse["kl"] > 1000 * max(1e-6, coarse["repeated_kl"])
    assert coarse["same_answers"] < 3
    assert table.exit_code == 1
    assert "differs" in table.output
    assert "answers from caches diverge by more than 0 nats beyond chance" in table.output
