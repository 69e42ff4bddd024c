"""A test rig: our cache with SGLang's own tree, allocator and pool, in place of a whole engine."""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from harness.metrics import own_metric
from harness.waiting import WAIT_S, polls, wait_until
from sgl_kvfetch import metrics
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.plane.config import parse_config
from sgl_kvfetch.plane.messages import Found
from sgl_kvfetch.plane.service import Service, run_data_plane
from sgl_kvfetch.plugin import data_plane as plane_module
from sgl_kvfetch.plugin.device.backend import DeviceBackend
from sgl_kvfetch.plugin.device.cache import KVFetchRadixCache
from sgl_kvfetch.plugin.device.fetch_state import State
from sgl_kvfetch.plugin.device.pages import DevicePages
from sgl_kvfetch.types import TENSORS
from tests.plugin.device.gated_store import GatedStore
from tests.plugin.planes import Served
from tests.segments import make_heads

PAGE, LAYERS, HEADS, DIM = 4, 4, 2, 48
HANG_S = 120.0  # without a step of any rank


def prompt(seed: int, num_pages: int = 8) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(num_pages * PAGE)]


def page_values(tokens: Sequence[int], tensor: str) -> torch.Tensor:
    """Return K or V of a prompt, ``(tokens, layers, heads, dim)``. Each page depends on all tokens before it."""
    pages = []
    for end in range(PAGE, len(tokens) + 1, PAGE):
        seed = int.from_bytes(hashlib.sha256(f"{tensor}{list(tokens[:end])}".encode()).digest()[:7], "big")
        pages.append(torch.randn((PAGE, LAYERS, HEADS, DIM), generator=torch.Generator().manual_seed(seed)))
    return torch.cat(pages)


@dataclass
class Rig:
    """One rank. Its methods do what SGLang's scheduler does."""

    cache: KVFetchRadixCache
    pool: MHATokenToKVPool
    backend: DeviceBackend
    served: Served
    num_slots: int
    connect: Callable[[], DeviceBackend]
    _num_requests: int = field(default=0)

    @property
    def parts(self) -> Any:
        """What the cache has while a backend is attached, for tests that need what SGLang's scheduler does not."""
        assert self.cache._parts is not None
        return self.cache._parts

    @property
    def service(self) -> Service:
        return self.served.service

    @property
    def store(self) -> GatedStore:
        store = self.service.client.store
        assert isinstance(store, GatedStore)
        return store

    def arrive(self, tokens: Sequence[int]) -> CacheRequestHandle:
        """Let a request arrive: SGLang matches it and tells the cache about the rest."""
        self._num_requests += 1
        handle = CacheRequestHandle(f"r{self._num_requests}", 0)
        matched = self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens)))
        start = matched.device_prefix_len
        ids = array("q", tokens)
        self.cache.prefetch_from_storage(
            handle,
            matched.last_host_node,
            ids[start:],
            self.cache.get_last_hash_value(matched.last_host_node),
            None,
            matched_prefix_tokens=ids[:start],
        )
        return handle

    def admit(self, handle: CacheRequestHandle, tokens: Sequence[int]) -> tuple[int, int, Any]:
        """Admit a request. Return its cached tokens, how many of them are from the store, and its own lock."""
        assert self.cache.check_prefetch_progress(handle)
        loaded, _ = self.cache.pop_prefetch_loaded_span(handle)
        matched = self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens)))
        lock = self.cache.lock(matched.last_device_node)
        self.cache.finish_storage_prefetch_admission(handle, loaded, None)
        return matched.device_prefix_len, loaded, lock

    def await_over(self, *handles: CacheRequestHandle) -> None:
        """Step until the fetches of these requests allow their admission."""
        self.settle(lambda: all(self.cache.check_prefetch_progress(handle) for handle in handles))

    def fetch(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Run a request from arrival to end. Return its cached tokens, and how many of them are from the store."""
        handle = self.arrive(tokens)
        self.await_over(handle)
        cached, loaded, lock = self.admit(handle, tokens)
        self.cache.unlock(lock)
        return cached, loaded

    def abort(self, handle: CacheRequestHandle) -> None:
        self.cache.release_aborted_request(handle)

    def compute(self, tokens: Sequence[int], rid: str = "computed") -> Any:
        """Prefill a request from its first token on, insert its pages, and end it. Return the tree's node."""
        slots = self.cache.token_to_kv_pool_allocator.alloc(len(tokens))
        assert slots is not None
        for tensor, buffers in (("k", self.pool.k_buffer), ("v", self.pool.v_buffer)):
            values = page_values(tokens, tensor)
            for layer, buffer in enumerate(buffers):
                buffer[slots] = values[:, layer]
        result = self.cache.insert(InsertParams(key=self.key(tokens), value=slots))
        if self.cache.enable_storage:
            self.parts.writes.inserted(rid, result.last_device_node)
            self.parts.writes.forget_request(rid)
        return result.last_device_node

    def stored(self, tokens: Sequence[int]) -> None:
        """Put the pages of a prompt into the store, and remove them from the tree. A busy machine may drop a write, so
        ask until none is dropped."""
        for _ in polls():
            before = _num_dropped()
            self.compute(tokens)
            self.write_all()
            self.flush()
            if _num_dropped() == before:
                return
        raise TimeoutError("writes are dropped")

    def write_all(self) -> None:
        """Wait until all computed pages are in the store."""
        self.settle()
        self.served.run(self.service.client.writer.drain())

    def flush(self) -> None:
        self.cache.reset()
        self.cache.token_to_kv_pool_allocator.clear()
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.fill_(float("nan"))

    def settle(self, until: Callable[[], bool] | None = None) -> None:
        """Step until nothing is under way, or until ``until`` says so."""

        def is_reached() -> bool:
            self.cache.step()
            return not self.cache.has_pending_cache_operations() if until is None else until()

        wait_until(is_reached, poll_s=0.001, found=lambda: f"states {self.states()}, {self.parts.board.num_open} open")

    def hear_plane(self) -> None:
        """Wait until everything that the data plane has sent so far is reported to the board."""
        plane, found = self.backend.plane, list[Found]()
        plane.look_up([], found.append)
        fetched = plane.fetch([], [0], time.monotonic() + WAIT_S).end

        def is_heard() -> bool:
            plane.step()
            return bool(found) and fetched.done()

        wait_until(is_heard)

    def key(self, tokens: Sequence[int]) -> RadixKey:
        return RadixKey(array("q", tokens)).page_aligned(PAGE)

    def cached_values(self, tokens: Sequence[int], num_tokens: int, tensor: str) -> torch.Tensor:
        """Return the pool's values for the first tokens of a prompt."""
        matched = self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens)[:num_tokens]))
        assert matched.device_prefix_len == num_tokens
        slots = self.cache.path_device_indices(matched.last_device_node)[:num_tokens]
        buffers = self.pool.k_buffer if tensor == "k" else self.pool.v_buffer
        return torch.stack([buffer[slots] for buffer in buffers], dim=1)

    def holds(self, tokens: Sequence[int], num_tokens: int) -> bool:
        """Return whether the tree has these tokens, with the right values."""
        return all(
            torch.equal(self.cached_values(tokens, num_tokens, t), page_values(tokens[:num_tokens], t)) for t in TENSORS
        )

    def states(self) -> list[State]:
        """Return the states of the fetches of all present requests, in order of arrival."""
        return [fetch.state for fetch in self.parts.fetches._fetches.values()]

    @property
    def num_available(self) -> int:
        return int(self.cache.token_to_kv_pool_allocator.available_size())

    def assert_nothing_held(self) -> None:
        """Assert that every slot is free or evictable once no work is under way."""
        self.settle()
        assert self.cache.protected_size() == 0
        assert self.num_available + self.cache.evictable_size() == self.num_slots
        assert self.parts.fetches.held_tokens == 0
        self.served.run(self.service.client.writer.drain())
        wait_until(lambda: own_metric("sgl_kvfetch_queued_bytes", queue="write") == 0)  # of all rigs


def _num_dropped() -> float:
    samples = next(iter(metrics.WRITTEN_PAGES.collect())).samples
    return sum(s.value for s in samples if s.labels.get("result", "").startswith("dropped"))


def make_rig(
    directory: Path,
    *,
    num_slots: int = 256,
    num_layers: int = LAYERS,
    agree: Callable[[torch.Tensor], None] | None = None,
    rank: int = 0,
    device: dict[str, Any] | None = None,
    **config: Any,
) -> Rig:
    """Build a rank on a directory store. ``agree`` replaces the collective of several ranks."""
    pool = MHATokenToKVPool(num_slots, PAGE, torch.float32, HEADS, DIM, num_layers, "cpu", False)
    allocator = PagedTokenToKVPoolAllocator(num_slots, PAGE, torch.float32, "cpu", pool, False)
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=ReqToTokenPool(8, num_slots, "cpu", False),
        token_to_kv_pool_allocator=allocator,
        page_size=PAGE,
        tree_components=(ComponentType.FULL,),
    )
    cache = KVFetchRadixCache(params)
    if agree is not None:
        cache._num_ranks = lambda: 2  # type: ignore[method-assign]
        cache._agree = agree  # type: ignore[assignment, method-assign]
    extra = {
        "store": f"file://{directory}",
        "codec": "zstd",
        "device": device or {},
        "recompute": "never",
        "lookup_timeout_s": 600,  # no test should wait for these, however slow its machine is
        "fetch_timeout_s": 600,
    } | config
    parsed = parse_config(extra)
    pages = DevicePages(pool, PAGE)
    quantiser = make_quantiser("exact")
    heads = make_heads(pages.geometry, quantiser, model=f"rank {rank}")

    served = Served()

    def connect() -> DeviceBackend:
        plane_module._launch = served.launch
        vars(plane_module)["run_data_plane"] = partial(run_data_plane, on_service=served.add)
        plane = plane_module.open_plane(parsed, quantiser, heads, rank, pages, None)
        return cache.start(parsed, plane, pages, pool_tokens=num_slots, threshold_tokens=PAGE)

    return Rig(cache, pool, connect(), served, num_slots, connect)


class Ranks:
    """The collective of ranks that run on threads: the minimum over all ranks."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=WAIT_S)
        self._values: list[torch.Tensor | None] = [None] * num_ranks
        self.num_collectives = 0

    def agree(self, rank: int) -> Callable[[torch.Tensor], None]:
        def take_least(values: torch.Tensor) -> None:
            self._values[rank] = values.clone()
            self._barrier.wait()
            given = [v for v in self._values if v is not None]
            least = torch.stack(given).amin(0)
            self._barrier.wait()
            values.copy_(least)
            if rank == 0:
                self.num_collectives += 1

        return take_least

    def abort(self) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            self._barrier.abort()

    def run(self, schedule: Callable[[int, list[Any]], None]) -> list[list[Any]]:
        """Run ``schedule`` for each rank, on a thread of its own, and return what it has added to its list. Raises the
        first exception, and AssertionError if no rank adds anything for ``HANG_S``."""
        histories: list[list[Any]] = [[] for _ in self._values]
        faults: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                schedule(rank, histories[rank])
            except BaseException as error:
                faults.append(error)
                self.abort()

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(histories))]
        for thread in threads:
            thread.start()
        num_steps, since_s = [-1 for _ in histories], time.monotonic()
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(0.05)
            if (now := [len(history) for history in histories]) != num_steps:
                num_steps, since_s = now, time.monotonic()
            assert time.monotonic() - since_s < HANG_S, f"no rank steps any more, after {num_steps} steps"
        assert not faults, faults
        return histories
