"""Measures the scheduler's cost of parked requests: ``python -m benchmarks.parking``.

Times what device mode's hooks add to one step of the scheduler, for several numbers of parked requests. It uses
SGLang's own radix tree and pool, our linker, board and queue, and real lookups in a store that accepts requests but
never answers. The functions that the hooks wrap are replaced by functions that do nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import threading
import time
from array import array
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("KVFETCH_CPU_ENGINE", "1")  # SGLang selects its platform when it is imported

import torch
from sglang.srt.mem_cache import unified_radix_cache
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from benchmarks.machine import machine, versions
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.keys import HeadSlice, Namespace
from sgl_kvfetch.plane.config import KVFetchConfig
from sgl_kvfetch.plugin.device import linker as linker_module
from sgl_kvfetch.plugin.device.linker import KVFetchLinker
from sgl_kvfetch.plugin.device.pages import SlotPages
from sgl_kvfetch.plugin.device.scheduler_hooks import form_batch
from sgl_kvfetch.plugin.starting import Opening
from sgl_kvfetch.plugin.waiting_queue import WaitingQueue

PAGE, SLOTS, PROMPT_TOKENS = 16, 4096, 1024
LIMIT_US = 100.0


def silent_store() -> tuple[socket.socket, str]:
    """Start a server that accepts requests but never answers. Return it, for the caller to close, and its URL."""
    server = socket.create_server(("127.0.0.1", 0), backlog=128)
    taken: list[socket.socket] = []

    def take() -> None:
        try:
            while True:
                taken.append(server.accept()[0])
        except OSError:
            for connection in taken:
                connection.close()

    threading.Thread(target=take, daemon=True).start()
    return server, f"http://127.0.0.1:{server.getsockname()[1]}"


def make_cache(store_url: str) -> UnifiedRadixCache:
    """Return SGLang's cache with our linker."""
    pool = MHATokenToKVPool(SLOTS, PAGE, torch.float32, 2, 64, 4, "cpu", False)
    allocator = PagedTokenToKVPoolAllocator(SLOTS, PAGE, torch.float32, "cpu", pool, False)
    requests = ReqToTokenPool(8, SLOTS, "cpu", False)
    params = CacheInitParams(False, requests, allocator, PAGE, tree_components=(ComponentType.FULL,))
    vars(linker_module)["open_engine_plane"] = _open_plane
    vars(unified_radix_cache)["get_disagg"] = lambda: SimpleNamespace(disaggregation_mode="null")
    config = {"store": store_url, "lookup_timeout_s": 600, "fetch_timeout_s": 600, "prefetch_threshold": PAGE}
    cache = UnifiedRadixCache(params)
    cache.init_cache_linker(
        KVFetchLinker(None, params, components={ComponentType.FULL}, extra_config={"config": json.dumps(config)})
    )
    return cache


def _open_plane(config: KVFetchConfig, rank: Any, pages: SlotPages, nvdec: None, **staging: Any) -> Any:
    quantiser, shape = make_quantiser("exact"), pages.geometry
    namespace = Namespace("benchmark", "float32", "mha", shape.dtype, PAGE, 4, 0, 2, 64, 64, quantiser.identity)
    heads = HeadSlice(namespace, range(2))
    return Opening(heads, 0, pages, nvdec, **staging).open(config, quantiser)


def park(queue: list[Any], number: int) -> None:
    """Let a request arrive for which the store is asked, and park it."""
    rng = random.Random(number)
    handle = CacheRequestHandle(f"request {number}", 0)
    tokens = array("q", (rng.randrange(1 << 15) for _ in range(PROMPT_TOKENS)))
    queue.append(Request(handle, tokens))


@dataclass(eq=False)
class Request:
    """The attributes of a request that the queue and the linker use."""

    cache_request_handle: CacheRequestHandle
    tokens: array[int]
    priority: int | None = None
    session: None = None
    prefix_len: int = 0  # nothing is in the tree

    @property
    def rid(self) -> str:
        return str(self.cache_request_handle.rid)

    def init_next_round_input(self, tree: UnifiedRadixCache, cow_mamba: bool) -> None:
        tree.match_prefix(MatchPrefixParams(key=RadixKey(self.tokens).page_aligned(PAGE), req=self))


def do_nothing(scheduler: Any) -> None:
    pass


def step(scheduler: Any) -> None:
    """Call all our hooks in one step of the scheduler, and what SGLang calls of a linker."""
    scheduler.tree_cache.check_hicache_events()
    form_batch(do_nothing, scheduler)


def time_steps(scheduler: Any, num_steps: int) -> list[float]:
    """Return the microseconds of each step."""
    times = []
    for _ in range(num_steps):
        begin = time.perf_counter_ns()
        step(scheduler)
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return times


def summary(times: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=100)
    return {"mean_us": statistics.fmean(times), "p50_us": cuts[49], "p99_us": cuts[98]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parked", type=int, nargs="+", default=[0, 10, 100, 1000])
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    server, url = silent_store()
    cache = make_cache(url)
    scheduler = SimpleNamespace(
        tree_cache=cache,
        waiting_queue=[],
        running_batch=None,
        last_batch=None,
        chunked_req=None,
        _engine_paused=False,
    )
    results = []
    for num_parked in sorted(options.parked):
        for number in range(len(scheduler.waiting_queue), num_parked):
            park(scheduler.waiting_queue, number)
        time.sleep(1.0)  # hashing and sending run on other threads, and must not be measured
        time_steps(scheduler, 100)
        queue: WaitingQueue = scheduler.waiting_queue
        assert (len(queue), len(queue) - len(queue.ready)) == (num_parked, num_parked)
        result = {"parked": num_parked, **summary(time_steps(scheduler, options.steps))}
        results.append(result)
        print(
            "{parked:5d} parked: mean {mean_us:6.2f} us, p50 {p50_us:6.2f}, p99 {p99_us:6.2f} a step".format(**result)
        )
    server.close()
    cache.release_host_resources()
    if options.json is not None:
        content = {"machine": machine(), "versions": versions(), "steps": options.steps, "results": results}
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    slowest = max(result["mean_us"] for result in results)
    if slowest > LIMIT_US:
        raise SystemExit(f"a step costs {slowest:.1f} us on average; expected at most {LIMIT_US:g} us")


if __name__ == "__main__":
    main()
