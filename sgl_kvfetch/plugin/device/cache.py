"""SGLang's radix cache with a store behind it: it fetches the prefixes that it lacks and writes new ones."""

from __future__ import annotations

import atexit
import dataclasses
import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    EvictResult,
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_unified_radix_cache
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_memory

from sgl_kvfetch import timeline
from sgl_kvfetch.codec import Nvdec
from sgl_kvfetch.errors import KVFetchError, UnsupportedError
from sgl_kvfetch.plane import DataPlane, KVFetchConfig, parse_config
from sgl_kvfetch.plugin import weight_updates
from sgl_kvfetch.plugin.attaching import try_to_connect
from sgl_kvfetch.plugin.data_plane import engine_nvdec, open_engine_plane
from sgl_kvfetch.plugin.device.backend import DeviceBackend
from sgl_kvfetch.plugin.device.board import Board
from sgl_kvfetch.plugin.device.early import EarlyStarts
from sgl_kvfetch.plugin.device.fetches import Fetches
from sgl_kvfetch.plugin.device.known import KnownPages
from sgl_kvfetch.plugin.device.pages import DevicePages, SlotPages, open_gpu, pool_device
from sgl_kvfetch.plugin.device.writes import Writes
from sgl_kvfetch.plugin.hooks import BACKEND
from sgl_kvfetch.plugin.host.pages import is_mla
from sgl_kvfetch.plugin.launch_check import read_extra_config
from sgl_kvfetch.plugin.prefill import PrefillMeter
from sgl_kvfetch.plugin.versions import require_distinct_images

logger = logging.getLogger(__name__)

_UNUSED_S = 30.0  # how long launched restores and copies may take to end: a forward pass before them takes seconds


@dataclass(frozen=True)
class _Parts:
    backend: DeviceBackend
    board: Board
    known: KnownPages
    fetches: Fetches
    writes: Writes


class KVFetchRadixCache(UnifiedRadixCache):  # type: ignore[misc]
    """A ``UnifiedRadixCache`` with a store behind it. Before ``start``, and when it is detached, it is a plain one.

    The scheduler's hooks step it. All methods run on the scheduler's thread.
    """

    is_stepped = True  # The hooks recognise the cache by this: importing this module would load all of the plugin.

    # Set on the class, because SGLang's constructor calls reset().
    _parts: _Parts | None = None
    _pages: SlotPages | None = None  # of the last attachment
    _connect: Callable[[str | None], None] | None = None
    _extra_config: str | None = None
    _changed: Sequence[Any] = ()  # handles that were left when the store was detached

    @cached_property
    def prefill_meter(self) -> PrefillMeter:
        """Measures how fast this rank computes; other ranks measure different values."""
        return PrefillMeter()

    def start(
        self,
        config: KVFetchConfig,
        plane: DataPlane,
        pages: SlotPages,
        *,
        pool_tokens: int,
        threshold_tokens: int,
        is_writer: bool = True,
    ) -> DeviceBackend:
        """Put a store behind the tree. ``pool_tokens``: the size of the pool. ``threshold_tokens``: the smallest number
        of tokens that is worth a lookup. ``is_writer`` is false if another rank has the same pages and writes them."""
        self._pages = pages
        board = Board(self._agree if self._num_ranks() > 1 else None)
        known = KnownPages()
        plane.on_switch = known.clear
        backend = DeviceBackend(config, plane, pages, self.prefill_meter, board, is_writer=is_writer)
        fetches = Fetches(
            self, backend, board, known, config, pool_tokens=pool_tokens, threshold_tokens=threshold_tokens
        )
        self._parts = _Parts(backend, board, known, fetches, Writes(self, backend, board, known))
        if not self.tree_core.enable_storage:
            self.tree_core.backfill_missing_hash_values()
        self.enable_storage = True  # nodes get hashes
        return backend

    @cached_property
    def early_starts(self) -> EarlyStarts:
        """The counter of layers for SGLang's pool."""
        return EarlyStarts(self.token_to_kv_pool_allocator.get_kvcache().layer_num, self._is_so_on_all_ranks)

    def _num_ranks(self) -> int:
        groups = [group for group in (self.attn_cp_group, self.attn_tp_group, self.tp_group) if group is not None]
        return max((torch.distributed.get_world_size(group=group) for group in groups), default=1)

    def _agree(self, least: torch.Tensor) -> None:
        self._all_reduce_attn_groups(least, torch.distributed.ReduceOp.MIN)

    # Attaching

    def set_connect(self, connect: Callable[[str | None], None]) -> None:
        """Set the function that attaches a store: it gets SGLang's extra config, and calls ``start`` or raises."""
        self._connect = connect

    def connect(self, extra_config: str | None) -> None:
        assert self._connect is not None
        self._connect(extra_config)
        self._extra_config = extra_config

    def attach_storage_backend(
        self,
        storage_backend: str,
        storage_backend_extra_config_json: str | None = None,
        served_model_name: str | None = None,
        hicache_storage_prefetch_policy: str | None = None,
        hicache_write_policy: str | None = None,
    ) -> tuple[bool, str]:
        """Attach the store on all ranks or on none. Return whether it is attached, and a message for the operator.
        SGLang calls this only while there are no requests."""
        policies = (hicache_storage_prefetch_policy, hicache_write_policy)
        if storage_backend != BACKEND or policies != (None, None):
            return False, f"device mode accepts only the storage backend {BACKEND}, and no policies of the host tier"
        if self._parts is not None:
            if storage_backend_extra_config_json in (None, self._extra_config):
                return True, f"{BACKEND} is already attached with this config."
            return False, f"{BACKEND} is attached with another config: detach it first, DELETE /hicache/storage-backend"
        fault = try_to_connect(self.connect, storage_backend_extra_config_json)
        if self._is_so_on_all_ranks(fault is None):
            return True, f"{BACKEND} is attached."
        self.detach_storage_backend()
        return False, fault or "another rank could not attach the storage backend; see its log for the reason"

    def _is_so_on_all_ranks(self, is_so: bool) -> bool:
        answer = torch.tensor([int(is_so)])
        if self._num_ranks() > 1:
            self._agree(answer)
        return bool(answer.item())

    def detach_storage_backend(self) -> tuple[bool, str]:
        """Detach the store. The tree stays as it is. Waits a few seconds at most for queued pages to be written."""
        if self._parts is None:
            return True, "No storage backend was attached."
        self.end_cache_operations()
        parts, self._parts = self._parts, None
        self._changed = parts.fetches.take_changed()
        self.enable_storage = False
        weight_updates.forget_access(parts.backend.access)
        try:
            parts.backend.close()
        except Exception:  # go on: it holds nothing of the tree, and the other ranks have detached
            logger.exception("kvfetch: closing the backend failed")
        return True, f"{BACKEND} is detached."

    # Reading

    def is_backuped(self, node_id: Any) -> bool:
        """Return True: any node's prefix may continue in the store. SGLang asks before ``prefetch_from_storage``."""
        return True

    def prefetch_from_storage(
        self,
        request: Any,
        last_host_node_id: Any,
        new_input_tokens: Any,
        last_hash: str | None = None,
        prefix_keys: list[str] | None = None,
        matched_prefix_tokens: Any = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        storage_hit_end: int | None = None,
    ) -> None:
        """Begin a fetch for a request that has arrived, or that has lost its prefix since. Never waits."""
        start = len(matched_prefix_tokens or ())
        if self._parts is None or start % self.page_size:
            return
        tokens = array("q", matched_prefix_tokens or ())
        tokens.extend(new_input_tokens)
        key = RadixKey(tokens, extra_key=extra_key, cache_salt=cache_salt).page_aligned(self.page_size)
        may_start_early = self.early_starts.may_start(request.rid)
        self._parts.fetches.arrive(request, key, start, last_hash, may_start_early=may_start_early)

    def check_prefetch_progress(self, request: Any) -> bool:
        return self._parts is None or self._parts.fetches.is_over(request)

    def finish_storage_prefetch_admission(self, request: Any, fulfilled_tokens: int, reason: str | None) -> None:
        super().finish_storage_prefetch_admission(request, fulfilled_tokens, reason)
        if self._parts is not None:
            self._parts.fetches.admitted(request)

    def release_aborted_request(self, request: Any) -> None:
        super().release_aborted_request(request)
        self._forget_request(request.rid, request)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        self._forget_request(req.rid, req.cache_request_handle)

    def _forget_request(self, rid: str, handle: Any) -> None:
        self.early_starts.forget_request(rid)
        if self._parts is not None:
            self._parts.fetches.abandon(handle)
            self._parts.writes.forget_request(rid)

    # Starting early. To SGLang, slots that are still being filled look like pages of a host tier.

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Extend the match with slots that a fetch is still filling, if the request may start with them."""
        result = super().match_prefix(params)
        if self._parts is None or params.req is None:
            return result
        num_tokens = self._parts.fetches.early_tokens(params.req.cache_request_handle, result.device_prefix_len)
        if not num_tokens or result.device_prefix_len + num_tokens > len(params.key):
            return result
        return result._replace(host_hit_length=num_tokens)

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, Any] | None:
        """Admit a request whose pages are still being restored, if `match_prefix` has offered it."""
        if self._parts is None or not params.host_hit_length:
            return super().init_load_back(params)  # type: ignore[no-any-return]
        req = params.req
        fillings, stored = self._parts.fetches.start_early(req.cache_request_handle)
        self.early_starts.start(req.rid, fillings)
        req.storage_hit_start, req.storage_hit_length = stored.start, len(stored)  # for its usage report
        return params.host_hit_length, req.last_node

    def load_back_is_cache_owned(self) -> bool:
        """Return False: the slots join the tree when the request inserts them, like what it has computed."""
        return False

    def prefix_device_indices(self, req: Any) -> torch.Tensor:
        slots = self.early_starts.slots(req.rid)
        if not slots:
            return super().prefix_device_indices(req)  # type: ignore[no-any-return]
        path = self.path_device_indices(req.last_node)
        return torch.cat([path, *(each.to(path.dtype) for each in slots)])[: req.prefix_len]

    # Writing

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        super().checkpoint(req, up_to=up_to, **kwargs)
        if self._parts is not None and not req.skip_radix_cache_insert:
            self._parts.writes.inserted(req.rid, req.last_node)

    # Stepping

    def step(self, reserved_tokens: Callable[[], int] = lambda: 0) -> None:
        """Process the work that has ended since the last step, and begin what can begin.

        ``reserved_tokens`` returns how many slots running requests will still need; called only if slots are wanted."""
        if self._parts is None:
            return
        self._parts.backend.plane.step()
        self._parts.board.step()
        self._parts.fetches.step(reserved_tokens)

    # An SGLang with patches/0003 asks the cache for what our hooks do in the others.

    def has_own_store(self) -> bool:
        return True

    def check_hicache_events(self) -> None:
        """Do nothing: the hook `step_cache` knows what running requests will still need."""

    def has_pending_cache_operations(self) -> bool:
        """Return whether slots or locks are held for anything but requests."""
        return self._parts is not None and bool(self._parts.board.num_open or not self._parts.fetches.is_idle)

    def is_parked(self, handle: Any) -> bool:
        """Return whether a request waits for its fetch."""
        return self._parts is not None and self._parts.fetches.is_parked(handle)

    def queued(self, handle: Any, urgency: int, span: Any) -> None:
        """Note that a request is in the waiting queue. Arguments as in `Fetches.queued`."""
        if self._parts is not None:
            self._parts.fetches.queued(handle, urgency, span)

    def take_changed(self) -> list[Any]:
        """Return the handles of requests whose ``is_parked`` may have changed since the last call."""
        changed, self._changed = self._changed, ()
        return [*changed, *(() if self._parts is None else self._parts.fetches.take_changed())]

    # Ends

    def reset(self) -> None:
        """Empty the tree and end all work under way. Waits at most for the copy of one cell."""
        self.end_cache_operations()
        if self._parts is not None:
            self._parts.backend.plane.flush()
        super().reset()
        self.enable_storage = self._parts is not None
        weight_updates.tree_is_empty()

    def end_cache_operations(self) -> None:
        """End all work under way at once. The requests that wait for it go on without it."""
        if self._parts is None:
            return
        self._parts.fetches.drop_all()
        self._parts.writes.drop_all()
        self._parts.board.clear()

    def stop_using_pool(self) -> None:
        """End all work under way, and wait until the device has ended it, too: the pool's memory is about to go.

        This is the scheduler's thread, which waits for nothing otherwise. Here it must: a kernel that runs on memory
        that is gone destroys the process's context, and SGLang neither serves nor steps until this returns. The wait is
        bounded, since a device that hangs would hold up all ranks. Then the memory must not go: raises KVFetchError,
        which ends the server.
        """
        self.end_cache_operations()
        if self._pages is not None and not self._pages.wait_until_unused(_UNUSED_S):
            raise KVFetchError(
                f"memory was not released: the GPU still reads or writes the KV pool {_UNUSED_S:g} s after the last "
                "fetch and copy were ended; it seems to hang"
            )

    def clear_storage_backend(self) -> bool:
        """Empty the store, while an operator waits. Return whether it succeeded."""
        if self._parts is None:
            return False
        self._parts.known.clear()  # even if clearing fails, so that it stays equal on all ranks
        try:
            self._parts.backend.plane.clear()
        except (KVFetchError, TimeoutError) as e:
            logger.warning("kvfetch: the store could not be cleared: %s", e)
            return False
        return True

    def evict_for_alloc(self, params: EvictParams, **kwargs: Any) -> EvictResult:
        """Evict for running requests. If that frees too little, waiting requests give up slots as well."""
        allocator = self.token_to_kv_pool_allocator
        before: int = allocator.available_size()
        result = super().evict_for_alloc(params, **kwargs)
        lacking = params.num_tokens - (allocator.available_size() - before)
        if lacking <= 0 or self._parts is None or not self._parts.fetches.give_way(lacking):
            return result
        lacking = params.num_tokens - (allocator.available_size() - before)  # fewer, if slots were freed
        if lacking > 0:
            more = super().evict_for_alloc(dataclasses.replace(params, num_tokens=lacking), **kwargs)
            result.num_tokens_evicted += more.num_tokens_evicted
        return result

    def release_host_resources(self) -> None:
        super().release_host_resources()
        if self._parts is not None:
            self.end_cache_operations()
            self._parts.backend.close()


def build_radix_cache(ctx: TreeCacheBuildContext) -> KVFetchRadixCache:
    """Build the cache and attach its store. Raises ConfigError and UnsupportedError, which stop SGLang's start."""
    require_distinct_images()
    timeline.start(ctx.tp_rank)
    cache = create_unified_radix_cache(ctx, cache_class=KVFetchRadixCache)
    assert isinstance(cache, KVFetchRadixCache)
    if cache.tree_components != (ComponentType.FULL,):
        raise UnsupportedError(
            f"device mode supports only plain KV caches; this model's has {', '.join(map(str, cache.tree_components))}"
        )
    allocator = ctx.params.token_to_kv_pool_allocator
    pool = allocator.get_kvcache()
    pages, nvdec = _open_pages(pool, cache.page_size, ctx.tp_worker), engine_nvdec(pool_device(pool))
    rank = SimpleNamespace(tp_rank=ctx.tp_rank, tp_size=ctx.tp_size, is_mla_model=is_mla(pool))
    cache.set_connect(partial(_connect, cache, pages, nvdec, rank, allocator.size))
    cache.connect(get_memory().hicache_storage_backend_extra_config)
    atexit.register(cache.release_host_resources)
    return cache


def _open_pages(pool: Any, page_size: int, tp_worker: Any) -> SlotPages:
    """Return access to the pool's pages. Raises UnsupportedError for a pool or device that is not supported."""
    opened = open_gpu(pool)
    if opened is None:
        return DevicePages(pool, page_size)
    from sgl_kvfetch.plugin.device.cuda_pages import CudaPages

    gpu, spare = opened
    return CudaPages(pool, page_size, gpu, tp_worker.model_runner.forward_stream, spare_decoders=spare)


def _connect(
    cache: KVFetchRadixCache,
    pages: SlotPages,
    nvdec: Nvdec | None,
    rank: SimpleNamespace,
    pool_tokens: int,
    extra_config: str | None,
) -> None:
    """Attach a store as ``extra_config`` says. Raises ConfigError and UnsupportedError."""
    extra, threshold_tokens = read_extra_config(extra_config)
    config = parse_config(extra)
    plane = open_engine_plane(config, rank, pages, nvdec)
    is_writer = not rank.is_mla_model or rank.tp_rank == 0  # all ranks have the same latent vectors
    backend = cache.start(
        config, plane, pages, pool_tokens=pool_tokens, threshold_tokens=threshold_tokens, is_writer=is_writer
    )
    weight_updates.register_access(backend.access, config.model_id)
    counter = cache.early_starts if config.device.early_start else None
    cache.token_to_kv_pool_allocator.get_kvcache().register_layer_transfer_counter(counter)
    ready = "all bytes of its stored prefix are here" if counter else "its whole stored prefix is in the pool"
    logger.info("kvfetch runs in device mode: a request starts when %s", ready)
