"""What device mode needs of the scheduler: its steps, its waiting queue, and what its requests will need."""

from __future__ import annotations

from sgl_kvfetch.plugin.seams.seam import Scope, Seam, Use

_DEVICE_HOOKS = "sgl_kvfetch.plugin.device.hooks"
_SRT = "sglang.srt"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

DEVICE_SCHEDULER: tuple[Seam, ...] = (
    Seam(
        f"{_SCHEDULER}._process_hicache_events",
        Use.AFTER,
        "runs every step, and calls no cache without a host tier",
        hook=f"{_DEVICE_HOOKS}.step_cache",
        params=("self", "should_retry_storage_prefetch"),
        mentions=("tree_cache", "check_hicache_events"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SCHEDULER}.process_batch_result",
        Use.AFTER,
        "a batch is done: how fast the engine computes prompts",
        hook=f"{_DEVICE_HOOKS}.measure_batch",
        params=("self", "batch", "result"),
        mentions=("forward_mode",),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SCHEDULER}.run_batch",
        Use.READ,
        "leaves in the batch when it was launched, by time.monotonic()",
        mentions=("launch_ts", "monotonic"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SRT}.managers.schedule_batch.ScheduleBatch",
        Use.READ,
        "what a batch computed, and for whom",
        has=("launch_ts", "extend_num_tokens", "forward_mode", "reqs", "decoding_reqs"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SRT}.model_executor.forward_batch_info.ForwardMode.is_extend_without_speculative",
        Use.CALL,
        "whether a batch computes prompts",
        params=("self",),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SRT}.model_executor.forward_batch_info.ForwardMode.is_split_prefill",
        Use.CALL,
        "whether it does so in parts",
        params=("self",),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SCHEDULER}.get_next_batch_to_run",
        Use.READ,
        "calls _process_hicache_events before it forms a batch",
        mentions=("_process_hicache_events",),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SCHEDULER}.is_fully_idle",
        Use.AFTER,
        "guards the count of the pool's slots, and its emptying",
        hook=f"{_DEVICE_HOOKS}.count_pending",
        params=("self", "for_health_check", "ignore_waiting"),
        mentions=("_engine_paused", "waiting_queue"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SCHEDULER}.clear_hicache_storage_wrapped",
        Use.AROUND,
        "refuses to without a host tier",
        hook=f"{_DEVICE_HOOKS}.clear_store",
        params=("self", "recv_req"),
        mentions=("clear_storage_backend",),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SCHEDULER}.attach_hicache_storage_wrapped",
        Use.AROUND,
        "refuses to without a host tier",
        hook=f"{_DEVICE_HOOKS}.attach_store",
        params=("self", "recv_req"),
        mentions=("enable_hierarchical_cache", "is_fully_idle", "attach_storage_backend"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SCHEDULER}.detach_hicache_storage_wrapped",
        Use.AROUND,
        "refuses to without a host tier",
        hook=f"{_DEVICE_HOOKS}.detach_store",
        params=("self", "recv_req"),
        mentions=("enable_hierarchical_cache", "is_fully_idle", "detach_storage_backend"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SRT}.managers.io_struct.ClearHiCacheReqOutput",
        Use.CALL,
        "what it answers",
        params=("rid", "http_worker_ipc", "success"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SCHEDULER}._prefetch_kvcache",
        Use.READ,
        "calls prefetch_from_storage when a request arrives",
        params=("self", "req", "storage_hit_end"),
        mentions=("is_backuped", "prefetch_from_storage", "get_last_hash_value"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SCHEDULER}._get_new_batch_prefill_raw",
        Use.AROUND,
        "looks at every request of waiting_queue; asks check_prefetch_progress before one is admitted, and where its "
        "prefix came from",
        hook=f"{_DEVICE_HOOKS}.form_batch",
        params=("self", "prefill_delayer_single_pass", "running_batch"),
        mentions=("waiting_queue", "check_prefetch_progress", "pop_prefetch_loaded_span", "storage_hit_start"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SRT}.managers.schedule_policy.PrefillAdder._account_prefill_cache_admission",
        Use.READ,
        "calls finish_storage_prefetch_admission when a request is admitted",
        mentions=("finish_storage_prefetch_admission",),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SRT}.managers.schedule_policy.CLIP_MAX_NEW_TOKENS",
        Use.READ,
        "bounds what a request is expected to generate",
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SRT}.managers.schedule_policy.PrefillAdder._get_running_request_total_token_offset",
        Use.READ,
        "what a running request is expected to need yet, which fetches leave it",
        params=("self", "req"),
        mentions=("ignore_eos", "max_new_tokens", "output_ids", "new_token_ratio"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SCHEDULER}._get_new_batch_prefill_raw",
        Use.READ,
        "has the chunked request and the ratio",
        mentions=("chunked_req", "new_token_ratio_tracker"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SCHEDULER}.init_running_status",
        Use.READ,
        "has the running requests, and those prefilled last",
        mentions=("running_batch", "last_batch"),
        scope=Scope.DEVICE,
    ),
)
