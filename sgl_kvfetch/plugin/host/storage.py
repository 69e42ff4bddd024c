"""Host mode: SGLang's HiCache asks for pages by their hashes, and we move them between store and host pool.

SGLang calls from three threads of its own: lookups (``batch_exists``) from one, fetches (``batch_get_v1``) from
another, writes (``batch_set_v1``) from a third. The scheduler's thread calls ``get_stats``, and on an operator's
request ``clear`` and ``close``. Lookups and fetches may wait, within their deadlines. Their failures are misses,
counted by reason, and raise nothing into those threads.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

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
from sgl_kvfetch.errors import KVFetchError, UnsupportedError
from sgl_kvfetch.labels import label_of_request
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.plane import Cost, DataPlane, Destination, Found, GuardedSink, SideOver, counted, parse_config
from sgl_kvfetch.plugin import status
from sgl_kvfetch.plugin.host.pages import HostPages, is_mla
from sgl_kvfetch.plugin.host.patience import GIVEN_UP, Patience, choose_budget, explain
from sgl_kvfetch.plugin.host.rewriting import Rewriting
from sgl_kvfetch.plugin.host.side_pools import SidePools, trailing_pages
from sgl_kvfetch.plugin.host.turns import NO_TURN, Turn, Turns
from sgl_kvfetch.plugin.page_hashes import hash_bytes
from sgl_kvfetch.plugin.prefill import PrefillMeter
from sgl_kvfetch.plugin.starting import engine_nvdec, open_engine_plane
from sgl_kvfetch.plugin.versions import dcp_size
from sgl_kvfetch.plugin.weight_updates import Access, register_access, require_no_former_pages

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)
R = TypeVar("R")

_WRITE_BACK = (
    "kvfetch: with --hicache-write-policy write_back, SGLang stores pages only when it evicts them, and never looks up "
    "a prompt whose beginning it has on the device alone: write_through, SGLang's default, does both"
)
_GRACE_S = 1.0  # how long a thread waits for the data plane beyond a deadline
_POLL_S = 0.05
_BATCH_PAGES = 128  # how many pages SGLang fetches at a time
_MAX_STATS = 1024


@dataclass(frozen=True, slots=True)
class _Prefetch:
    """The prefetch that SGLang makes now, in fetches of some pages. ``hashes``: of the pages that it looked up.
    ``last_hash``: of the last page that it fetches. ``compute_page_s``: how long the engine would take for each page.
    ``end_s``: when its fetches must end. ``is_stopping``: whether SGLang waits for its threads to end. ``given_up``
    returns why SGLang gave it up, or an empty string."""

    request_id: str = ""
    hashes: Sequence[str] = ()
    last_hash: str = ""
    turn: Turn = NO_TURN
    compute_page_s: float = math.inf
    end_s: float = math.inf
    is_stopping: Callable[[], bool] = lambda: False
    given_up: Callable[[], str] = lambda: ""

    def why_given_up(self) -> str:
        return "cancelled" if self.is_stopping() else self.given_up()

    def note_shortfall(self, keys: Sequence[str], num_served: int, reason: str) -> None:
        """Note that only the first ``num_served`` pages of a fetch were served."""
        hashes = self.hashes if keys[0] in self.hashes else keys
        last = self.last_hash if self.last_hash in hashes else keys[-1]
        num_before, num_found = hashes.index(keys[0]), hashes.index(last) + 1
        status.note_shortfall(self.request_id, hashes, num_found, num_before + num_served, reason)


class KVFetchStorage(HiCacheStorage):  # type: ignore[misc]
    """The storage backend ``kvfetch``."""

    supports_zero_copy = requires_prefix_keys = True  # what an SGLang with patches/0001 asks

    def __init__(self, storage_config: HiCacheStorageConfig, mem_pool_host: Any) -> None:
        """Raises ConfigError and UnsupportedError, which stop SGLang's start or fail an attach."""
        require_no_former_pages()
        config = parse_config(storage_config.extra_config or {})
        _require_supported(storage_config, mem_pool_host)
        self._config = config
        self._storage_config = storage_config
        self._pages = HostPages(mem_pool_host)
        self._sides = SidePools()
        self._patience = Patience(None, config.fetch_timeout_s)
        self.meter = PrefillMeter()
        self.turns = Turns(self.meter, mem_pool_host.page_size, may_compute=config.recompute == "auto")
        self._looked_up_for = ""  # the label of the request whose pages SGLang looks up now
        self._prefetch = _Prefetch()
        self._has_draft_layers = mem_pool_host.layer_num != mem_pool_host.target_layer_num
        self.access = Access(config)
        register_access(self.access, config.model_id)
        # Pages and GB/s of reads and writes, since SGLang last asked.
        self._reads: deque[tuple[int, float]] = deque(maxlen=_MAX_STATS)
        self._writes: deque[tuple[int, float]] = deque(maxlen=_MAX_STATS)
        buffers = mem_pool_host.device_kv_buffers if is_mla(mem_pool_host) else mem_pool_host.device_k_buffers
        self._device = buffers[0].device
        self._open_plane: DataPlane | None = None
        self._rewriting = Rewriting()

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take in a side pool. Raises KVFetchError."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name == PoolName.KV:
            return
        self._sides.add_pool(str(host_pool_name), host_pool)
        if self._open_plane is not None:
            # At a start, SGLang adds a draft model's pools after it has attached the backend; it does not serve yet.
            self._open_plane.close()
            self.on_host_pools_registered()

    def on_host_pools_registered(self) -> None:
        """Start the data plane: all pools are known now. Raises KVFetchError."""
        self._open_plane = open_engine_plane(
            self._config,
            self._storage_config,
            self._pages,
            engine_nvdec(self._device),
            _BATCH_PAGES,  # several fetches would each decode a span that is longer than a fetch
            self._sides,
            has_draft=self._has_draft_layers or self._sides.has_draft,
        )

    def store_node(self, original: Callable[[Any, int], None], cache: Any, node_id: int) -> None:
        """See `Rewriting.store`."""
        self._rewriting.store(original, cache, node_id, self._plane.num_losses)

    @property
    def _plane(self) -> DataPlane:
        assert self._open_plane is not None, "SGLang has not said which pools there are"
        return self._open_plane

    def be_patient(self, cache: Any, base_s: float, per_ki_token_s: float) -> tuple[float, float]:
        """Let requests wait for their prefixes as SGLang's policy and ``fetch_timeout_s`` say.

        SGLang's default prefetch budget is replaced by ``fetch_timeout_s``. Return the budget to use, in seconds and in
        seconds per 1,024 tokens. ``base_s``, ``per_ki_token_s``: the budget in SGLang's config.
        """
        self._patience = Patience(cache, self._config.fetch_timeout_s)
        budget = choose_budget(base_s, per_ki_token_s, self._config.fetch_timeout_s)
        if self._storage_config.tp_rank == 0:
            policy = cache.prefetch_stop_policy
            meaning = explain(policy, budget, self._config.fetch_timeout_s)
            logger.info("kvfetch: SGLang's prefetch policy is %s: %s", policy, meaning)
            if cache.is_write_back:
                logger.warning(_WRITE_BACK)
        return budget

    def begin_lookup(self, request_id: str) -> None:
        """Note for which request SGLang looks up pages next, on this thread."""
        self._looked_up_for = label_of_request(request_id)

    def begin_transfer(self, operation: Any, is_stopping: Callable[[], bool]) -> None:
        """Note how long SGLang waits for the fetches of a ``PrefetchOperation``. It makes them next, on this thread.

        SGLang gives up slow prefetches, and joins this thread within 10 s when it flushes, detaches or updates weights,
        which ``is_stopping`` tells; if the join fails, the scheduler dies. So a fetch ends soon after either event.
        """
        patience, hashes = self._patience, operation.hash_value
        turn = self.turns.begin(hashes, time.monotonic())
        # SGLang reads side pages only behind the whole KV, so what has come of it would be lost.
        is_divisible = all(transfer.indices_from_pool == PoolName.KV for transfer in operation.pool_transfers or ())
        self._prefetch = _Prefetch(
            request_id=label_of_request(operation.request_id),
            hashes=operation.all_hash_values or (),
            last_hash=hashes[-1] if hashes else "",
            turn=turn,
            compute_page_s=turn.compute_s / len(turn.hashes) if turn.hashes and is_divisible else math.inf,
            end_s=min(patience.deadline_s(operation), time.monotonic() + turn.within_s),
            is_stopping=is_stopping,
            given_up=lambda: patience.reason(operation) if operation.is_terminated() else "",
        )

    # Lookup

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return how many pages are stored, from the first key on, without a gap, or 0 if computing them is sooner.
        Begins to transmit them."""
        return self._look_up(keys, ()).num_pages

    def _look_up(self, keys: list[str], transfers: Sequence[PoolTransfer]) -> Found:
        if keys and self.access.reads:
            found: Future[Found] = Future()
            with counted("lookup"):
                trailing = trailing_pages(transfers)
                work = self._plane.look_up(hash_bytes(keys), found.set_result, trailing=trailing)
                result = found.result(self._config.lookup_timeout_s + _GRACE_S)
                is_fetched = self.turns.looked_up(keys, result, time.monotonic())
                num_fetched = result.num_pages if is_fetched else 0
                reason = "sooner" if result.num_pages and not is_fetched else result.reason
                status.note(self._looked_up_for, keys, result.num_pages, num_fetched, reason)
                if not result.num_pages:
                    return result
                if is_fetched:
                    self._plane.read_ahead(work)
                    return result
                self._plane.forget_lookup(work)
        return Found(0, 0, Cost(None, None))

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return which runs of pages are stored with the side pages that they need, as SGLang's file backend does."""
        found = self._look_up(keys, pool_transfers or ())
        if not any(transfer.name != PoolName.KV for transfer in pool_transfers or ()):
            hit = found.num_pages
            return PoolTransferResult(hit, {PoolName.KV: hit} if hit else {}, list(range(1, hit + 1)))
        stored = {PoolName(pool): num_pages for pool, num_pages in found.stored.items() if num_pages}
        return PoolTransferResult(found.num_pages, stored, list(found.lengths))

    # Read

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Restore pages into the host pool. Return True for each page of the leading run that is there and verified.

        Returns soon after the deadline, or when SGLang gives up; nothing is written afterwards.
        """
        if not keys or not self.access.reads:
            return [False] * len(keys)
        started_s = time.monotonic()
        sink, prefetch = GuardedSink(self._pages), self._prefetch
        num_pages, given_up, reason = 0, "", ""
        try:
            with counted("fetch"):
                destination = Destination(self._pages.page_indices(host_indices), sink)
                deadline_s, compute_s = self._deadline_s(), len(keys) * prefetch.compute_page_s
                work, over = self._plane.fetch(hash_bytes(keys), deadline_s, destination, compute_s)
                try:
                    awaited = _await(over, deadline_s + _GRACE_S, prefetch.why_given_up)
                finally:
                    if not over.done():
                        self._plane.cancel(work)
                ended, given_up = awaited
                if ended is not None:
                    num_pages, reason = ended.num_pages, ended.reason
                else:
                    reason = given_up
                    metrics.MISSES.labels("fetch", reason).inc()
                    after_s = time.monotonic() - started_s
                    message = f"kvfetch fetch of {len(keys)} pages given up ({given_up}) after {after_s:.1f} s"
                    _limited.warning(given_up, f"{message}: {GIVEN_UP[given_up]}")
        finally:
            sink.close()
            if num_pages < len(keys) or keys[-1] == prefetch.last_hash:
                self.turns.end(prefetch.turn, time.monotonic(), is_whole=num_pages == len(keys))
        if num_pages < len(keys):
            prefetch.note_shortfall(keys, num_pages, reason or "timeout")
        if num_pages:
            self._count(self._reads, num_pages, started_s)
        return [page < num_pages for page in range(len(keys))]

    def _deadline_s(self) -> float:
        return min(time.monotonic() + self._config.fetch_timeout_s, self._prefetch.end_s)

    def _count(self, stats: deque[tuple[int, float]], num_pages: int, started_s: float) -> None:
        gigabytes = num_pages * self._pages.geometry.page_bytes / 1e9
        stats.append((num_pages, gigabytes / max(time.monotonic() - started_s, 1e-9)))

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
        num_queued = 0
        try:
            num_queued = self._queue(keys, host_indices, None if extra_info is None else extra_info.prefix_keys)
        finally:
            if num_queued < num_pages:
                self._sides.forget_announced()
        return [page < num_queued for page in range(num_pages)]

    def _queue(self, keys: list[str], host_indices: torch.Tensor, before: list[str] | None) -> int:
        """Queue pages for writing. Return how many, from the first on. ``before``: keys of the pages before them."""
        num_pages = len(keys)
        if before is None:
            _limited.warning("prefix", "pages not written: SGLang did not pass the hashes of the pages before them")
            metrics.WRITTEN_PAGES.labels("dropped_invalid").inc(num_pages)
            return 0
        started_s = time.monotonic()
        previous_hash = hash_bytes(before[-1:])[0] if before else None
        pool_pages = self._pages.page_indices(host_indices)
        num_queued = self._plane.write(
            len(before),
            previous_hash,
            hash_bytes(keys),
            pool_pages,
            self._pages.read,
            self._sides.take_announced(keys),
            may_wait=self._may_wait,
        )
        if num_queued:
            self._count(self._writes, num_queued, started_s)
        return num_queued

    def _may_wait(self) -> bool:
        """Return whether pages may wait in the host pool for room in the write queue: SGLang does not stop its threads,
        and the pages that wait behind these, and cannot be evicted, take less than half of the pool."""
        if self._patience.cache is None:
            return False
        controller = self._patience.cache.cache_controller
        with controller.backup_queue.mutex:
            num_waiting = sum(len(each.hash_value) for each in controller.backup_queue.queue if each is not None)
        return num_waiting < self._pages.num_pages // 2 and not controller.storage_stop_event.is_set()

    # Side pools

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Restore side pages, after their KV. Return which are there and verified. Returns soon after
        the deadline, or when SGLang stops its threads."""
        deadline_s = self._deadline_s()
        calls = [self._begin_side(transfer, deadline_s) for transfer in transfers if transfer.name != PoolName.KV]
        results = {
            transfer.name: self.batch_get_v1(transfer.keys or [], transfer.host_indices, extra_info)
            for transfer in transfers
            if transfer.name == PoolName.KV
        }
        for transfer, pages, over in calls:
            results[transfer.name] = [False] * len(pages)
            with counted("fetch"):
                ended = _await(over, deadline_s + _GRACE_S, lambda: "cancelled" if self._prefetch.is_stopping() else "")
                come = ended[0].pages if ended[0] is not None else ()
                there = [page if index in come else None for index, page in enumerate(pages)]
                results[transfer.name] = self._sides.write(transfer, there)
        return results

    def _begin_side(
        self, transfer: PoolTransfer, deadline_s: float
    ) -> tuple[PoolTransfer, list[torch.Tensor], Future[SideOver]]:
        keys = transfer.keys or []
        over: Future[SideOver] = Future()
        if not keys or not self.access.reads:
            over.set_result(SideOver(0, ()))
            return transfer, [torch.empty(0)] * len(keys), over
        pages = [self._sides.new_page(str(transfer.name)) for _ in keys]

        def take(page: int, content: torch.Tensor) -> None:
            pages[page].view(torch.uint8).copy_(content)

        return transfer, pages, self._plane.fetch_side(str(transfer.name), hash_bytes(keys), deadline_s, take)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Note side pages. They are written with their KV, which SGLang hands over next."""
        results: dict[str, list[bool]] = {}
        try:
            for transfer in transfers:
                if transfer.name == PoolName.KV:
                    results[transfer.name] = self.batch_set_v1(transfer.keys or [], transfer.host_indices, extra_info)
                elif self.access.writes:
                    results[transfer.name] = [True] * self._sides.announce(transfer)
                else:
                    results[transfer.name] = [True] * len(transfer.keys or [])
        except BaseException:
            self._sides.forget_announced()  # SGLang gives up the operation
            raise
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
        if self._open_plane is not None:
            self._open_plane.close()

    def get_stats(self) -> StorageMetrics:
        """Return the pages and the GB/s of each read and write since the last call."""
        reads, writes = ([stats.popleft() for _ in range(len(stats))] for stats in (self._reads, self._writes))
        pages, gb_s = ([[entry[i] for entry in stats] for stats in (reads, writes)] for i in (0, 1))
        return StorageMetrics(*pages, *gb_s)


def _await(future: Future[R], deadline_s: float, given_up: Callable[[], str]) -> tuple[R | None, str]:
    """Wait for a future. Return its result, or None and the reason that ``given_up`` returned. Raises TimeoutError."""
    while True:
        left_s = max(0.0, deadline_s - time.monotonic())
        try:
            return future.result(min(left_s, _POLL_S)), ""
        except TimeoutError:
            if not left_s:
                raise
        if reason := given_up():
            return None, reason


def _require_supported(storage_config: HiCacheStorageConfig, pool: Any) -> None:
    """Raise UnsupportedError for anything that host mode cannot store."""
    from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    if storage_config.attn_cp_size > 1 or dcp_size(storage_config) > 1:
        raise UnsupportedError("context parallelism is not supported")
    if storage_config.should_split_heads:
        raise UnsupportedError("tp_lcm_size (pages shared between sizes of tensor parallelism) is not supported")
    # Other subclasses are refused: they may keep more than K and V, as the one for mxfp8 keeps scales.
    if type(pool) not in (MHATokenToKVPoolHost, AsymmetricMHATokenToKVPoolHost, MLATokenToKVPoolHost):
        raise UnsupportedError(f"host pools of the kind {type(pool).__name__} are not supported")
    if is_mla(pool) and pool.kv_cache_dim != pool.kv_lora_rank + pool.qk_rope_head_dim:
        raise UnsupportedError("latent vectors that SGLang keeps with their scales are not supported yet")
    if pool.storage_format_tag is not None:
        raise UnsupportedError(f"host pool with page format {pool.storage_format_tag!r} is not supported")
