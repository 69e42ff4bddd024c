"""Scales one server's costs up to a fleet, and tells how many servers each limit allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.scaling.measure import IndexCost
from benchmarks.scaling.workload import Simulation
from sgl_kvfetch.tools.estimate import GB_MONTH_PRICE_ABOVE_500_TB, GET_PRICE, PUT_PRICE

# Amazon S3, by partitioned prefix: docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance.html
PREFIX_GETS, PREFIX_PUTS = 5500, 3500  # a second; GETs with HEADs, PUTs with DELETEs
MONTH_S = 30 * 86400
# `--measure 250000` prints these: a single server, and a cluster of one node.
SINGLE = IndexCost(177.0, 2.3, 4.2)
CLUSTER = IndexCost(193.0, 7.2, 8.7)


@dataclass(frozen=True)
class Fleet:
    servers: int = 1000
    server_requests: float = 2.0  # a second, of one server
    pages: int = 10**9  # indexed
    namespaces: int = 1  # models and settings, equally busy; each has a folder for every rank
    ttl_s: float = 7 * 86400.0
    shard_gib: float = 64.0  # of Redis, for entries
    shard_load: float = 0.5  # share of a core that a shard may use


def scale(simulation: Simulation, fleet: Fleet, single: IndexCost, cluster: IndexCost) -> dict[str, Any]:
    """Return totals of the fleet a second, shards, prefixes, and costs in USD a month."""
    costs, workload = simulation.costs, simulation.workload
    rate = fleet.servers * fleet.server_requests / costs.requests  # from simulated totals to the fleet's a second
    gets, puts = costs.gets * rate, (costs.puts + costs.deletes) * rate
    folders = fleet.namespaces * workload.ranks
    shard_bytes = fleet.shard_gib * 2**30
    is_single = fleet.pages * single.page_bytes <= shard_bytes and _cores(simulation, single) * rate <= fleet.shard_load
    index = single if is_single else cluster
    memory, cores = fleet.pages * index.page_bytes, _cores(simulation, index) * rate
    new_pages = costs.written_pages * workload.ranks * rate
    prefixes = int(np.ceil(max(gets / PREFIX_GETS, puts / PREFIX_PUTS)))
    stored_gb = fleet.pages / workload.ranks * workload.page_size * workload.kv_bytes / 1e9
    return {
        "requests_per_s": fleet.servers * fleet.server_requests,
        "index_gb": memory / 1e9,
        "index_calls_per_s": costs.index_calls * rate,
        "index_pages_looked_up_per_s": costs.index_pages * rate,
        "index_pages_entered_per_s": costs.index_entered * rate,
        "index_cores": cores,
        "shards": int(np.ceil(max(memory / shard_bytes, cores / fleet.shard_load))),
        "hours_until_that_many_pages_are_written": fleet.pages / new_pages / 3600,
        "pages_within_ttl": new_pages * fleet.ttl_s,
        "gets_per_s": gets,
        "gets_per_s_of_missing_names": costs.name_gets * rate,
        "puts_per_s": costs.puts * rate,
        "deletes_per_s": costs.deletes * rate,
        "gets_per_s_and_folder": gets / folders,
        "puts_and_deletes_per_s_and_folder": puts / folders,
        "prefixes_needed": prefixes,
        "busiest_of_as_many_hash_prefixes": _imbalance(simulation, -(-prefixes // folders)),
        "gets_of_most_frequent_length": max(simulation.segment_lengths.values()) * workload.ranks / costs.gets,
        "gets_per_s_of_hottest_segment": max(simulation.segment_gets.values(), default=0) * rate,
        "read_gbps": costs.read_bytes * rate * 8 / 1e9,
        "written_gbps": costs.written_bytes * rate * 8 / 1e9,
        "read_gbps_of_a_server": costs.read_bytes * rate * 8 / 1e9 / fleet.servers,
        "stored_tb": stored_gb / 1e3,
        "gets_usd": gets * MONTH_S * GET_PRICE,
        "puts_usd": costs.puts * rate * MONTH_S * PUT_PRICE,
        "storage_usd": stored_gb * GB_MONTH_PRICE_ABOVE_500_TB,
    }


def limits(simulation: Simulation, cold: Simulation, fleet: Fleet, single: IndexCost) -> dict[str, float]:
    """Return how many servers each limit allows, the lowest first. ``cold``: no server keeps anything."""
    costs, workload = simulation.costs, simulation.workload
    rate = fleet.server_requests / costs.requests
    folders = fleet.namespaces * workload.ranks
    shard_pages = fleet.shard_gib * 2**30 / single.page_bytes
    hottest = max(cold.segment_gets.values(), default=0) * fleet.server_requests / cold.costs.requests
    found = {
        "GETs of one folder, if S3 does not split it": PREFIX_GETS * folders / (costs.gets * rate),
        "PUTs and DELETEs of one folder": PREFIX_PUTS * folders / ((costs.puts + costs.deletes) * rate),
        "GETs of the hottest segment, if no server keeps it": PREFIX_GETS / hottest if hottest else float("inf"),
        "memory of one Redis, at the TTL": shard_pages / (costs.written_pages * workload.ranks * rate * fleet.ttl_s),
        "CPU of one Redis": fleet.shard_load / (_cores(simulation, single) * rate),
    }
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _cores(simulation: Simulation, cost: IndexCost) -> float:
    """Return the CPU seconds of Redis for all simulated requests."""
    costs = simulation.costs
    return (costs.index_pages * cost.lookup_us + costs.index_entered * cost.enter_us) / 1e6


def _imbalance(simulation: Simulation, prefixes: int) -> float:
    """Return the load of the busiest of ``prefixes`` partitions by hash, as a multiple of the mean. GETs of segments
    that nobody shares are spread evenly."""
    rng = np.random.default_rng(simulation.workload.seed)
    shared = np.fromiter(simulation.segment_gets.values(), float)
    loads = np.bincount(rng.integers(prefixes, size=len(shared)), shared, prefixes)
    loads += (simulation.costs.gets / simulation.workload.ranks - shared.sum()) / prefixes
    return float(loads.max() / loads.mean())
