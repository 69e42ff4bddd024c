"""Host mode: SGLang's HiCache asks for pages by their hashes, and we move them between store and host pool.

SGLang calls from three threads of its own: lookups (``batch_exists``) from one, fetches (``batch_get_v1``) from
another, writes (``batch_set_v1``) from a third. The scheduler's thread calls ``get_stats``, and on an operator's
request ``clear`` and ``close``. Lookups and fetches may wait, within their deadlines. Their failures are misses,
counted by reason, and raise nothing into those threads.

**How long a request waits.** It waits as long as SGLang's prefetch policy says, at most ``fetch_timeout_s``. SGLang's
default policy, ``timeout``, gives a prefetch 1 s and 0.25 s per 1,024 tokens. Then it keeps the complete batches of 128
pages and drops the rest, often all of a prefix. So that budget is replaced unless the user has set one. A fetch ends a
little before SGLang's budget does, so that the pages that have arrived count.

**Pages that were lost on the way to the store**, and that SGLang still holds, are written once more. SGLang stores a
node of its tree once, when the node's pages have reached the host pool. A prefix may stay in the tree, such as a system
prompt that is always in use. If the store failed to take its pages, or they were stored by a quantiser that is no
longer used, nothing behind them could be found. So when SGLang stores a node, the nodes before it are stored first,
unless they have been since the last loss. Pages that the store has are recognised before they are encoded again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
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
from sgl_kvfetch.codec import CellValues
from sgl_kvfetch.engine import DataPlane
from sgl_kvfetch.engine.data_plane import SideFetch
from sgl_kvfetch.errors import KVFetchError, UnsupportedError
from sgl_kvfetch.keys import hash_bytes, label_of_request
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.metrics import counted
from sgl_kvfetch.plugin import status
from sgl_kvfetch.plugin.host.pool import HostPages, is_mla
from sgl_kvfetch.plugin.host.side_pools import PACKED, SidePools, trailing_pages
from sgl_kvfetch.plugin.prefill import PrefillMeter
from sgl_kvfetch.plugin.starting import open_engine_plane
from sgl_kvfetch.plugin.versions import budget_pages, dcp_size, is_deadline_expired
from sgl_kvfetch.plugin.weight_updates import Access, register_access, require_no_former_pages
from sgl_kvfetch.processes import use_one_thread
from sgl_kvfetch.protocol import SharedPool, parse_config
from sgl_kvfetch.protocol.messages import FetchPages, Found, LookUp
from sgl_kvfetch.status import Audits

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)

SGLANG_BUDGET = (1.0, 0.25)  # SGLang's defaults of prefetch_timeout_base and prefetch_timeout_per_ki_token
_BACKSTOP_S = 1.0  # how long SGLang waits for a fetch that should have ended
_MARGIN_S = 0.1  # what SGLang needs to notice that a fetch has ended

# Why a fetch was given up, by the reason that metrics count.
GIVEN_UP = {
    "policy": "SGLang's prefetch policy no longer waits for it: see --hicache-storage-prefetch-policy, "
    "prefetch_timeout_base and prefetch_timeout_per_ki_token",
    "cancelled": "the request was aborted, or SGLang flushes its cache, detaches its storage or stops",
}


def choose_budget(base_s: float, per_ki_token_s: float, fetch_timeout_s: float) -> tuple[float, float]:
    """Return SGLang's budget for a prefetch: ``fetch_timeout_s`` in place of SGLang's defaults, else the user's."""
    if (base_s, per_ki_token_s) == SGLANG_BUDGET:
        return fetch_timeout_s + _BACKSTOP_S, 0.0
    return base_s, per_ki_token_s


@dataclass(frozen=True, slots=True)
class Patience:
    """Knows how long SGLang waits for a prefetch. ``cache``: SGLang's radix cache, whose policy may change at run
    time."""

    cache: Any
    fetch_timeout_s: float

    def deadline_s(self, operation: Any) -> float:
        """Return when the fetch of a ``PrefetchOperation`` must end, in ``time.monotonic()``."""
        wait_s = self.fetch_timeout_s
        if self.cache.prefetch_stop_policy == "timeout":
            budget_s = self._budget_s(operation)
            wait_s = min(wait_s, max(budget_s - _MARGIN_S, budget_s / 2))
        return float(operation.start_time + wait_s)

    def reason(self, operation: Any) -> str:
        """Return why SGLang has terminated an operation: a key of `GIVEN_UP`."""
        if self.cache.prefetch_stop_policy != "timeout":
            return "policy" if self.cache.prefetch_stop_policy == "best_effort" else "cancelled"
        elapsed_s = time.monotonic() - operation.start_time
        return "policy" if is_deadline_expired(operation, elapsed_s, self._budget_s(operation)) else "cancelled"

    def _budget_s(self, operation: Any) -> float:
        pages = budget_pages(operation, self.cache.page_size)
        return float(self.cache.prefetch_timeout_base + pages * self.cache.prefetch_timeout_per_page)


def explain(policy: str, budget: tuple[float, float], fetch_timeout_s: float) -> str:
    """Return what SGLang's policy means for a request. ``budget``: as `choose_budget` returns it."""
    at_most = f"at most {fetch_timeout_s:g} s (fetch_timeout_s)"
    if policy == "best_effort":
        return "no request waits for its stored prefix: what has not arrived when its turn comes is recomputed"
    if policy == "timeout" and budget != choose_budget(*SGLANG_BUDGET, fetch_timeout_s):
        at_most += f" and {budget[0]:g} s + {budget[1]:g} s per 1,024 tokens (prefetch_timeout_*)"
    return f"a request waits for its stored prefix {at_most}; what has not arrived by then is recomputed"


def _unstored(cache: Any) -> list[str]:
    """Return why SGLang stores less than it computes; nothing if it stores all. ``cache``: its radix cache."""
    found, controller = [], cache.cache_controller
    if cache.is_write_back:
        found.append(
            "with --hicache-write-policy write_back, SGLang stores pages only when it evicts them, and never looks up "
            "a prompt whose prefix it has only on the device: write_through, SGLang's default, does both"
        )
    in_host, on_device = controller.mem_pool_host.size, cache.token_to_kv_pool_allocator.size
    if in_host < on_device and controller.host_memory_mode != "buffer_only":
        found.append(
            f"SGLang's host pool has room for {in_host:,} tokens, its device pool for {on_device:,}: pages that find "
            "no room in the host pool when they are computed are never stored. --hicache-host-memory-mode buffer_only "
            "stores all, if the host pool has room for a whole prompt; so does --hicache-ratio 1 or more, and device "
            "mode, which needs no host pool"
        )
    return found


_MOST_NODES = 1 << 16  # after so many, it begins anew


class Rewriting:
    """SGLang stores the same nodes on all ranks, so all must decide alike which others to store."""

    def __init__(self) -> None:
        self._stored: set[int] = set()  # ids of nodes, since the last loss
        self._num_losses = 0  # of the rank that has had most

    def store(self, original: Callable[[Any, int], None], cache: Any, node_id: int, num_losses: int) -> None:
        """Store a node of SGLang's ``UnifiedRadixCache``, and those before it that may be lost. ``num_losses``: how
        often this rank has lost pages so far."""
        least = torch.tensor([-num_losses])
        # Of pipeline stages, the first one's counts. This does nothing where there is one rank.
        cache._all_reduce(least, torch.distributed.ReduceOp.MIN)
        most_losses = -int(least.item())
        if most_losses > self._num_losses or len(self._stored) > _MOST_NODES:
            self._num_losses = most_losses
            self._stored.clear()
        if not self._num_losses:
            original(cache, node_id)
            return
        (path,) = cache.tree_core.collect_path_info([node_id])
        before = [info.node_id for info in path if info.node_id not in self._stored and info.node_id != node_id]
        for each in (*before, node_id):
            self._stored.add(each)
            original(cache, each)


R = TypeVar("R")

_GRACE_S = 1.0  # how long a thread waits for the data plane beyond a deadline
_POLL_S = 0.05
_BATCH_PAGES = 128  # how many pages SGLang fetches at a time
_MAX_STATS = 1024
_NO_INDICES = torch.empty(0, dtype=torch.long)


@dataclass(frozen=True, slots=True)
class _Prefetch:
    """The prefetch that SGLang makes now, in fetches of some pages."""

    request_id: str = ""
    hashes: Sequence[str] = ()  # of the pages that it looked up
    first_hash: str = ""  # of the first page that it fetches
    last_hash: str = ""  # of the last page that it fetches
    is_divisible: bool = True  # whether some of its pages are of use without the others
    end_s: float = float("inf")  # when its fetches must end
    is_stopping: Callable[[], bool] = lambda: False  # whether SGLang waits for its threads to end
    given_up: Callable[[], str] = lambda: ""  # why SGLang gave it up; "" if it did not

    def why_given_up(self) -> str:
        return "cancelled" if self.is_stopping() else self.given_up()

    def record_shortfall(self, keys: Sequence[str], num_served: int, reason: str) -> None:
        """Record that only the first ``num_served`` pages of a fetch were served."""
        hashes = self.hashes if keys[0] in self.hashes else keys
        last = self.last_hash if self.last_hash in hashes else keys[-1]
        num_before, num_found = hashes.index(keys[0]), hashes.index(last) + 1
        status.record_shortfall(self.request_id, hashes, num_found, num_before + num_served, reason)


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
        self._shared = self._pages.shared()
        # A host pool that the data plane cannot map, as of a server that was started without us, gets its pages from
        # here. SGLang fetches one batch after another.
        self._staged = SharedPool.create(self._pages.geometry, _BATCH_PAGES) if self._shared is None else None
        if self._staged is not None:
            logger.info("kvfetch: the data plane cannot map this host pool, and its pages are copied once more")
        self._sides = SidePools()
        if self._pages.packed is not None:
            self._sides.add_pool(PACKED, self._pages.packed)
        self._patience = Patience(None, config.fetch_timeout_s)
        self.unstored: list[str] = []  # why SGLang stores less than it computes
        self.meter = PrefillMeter()
        self._was_idle = False  # the engine has had nothing to compute since the data plane was told so
        self._looked_up_for = ""  # the label of the request whose pages SGLang looks up now
        self._prefetch = _Prefetch()
        self.access = Access(config)
        register_access(self.access, config.model_id)
        # Pages and GB/s of reads and writes, since SGLang last asked.
        self._reads: deque[tuple[int, float]] = deque(maxlen=_MAX_STATS)
        self._writes: deque[tuple[int, float]] = deque(maxlen=_MAX_STATS)
        buffers = mem_pool_host.device_kv_buffers if is_mla(mem_pool_host) else mem_pool_host.device_k_buffers
        device = buffers[0].device
        self._gpu = device.index if device.type == "cuda" else None
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
            self._gpu,
            _BATCH_PAGES,  # several fetches would each decode a span that is longer than a fetch
            self._sides,
            pool=self._shared or self._staged,
        )

    def store_node(self, original: Callable[[Any, int], None], cache: Any, node_id: int) -> None:
        """See `Rewriting.store`."""
        self._rewriting.store(original, cache, node_id, self._plane.num_losses)

    @property
    def audits(self) -> Audits | None:
        """What audits have found; None before the first one."""
        return None if self._open_plane is None else self._open_plane.audits

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
        self.unstored = _unstored(cache)
        if self._storage_config.tp_rank == 0:
            policy = cache.prefetch_stop_policy
            meaning = explain(policy, budget, self._config.fetch_timeout_s)
            logger.info("kvfetch: SGLang's prefetch policy is %s: %s", policy, meaning)
            for reason in self.unstored:
                logger.warning("kvfetch: %s", reason)
        return budget

    def begin_lookup(self, request_id: str) -> None:
        """Note for which request SGLang looks up pages next, on this thread."""
        self._looked_up_for = label_of_request(request_id)

    def begin_transfer(self, operation: Any, is_stopping: Callable[[], bool]) -> None:
        """Record how long SGLang waits for the fetches of a ``PrefetchOperation``. It makes them next, on this thread.

        SGLang gives up slow prefetches, and joins this thread within 10 s when it flushes, detaches or updates weights,
        which ``is_stopping`` tells; if the join fails, the scheduler dies. So a fetch ends soon after either event.
        """
        patience, hashes = self._patience, operation.hash_value
        # SGLang reads side pages only behind the whole KV, so what has come of it would be lost.
        is_divisible = all(transfer.indices_from_pool == PoolName.KV for transfer in operation.pool_transfers or ())
        self._prefetch = _Prefetch(
            request_id=label_of_request(operation.request_id),
            hashes=operation.all_hash_values or (),
            first_hash=hashes[0] if hashes else "",
            last_hash=hashes[-1] if hashes else "",
            is_divisible=is_divisible,
            end_s=patience.deadline_s(operation),
            is_stopping=is_stopping,
            given_up=lambda: patience.reason(operation) if operation.is_terminated() else "",
        )

    def record_idle_engine(self) -> None:
        """Record that the engine has nothing to compute."""
        self._was_idle = True

    def _tell_idle(self) -> bool:
        """Return whether the engine has had nothing to compute since this was last called."""
        was_idle, self._was_idle = self._was_idle, False
        return was_idle

    # Lookup

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return how many pages are stored, from the first key on, without a gap, or 0 if computing them is sooner.
        Begins to transmit them."""
        return self._look_up(keys, ()).num_pages

    def _look_up(self, keys: list[str], transfers: Sequence[PoolTransfer]) -> Found:
        if keys and self.access.reads:
            with counted("lookup"):
                asked = LookUp(
                    0,
                    b"".join(hash_bytes(keys)),
                    tuple(self.meter.speed.saved_s(len(keys), self._pages.geometry.page_size)),
                    is_idle=self._tell_idle(),
                    trailing=trailing_pages([*transfers, *self._sides.with_kv((), _NO_INDICES)]),
                )
                result = self._plane.look_up(asked).result(self._config.lookup_timeout_s + _GRACE_S)
                status.record(self._looked_up_for, keys, result.num_found, result.num_pages, result.reason)
                return result
        return Found(0)

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
        stored = {PoolName(pool): num_pages for pool, num_pages in found.stored.items() if num_pages and pool != PACKED}
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
        prefetch = self._prefetch
        num_pages, given_up, reason = 0, "", ""
        with counted("fetch"), ExitStack() as ends:
            pool_pages = self._pages.page_indices(host_indices)
            places: Sequence[int] = pool_pages if self._staged is None else range(min(len(keys), _BATCH_PAGES))
            deadline_s = self._deadline_s()
            here = slice(len(places) * self._pages.geometry.page_size)
            asked = FetchPages(
                0,
                b"".join(hash_bytes(keys[: len(places)])),
                tuple(places),
                deadline_s,
                is_first=keys[0] == prefetch.first_hash,
                is_last=keys[-1] == prefetch.last_hash,
                is_divisible=prefetch.is_divisible,
                is_idle=self._tell_idle(),
            )
            fetch = self._plane.fetch(asked)  # before side pages, whose deadline is that of the turn that this begins
            try:
                packed = [
                    (each, self._begin_side(each, deadline_s, ends))
                    for each in self._sides.with_kv(keys[: len(places)], host_indices[here])
                ]
                awaited = _await(fetch.over, deadline_s + _GRACE_S, prefetch.why_given_up)
            finally:
                fetch.end()
            ended, given_up = awaited
            if ended is not None:
                num_come, reason = ended.num_pages, ended.reason
                if num_come < len(places):  # the rest is computed, and nobody waits for what a link does not bring
                    deadline_s = min(deadline_s, time.monotonic())
                for each in packed:
                    there = self._end_side(*each, deadline_s, prefetch.why_given_up)
                    num_come = there.index(False) if False in there[:num_come] else num_come
                if self._staged is not None and num_come:
                    self._take(self._staged, pool_pages[:num_come])
                num_pages = num_come  # only now: if a step before has failed, nothing is a hit
            else:
                reason = given_up
                metrics.MISSES.labels("fetch", reason).inc()
                after_s = time.monotonic() - started_s
                message = f"kvfetch fetch of {len(keys)} pages given up ({given_up}) after {after_s:.1f} s"
                _limited.warning(given_up, f"{message}: {GIVEN_UP[given_up]}")
        if num_pages < len(keys):
            prefetch.record_shortfall(keys, num_pages, reason or "timeout")
        if num_pages:
            self._count(self._reads, num_pages, started_s)
        return [page < num_pages for page in range(len(keys))]

    def _take(self, staged: SharedPool, pool_pages: Sequence[int]) -> None:
        """Copy the first pages of ``staged`` into the host pool."""
        use_one_thread()
        values = CellValues(*(view[: len(pool_pages)].flatten(0, 1) for view in staged.views))
        geometry = self._pages.geometry
        self._pages.write(range(geometry.num_layers), range(geometry.num_heads), pool_pages, values)

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
        for each in self._sides.with_kv(keys, host_indices):
            self._sides.announce(each)
        num_queued = self._plane.write(
            len(before),
            previous_hash,
            hash_bytes(keys),
            pool_pages,
            self._pages.read_into,
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
        deadline_s, is_stopping = self._deadline_s(), self._prefetch.is_stopping
        with ExitStack() as ends:
            calls = [(x, self._begin_side(x, deadline_s, ends)) for x in transfers if x.name != PoolName.KV]
            results = {
                transfer.name: self.batch_get_v1(transfer.keys or [], transfer.host_indices, extra_info)
                for transfer in transfers
                if transfer.name == PoolName.KV
            }
            for transfer, fetch in calls:
                results[transfer.name] = [False] * len(transfer.keys or ())
                with counted("fetch"):
                    results[transfer.name] = self._end_side(
                        transfer, fetch, deadline_s, lambda: "cancelled" if is_stopping() else ""
                    )
        return results

    def _begin_side(self, transfer: PoolTransfer, deadline_s: float, ends: ExitStack) -> SideFetch | None:
        if not transfer.keys or not self.access.reads:
            return None
        fetch = self._plane.fetch_side(str(transfer.name), hash_bytes(transfer.keys), deadline_s)
        ends.callback(fetch.end)
        return fetch

    def _end_side(
        self, transfer: PoolTransfer, fetch: SideFetch | None, deadline_s: float, given_up: Callable[[], str]
    ) -> list[bool]:
        """Wait for what `_begin_side` began, and copy what has come into its pool. Return which pages were there."""
        is_there = [False] * len(transfer.keys or ())
        if fetch is not None:
            use_one_thread()
            for come in fetch.parts(lambda over: _await(over, deadline_s + _GRACE_S, given_up)[0]):
                self._sides.write(transfer, come)
                for page in come:
                    is_there[page] = True
        return is_there

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
        if self._staged is not None:
            self._staged.close()

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
