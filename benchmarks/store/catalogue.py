"""A store with many small segments: its start, its memory, its lookups while idle and while it evicts, its writes."""

from __future__ import annotations

import http.client
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.processes import load_processes, usage
from benchmarks.stats import distribution
from benchmarks.store.client import Lookups, Writes, connect, count_found, look_up, write
from benchmarks.store.small import SEGMENTS_A_PROMPT, fill, prompt_hashes
from harness.metrics import read_metric
from harness.store_process import StoreProcess
from sgl_kvfetch.stores.wire import Route

_START_S = 600.0
_POLL_S = 0.005
_LEAD_S = 1.0  # writing begins this long before the lookups, and ends this long after them


def prepare(folder: Path, num_segments: int, note: Callable[[str], None]) -> float:
    """Fill a store. Return how long its first start takes until it knows all segments, in seconds."""
    note(f"making {num_segments:,} segments")
    fill(folder, range(num_segments // SEGMENTS_A_PROMPT))
    note("first start")
    began_s = time.perf_counter()
    with _answering(folder) as store:
        _wait_for_segments(store, num_segments)
        return time.perf_counter() - began_s


def measure_starts(folder: Path, num_segments: int, rounds: int, note: Callable[[str], None]) -> dict[str, Any]:
    """Start a store that `prepare` filled several times. Also start one whose directory is empty, for comparison."""
    with TemporaryDirectory() as empty:
        filled_starts, empty_starts = [], []
        for number in range(rounds):
            note(f"start {number + 1} of {rounds}")
            filled_starts.append(_time_start(folder, num_segments))
            empty_starts.append(_time_start(Path(empty), 0))
    return {"filled": _medians(filled_starts), "empty": _medians(empty_starts)}


def measure_lookups(
    folder: Path, num_segments: int, rate: float, seconds: float, clients: int, note: Callable[[str], None]
) -> dict[str, Any]:
    """Look up random prompts, first while nothing else happens, then while new segments replace the old ones."""
    prompts = num_segments // SEGMENTS_A_PROMPT
    with load_processes(2) as load:
        note("lookups while idle")
        with _answering(folder) as store:
            _wait_for_segments(store, num_segments)
            idle = load.submit(look_up, store.port, prompts, rate, seconds, 0).result()
            idle_rss_bytes = usage(store.pid).rss_bytes
            stored_bytes = int(_metric(store, "stored_bytes"))
        note("lookups while evicting")
        with _answering(folder, "--capacity", f"{stored_bytes}") as store:
            _wait_for_segments(store, num_segments)
            writing = load.submit(write, store.port, prompts, clients, seconds + 2 * _LEAD_S)
            time.sleep(_LEAD_S)
            busy = load.submit(look_up, store.port, prompts, rate, seconds, 1).result()
            writes = writing.result()
            evicting = {
                **_summary(busy, usage(store.pid).rss_bytes),
                "evicted_segments": int(_metric(store, "evicted_segments_total")),
                **summarise_writes(writes),
            }
    return {"lookups_per_s": rate, "idle": _summary(idle, idle_rss_bytes), "evicting": evicting}


def summarise_writes(writes: Writes) -> dict[str, Any]:
    return {
        "segments_per_s": writes.segments / writes.seconds,
        "write_errors": dict(writes.errors),
        "write_client_cores": writes.client_cores,
    }


def _summary(lookups: Lookups, rss_bytes: int) -> dict[str, Any]:
    spread = distribution(lookups.latencies_s)
    return {
        "p50_s": spread.p50,
        "p99_s": spread.p99,
        "max_s": max(lookups.latencies_s),
        "share_found": lookups.pages_found / lookups.pages_asked,
        "rss_bytes": rss_bytes,
        "lookup_client_cores": lookups.client_cores,
        "latencies_s": lookups.latencies_s,
    }


def _time_start(folder: Path, num_segments: int) -> dict[str, float]:
    began_s = time.perf_counter()
    with _answering(folder) as store:
        answered_s = time.perf_counter() - began_s
        _wait_for_segments(store, num_segments)
        return {"first_lookup_s": answered_s, "rss_bytes": usage(store.pid).rss_bytes}


def _medians(starts: Sequence[dict[str, float]]) -> dict[str, Any]:
    return {key: statistics.median(start[key] for start in starts) for key in starts[0]} | {"starts": list(starts)}


@contextmanager
def _answering(folder: Path, *args: str) -> Iterator[StoreProcess]:
    """Start a store, and yield it as soon as it answers a lookup."""
    store = StoreProcess(folder, extra_args=args)
    try:
        store.launch()
        hashes = prompt_hashes(0)
        deadline_s = time.monotonic() + _START_S
        while True:
            try:
                with closing(connect(store.port)) as connection:
                    count_found(connection, hashes)
                break
            except (OSError, http.client.HTTPException) as e:
                is_starting = isinstance(e, OSError) and not store.has_ended
                if not is_starting or time.monotonic() > deadline_s:
                    raise SystemExit(f"the store does not answer: {e}\n{store.log()[-4000:]}") from e
                time.sleep(_POLL_S)
        yield store
    finally:
        store.__exit__(None, None, None)


def _wait_for_segments(store: StoreProcess, count: int) -> None:
    """Wait until lookups can find ``count`` segments: a store may index what it does not know while it serves."""
    deadline_s = time.monotonic() + _START_S
    while (found := _metric(store, "segments")) < count:
        if time.monotonic() > deadline_s:
            raise SystemExit(f"the store knows only {found:g} of {count} segments")
        time.sleep(0.1)


def _metric(store: StoreProcess, name: str) -> float:
    with urllib.request.urlopen(store.url + Route.METRICS, timeout=_START_S) as response:
        return read_metric(response.read().decode(), f"kvfetch_server_{name}")


def measure_writes(
    folder: Path, clients: Sequence[int], rounds: int, seconds: float, note: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return a row for each number of clients. Every run has a new store."""
    rows = []
    with load_processes(1) as load:
        for number in clients:
            note(f"writing with {number} clients")
            runs = []
            for _ in range(rounds):
                with TemporaryDirectory(dir=folder) as directory, StoreProcess(directory) as store:
                    before_s = usage(store.pid).cpu_s
                    writes = load.submit(write, store.port, 0, number, seconds).result()
                    server_cores = (usage(store.pid).cpu_s - before_s) / writes.seconds
                runs.append(summarise_writes(writes) | {"server_cores": server_cores})
            rates = [run["segments_per_s"] for run in runs]
            rows.append({"clients": number, "segments_per_s": statistics.median(rates), "runs": runs})
    return rows
