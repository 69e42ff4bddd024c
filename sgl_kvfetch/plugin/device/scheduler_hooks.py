"""The hooks that SGLang runs for device mode.

`plugin/seams.py` says where each hook is installed, and why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

from sgl_kvfetch import timeline
from sgl_kvfetch.plugin.hooks import BACKEND
from sgl_kvfetch.plugin.waiting_queue import WaitingQueue, reserved_tokens, span_of, urgency_of

if TYPE_CHECKING:
    from sgl_kvfetch.plugin.device.cache import KVFetchRadixCache


def build_cache(original: Callable[..., Any], ctx: Any) -> Any:
    """Around ``default_radix_cache_factory``: build our cache if our backend is chosen without a host tier."""
    from sglang.srt.runtime_context import get_memory

    if get_memory().hicache_storage_backend != BACKEND or ctx.enable_hierarchical_cache:
        return original(ctx)
    from sgl_kvfetch.plugin.device.cache import build_radix_cache

    return build_radix_cache(ctx)


def _is_ours(cache: Any) -> TypeGuard[KVFetchRadixCache]:
    """Return whether a scheduler's cache is that of device mode."""
    return getattr(cache, "is_stepped", False)


def step_cache(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After ``Scheduler._process_hicache_events``, which does not call the cache if there is no host tier: step it."""
    if _is_ours(scheduler.tree_cache):
        if gone := scheduler.tree_cache.early_starts.take_leavers():
            scheduler.last_batch.filter_batch(reqs_to_exclude=gone)
        scheduler.tree_cache.step(partial(reserved_tokens, scheduler))


def form_batch(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``Scheduler._get_new_batch_prefill_raw``: let it see only the requests that are not parked."""
    cache = scheduler.tree_cache
    if not _is_ours(cache):
        return original(scheduler, *args, **kwargs)
    queue = scheduler.waiting_queue
    if not isinstance(queue, WaitingQueue):  # at first, and whenever SGLang has made a new list
        queue = WaitingQueue(cache.is_parked, queue, on_append=partial(_queued, scheduler))
    for handle in cache.take_changed():
        queue.update(handle)
    return queue.form_batch(original, scheduler, *args, **kwargs)


def _queued(scheduler: Any, request: Any) -> None:
    """Pass on a request's urgency and its span."""
    span = span_of(request) if timeline.is_traced() else None
    scheduler.tree_cache.queued(request.cache_request_handle, urgency_of(scheduler, request), span)


def measure_batch(result: None, scheduler: Any, batch: Any, batch_result: Any) -> None:
    """After ``Scheduler.process_batch_result``: measure how long the batch took."""
    if _is_ours(scheduler.tree_cache):
        meter, queue = scheduler.tree_cache.prefill_meter, scheduler.waiting_queue
        meter.finished(batch, time.monotonic())
        if not (queue.ready if isinstance(queue, WaitingQueue) else queue) and scheduler.running_batch.is_empty():
            meter.queue.clear()
        _requeue_discarded(scheduler, batch)


def run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``Scheduler.run_batch``: let requests compute whose last pages are being restored.

    If a page does not come, no prompt of the batch gets a result: SGLang takes all their logprobs apart in one go."""
    cache = scheduler.tree_cache
    if not _is_ours(cache) or cache.early_starts.is_idle:
        return original(scheduler, batch, *args, **kwargs)
    request_ids = [req.rid for req in batch.reqs]
    cache.early_starts.begin_pass(request_ids)
    result = original(scheduler, batch, *args, **kwargs)
    if not cache.early_starts.end_pass(request_ids):
        discarded = [req for req in batch.reqs if req not in (batch.decoding_reqs or ())]
        for req in discarded:
            req.is_retracted = True  # so that SGLang does not use its result
            if scheduler.chunked_req is req:
                scheduler.chunked_req = None
        # Under overlap the result is processed after the next batch was formed, otherwise before.
        cache.early_starts.discard(batch.forward_iter, discarded)
    return result


def _requeue_discarded(scheduler: Any, batch: Any) -> None:
    """Queue the requests again that got no result in a batch, as after a retraction. Call when it is processed."""
    from sglang.srt.managers.schedule_batch import release_req

    early_starts = scheduler.tree_cache.early_starts
    for req in early_starts.take_discarded(batch.forward_iter):
        release_req(
            req=req,
            remaing_req_count=0,
            req_to_token_pool=scheduler.req_to_token_pool,
            token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
            tree_cache=scheduler.tree_cache,
            hisparse_coordinator=None,
        )
        early_starts.bar(req.rid)
        scheduler._add_request_to_queue(req, is_retracted=True)


def clear_store(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Around ``Scheduler.clear_hicache_storage_wrapped``, which refuses without a host tier."""
    if not _is_ours(scheduler.tree_cache):
        return original(scheduler, recv_req)
    from sglang.srt.managers.io_struct import ClearHiCacheReqOutput

    return ClearHiCacheReqOutput(success=scheduler.tree_cache.clear_storage_backend())


def attach_store(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Around ``Scheduler.attach_hicache_storage_wrapped``, which refuses without a host tier."""
    with _as_with_host_tier(scheduler):
        return original(scheduler, recv_req)


def detach_store(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Around ``Scheduler.detach_hicache_storage_wrapped``, which refuses without a host tier.

    It also refuses while work is under way. So work that no request needs any more is ended first.
    """
    cache = scheduler.tree_cache
    if _is_ours(cache) and scheduler.is_fully_idle(for_health_check=True):
        cache.end_cache_operations()
    with _as_with_host_tier(scheduler):
        return original(scheduler, recv_req)


def stop_using_pool(manager: Any, recv_req: Any) -> None:
    """Before ``SchedulerWeightUpdaterManager.release_memory_occupation``: end all use of the pool.

    SGLang asserts there that nothing is under way, and unmaps the pool before it flushes the tree."""
    cache = manager.scheduler.tree_cache
    if _is_ours(cache):
        cache.stop_using_pool()


@contextmanager
def _as_with_host_tier(scheduler: Any) -> Iterator[None]:
    """Let calls run that require a host tier but do not need one: they only call our cache."""
    was_enabled = scheduler.enable_hierarchical_cache
    scheduler.enable_hierarchical_cache = was_enabled or _is_ours(scheduler.tree_cache)
    try:
        yield
    finally:
        scheduler.enable_hierarchical_cache = was_enabled


def count_pending(idle: bool, scheduler: Any, for_health_check: bool = False, ignore_waiting: bool = False) -> bool:
    """After ``Scheduler.is_fully_idle``: a scheduler is not idle while fetches or copies hold slots or locks.

    An idle scheduler would miss these slots in its count, and could empty the pool. A paused scheduler may be idle: it
    takes no steps, and ``reset`` ends fetches of its waiting requests, as does `stop_using_pool`. A health check
    concerns only requests.
    """
    cache = scheduler.tree_cache
    if not idle or for_health_check or scheduler._engine_paused or not _is_ours(cache):
        return idle
    return not cache.has_pending_cache_operations()
