"""The step of gpu_check that runs SGLang, on SGLang's CPU engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_check import server as step
from benchmarks.gpu_check.record import Record
from harness.engine import SGLangServer, device_args
from harness.models import make_tiny_llama
from harness.store_process import StoreProcess

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PAGES = "--page-size", str(step.PAGE_TOKENS)


def found_by(record: Record) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(record.path.read_text())
    return content


def test_what_is_fetched_answers_as_sglangs_own_cache(tmp_path: Path) -> None:
    record = Record(tmp_path / "found.json")
    with StoreProcess(tmp_path / "store") as store:
        args = [*PAGES, *device_args(store.url, quantiser="exact")]
        with SGLangServer(make_tiny_llama(tmp_path / "model"), extra_args=args) as server:
            step.check(record, server, num_tokens=320)
    found = found_by(record)
    assert not found["reason"]
    computed, cached, fetched = found["rows"]
    assert [computed["cached_tokens"], cached["from_store"], fetched["from_store"]] == [0, 0, 5 * 64 - 64]
    assert cached["cached_tokens"] == fetched["cached_tokens"]
    assert fetched["log_probability_gap"] == 0


def test_times_of_klt(tmp_path: Path) -> None:
    record, sizes = Record(tmp_path / "found.json"), step.Sizes((128, 512), (0, 1), running=200, alone=4)
    profile = step.make_profile(4, 2, 64, cell_layers=2)
    profile.save(tmp_path / "profile")
    config: dict[str, Any] = {
        "quantiser": "klt",
        "codec": "ans",
        "profile": str(tmp_path / "profile"),
        "model_id": "random",
    }
    with StoreProcess(tmp_path / "store") as store:
        args = [*PAGES, *device_args(store.url, **config)]
        with SGLangServer(make_tiny_llama(tmp_path / "model"), extra_args=args) as server:
            step.measure(record, server, store, sizes)
    found = found_by(record)
    assert not found["reason"]
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        tables.setdefault(row["table"], []).append(row)
    times, written, gaps = tables.values()
    assert [row["path"] for row in times[:4]] == ["computed", "SGLang's own cache"] * 2
    assert [row["path"] for row in times[4:]] == ["fetched, no limit of the link"] * 4 + ["fetched, 1 Gbps"] * 4
    assert all(row["ttft_ms"] > 0 for row in times)
    assert written[0]["stored_mb"] > 0
    assert next(row["beside"] for row in gaps) == "nothing"
