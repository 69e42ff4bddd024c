"""The step of gpu_check that runs SGLang, on SGLang's CPU engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.flat_profile import flat_profile
from benchmarks.gpu_check import server as step
from benchmarks.gpu_check.record import Record
from harness.attaching import detach
from harness.engine import SGLangServer, device_args, host_tier_args
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


def test_times_of_each_coding(tmp_path: Path) -> None:
    record = Record(tmp_path / "found.json")
    sizes = step.Sizes((128, 512), (0, 1), 4096, "64MiB", running=100, alone=4)
    flat_profile(1.5, 4, 2, 64, cell_layers=2).save(tmp_path / "profile")
    model = make_tiny_llama(tmp_path / "model")
    with StoreProcess(tmp_path / "store") as store:
        args = [*PAGES, *device_args(store.url)]
        with SGLangServer(model, extra_args=args, admin_api_key="admin") as server:
            detach(server)
            step.measure(record, server, store, tmp_path / "profile", sizes)
    found = found_by(record)
    assert not found["reason"]
    times, written, gaps = by_table(found)
    links = "no limit of the link", "1 Gbps"
    for quantiser in ("exact", "klt"):
        own = [(row["path"], row["tokens"]) for row in times if row["quantiser"] == quantiser]
        paths = ["computed", "SGLang's own cache"]
        assert own[:4] == [(path, tokens) for tokens in sizes.prompts for path in paths]
        assert {path for path, _ in own[4:]} == {
            "`memory_cache`",
            *(f"fetched, {link}" for link in links),
            *(f"what `auto` chooses, {link}" for link in links),
        }
    assert all(row["ttft_ms"] > 0 for row in times)
    assert all(row["stored_mb"] > 0 for row in written)
    assert [row["beside"] for row in gaps].count("nothing") == 2


def test_times_of_sglangs_host_tier(tmp_path: Path) -> None:
    record, sizes = Record(tmp_path / "found.json"), step.Sizes((128, 512), pool=2048)
    model = make_tiny_llama(tmp_path / "model")
    args = [*PAGES, "--max-total-tokens", str(sizes.pool), *host_tier_args()]
    with SGLangServer(model, extra_args=args) as server:
        step.measure_host_tier(record, server, sizes)
    found = found_by(record)
    assert not found["reason"] + "".join(found["notes"])
    (times,) = by_table(found)
    assert [row["path"] for row in times] == ["computed, with a host tier"] * 2 + ["SGLang's host tier"] * 2


def by_table(found: dict[str, Any]) -> list[list[dict[str, Any]]]:
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        tables.setdefault(row["table"], []).append(row)
    return list(tables.values())
