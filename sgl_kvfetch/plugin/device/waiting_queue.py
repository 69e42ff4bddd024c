"""The scheduler's waiting queue while requests are parked, and the hooks through which SGLang's scheduler gets it.

These are all hooks of device mode. `plugin/seams.py` says where each one is installed.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsIndex

from sgl_kvfetch import timeline
from sgl_kvfetch.plugin.register import BACKEND, linker_of

if TYPE_CHECKING:
    from sgl_kvfetch.plugin.device.linker import KVFetchLinker


class WaitingQueue(list[Any]):
    """Replaces the scheduler's ``waiting_queue``: holds all waiting requests, in order of arrival.

    Aborts, limits, timeouts, metrics and load reports work on the whole list. Batches are formed only from ``ready``,
    which leaves out parked requests, so that these cost nothing in a step. Each request is in ``ready`` or parked.
    """

    def __init__(
        self,
        is_parked: Callable[[Any], bool],
        requests: Iterable[Any] = (),
        *,
        on_append: Callable[[Any], None] = lambda request: None,
        on_leave: Callable[[Any], None] = lambda request: None,
    ) -> None:
        """``is_parked`` returns whether the request with a given handle waits for its fetch. ``on_append`` is called
        with each new request, ``on_leave`` with each that is admitted or gone."""
        super().__init__()
        self._is_parked = is_parked
        self._on_append = on_append
        self._on_leave = on_leave
        self._order: dict[Any, int] = {}  # arrival number, by request
        self._requests: dict[Any, Any] = {}  # by handle
        self._num_arrived = 0
        self._parked: dict[Any, None] = {}
        self.ready: list[Any] = _Ready(self)
        self.extend(requests)

    def append(self, request: Any) -> None:
        super().append(request)
        self._num_arrived += 1
        self._order[request] = self._num_arrived
        self._requests[request.cache_request_handle] = request
        self._on_append(request)
        if self._is_parked(request.cache_request_handle):
            self._parked[request] = None
        else:
            self.ready += [request]  # its own `append` comes here

    def form_batch(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        """Run SGLang's forming of a batch while the scheduler sees only the requests that are ready."""
        scheduler.waiting_queue = self.ready
        try:
            return original(scheduler, *args, **kwargs)
        finally:
            left, scheduler.waiting_queue = scheduler.waiting_queue, self
            if left is not self.ready:
                self._formed(left)

    def extend(self, requests: Iterable[Any]) -> None:
        for request in requests:
            self.append(request)

    def pop(self, index: SupportsIndex = -1) -> Any:
        request = super().pop(index)
        if self._parked.pop(request, self) is self:
            self.ready.remove(request)
        self._forget(request)
        return request

    def update(self, handle: Any) -> None:
        """Park or unpark a request whose fetch may have begun or ended. It re-enters ``ready`` in order of arrival; the
        scheduler's policy restores any other order when it forms a batch."""
        request = self._requests.get(handle)
        if request is None:
            return
        is_parked = self._is_parked(handle)
        if is_parked == (request in self._parked):
            return
        if is_parked:
            self.ready.remove(request)
            self._parked[request] = None
        else:
            del self._parked[request]
            bisect.insort(self.ready, request, key=self._order.__getitem__)

    def _formed(self, left: list[Any]) -> None:
        """Update the queue after a batch was formed. ``left``: the requests that were not admitted, and new ones."""
        gone = {*self.ready}.difference(left)
        self.ready[:] = [request for request in left if request in self._order]
        if gone:
            self[:] = [request for request in self if request not in gone]
            for request in gone:
                self._forget(request)
        self.extend([request for request in left if request not in self._order])

    def _forget(self, request: Any) -> None:
        del self._order[request]
        self._requests.pop(request.cache_request_handle, None)
        self._on_leave(request)


class _Ready(list[Any]):
    """What SGLang sees while it forms a batch. Whom it adds then, as when a grammar is compiled, arrives before it is
    admitted, and whom it takes out, as where too many wait, leaves."""

    def __init__(self, queue: WaitingQueue) -> None:
        super().__init__()
        self._queue = queue

    def append(self, request: Any) -> None:
        self._queue.append(request)

    def pop(self, index: SupportsIndex = -1) -> Any:
        return self._queue.pop(self._queue.index(self[index]))


def wanted_tokens(request: Any, page_size: int) -> int:
    """Return how many tokens of the pool SGLang wants to have free to admit a request, if the tree has none of them."""
    from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

    num_output = len(request.output_ids)
    num_new = min(max(request.sampling_params.max_new_tokens - num_output, 0), CLIP_MAX_NEW_TOKENS)
    return int(len(request.origin_input_ids) + num_output + num_new + page_size)


def spare_tokens(tree: Any) -> int:
    """Return how many slots of the pool of K and V are free, or can be made free: nothing in SGLang's ``tree`` locks
    them."""
    allocator = tree.token_to_kv_pool_allocator
    # Where windows have a pool of their own, it is smaller, and a prompt needs only its end.
    allocator = getattr(allocator, "full_attn_allocator", allocator)
    return int(allocator.available_size() + tree.evictable_size())


def reserved_tokens(scheduler: Any) -> int:
    """Return the slots that running requests will still need: SGLang's estimate (``PrefillAdder``) plus a page each."""
    from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

    ratio, page_size = scheduler.new_token_ratio_tracker.current, scheduler.tree_cache.page_size
    # Requests that were just prefilled are not in the running batch yet.
    batches = [batch for batch in (scheduler.running_batch, scheduler.last_batch) if batch is not None]
    total = 0.0
    for req in {id(req): req for batch in batches for req in batch.reqs}.values():
        left = min(req.sampling_params.max_new_tokens - len(req.output_ids), CLIP_MAX_NEW_TOKENS)
        total += max(0, left) * (1.0 if req.sampling_params.ignore_eos else ratio) + page_size
    chunked = scheduler.chunked_req
    if chunked is not None:
        total += len(chunked.origin_input_ids) + len(chunked.output_ids) - chunked.prefix_len
    return int(total)


def span_of(request: Any) -> Any:
    """Return the ``SpanContext`` of SGLang's span of the request. None if SGLang does not trace it."""
    from opentelemetry.trace import get_current_span

    traced = request.time_stats.trace_ctx
    return get_current_span(traced.root_span_context).get_span_context() if traced.tracing_enable else None


def form_batch(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``Scheduler._get_new_batch_prefill_raw``: let it see only the requests that are not parked."""
    linker = linker_of(scheduler.tree_cache)
    if linker is None:
        return original(scheduler, *args, **kwargs)
    arrive = partial(_arrive, scheduler, linker)
    is_beside = scheduler.enable_overlap and scheduler.last_batch is not None
    for request in linker.step(scheduler.tree_cache, partial(_wanted_tokens, scheduler), is_beside=is_beside):
        arrive(request)
    queue = scheduler.waiting_queue
    if not isinstance(queue, WaitingQueue):  # at first, and whenever SGLang has made a new list
        queue = WaitingQueue(
            lambda handle: linker.prefixes.is_parked(handle),  # those of the store that is attached by then
            queue,
            on_append=arrive,
            on_leave=lambda request: linker.prefixes.leave(request.rid),
        )
        linker.prefixes.retain({request.rid for request in queue})
    linker.prefixes.hold_back(partial(_free_tokens, scheduler))
    for handle in linker.prefixes.take_changed():
        queue.update(handle)
    return queue.form_batch(original, scheduler, *args, **kwargs)


def _free_tokens(scheduler: Any) -> float:
    """Return how many tokens the pool has room for beside those that run; infinite if nothing runs that could make
    room, or if SGLang makes room itself, for requests that it sees."""
    if scheduler.enable_priority_preemption or not _runs(scheduler):
        return math.inf
    return spare_tokens(scheduler.tree_cache) - reserved_tokens(scheduler)


def _wanted_tokens(scheduler: Any) -> int:
    """Return how many tokens of the pool are wanted, at most, to admit the next request beside those that run."""
    if not (ready := getattr(scheduler.waiting_queue, "ready", scheduler.waiting_queue)):
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
    is_idle = not getattr(queue, "ready", queue) and not _runs(scheduler)
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
