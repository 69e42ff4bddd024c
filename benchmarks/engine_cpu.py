"""Measures what a fetch costs in SGLang's process: ``python -m benchmarks.engine_cpu``.

For each page size, a prefix is stored once. Then it is fetched again and again, over loopback, by a data plane in a
process of its own, into SGLang's own pool and tree, as the scheduler does it. `whole` is the CPU time of this process,
all threads: Python, and copying the values. `scheduler` is that of the thread that the scheduler would run on. `fetch`
is how long it takes. `lookup` is how long the store takes to answer one. `sent` and `received` are the store's bytes of
bodies for a fetch. `calls` counts the calls of this package's functions in this process. There is no model.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

os.environ.setdefault("KVFETCH_CPU_ENGINE", "1")  # SGLang selects its platform when it is imported

import torch
from sglang.srt.mem_cache import unified_radix_cache
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.utils import get_storage_hash_str

import sgl_kvfetch
from benchmarks.machine import machine, versions
from benchmarks.report import make_parser, whole_numbers, write_json
from harness.metrics import read_metric
from harness.store_process import StoreProcess
from harness.waiting import wait_until
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.keys import HeadSlice, Namespace
from sgl_kvfetch.plugin.device import linker as linker_module
from sgl_kvfetch.plugin.device.linker import KVFetchLinker
from sgl_kvfetch.plugin.page_hashes import hash_bytes
from sgl_kvfetch.plugin.starting import Opening
from sgl_kvfetch.stores.wire import Route

HEADS, DIM = 3, 64
_STEP_S = 0.02  # between two steps, so that the steps in which nothing happens cost little


class Engine:
    """A pool, a tree and a data plane."""

    def __init__(self, store_url: str, tokens: array[int], layers: int, page_size: int) -> None:
        self.tokens = tokens
        self.page_size = page_size
        self.layers = layers
        num_slots = 2 * (len(tokens) + page_size)  # half for others: then pages may wait for room in the write queue
        self.pool = MHATokenToKVPool(num_slots, page_size, torch.bfloat16, HEADS, DIM, layers, "cpu", False)
        allocator: Any  # SGLang has one of its own for pages of one token
        if page_size == 1:
            allocator = TokenToKVPoolAllocator(num_slots, torch.bfloat16, "cpu", self.pool, False)
        else:
            allocator = PagedTokenToKVPoolAllocator(num_slots, page_size, torch.bfloat16, "cpu", self.pool, False)
        slots = ReqToTokenPool(8, num_slots, "cpu", False)
        params = CacheInitParams(False, slots, allocator, page_size, tree_components=(ComponentType.FULL,))
        extra = {
            "store": store_url,
            "recompute": "never",
            "lookup_timeout_s": 600,
            "fetch_timeout_s": 600,
            "device": {"pool_share": 1.0},
        }
        quantiser = make_quantiser("exact")
        namespace = Namespace(
            "benchmark", "bfloat16", "mha", "bfloat16", page_size, layers, 0, HEADS, DIM, DIM, quantiser.identity
        )
        heads = HeadSlice(namespace, range(HEADS))

        def open_engine_plane(config: Any, rank: Any, pages: Any, nvdec: Any, **staging: Any) -> Any:
            return Opening(heads, 0, pages, nvdec, **staging).open(config, quantiser)

        vars(linker_module)["open_engine_plane"] = open_engine_plane
        self.cache = unified_radix_cache.UnifiedRadixCache(params)
        self.linker = KVFetchLinker(
            None,
            params,
            components={ComponentType.FULL},
            extra_config={"config": json.dumps(extra | {"prefetch_threshold": page_size})},
        )
        self.cache.init_cache_linker(self.linker)

    def step(self) -> None:
        self.cache.check_hicache_events()
        self.linker.step(self.cache, lambda: 0)

    @property
    def key(self) -> RadixKey:
        return RadixKey(self.tokens).page_aligned(self.page_size)

    def write(self) -> None:
        slots = self.cache.token_to_kv_pool_allocator.alloc(len(self.tokens))
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(0)).cumsum(0) * 0.05)
        self.cache.insert(InsertParams(key=self.key, value=slots))
        wait_until(self._is_stored)

    def _is_stored(self) -> bool:
        for _ in range(20):
            self.step()
            time.sleep(0.01)
        assert self.linker._parts is not None
        found: list[Any] = []
        hashes = hash_bytes(get_storage_hash_str(self.key, None, page_size=self.page_size))
        self.linker._parts.plane.look_up(hashes, found.append)

        def is_found() -> bool:
            self.step()
            return bool(found)

        wait_until(is_found)
        return bool(found[0].num_pages == len(self.tokens) // self.page_size)

    def flush(self) -> None:
        self.cache.reset()
        self.cache.token_to_kv_pool_allocator.clear()

    def fetch(self, rid: str) -> int:
        request = _Request(rid, self.key)
        self.linker.arrive(request, self.cache)
        self._until(lambda: not self.linker.is_parked(request.cache_request_handle))
        request.init_next_round_input(self.cache, cow_mamba=False)
        num_tokens, _ = self.cache.init_load_back(
            InitLoadBackParams(request.best_match_node, request.host_hit_length, req=request)
        )
        self.linker.leave(request)
        self.linker.layer_done_counter.set_consumer(self.cache.ready_to_load_host_cache())
        for layer in range(self.layers):
            self.linker.layer_done_counter.wait_until(layer)
        slots = self.cache.prefix_device_indices(request)
        assert not self.cache.finish_external_linker_loads([request])
        self.cache.insert(InsertParams(key=self.key, value=slots))
        return int(num_tokens)

    def _until(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            self.step()
            time.sleep(_STEP_S)

    def close(self) -> None:
        self.cache.release_host_resources()


class _Request(SimpleNamespace):
    """What the linker and SGLang's tree use of a ``Req``."""

    def __init__(self, rid: str, key: RadixKey) -> None:
        super().__init__(
            rid=rid,
            key=key,
            session=None,
            extra_key=None,
            swa_branching_seqlen=None,
            prefix_len=0,
            cache_request_handle=CacheRequestHandle(rid, 0),
        )

    def init_next_round_input(self, tree: Any, *, cow_mamba: bool) -> None:
        matched = tree.match_prefix(MatchPrefixParams(key=self.key, req=self))
        self.last_node, self.best_match_node = matched.last_device_node, matched.best_match_node
        self.host_hit_length, self.prefix_len = matched.host_hit_length, matched.host_hit_length


def measure(engine: Engine, rounds: int, store_url: str) -> dict[str, float]:
    """Return medians in milliseconds, of the time that a fetch takes and of CPU time, and what the store says of it."""
    whole: list[float] = []
    scheduler: list[float] = []
    fetch: list[float] = []
    for number in range(rounds + 1):
        if number == 1:
            before = StoreFigures.of(store_url)
        engine.flush()
        began = time.process_time(), time.thread_time(), time.monotonic()
        num_tokens = engine.fetch(f"request {number}")
        ended = time.process_time(), time.thread_time(), time.monotonic()
        assert num_tokens == len(engine.tokens), num_tokens
        if number:  # the first one warms up
            for kept, since, now in zip((whole, scheduler, fetch), began, ended, strict=True):
                kept.append(1e3 * (now - since))
    names = {"whole_ms": whole, "scheduler_ms": scheduler, "fetch_ms": fetch}
    medians = {name: statistics.median(values) for name, values in names.items()}
    return medians | before.until(StoreFigures.of(store_url))


@dataclass(frozen=True)
class StoreFigures:
    """What a store has counted since it started."""

    stored_bytes: float
    lookups: float
    lookup_s: float
    sent_bytes: float
    received_bytes: float

    @staticmethod
    def of(url: str) -> StoreFigures:
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            text = answer.read().decode()

        def read(name: str, **labels: str) -> float:
            return read_metric(text, f"kvfetch_server_{name}", **labels)

        return StoreFigures(
            read("stored_bytes"),
            read("lookups_total"),
            read("request_seconds_sum", route=Route.LOOKUP),
            read("sent_bytes_total"),
            read("received_bytes_total"),
        )

    def until(self, later: StoreFigures) -> dict[str, float]:
        """Return what is stored, how long a lookup took, and the bytes of one, as there is one for each fetch."""
        num_lookups = later.lookups - self.lookups
        return {
            "stored_mb": later.stored_bytes / 1e6,
            "lookup_ms": 1e3 * (later.lookup_s - self.lookup_s) / num_lookups,
            "sent_mb": (later.sent_bytes - self.sent_bytes) / num_lookups / 1e6,
            "received_mb": (later.received_bytes - self.received_bytes) / num_lookups / 1e6,
        }


def count_calls(make: Callable[[], Engine]) -> int:
    """Return how many functions of this package run in this process during a fetch."""
    package = str(Path(sgl_kvfetch.__file__).parent)
    num_calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal num_calls
        num_calls += event == "call" and frame.f_code.co_filename.startswith(package)

    threading.setprofile(count)  # of threads that start from now on
    engine = make()
    try:
        sys.setprofile(count)
        num_calls = 0
        engine.fetch("counted")
        return num_calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        engine.close()


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser("benchmarks.engine_cpu", __doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--page-sizes", type=whole_numbers, default="64", help="in tokens (default: %(default)s)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    vars(unified_radix_cache)["get_disagg"] = lambda: SimpleNamespace(disaggregation_mode="null")
    tokens = array("q", (i * 7919 % 30011 for i in range(args.tokens)))
    results = {}
    for page_size in args.page_sizes:
        with tempfile.TemporaryDirectory(prefix="kvfetch-engine-cpu-") as folder, StoreProcess(Path(folder)) as store:
            make = partial(Engine, store.url, tokens, args.layers, page_size)
            engine = make()
            engine.write()
            found = measure(engine, args.rounds, store.url)
            engine.close()
            results[page_size] = found | {"calls": count_calls(make)}
        print(f"page size {page_size}:", {name: round(value, 1) for name, value in results[page_size].items()})
    if args.json:
        write_json(args.json, {"results": results, "machine": machine(), "versions": versions()})


if __name__ == "__main__":
    main()
