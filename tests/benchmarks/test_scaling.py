"""The model behind docs/scaling.md: counts that can be made by hand, and its command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scaling.__main__ import main
from benchmarks.scaling.limits import PREFIX_GETS, SINGLE, Fleet, limits, scale
from benchmarks.scaling.measure import measure
from benchmarks.scaling.workload import Simulation, Workload
from harness.redis_server import REDIS, REDIS_MISSING

WORKLOAD = Workload(document_sigma=0.0, documents=100, requests=2000, page_size=64, turn_tokens=0)


def test_a_miss_writes_what_it_did_not_find() -> None:
    """48 pages and one: segments of 32, 16 and 1."""
    costs = Simulation(replace(WORKLOAD, hit_rate=0.0)).run().costs
    assert costs.requests == 1000
    assert (costs.written_pages, costs.puts, costs.merges) == (49_000, 6000, 0)
    names = 6 + 6 + 5 + 1  # of the lookup of 49 pages, and of the writer's three
    assert costs.gets == costs.name_gets == 1000 * names  # none is a right half, so no left buddy is asked for
    assert (costs.index_calls, costs.index_pages, costs.index_entered) == (7000, 98_000, 49_000)
    assert costs.read_bytes == 0


def test_a_hit_reads_spans_in_eighths() -> None:
    costs = Simulation(replace(WORKLOAD, hit_rate=1.0, local_tokens=0, turns=1)).run().costs
    names, manifests, reads = 1, 2, 3 * 8  # the writer's lookup; segments of 32 and 16 pages; spans of 16 pages
    assert costs.gets == 1000 * (names + manifests + reads)
    assert costs.read_bytes == pytest.approx(1000 * 48 * 64 * WORKLOAD.kv_bytes)


def test_local_documents_are_not_read() -> None:
    costs = Simulation(replace(WORKLOAD, hit_rate=1.0, turns=1, local_tokens=10**9)).run().costs
    assert costs.read_bytes < 0.02 * 1000 * 48 * 64 * WORKLOAD.kv_bytes


def test_merging_takes_requests_and_saves_segments() -> None:
    merged = Simulation(replace(WORKLOAD, turn_tokens=512)).run()
    apart = Simulation(replace(WORKLOAD, turn_tokens=512, merging=0)).run()
    assert merged.costs.merges > 0
    assert apart.costs.merges == apart.costs.deletes == 0
    assert merged.costs.puts == apart.costs.puts + 2 * merged.costs.merges
    assert merged.costs.written_pages == apart.costs.written_pages


def test_limits_agree_with_the_scaled_load() -> None:
    simulation = Simulation(WORKLOAD).run()
    allowed = limits(simulation, simulation, Fleet(), SINGLE)
    servers = allowed["GETs of one folder, if S3 does not split it"]
    assert list(allowed.values()) == sorted(allowed.values())
    total = scale(simulation, Fleet(servers=1000), SINGLE, SINGLE)
    assert total["gets_per_s"] == pytest.approx(PREFIX_GETS * 1000 / servers)
    assert total["index_gb"] == pytest.approx(SINGLE.page_bytes)
    assert total["busiest_of_as_many_hash_prefixes"] >= 1


@pytest.mark.skipif(REDIS is None, reason=REDIS_MISSING)
@pytest.mark.parametrize("cluster", [False, True])
def test_an_entry_is_measured(cluster: bool) -> None:
    cost = measure(640, cluster=cluster)
    assert 100 < cost.page_bytes < 1000
    assert min(cost.lookup_us, cost.enter_us) > 0


def test_the_command_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "scaling.json"
    main(["--json", str(path), "--requests", "500", "--documents", "1000", "--servers", "7"])
    found = json.loads(path.read_text())
    assert found["fleet"]["servers"] == 7
    assert found["total"]["requests_per_s"] == 14
