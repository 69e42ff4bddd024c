"""Host mode: SGLang's HiCache asks for pages by their hashes, and we move them between store and host pool.

SGLang calls from three threads of its own: lookups (``batch_exists``) from one, fetches (``batch_get_v1``) from
another, writes (``batch_set_v1``) from a third. The scheduler's thread calls ``get_stats``, and on an operator's
request ``clear`` and ``close``. Lookups and fetches may wait, within their deadlines. Their failures are misses,
counted by reason, and raise nothing into those threads.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from sgl_kvfetch import metrics
from sgl_kvfetch.config import parse_config
from sgl_kvfetch.dataplane.client import counted
from sgl_kvfetch.dataplane.plane import FetchCall, Find
from sgl_kvfetch.errors import KVFetchError, UnsupportedError
from sgl_kvfetch.fetch.rounds import Destination
from sgl_kvfetch.fetch.sink import GuardedSink
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.plugin.access import Access
from sgl_kvfetch.plugin.engine_nvdec import engine_nvdec
from sgl_kvfetch.plugin.host_pages import HostPages
from sgl_kvfetch.plugin.namespace import engine_heads
from sgl_kvfetch.plugin.page_hashes import compile_hash_function, hash_bytes
from sgl_kvfetch.plugin.plane import open_plane
from sgl_kvfetch.plugin.quantiser import engine_quantiser, require_own_profile
from sgl_kvfetch.plugin.queueing import PageRun, queue_pages

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)

_GRACE_S = 1.0  # how long a thread waits for the data plane beyond a deadline
_POLL_S = 0.05
_BATCH_PAGES = 128  # how many pages SGLang fetches at a time
_MAX_STATS = 1024


class KVFetchStorage(HiCacheStorage):  # type: ignore[misc]
    """The storage backend ``kvfetch``."""

    def __init__(self, storage_config: HiCacheStorageConfig, mem_pool_host: Any) -> None:
        """Raises ConfigError and UnsupportedError, which stop SGLang's start or fail an attach."""
        config = parse_config(storage_config.extra_config or {})
        _require_supported(storage_config, mem_pool_host)
        self._config = config
        self._pages = HostPages(mem_pool_host)
        geometry, first_layer = self._pages.geometry, mem_pool_host.start_layer
        quantiser = engine_quantiser(config, storage_config, geometry, first_layer)
        heads = engine_heads(config, quantiser, storage_config, geometry, first_layer)
        require_own_profile(config, quantiser, heads.namespace)
        self.access = Access(config)
        self._stats_pages: dict[str, deque[int]] = {"read": deque(maxlen=_MAX_STATS), "write": deque(maxlen=_MAX_STATS)}
        self._stats_gb_s: dict[str, deque[float]] = {
            "read": deque(maxlen=_MAX_STATS),
            "write": deque(maxlen=_MAX_STATS),
        }

        compile_hash_function()
        nvdec = engine_nvdec(mem_pool_host.device_k_buffers[0].device)
        # Several fetches would each decode a span that is longer than a fetch.
        self._plane = open_plane(config, quantiser, heads, storage_config.tp_rank, self._pages, nvdec, _BATCH_PAGES)
        logger.info("kvfetch: %s, namespace %s: %s", config.store, heads.folder, heads.namespace)

    # Lookup

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return how many pages are stored, from the first key on, without a gap. Begins to transmit them."""
        if not keys or not self.access.reads:
            return 0
        found: Future[Find] = Future()
        with counted("lookup"):
            self._plane.look_up(hash_bytes(keys), found.set_result, reads_ahead=True)
            return found.result(self._config.lookup_timeout_s + _GRACE_S).num_pages
        return 0

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        for transfer in pool_transfers or []:
            _require_kv(transfer.name)
        hit = self.batch_exists(keys, extra_info)
        return PoolTransferResult(hit, {PoolName.KV: hit} if hit else {}, list(range(1, hit + 1)))

    # Read

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Restore pages into the host pool. Return True for each page of the leading run that is there and verified."""
        num_pages = self.fetch_pages(keys, host_indices)
        return [page < num_pages for page in range(len(keys))]

    def fetch_pages(
        self, keys: list[str], host_indices: torch.Tensor, is_cancelled: Callable[[], bool] | None = None
    ) -> int:
        """Restore pages into the host pool. Return how many, from the first one on, are there and verified.

        Returns soon after ``fetch_timeout_s`` or after ``is_cancelled`` becomes true; nothing is written afterwards.
        """
        if not keys or not self.access.reads:
            return 0
        started_s = time.monotonic()
        sink = GuardedSink(self._pages)
        num_pages = 0
        try:
            with counted("fetch"):
                hashes, pool_pages = hash_bytes(keys), self._pages.page_indices(host_indices)
                deadline_s = started_s + self._config.fetch_timeout_s
                call = self._plane.fetch(hashes, [len(keys)], deadline_s)
                self._plane.give(call, 0, Destination(pool_pages, sink))
                num_pages = self._await(call, deadline_s + _GRACE_S, is_cancelled)
        finally:
            sink.close()
        if num_pages:
            self._count("read", num_pages, time.monotonic() - started_s)
        return num_pages

    def _await(self, call: FetchCall, deadline_s: float, is_cancelled: Callable[[], bool] | None) -> int:
        """Wait for a fetch, and return how many pages are there. Raises TimeoutError."""
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            try:
                return call.over[0].result(left_s if is_cancelled is None else min(left_s, _POLL_S))
            except TimeoutError:
                if not left_s:
                    self._plane.cancel(call.work)
                    raise
            if is_cancelled is not None and is_cancelled():
                self._plane.cancel(call.work)
                return 0

    def _count(self, direction: str, num_pages: int, seconds: float) -> None:
        self._stats_pages[direction].append(num_pages)
        gigabytes = num_pages * self._pages.geometry.page_bytes / 1e9
        self._stats_gb_s[direction].append(gigabytes / max(seconds, 1e-9))

    # Write

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Copy pages out of the host pool and queue them for writing. Return True for each queued page, or for all
        pages if writes are off. Waits a little for room in the queue: nothing else waits on SGLang's backup thread.
        """
        num_pages = len(keys)
        if not num_pages or not self.access.writes:
            return [True] * num_pages
        before = None if extra_info is None else extra_info.prefix_keys
        if before is None:
            _limited.warning("prefix", "pages not written: SGLang did not pass the hashes of the pages before them")
            metrics.WRITTEN_PAGES.labels("dropped_invalid").inc(num_pages)
            return [False] * num_pages
        started_s = time.monotonic()
        previous_hash = hash_bytes(before[-1:])[0] if before else None
        run = PageRun(len(before), previous_hash, hash_bytes(keys), self._pages.page_indices(host_indices))
        num_queued = queue_pages(self._plane, run, self._pages.read)
        if num_queued < num_pages:
            metrics.WRITTEN_PAGES.labels("dropped_full").inc(num_pages - num_queued)
            _limited.warning("full", f"{num_pages - num_queued} pages not written: the write queue is full")
        if num_queued:
            self._count("write", num_queued, time.monotonic() - started_s)
        return [page < num_queued for page in range(num_pages)]

    # v2, only for the KV pool

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        _require_kv(host_pool_name)
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return self._each_transfer(self.batch_get_v1, transfers, extra_info)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return self._each_transfer(self.batch_set_v1, transfers, extra_info)

    def _each_transfer(
        self, move: Any, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None
    ) -> dict[str, list[bool]]:
        results: dict[str, list[bool]] = {}
        for transfer in transfers:
            _require_kv(transfer.name)
            results[transfer.name] = move(transfer.keys or [], transfer.host_indices, extra_info)
        return results

    # The copying interface, which SGLang never calls on a backend with the zero-copy interface

    def get(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("kvfetch supports only SGLang's zero-copy interface")

    batch_get = set = batch_set = get

    # Lifecycle

    def clear(self) -> None:
        """Delete the segments of this rank from the store. Raises RuntimeError."""
        try:
            self._plane.clear()
        except KVFetchError as e:
            raise RuntimeError(f"the store could not be cleared: {e}") from e

    def close(self) -> None:
        """Write what is queued, within a few seconds, and release threads and sockets. Idempotent."""
        self._plane.close()

    def get_stats(self) -> StorageMetrics:
        """Return the pages and the GB/s of each read and write since the last call."""
        return StorageMetrics(
            _drain(self._stats_pages["read"]),
            _drain(self._stats_pages["write"]),
            _drain(self._stats_gb_s["read"]),
            _drain(self._stats_gb_s["write"]),
        )


def _require_kv(name: Any) -> None:
    if name != PoolName.KV:
        raise UnsupportedError(
            f"this model keeps a side pool {str(name)!r} beside its KV cache; kvfetch supports only plain KV caches"
        )


def _require_supported(storage_config: HiCacheStorageConfig, pool: Any) -> None:
    """Raise UnsupportedError for anything that host mode cannot store."""
    from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost

    if storage_config.is_mla_model:
        raise UnsupportedError("models with MLA are not supported yet")
    if storage_config.attn_cp_size > 1 or storage_config.dcp_size > 1:
        raise UnsupportedError("context parallelism is not supported")
    if storage_config.should_split_heads:
        raise UnsupportedError("tp_lcm_size (pages shared between sizes of tensor parallelism) is not supported")
    # Other subclasses are refused: they may keep more than K and V, as the one for mxfp8 keeps scales.
    if type(pool) not in (MHATokenToKVPoolHost, AsymmetricMHATokenToKVPoolHost):
        raise UnsupportedError(f"host pools of the kind {type(pool).__name__} are not supported")
    if pool.storage_format_tag is not None:
        raise UnsupportedError(f"host pool with page format {pool.storage_format_tag!r} is not supported")
    if pool.layer_num != pool.target_layer_num:
        raise UnsupportedError("host pools that carry a draft model's layers are not supported yet")


def _drain(values: deque[Any]) -> list[Any]:
    return [values.popleft() for _ in range(len(values))]
