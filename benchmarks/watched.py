"""Measures what it costs a store to be watched: by its page in several browsers, and by Prometheus every second.

    python -m benchmarks.watched [--segments 10000] [--browsers 3] [--rounds 6] [--seconds 8] [--json OUT]

The store runs on one core, its clients on another. By turns it is watched or not, and serves lookups at a fixed rate,
then ranged reads of 1 MiB as fast as one client takes them. The watchers send what a browser and Prometheus would;
there is no browser here, which would take its time from the clients.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.machine import machine, versions
from benchmarks.noise import noise_segment, noise_values
from benchmarks.processes import SERVER_CORE, children_on, load_processes
from benchmarks.report import make_parser, make_table, whole_number, write_json
from benchmarks.store.client import Lookups, connect, look_up
from benchmarks.store.ranges import Reading, read_ranges
from benchmarks.store.small import SEGMENTS_A_PROMPT, fill
from harness.small_segments import page_hashes
from harness.store_process import StoreProcess
from sgl_kvfetch.plane.write.writer import commit_segment
from sgl_kvfetch.stores import wire
from sgl_kvfetch.stores.http import HttpStore

_LOOKUPS_PER_S = 100
_PAGE_S, _SCRAPE_S = 5.0, 1.0  # between two requests of a page, and of Prometheus
_RANGE_BYTES = 1 << 20
_NUM_PAGES = 64  # of the segment that is read


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("benchmarks.watched", __doc__)
    parser.add_argument("--segments", type=whole_number, default=10_000, help="segments in the store")
    parser.add_argument("--browsers", type=whole_number, default=3, help="browsers with the page open")
    parser.add_argument("--rounds", type=whole_number, default=6, help="how often each is measured")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long each takes")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args(argv)
    with children_on(SERVER_CORE):
        rows = _measure(args)
    lines = [(name, *(f"{row[key]:.3g}" for key in ("alone", "watched")), f"{row['ratio']:.3f}") for name, row in rows]
    Console().print(make_table("medians; ratio: median of pairs", ("", "alone", "watched", "ratio"), lines))
    if args.json:
        write_json(args.json, {"rows": dict(rows), "machine": machine(), "versions": versions()})
    return 0


def _measure(args: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    prompts = max(1, args.segments // SEGMENTS_A_PROMPT)
    segment = noise_segment(noise_values(_NUM_PAGES, seed=0), page_hashes(_NUM_PAGES))
    path = f"{wire.Route.OBJECTS}/{segment.data_name}"
    lookups: dict[bool, list[Lookups]] = {False: [], True: []}
    readings: dict[bool, list[Reading]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder, load_processes(2) as load:
        fill(Path(folder, "store"), range(prompts))
        with StoreProcess(Path(folder, "store")) as store:
            asyncio.run(_put(store.url, segment))
            for number in range(args.rounds):
                for is_watched in (False, True) if number % 2 else (True, False):
                    if is_watched:
                        watching = load.submit(watch, store.port, args.browsers, 2 * args.seconds)
                    looking = store.port, prompts, _LOOKUPS_PER_S, args.seconds, number
                    lookups[is_watched].append(load.submit(look_up, *looking).result())
                    reading = store.port, path, len(segment.data), _RANGE_BYTES, 4, args.seconds
                    readings[is_watched].append(load.submit(read_ranges, *reading).result())
                    if is_watched:
                        watching.result()
    hundredths = {
        key: [statistics.quantiles(each.latencies_s, n=100) for each in found] for key, found in lookups.items()
    }
    p50, p99 = ({key: [each[i] * 1e3 for each in found] for key, found in hundredths.items()} for i in (49, 98))
    rates = {key: [each.received_bytes / each.seconds / 1e9 for each in found] for key, found in readings.items()}
    return [("lookups, p50, ms", _row(p50)), ("lookups, p99, ms", _row(p99)), ("reads, GB/s", _row(rates))]


def _row(figures: dict[bool, list[float]]) -> dict[str, Any]:
    ratios = [watched / alone for alone, watched in zip(figures[False], figures[True], strict=True)]
    medians = {name: statistics.median(figures[key]) for name, key in (("alone", False), ("watched", True))}
    return {**medians, "ratio": statistics.median(ratios), "ratios": ratios}


async def _put(url: str, segment: Any) -> None:
    store = HttpStore(url)
    try:
        await commit_segment(store, segment)
    finally:
        await store.close()


def watch(port: int, browsers: int, seconds: float) -> None:
    """Send what browsers with the page and a Prometheus send."""
    over = threading.Event()
    watchers = [(wire.Route.SUMMARY, _PAGE_S)] * browsers + [(wire.Route.METRICS, _SCRAPE_S)]
    with ThreadPoolExecutor(len(watchers)) as threads:
        asking = [threads.submit(_ask, port, *each, over) for each in watchers]
        time.sleep(seconds)
        over.set()
        for each in asking:
            each.result()


def _ask(port: int, path: str, every_s: float, over: threading.Event) -> None:
    connection = connect(port)
    while not over.wait(every_s):
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise http.client.HTTPException(f"{path}: status {answer.status}")
    connection.close()


if __name__ == "__main__":
    sys.exit(main())
