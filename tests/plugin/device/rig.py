"""A test rig: our linker with SGLang's own tree, allocator and pool, in place of a whole engine."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MiniMaxSparseKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from harness.waiting import WAIT_S, wait_until
from sgl_kvfetch.codec import Content
from sgl_kvfetch.codec.quant.base import Quantiser
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.engine import DataPlane
from sgl_kvfetch.engine.process import Peer, Setup
from sgl_kvfetch.plane import service
from sgl_kvfetch.plane.service import Service
from sgl_kvfetch.plugin import starting
from sgl_kvfetch.plugin.device import linker as linker_module
from sgl_kvfetch.plugin.device.gpu_pages import CudaPages
from sgl_kvfetch.plugin.device.linker import KVFetchLinker
from sgl_kvfetch.plugin.device.pools import DevicePages, EnginePools, SlotPages
from sgl_kvfetch.protocol.messages import LookUp
from sgl_kvfetch.protocol.quantiser import config_quantiser
from sgl_kvfetch.stores.base import Lookup, Store, WrappedStore
from sgl_kvfetch.types import TENSORS
from tests.plugin.device.fake_streams import FakeDevice
from tests.plugin.planes import Served, start_by_uint8
from tests.segments import make_heads

PAGE, LAYERS, HEADS, DIM = 4, 4, 2, 48
WINDOW_LAYERS = 2  # beside these, of a rig with windows


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


@dataclass(eq=False)
class Request:
    """What the linker and SGLang's tree use of a ``Req``."""

    rid: str
    tokens: list[int]
    kv: Any = None
    priority: int | None = None
    session: None = None
    extra_key: str | None = None
    swa_branching_seqlen: None = None
    host_hit_is_storage: bool = False
    host_hit_length: int = 0
    prefix_len: int = 0
    device_len: int = 0
    last_node: Any = None
    best_match_node: Any = None
    skip_radix_cache_insert: bool = False
    discard_output_reason: Any = None
    output_ids: tuple[int, ...] = ()
    time_stats: Any = None
    sampling_params: Any = field(default_factory=lambda: SimpleNamespace(max_new_tokens=1, ignore_eos=False))

    @property
    def origin_input_ids(self) -> list[int]:
        return self.tokens

    @property
    def cache_request_handle(self) -> CacheRequestHandle:
        return CacheRequestHandle(self.rid, 0)

    def init_next_round_input(self, tree: UnifiedRadixCache, cow_mamba: bool = False) -> None:
        """As SGLang does: one token at least is left to compute."""
        key = key_of(self.tokens[:-1], self.extra_key, tree.tree_core.is_eagle)
        matched = tree.match_prefix(MatchPrefixParams(key=key, req=self, cow_mamba=cow_mamba))
        self.prefix_len = self.device_len = matched.device_prefix_len
        self.last_node, self.best_match_node = matched.last_device_node, matched.best_match_node
        self.host_hit_length = matched.host_hit_length


def key_of(tokens: Sequence[int], extra_key: str | None = None, has_pairs: bool = False) -> RadixKey:
    return RadixKey(array("q", tokens), extra_key=extra_key, is_bigram=has_pairs).page_aligned(PAGE)


class Gate:
    """Lets a store's requests through, holds them or fails them, while the test runs on another thread."""

    def __init__(self) -> None:
        self.is_open = True
        self.error: Exception | None = None
        self.num_waiting = 0

    async def pass_through(self, name: str = "", start: int = 0) -> None:
        self.num_waiting += 1
        try:
            while not self.is_open:  # noqa: ASYNC110 -- set from another thread
                await asyncio.sleep(0.001)
        finally:
            self.num_waiting -= 1
        if self.error is not None:
            raise self.error


class GatedStore(WrappedStore):
    """A store whose lookups and reads go through gates."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.lookups, self.reads, self.puts = Gate(), Gate(), Gate()
        self.num_lookups = 0
        self.data_reads: list[tuple[str, int]] = []

    async def lookup(self, namespace: str, hashes: Sequence[bytes]) -> Lookup:
        self.num_lookups += 1
        await self.lookups.pass_through()
        return await self._store.lookup(namespace, hashes)

    async def put(self, name: str, data: Content) -> None:
        await self.puts.pass_through(name)
        await self._store.put(name, data)

    async def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        if name.endswith(".kvd"):
            self.data_reads.append((name, start))
            await self.reads.pass_through(name, start)
        return await self._store.get(name, start, length)


_CONNECTING = threading.Lock()
_NO_SLOTS = torch.empty(0, dtype=torch.int64)


@dataclass
class Rig:
    """One rank. Its methods do what SGLang's scheduler does. ``install`` makes what the linker opens next this rank's.
    ``extra_key``: of its requests, such as an adapter's. ``weights``: a name for those that it computes with now."""

    cache: UnifiedRadixCache
    linker: KVFetchLinker
    pool: MHATokenToKVPool
    served: Served
    num_slots: int
    extra_config: str
    install: Callable[[], None]
    windows: MHATokenToKVPool | None = None
    following: Sequence[torch.Tensor] = ()  # the buffers of side pools that have the slots of K and V
    has_pairs: bool = False
    requests: list[Request] = field(default_factory=list)
    extra_key: str | None = None
    weights: str = ""

    @property
    def parts(self) -> Any:
        assert self.linker._attached is not None
        return self.linker._attached

    @property
    def service(self) -> Service:
        return self.served.service

    @property
    def store(self) -> GatedStore:
        store = self.service.client.store
        while not isinstance(store, GatedStore):  # one with keys
            assert isinstance(store, WrappedStore)
            store = store._store
        return store

    def arrive(self, tokens: Sequence[int], rid: str = "", *, is_idle: bool = False) -> Request:
        # One token more, which is always computed.
        request = Request(rid or f"r{len(self.requests)}", [*tokens, 1], extra_key=self.extra_key)
        self.requests.append(request)
        self.linker.arrive(request, self.cache, is_idle=is_idle)
        return request

    def arrive_staged(self, tokens: Sequence[int], rid: str = "", *, is_idle: bool = False) -> Request:
        request = self.arrive(tokens, rid, is_idle=is_idle)
        self.await_unparked(request)
        return request

    def is_parked(self, request: Request) -> bool:
        return self.linker.prefixes.is_parked(request.cache_request_handle)

    def step(self) -> None:
        self.cache.check_hicache_events()
        for request in self.linker.step(self.cache, lambda: 0):
            self.linker.arrive(request, self.cache)

    def settle(self, until: Callable[[], bool]) -> None:
        def is_reached() -> bool:
            self.step()
            return until()

        wait_until(is_reached, poll_s=0.001)

    def await_unparked(self, *requests: Request) -> None:
        self.settle(lambda: not any(map(self.is_parked, requests)))

    def fetch(self, tokens: Sequence[int], *, is_idle: bool = False) -> int:
        """Arrive, and be admitted. Return how many tokens were loaded."""
        request = self.arrive_staged(tokens, is_idle=is_idle)
        (num_tokens,) = self.admit(request)
        return num_tokens

    def admit(self, *requests: Request) -> list[int]:
        """Admit requests in one batch, compute it, and insert what they have. Return how many tokens were loaded."""
        loaded = []
        for request in requests:
            loaded.append(self.load_back(request))
            self.linker.prefixes.leave(request.rid)  # the waiting queue
        index = self.cache.ready_to_load_host_cache()
        counter = self.linker.layer_done_counter
        counter.set_consumer(index)
        prefixes = [self.cache.prefix_device_indices(request) for request in requests]
        for layer in range(len(self.pool.k_buffer) + (WINDOW_LAYERS if self.windows else 0)):
            counter.wait_until(layer)
        failed = self.cache.finish_external_linker_loads(list(requests))
        for request, prefix in zip(requests, prefixes, strict=True):
            if request in failed:  # which its end would free
                self.cache.token_to_kv_pool_allocator.free(prefix[request.device_len :])
            else:
                self.compute(request.tokens[:-1], prefix, request.device_len, request.kv)
        mode = SimpleNamespace(is_extend_without_speculative=lambda: False)  # no prefill, for the meter
        self.linker.batch_ended(SimpleNamespace(reqs=[*requests], launch_ts=0.0, forward_mode=mode), 0.0)
        return loaded

    def load_back(self, request: Request) -> int:
        """Queue a request's load, as SGLang does when it admits it. Return how many tokens are loaded."""
        request.init_next_round_input(self.cache)
        count = 0
        if request.host_hit_length:
            params = InitLoadBackParams(request.best_match_node, request.host_hit_length, req=request)
            count, request.last_node = self.cache.init_load_back(params)
            request.prefix_len += count
        return count

    def compute(
        self, tokens: Sequence[int], prefix: torch.Tensor = _NO_SLOTS, device_len: int = 0, kv: Any = None
    ) -> None:
        """Compute what is not in ``prefix``, and insert it all. ``device_len``: tokens that the tree had. ``kv``: of
        the request."""
        key = self._key(tokens)
        num_tokens = len(key) - len(prefix)
        new = self._alloc(tokens, num_tokens) if num_tokens else prefix[:0]
        for tensor, buffers in zip(TENSORS, (self.pool.k_buffer, self.pool.v_buffer), strict=True):
            values = self.values(tokens, tensor)[len(prefix) : len(key)]
            for layer, buffer in enumerate(buffers):
                buffer[new] = values[:, layer].to(self.pool.dtype).view(self.pool.store_dtype)  # fp8 as bytes
        for number, buffer in enumerate(self.following):
            buffer[new] = self._following(tokens, number, buffer)[len(prefix) : len(key)]
        slots = torch.cat([prefix.to(new.dtype), new])
        params = InsertParams(key=key, value=slots, prev_prefix_len=device_len)
        if self.windows and kv is not None:
            params.set_evicted_seqlen(ComponentType.SWA, kv.get_evicted_seqlen(ComponentType.SWA))
        self.cache.insert(params)

    def _alloc(self, tokens: Sequence[int], num_tokens: int) -> torch.Tensor:
        """Return slots for the last tokens. Where windows have slots of their own, fill these."""
        allocator = self.cache.token_to_kv_pool_allocator
        if self.windows is None:
            new = allocator.alloc(num_tokens)
        else:
            new = allocator.full_attn_allocator.alloc(num_tokens)
            of_window = allocator.swa_attn_allocator.alloc(num_tokens)
            allocator.set_full_to_swa_mapping(new, of_window)
            for buffers, values in self._window_values(tokens):
                for layer, buffer in enumerate(buffers):
                    buffer[of_window] = values[-num_tokens:, layer]
        assert new is not None
        return new

    def _window_values(self, tokens: Sequence[int]) -> Iterator[tuple[Sequence[torch.Tensor], torch.Tensor]]:
        """Yield the buffers of the windows' K and V with what is in them for these tokens."""
        assert self.windows is not None
        for tensor, buffers in zip(TENSORS, (self.windows.k_buffer, self.windows.v_buffer), strict=True):
            yield buffers, self.values(tokens, f"{tensor} of windows")

    def holds_window(self, tokens: Sequence[int], num_tokens: int) -> bool:
        """Return whether the windows' pool has the right values of the last ``num_tokens`` of these."""
        slots = self.slots_of(tokens)[-num_tokens:]
        if len(slots) < num_tokens:
            return False
        there = self.cache.token_to_kv_pool_allocator.full_to_swa_index_mapping[slots]
        return bool(there.all()) and all(
            torch.equal(buffer[there], values[-num_tokens:, layer])
            for buffers, values in self._window_values(tokens)
            for layer, buffer in enumerate(buffers)
        )

    def fill_queue(self) -> Callable[[], None]:
        """Leave no room for pages in the write queue. Return what frees it all."""
        room = self.parts.plane._peer._room
        offset = room.allocate(room.num_bytes, 0)
        assert offset is not None
        return lambda: room.free(offset)

    def switch(self) -> Callable[[], None]:
        """Go over to another quantiser. Return what waits until a data plane serves by it."""
        service.__dict__["config_quantiser"] = config_quantiser
        plane = self.parts.plane
        start = start_by_uint8(plane)
        plane.switch(lambda _: start)
        return lambda: wait_until(lambda: plane._make is None)

    def stored(self, tokens: list[int]) -> list[int]:
        """Put the pages of a prompt into the store, and remove them from the tree. Return the prompt."""
        self.compute(tokens)
        self.write_all()
        self.flush()
        return tokens

    def write_all(self) -> None:
        """Several ranks agree on what has been offloaded, and so take the same number of steps."""
        self.settle(lambda: not self.cache.linker.pending_offloads)
        self.served.write_all()

    def hear_plane(self) -> None:
        """Wait until the data plane has done all that it was told so far."""
        self.settle(self.parts.plane.look_up(LookUp(0, b"")).done)

    def flush(self) -> None:
        self.cache.reset()
        self.cache.token_to_kv_pool_allocator.clear()
        self.overwrite()

    def overwrite(self) -> None:
        """Leave nothing of what the pools have had."""
        pools = [pool for pool in (self.pool, self.windows) if pool is not None]
        for buffer in [*self.following, *(each for pool in pools for each in (*pool.k_buffer, *pool.v_buffer))]:
            buffer.view(torch.uint8).fill_(0xFF)  # NaN in every dtype

    def evict(self) -> None:
        """Let the pool lose everything, as when other prompts need its slots."""
        self.settle(lambda: not self.cache.linker.pending_offloads)
        self.cache.evict(EvictParams(num_tokens=self.num_slots))
        assert self.cache.token_to_kv_pool_allocator.available_size() == self.num_slots

    def holds(self, tokens: Sequence[int], num_tokens: int) -> bool:
        """Return whether the tree has these tokens, with the right values."""
        slots = self.slots_of(tokens)[:num_tokens]
        if len(slots) < num_tokens:
            return False
        return self.holds_following(tokens, slots) and all(
            torch.equal(torch.stack([buffer[slots] for buffer in buffers], dim=1), self.values(tokens, t)[:num_tokens])
            for t, buffers in zip(TENSORS, (self.pool.k_buffer, self.pool.v_buffer), strict=True)
        )

    def holds_following(self, tokens: Sequence[int], slots: torch.Tensor) -> bool:
        """Return whether what follows K and V has the right values in these slots, of the first tokens."""
        return all(
            torch.equal(buffer[slots], self._following(tokens, number, buffer)[: len(slots)])
            for number, buffer in enumerate(self.following)
        )

    def slots_of(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the slots of what the tree has of these tokens."""
        matched = self.cache.match_prefix(MatchPrefixParams(key=self._key(tokens)))
        return self.cache.path_device_indices(matched.last_device_node)[: matched.device_prefix_len]

    def values(self, tokens: Sequence[int], name: str) -> torch.Tensor:
        """Return what this rank computes, ``(tokens, layers, heads, dim)``. ``name``: "k", "v", or of side pages."""
        return page_values(tokens, f"{name}{self.weights}{self.extra_key or ''}")

    def _key(self, tokens: Sequence[int]) -> RadixKey:
        return key_of(tokens, self.extra_key, self.has_pairs)

    def _following(self, tokens: Sequence[int], number: int, buffer: torch.Tensor) -> torch.Tensor:
        """Return what a buffer of a side pool that follows K and V has of a prompt, ``(tokens, heads, dim)``. A draft
        model that goes by pairs of tokens has nothing of the first token."""
        heads, dim = buffer.shape[1:]
        values = self.values(tokens[self.has_pairs :], f"buffer {number} of side pools")
        return values[:, 0, :heads, :dim].to(buffer.dtype)

    def checked_slots(self, tokens: Sequence[int], of_window: int) -> torch.Tensor:
        """Assert that the tree has these tokens with all that follows K and V, and their last ``of_window`` in windows,
        if there are any. Since the last flush, nothing was written to any other slot. Return theirs."""
        slots = self.slots_of(tokens)
        assert len(slots) == len(tokens)
        assert self.holds_following(tokens, slots)
        assert self.windows is None or self.holds_window(tokens, of_window)
        is_free = torch.ones(self.num_slots + PAGE, dtype=torch.bool)
        is_free[slots] = False
        buffers = [(is_free, each) for each in (*self.pool.k_buffer, *self.pool.v_buffer, *self.following)]
        if self.windows is not None:
            of_windows = torch.ones_like(is_free)
            of_windows[self.cache.token_to_kv_pool_allocator.full_to_swa_index_mapping[slots]] = False
            of_windows[0] = False  # where those are mapped to that have none
            buffers += [(of_windows, each) for each in (*self.windows.k_buffer, *self.windows.v_buffer)]
        for others, buffer in buffers:
            assert bool((buffer[others].view(torch.uint8) == 0xFF).all()), "a slot of nobody was written to"
        return slots

    def connect(self, **changes: Any) -> None:
        """Attach the store again, with another config."""
        with _CONNECTING:
            self.install()
            self.linker.connect(json.dumps(json.loads(self.extra_config) | changes))

    def assert_nothing_held(self) -> None:
        """Let all requests leave, and assert that every slot is free or evictable, and no memory is kept for them."""
        if self.linker._attached is None or self.linker._rank.tp_size > 1 or self.cache.linker.private_load_indices:
            return  # it is closed, would wait for other ranks, or loads still
        self.linker.prefixes.retain(())
        self.settle(lambda: not self.cache.linker.pending_offloads and not self.parts.board._open)
        assert self.cache.protected_size() == 0
        allocator = self.cache.token_to_kv_pool_allocator
        if self.windows is not None:
            of_windows = allocator.swa_attn_allocator.available_size()
            assert of_windows + self.cache.swa_evictable_size() == self.num_slots
            allocator = allocator.full_attn_allocator
        assert allocator.available_size() + self.cache.evictable_size() == self.num_slots
        self.assert_no_memory_held()

    def assert_no_memory_held(self) -> None:
        """Assert that no shared memory is kept for requests."""
        stager = self.service._stager
        # A staging that is released while it is fetched gives its memory back when its task has been cancelled.
        wait_until(lambda: not stager._works and not stager._turns._used_bytes)
        entries = self.service.client.reads.memory._entries  # an audit holds some, too
        wait_until(lambda: not any(entry.num_holders or entry.filler for entry in [*entries.values()]))


def make_rig(
    url: str,
    *,
    num_slots: int = 256,
    num_layers: int = LAYERS,
    window: int = 0,
    following: str = "",
    has_pairs: bool = False,
    core: str = "python",
    rank: int = 0,
    quantiser: Quantiser | None = None,
    dtype: torch.dtype = torch.float32,
    gpu: FakeDevice | None = None,
    agree: Callable[[torch.Tensor], None] | None = None,
    **config: Any,
) -> Rig:
    """Build a rank on a store. ``core``: of SGLang's tree. ``window``: of two more layers, in tokens; 0 for
    none. ``following``: "draft", "packed" or "indexer" for a side pool that has the slots of K and V. ``has_pairs``:
    whether the tree's keys are pairs of tokens, as with EAGLE, whose draft model has a token's KV by the next one.
    ``quantiser``: `exact` by default. ``dtype``: of K and V where there are no windows. ``gpu``: where the pool
    is; the host by default. ``agree`` replaces the collectives of several ranks."""
    windows: MHATokenToKVPool | None = None
    allocator: Any
    if window:
        layers = [*range(num_layers + WINDOW_LAYERS)]
        of_window, others = layers[1 : 1 + WINDOW_LAYERS], [*layers[:1], *layers[1 + WINDOW_LAYERS :]]
        sizes = num_slots, num_slots, PAGE
        both = SWAKVPool(*sizes, torch.float32, HEADS, DIM, of_window, others, "cpu")
        pool, windows = both.full_kv_pool, both.swa_kv_pool
        allocator = SWATokenToKVPoolAllocator(*sizes, torch.float32, "cpu", both, False)
    else:
        pool = MHATokenToKVPool(num_slots, PAGE, dtype, HEADS, DIM, num_layers, "cpu", False)
        of_model = pool
        if following == "indexer":
            sparse = [*range(1, num_layers)]
            which = {"dense_layer_ids": [0], "sparse_layer_ids": sparse, "disable_value_sparse_layer_ids": sparse}
            stage = {"start_layer": 0, "end_layer": num_layers}
            of_model = MiniMaxSparseKVPool(num_slots, PAGE, dtype, HEADS, DIM, 16, device="cpu", **which, **stage)
            pool = of_model.main_pool
        allocator = PagedTokenToKVPoolAllocator(num_slots, PAGE, dtype, "cpu", of_model, False)
    # A draft model has other heads than the model; MTP's layers, which are packed, have the model's.
    shapes = {"draft": [(1, min(16, DIM), 2)], "packed": [(HEADS, DIM, 1)] * 2}.get(following, [])
    drafts = tuple(MHATokenToKVPool(num_slots, PAGE, torch.bfloat16, *shape, "cpu", False) for shape in shapes)
    buffers = [x for draft in drafts for x in (*draft.k_buffer, *draft.v_buffer)]
    if following == "indexer":
        buffers = of_model.index_k_pool.k_buffer
    components = (ComponentType.FULL, ComponentType.SWA) if window else (ComponentType.FULL,)
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=ReqToTokenPool(8, num_slots, "cpu", False),
        token_to_kv_pool_allocator=allocator,
        page_size=PAGE,
        tree_components=components,
        sliding_window_size=window or None,
        is_eagle=has_pairs,
        tree_core_backend=core,
        sidecar_draft_device_pools=drafts if following == "draft" else (),
        mtp_draft_device_pools=drafts if following == "packed" else (),
    )
    served = Served()
    own_rank = rank
    of_store = quantiser or make_quantiser("exact")

    def open_engine_plane(
        config: Any, rank: Any, pages: Any, gpu: int | None, sides: Any, staging_bytes: int, takes_code: bool
    ) -> DataPlane:
        heads = make_heads(pages.geometry, of_store, model=f"rank {own_rank}{config.model_id or ''}")
        sizes = sides.page_bytes
        room = config.write_queue_bytes, staging_bytes, config.memory_cache
        start = starting.Opening(heads, own_rank, pages, gpu, None, sizes, takes_code, None).start(config, of_store)
        return DataPlane(start, Peer(Setup(starting._launch, pages.geometry, sizes, *room)))

    def open_pages(pools: EnginePools, page_size: int, forward_stream: Any) -> tuple[SlotPages, bool]:
        if gpu is None:
            return DevicePages(pools.kv, page_size), False
        return CudaPages(pools.kv, page_size, gpu, gpu.forward), True

    def install() -> None:
        vars(linker_module).update(open_engine_plane=open_engine_plane, _open_pages=open_pages)
        starting._launch = served.launch

    install()
    service.__dict__["config_quantiser"] = lambda config: of_store
    extra = {
        "store": url,
        "codec": "zstd",
        "quantiser": "exact" if quantiser is None else "klt",
        "device": {"pool_share": 1.0},
        "recompute": "never",
        "audit_share": 0,  # which hits they cut is drawn
        "prefetch_threshold": PAGE,
        "lookup_timeout_s": 600,  # no test should wait for these, however slow its machine is
        "fetch_timeout_s": 600,
    } | config
    cache = UnifiedRadixCache(params)
    linker = KVFetchLinker(None, params, components={*components}, extra_config={"config": json.dumps(extra)})
    assert type(cache.tree_core).__name__.startswith("Rust") == (core == "rust")  # SGLang falls back to the other one
    cache.init_cache_linker(linker)
    if agree is not None:
        cache.__dict__["_all_reduce_attn_groups"] = lambda values, op: agree(values)
        linker.__dict__["_agree"] = agree
        linker._rank.tp_size = 2
        linker.detach()
        linker.connect(json.dumps(extra))
    return Rig(cache, linker, pool, served, num_slots, json.dumps(extra), install, windows, buffers, has_pairs)


class Ranks:
    """The collective of ranks that run on threads: the minimum over all ranks."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=WAIT_S)
        self._values: list[torch.Tensor | None] = [None] * num_ranks

    def agree(self, rank: int) -> Callable[[torch.Tensor], None]:
        def take_least(values: torch.Tensor) -> None:
            self._values[rank] = values.clone()
            self._barrier.wait()
            least = torch.stack([each for each in self._values if each is not None]).amin(0)
            self._barrier.wait()
            values.copy_(least)

        return take_least

    def run(self, schedule: Callable[[int, list[Any]], None]) -> list[list[Any]]:
        """Run ``schedule`` for each rank, on a thread of its own, and return what it has added to its list. Raises
        AssertionError with the exceptions."""
        histories: list[list[Any]] = [[] for _ in self._values]
        faults: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                schedule(rank, histories[rank])
            except BaseException as error:
                faults.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(histories))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not faults, faults
        return histories
