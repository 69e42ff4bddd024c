"""The hooks that SGLang runs for device mode through its linker. `plugin/seams.py` says where each is installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from sgl_kvfetch import timeline
from sgl_kvfetch.plugin.hooks import BACKEND, linker_of
from sgl_kvfetch.plugin.waiting_queue import WaitingQueue, reserved_tokens, span_of, spare_tokens, wanted_tokens

if TYPE_CHECKING:
    from sgl_kvfetch.plugin.device.linker import KVFetchLinker


def form_batch(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``Scheduler._get_new_batch_prefill_raw``: let it see only the requests that are not parked."""
    linker = linker_of(scheduler.tree_cache)
    if linker is None:
        return original(scheduler, *args, **kwargs)
    arrive = partial(_arrive, scheduler, linker)
    for request in linker.step(scheduler.tree_cache, partial(_wanted_tokens, scheduler)):
        arrive(request)
    queue = scheduler.waiting_queue
    if not isinstance(queue, WaitingQueue):  # at first, and whenever SGLang has made a new list
        queue = WaitingQueue(linker.is_parked, queue, on_append=arrive, on_leave=linker.leave)
        linker.retain({request.rid for request in queue})
    linker.hold_back(partial(_free_tokens, scheduler))
    for handle in linker.take_changed():
        queue.update(handle)
    return queue.form_batch(original, scheduler, *args, **kwargs)


def _free_tokens(scheduler: Any) -> int | None:
    """Return how many tokens the pool has room for beside those that run; None if nothing runs that could make room."""
    if not _runs(scheduler):
        return None
    return spare_tokens(scheduler.tree_cache) - reserved_tokens(scheduler)


def _wanted_tokens(scheduler: Any) -> int:
    """Return how many tokens of the pool are wanted, at most, to admit the next request beside those that run."""
    queue = scheduler.waiting_queue
    ready = queue.ready if isinstance(queue, WaitingQueue) else queue
    if not ready:
        return 0
    return wanted_tokens(ready[0], scheduler.tree_cache.page_size) + reserved_tokens(scheduler)


def _runs(scheduler: Any) -> bool:
    """Return whether requests were admitted that have not ended."""
    batches = [batch for batch in (scheduler.running_batch, scheduler.last_batch) if batch is not None]
    return any(batch.reqs for batch in batches) or scheduler.chunked_req is not None


def _arrive(scheduler: Any, linker: KVFetchLinker, request: Any) -> None:
    """Let a request that was queued arrive."""
    span = span_of(request) if timeline.is_traced() else None
    queue = scheduler.waiting_queue
    is_idle = isinstance(queue, WaitingQueue) and not queue.ready and not _runs(scheduler)
    linker.arrive(request, scheduler.tree_cache, span, is_idle=is_idle)


def clear_store(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Around ``Scheduler.clear_hicache_storage_wrapped``, which refuses without a host tier."""
    linker = linker_of(scheduler.tree_cache)
    if linker is None:
        return original(scheduler, recv_req)
    from sglang.srt.managers.io_struct import ClearHiCacheReqOutput

    return ClearHiCacheReqOutput(success=linker.clear())


def attach_store(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Around ``Scheduler.attach_hicache_storage_wrapped``, which refuses without a host tier."""
    linker = linker_of(scheduler.tree_cache)
    if linker is None:
        return original(scheduler, recv_req)
    from sglang.srt.managers.io_struct import AttachHiCacheStorageReqOutput

    if not scheduler.is_fully_idle():
        return AttachHiCacheStorageReqOutput(success=False, message=_busy("attach", scheduler))
    policies = recv_req.hicache_storage_prefetch_policy, recv_req.hicache_write_policy
    success, message = linker.attach(
        recv_req.hicache_storage_backend, recv_req.hicache_storage_backend_extra_config_json, policies
    )
    return AttachHiCacheStorageReqOutput(success=success, message=message)


def detach_store(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Around ``Scheduler.detach_hicache_storage_wrapped``, which refuses without a host tier."""
    linker = linker_of(scheduler.tree_cache)
    if linker is None:
        return original(scheduler, recv_req)
    from sglang.srt.managers.io_struct import DetachHiCacheStorageReqOutput

    if not scheduler.is_fully_idle():
        return DetachHiCacheStorageReqOutput(success=False, message=_busy("detach", scheduler))
    linker.detach()
    return DetachHiCacheStorageReqOutput(success=True, message=f"{BACKEND} is detached.")


def _busy(what: str, scheduler: Any) -> str:
    """Return SGLang's message for the same case with a host tier."""
    num_queued, num_running = len(scheduler.waiting_queue), len(scheduler.running_batch.reqs)
    return f"Reject {what}: scheduler is not idle. #queue-req={num_queued} #running-req={num_running}"
