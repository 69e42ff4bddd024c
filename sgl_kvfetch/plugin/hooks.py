"""The hooks that SGLang runs. `seams.py` says where each one is installed, and why.

Arguments come as SGLang passes them; hooks that run after a call get its result first. They do nothing unless the
storage backend in question is ours.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from sgl_kvfetch.errors import KVFetchError
from sgl_kvfetch.plugin import versions, weight_updates
from sgl_kvfetch.plugin.register import BACKEND, is_chosen, linker_of, require_packages
from sgl_kvfetch.status import STATUS_KEY

logger = logging.getLogger(__name__)


def try_to_connect(connect: Callable[[str | None], object], extra_config: str | None) -> str | None:
    """Return None, or why ``connect`` failed. Never raises, because the other ranks wait for this rank's answer."""
    try:
        weight_updates.require_no_former_pages()
        connect(extra_config)
    except KVFetchError as error:
        logger.warning("kvfetch is not attached: %s", error)
        return str(error)
    except Exception as error:
        logger.exception("kvfetch is not attached")
        return f"{type(error).__name__}: {error}"
    return None


def allow_choice(result: None, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
    """After ``ServerArgs.add_cli_args``: let ``--hicache-storage-backend`` accept our name."""
    for action in parser._actions:
        if action.dest == "hicache_storage_backend" and action.choices is not None:
            if BACKEND not in action.choices:
                action.choices = [*action.choices, BACKEND]
            return


def gate_command_line(server_args: Any, argv: list[str]) -> None:
    """After ``prepare_server_args``: stop the command with one message if the launch cannot work.

    Raises ``SystemExit``: on the command line a traceback would only hide the message.
    """
    try:
        _check(server_args)
    except KVFetchError as error:
        raise SystemExit(f"sgl_kvfetch: {error}") from error


def gate_launch(server_args: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before ``ServerArgs.resolve_once``: raise a domain error to the caller if the launch cannot work."""
    if _check(server_args):
        from sgl_kvfetch.plugin.launch_check import use_linker

        use_linker(server_args)
    return None


def _check(server_args: Any) -> bool:
    """Check a launch that selects our backend. Return whether it does. Raises domain errors. For others, nothing is
    imported: this machine may lack what we need."""
    if getattr(server_args, "hicache_storage_backend", None) != BACKEND:
        return False
    require_packages()
    from sgl_kvfetch.plugin.launch_check import check_launch

    check_launch(server_args)
    return True


def choose_page_size(chosen: dict[str, Any], server_args: Any) -> dict[str, Any]:
    """After ``_page_size_default``: choose larger pages than SGLang's of one token."""
    if not is_chosen(server_args):
        return chosen
    from sgl_kvfetch.plugin.launch_check import larger_pages

    return larger_pages(chosen, server_args)


def create_backend(
    original: Callable[..., Any],
    factory: Any,
    backend_name: str,
    storage_config: Any,
    mem_pool_host: Any,
    **kwargs: Any,
) -> Any:
    """Around ``StorageBackendFactory._do_create_backend``, or ``create_backend``: build ours, leave the others to
    SGLang."""
    if backend_name != BACKEND:
        return original(factory, backend_name, storage_config, mem_pool_host, **kwargs)
    from sgl_kvfetch.plugin.host.storage import KVFetchStorage

    versions.require_distinct_images()
    return KVFetchStorage(storage_config, mem_pool_host)


def share_host_pool(allocator_type: str, *args: Any, **kwargs: Any) -> str:
    """After ``get_allocator_type`` of the host pools: let them lie in memory that the data plane can map, unless the
    user has asked for memory that SGLang cannot share."""
    from sglang.srt.environ import envs

    wants_huge_pages = envs.SGLANG_HUGEPAGE_SIZE.get()
    num_threads = getattr(envs, "SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS", None)  # not before 0.5.23
    is_private = wants_huge_pages or (num_threads is not None and num_threads.get())
    return "shm" if allocator_type == BACKEND and not is_private else allocator_type


def suspend_for_update(manager: Any, recv_req: Any) -> None:
    """Before a method of the scheduler that changes weights: suspend the backends, which have pages of the old ones.

    It does not wait for success, because a failed update may have changed some weights. Beginning a session of updates
    counts too, because other processes may write into the weights from then on.
    """
    _leave_gpu(manager, recv_req)
    weight_updates.weights_change(type(recv_req).__name__)


def suspend_in_session(manager: Any, recv_req: Any) -> None:
    """Before the methods that SGLang refuses, on all ranks, unless a session of updates is open: suspend the backends
    if one is."""
    if manager._session is not None:
        suspend_for_update(manager, recv_req)


# SGLang's answer to an update from files that it does not find. What it says of later faults begins otherwise.
_REFUSED = "Failed to get weights iterator"


def watch_disk_update(original: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """Around ``update_weights_from_disk``: suspend the backends, unless SGLang refused before it changed any weight."""
    has_happened = True
    _leave_gpu(manager, recv_req)
    weight_updates.begin_change()
    try:
        output = original(manager, recv_req)
        has_happened = _may_have_changed(manager, output)
    finally:
        weight_updates.end_change(type(recv_req).__name__, has_happened=has_happened)
    return output


def _leave_gpu(manager: Any, recv_req: Any) -> None:
    """Let no thread of ours use the GPU if an update captures CUDA graphs anew: a capture fails when any thread of the
    process allocates or pins memory."""
    if not getattr(recv_req, "recapture_cuda_graph", False):
        return
    if (linker := linker_of(manager.scheduler.tree_cache)) is not None:
        linker.leave_gpu()


def _may_have_changed(manager: Any, output: Any) -> bool:
    """Return whether an update from disk may have changed weights of any rank. All ranks of a pipeline stage must call
    this: one of them may lack files that another one has."""
    import torch
    from sglang.srt.runtime_context import get_parallel

    is_refused = not output.success and output.message.startswith(_REFUSED)
    # A draft model's files are looked for when the model has its new weights. Stages of a pipeline do not agree here.
    is_refused = is_refused and len(manager._select_runners()) == 1 and get_parallel().pp_size == 1
    may_have_changed = torch.tensor([int(not is_refused)])
    torch.distributed.all_reduce(may_have_changed, op=torch.distributed.ReduceOp.MAX, group=manager.tp_cpu_group)
    return bool(may_have_changed.item())


def suspend_for_reset(manager: Any, recv_req: Any) -> None:
    """Before ``SchedulerWeightUpdaterManager.check_weights``, which can overwrite the weights to test updates."""
    if recv_req.action == "reset_tensors":
        suspend_for_update(manager, recv_req)


def suspend_for_release(manager: Any, recv_req: Any) -> None:
    """Before ``SchedulerWeightUpdaterManager.release_memory_occupation``: released weights come back undefined.

    Nothing is suspended if SGLang keeps a copy of them, or has no memory saver to release them with. A linker's copies
    out of the pool end in any case: SGLang unmaps the pool before it resets the linker.
    """
    if (linker := linker_of(manager.scheduler.tree_cache)) is not None:
        linker.stop_using_pool()
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
    from sglang.srt.runtime_context import get_exec

    features = get_exec().features
    if not features.enable_memory_saver or features.enable_weights_cpu_backup:
        return
    if not recv_req.tags or GPU_MEMORY_TYPE_WEIGHTS in recv_req.tags:
        suspend_for_update(manager, recv_req)


def record_empty_tree(result: None, tree: Any) -> None:
    """After ``UnifiedRadixCache.reset``, which a flush calls: note that the tree is empty."""
    weight_updates.tree_is_empty()


def attach_backend(original: Callable[..., None], controller: Any, *args: Any, **kwargs: Any) -> None:
    """Around ``HybridCacheController.attach_storage_backend``: move pages between the store and the host pool in place,
    and detach again if we refuse the model's pools. SGLang does the latter only for what fails earlier.

    The storage threads already run, but nothing is queued before the scheduler sees that attaching has succeeded.
    """
    try:
        original(controller, *args, **kwargs)
        if controller.storage_backend_type == BACKEND:
            versions.announce_pools(controller.storage_backend)
    except Exception:
        if controller.storage_backend_type == BACKEND:
            controller.detach_storage_backend()
        raise
    if controller.storage_backend_type == BACKEND:
        controller.page_get_func = controller._page_get_zero_copy
        controller.page_set_func = controller._page_set_zero_copy


def begin_lookup(controller: Any, operation: Any, *args: Any, **kwargs: Any) -> None:
    """Before ``HybridCacheController._storage_hit_query``: tell the backend whose pages it looks up next."""
    if controller.storage_backend_type == BACKEND:
        controller.storage_backend.begin_lookup(operation.request_id)


def begin_transfer(controller: Any, operation: Any) -> None:
    """Before ``HybridCacheController._page_transfer``: tell the backend how long SGLang waits for this prefetch."""
    if controller.storage_backend_type == BACKEND:
        controller.storage_backend.begin_transfer(operation, controller.storage_stop_event.is_set)


def measure_prompts(result: None, scheduler: Any, batch: Any, batch_result: Any) -> None:
    """After ``Scheduler.process_batch_result``: tell the backend how long the batch took. Let a calibration look at
    the batch's prompts, if one is to be made."""
    controller = getattr(scheduler.tree_cache, "cache_controller", None)
    backend = getattr(controller, "storage_backend", None)  # None while it is detached
    if backend is not None and controller.storage_backend_type == BACKEND:  # type: ignore[union-attr]
        backend.meter.finished(batch, time.monotonic())
        if not scheduler.waiting_queue and scheduler.running_batch.is_empty():
            backend.record_idle_engine()
    if (linker := linker_of(scheduler.tree_cache)) is not None:
        linker.batch_ended(batch, time.monotonic())
    from sgl_kvfetch.plugin import auto_profile

    if (profile := auto_profile.current()) is not None:
        profile.batch_ended(batch)


def tell_status(result: Any, scheduler: Any, recv_req: Any) -> None:
    """After ``Scheduler.get_internal_state``: tell what `kvfetch why` asks, in ``/server_info``."""
    from sgl_kvfetch.plugin import status

    if (found := status.status_of(scheduler)) is not None:
        result.internal_state[STATUS_KEY] = msgspec.to_builtins(found)


def step_profile(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """After ``Scheduler._process_hicache_events``: serve by a new profile, if there is one."""
    from sgl_kvfetch.plugin import auto_profile

    if (profile := auto_profile.current()) is not None:
        profile.step(scheduler)


def store_node(original: Callable[[Any, int], None], cache: Any, node_id: int) -> None:
    """Around ``UnifiedRadixCache.write_backup_storage``: store the nodes before it, too, if they may be lost."""
    controller = cache.cache_controller
    backend = getattr(controller, "storage_backend", None)
    if backend is None or controller.storage_backend_type != BACKEND:
        original(cache, node_id)
    else:
        backend.store_node(original, cache, node_id)


def configure_prefetches(
    attachment: Any,
    *,
    storage_backend: str | None,
    prefetch_timeout_base: float,
    prefetch_timeout_per_ki_token: float,
    **kwargs: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before ``StorageAttachment.apply_runtime_config``: let requests wait as long as our config says, and make writes
    pass the hashes of all pages before them.

    The number of those hashes is the position of the first written page, and the last of them is the page before a
    segment.
    """
    budget = prefetch_timeout_base, prefetch_timeout_per_ki_token
    if storage_backend == BACKEND:
        budget = attachment._cache.cache_controller.storage_backend.be_patient(attachment._cache, *budget)
        kwargs["hicache_storage_pass_prefix_keys"] = True
    timeouts = dict(zip(("prefetch_timeout_base", "prefetch_timeout_per_ki_token"), budget, strict=True))
    return (attachment,), {"storage_backend": storage_backend, **timeouts, **kwargs}
