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


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(tmp_path / "found.json")


def rows_of(record: Record) -> list[dict[str, Any]]:
    """Return what a step found that neither failed nor missed anything."""
    content = json.loads(record.path.read_text())
    assert not content["reason"] + "".join(content["notes"])
    rows: list[dict[str, Any]] = content["rows"]
    return rows


def test_what_is_fetched_answers_as_sglangs_own_cache(record: Record, tmp_path: Path) -> None:
    with StoreProcess(tmp_path / "store") as store:
        args = [*PAGES, *device_args(store.url, quantiser="exact")]
        with SGLangServer(make_tiny_llama(tmp_path / "model"), extra_args=args) as server:
            step.check(record, server, num_tokens=320)
    computed, cached, fetched = rows_of(record)
    assert [computed["cached_tokens"], cached["from_store"], fetched["from_store"]] == [0, 0, 5 * 64 - 64]
    assert cached["cached_tokens"] == fetched["cached_tokens"]
    assert fetched["log_probability_gap"] == 0


def test_times_of_each_coding(record: Record, tmp_path: Path) -> None:
    sizes = step.Sizes((128, 512), (0, 1), 4096, "64MiB", running=100, alone=4)
    flat_profile(1.5, 4, 2, 64, cell_layers=2).save(tmp_path / "profile")
    with StoreProcess(tmp_path / "store") as store:
        args = [*PAGES, *device_args(store.url)]
        with SGLangServer(make_tiny_llama(tmp_path / "model"), extra_args=args, admin_api_key="admin") as server:
            detach(server)
            step.measure(record, server, store, tmp_path / "profile", sizes)
    rows = rows_of(record)
    times = [row for row in rows if "ttft_ms" in row]
    paths = {"computed", "SGLang's own cache", "`memory_cache`"}
    paths |= {
        f"{how}, {link}" for how in ("fetched", "what `auto` chooses") for link in ("no limit of the link", "1 Gbps")
    }
    assert {(row["quantiser"], row["path"]) for row in times} == {(x, path) for x in ("exact", "klt") for path in paths}
    assert all(row["ttft_ms"] > 0 for row in times)
    assert all(row["stored_mb"] > 0 for row in rows if "stored_mb" in row)
    assert [row["beside"] for row in rows if "beside" in row].count("nothing") == 2


def test_times_of_sglangs_host_tier(record: Record, tmp_path: Path) -> None:
    sizes = step.Sizes((128, 512), pool=2048)
    args = [*PAGES, "--max-total-tokens", str(sizes.pool), *host_tier_args()]
    with SGLangServer(make_tiny_llama(tmp_path / "model"), extra_args=args) as server:
        step.measure_host_tier(record, server, sizes)
    paths = [row["path"] for row in rows_of(record)]
    assert paths == ["computed, with a host tier"] * 2 + ["SGLang's host tier"] * 2
