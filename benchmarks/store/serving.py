"""Ranged reads of one object from the store, beside nginx on the same file.

Runs alternate between the two servers, so that a machine whose speed changes treats both alike. Each has one worker on
a core of its own; the client runs on another core, and takes so little CPU time that it is not the limit.
"""

from __future__ import annotations

import asyncio
import statistics
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.noise import PAGE_BYTES, noise_segment, noise_values
from benchmarks.processes import load_processes, usage
from benchmarks.store.nginx import NginxProcess, find_nginx, nginx_version
from benchmarks.store.ranges import Reading, read_ranges
from harness.small_segments import page_hashes
from harness.store_process import StoreProcess
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.plane.write.writer import commit_segment
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.stores.wire import Route

NO_NGINX = "no nginx: serving is not compared (Debian: apt-get install nginx-light)"
_RANGES_AN_OBJECT = 8


@dataclass(frozen=True)
class Target:
    """One server. ``path``: the object's, in its URLs."""

    port: int
    pid: int
    path: str


@dataclass(frozen=True)
class Run:
    gb_per_s: float
    cpu_s_per_gb: float
    client_cores: float  # how much of its core the client used


def measure_serving(
    folder: Path,
    sizes_mib: Sequence[int],
    connections: Sequence[int],
    rounds: int,
    seconds: float,
    note: Callable[[str], None],
) -> dict[str, Any] | None:
    """Return a row for each size of a range and number of connections; None if there is no nginx."""
    binary = find_nginx()
    if binary is None:
        return None
    for name in ("store", "nginx"):
        (folder / name).mkdir()
    rows = []
    with (
        StoreProcess(folder / "store") as store,
        NginxProcess(binary, store.directory, folder / "nginx") as nginx,
        load_processes(1) as load,
    ):
        num_pages = _RANGES_AN_OBJECT * (max(sizes_mib) << 20) // PAGE_BYTES
        segment = noise_segment(noise_values(num_pages, seed=0), page_hashes(num_pages))
        asyncio.run(_put(store.url, segment))
        ours = Target(store.port, store.pid, f"{Route.OBJECTS}/{segment.data_name}")
        theirs = Target(nginx.port, nginx.pid, f"/{segment.data_name}")
        for target in (ours, theirs):
            _require_content(target, segment.data)
        for size_mib in sizes_mib:
            for count in connections:
                note(f"serving ranges of {size_mib} MiB to {count} connections")
                pairs = []
                for _ in range(rounds):
                    ask = partial(_run, load, len(segment.data), size_mib << 20, count, seconds)
                    pairs.append((ask(ours), ask(theirs)))
                rows.append({"range_mib": size_mib, "connections": count, **_row(pairs)})
    return {"nginx": nginx_version(binary), "rows": rows}


async def _put(url: str, segment: CodedSegment) -> None:
    store = HttpStore(url)
    try:
        await commit_segment(store, segment)
    finally:
        await store.close()


def _require_content(target: Target, content: bytes) -> None:
    """Read the whole object once, which also warms up the page cache. The measured reads check only lengths."""
    with urllib.request.urlopen(f"http://127.0.0.1:{target.port}{target.path}") as response:
        if response.read() != content:
            raise SystemExit(f"{target.path}: the server sends other bytes than were put")


def _run(load: Executor, object_bytes: int, range_bytes: int, connections: int, seconds: float, target: Target) -> Run:
    before_s = usage(target.pid).cpu_s
    args = target.port, target.path, object_bytes, range_bytes, connections, seconds
    reading: Reading = load.submit(read_ranges, *args).result()
    gb = reading.received_bytes / 1e9
    return Run(gb / reading.seconds, (usage(target.pid).cpu_s - before_s) / gb, reading.client_cpu_s / reading.seconds)


def _row(pairs: Sequence[tuple[Run, Run]]) -> dict[str, Any]:
    """``ratios``: the store's speed to nginx's, in each round."""
    row: dict[str, Any] = {}
    for name, runs in zip(("store", "nginx"), zip(*pairs, strict=True), strict=True):
        for field in fields(Run):
            row[f"{name}_{field.name}"] = statistics.median(getattr(run, field.name) for run in runs)
    ratios = [ours.gb_per_s / theirs.gb_per_s for ours, theirs in pairs]
    return row | {"ratio": statistics.median(ratios), "ratios": ratios}
