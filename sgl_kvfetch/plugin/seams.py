"""Every place where we touch SGLang: one table, checked against the installed version.

SGLang's plugin loader logs what goes wrong and goes on, so a seam that moved would show as a backend that is silently
not there. `register.py` installs its hooks from this table and the gate checks it before a launch: what is not in here
is not used, and a test compares the table with the imports of this package.
"""

from __future__ import annotations

import enum
import importlib.metadata
import inspect
import pkgutil
import types
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sgl_kvfetch.plugin.compute_flags import FILES, JSON_TEXTS, RELEVANT

SGLANG_VERSION = "0.5.23"


class Use(enum.Enum):
    """What we do at a seam. The first four are hooks; their values are those of SGLang's ``HookType``."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"
    SUBCLASS = "subclass"
    CALL = "call"
    READ = "read"


class Scope(enum.Enum):
    """When a seam is needed."""

    GATE = "gate"  # to accept the backend's name and to refuse a launch that cannot work
    HOST = "host"  # for the storage backend behind the host pool
    DEVICE = "device"  # for the radix cache without a host tier
    CPU_ENGINE = "cpu_engine"  # to run without an accelerator


@dataclass(frozen=True)
class Seam:
    """One place in SGLang that we depend on.

    ``params`` are the exact parameter names of a callable, ``has`` are fields or attributes of a class, and
    ``mentions`` are names that a function's own code must use: attributes that only exist on instances.
    """

    path: str
    use: Use
    why: str
    hook: str | None = None
    params: tuple[str, ...] | None = None
    has: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()
    scope: Scope = Scope.HOST

    def __post_init__(self) -> None:
        is_hook = self.use in (Use.BEFORE, Use.AFTER, Use.AROUND, Use.REPLACE)
        assert is_hook == (self.hook is not None), self.path


_HOOKS = "sgl_kvfetch.plugin.hooks"
_DEVICE_HOOKS = "sgl_kvfetch.plugin.device.hooks"
_CPU = "sgl_kvfetch.plugin.cpu_engine"
_SRT = "sglang.srt"
_STORAGE = "sglang.srt.mem_cache.hicache_storage"
_CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_TREE = "sglang.srt.mem_cache.unified_cache.unified_tree_core.UnifiedTreeCore"
_RUST_TREE = "sglang.srt.mem_cache.rust_tree_core.adapter.RustUnifiedTreeCore"
_MHA_HOST = "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost"

SEAMS: tuple[Seam, ...] = (
    Seam(
        f"{_SRT}.plugins.hook_registry.HookRegistry.register",
        Use.CALL,
        "installs the hooks of this table",
        params=("target", "hook", "hook_type", "source"),
        scope=Scope.GATE,
    ),
    Seam(
        f"{_SRT}.plugins.hook_registry.HookType",
        Use.READ,
        "names the kinds of hook",
        has=("BEFORE", "AFTER", "AROUND", "REPLACE"),
        scope=Scope.GATE,
    ),
    Seam(
        f"{_SRT}.server_args.ServerArgs.add_cli_args",
        Use.AFTER,
        "--hicache-storage-backend has fixed choices",
        hook=f"{_HOOKS}.allow_choice",
        params=("parser",),
        scope=Scope.GATE,
    ),
    Seam(
        f"{_SRT}.server_args.prepare_server_args",
        Use.AFTER,
        "the command line's way in: a launch that cannot work stops with one message",
        hook=f"{_HOOKS}.gate_command_line",
        params=("argv",),
        scope=Scope.GATE,
    ),
    Seam(
        f"{_SRT}.server_args.ServerArgs.resolve_once",
        Use.BEFORE,
        "every launch's way in (sgl.Engine too), before a model is looked at",
        hook=f"{_HOOKS}.gate_launch",
        params=("self",),
        scope=Scope.GATE,
    ),
    Seam(
        f"{_SRT}.server_args.ServerArgs",
        Use.READ,
        "the flags that the gate looks at",
        has=(
            "hicache_storage_backend",
            "hicache_storage_backend_extra_config",
            "enable_hierarchical_cache",
            "hicache_mem_layout",
            "hicache_host_memory_mode",
            "pp_size",
            "disaggregation_decode_enable_offload_kvcache",
            "enable_lora",
            "lora_paths",
            "disable_radix_cache",
            "radix_cache_backend",
            "enable_lmcache",
            "enable_flexkv",
            "enable_unified_cache_external_linker",
            "enable_streaming_session",
            "speculative_algorithm",
            "disaggregation_mode",
            "enable_dp_attention",
            "attn_dp_size",
            "attn_cp_size",
            "dcp_size",
        ),
        scope=Scope.GATE,
    ),
    Seam(
        f"{_SRT}.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
        ".parse_storage_backend_extra_config",
        Use.CALL,
        "reads the extra config as SGLang will: JSON or @file, SGLang's own keys taken out",
        params=("storage_backend_extra_config",),
        scope=Scope.GATE,
    ),
    Seam(
        f"{_SRT}.mem_cache.storage.backend_factory.StorageBackendFactory._do_create_backend",
        Use.AROUND,
        "a registered name is refused by _create_builtin_backend unless SGLang knows it",
        hook=f"{_HOOKS}.create_backend",
        params=("backend_name", "storage_config", "mem_pool_host", "kwargs"),
    ),
    Seam(
        f"{_CONTROLLER}.attach_storage_backend",
        Use.AFTER,
        "the zero-copy interface is given to a fixed list of names; runs at start-up and at run time",
        hook=f"{_HOOKS}.use_zero_copy",
        params=(
            "self",
            "storage_backend",
            "prefetch_threshold",
            "model_name",
            "storage_backend_extra_config",
        ),
        mentions=(
            "storage_backend_type",
            "page_get_func",
            "page_set_func",
            "_page_get_zero_copy",
            "_page_set_zero_copy",
        ),
    ),
    Seam(
        f"{_CONTROLLER}._page_get_zero_copy",
        Use.READ,
        "hooks.fetch_pages takes its place, with its parameters, since it cannot be interrupted",
        params=("self", "operation", "hash_values", "host_indices", "extra_info"),
        mentions=("batch_get_v1", "storage_backend"),
    ),
    Seam(
        f"{_CONTROLLER}._stop_storage_threads",
        Use.READ,
        "sets the event on which a fetch gives up, before it joins the thread that waits for it",
        params=("self",),
        mentions=("storage_stop_event",),
    ),
    Seam(
        "sglang.srt.managers.cache_controller.PrefetchOperation.is_terminated",
        Use.CALL,
        "says that SGLang waits for a fetch no longer",
        params=("self",),
    ),
    Seam(
        f"{_CONTROLLER}._page_set_zero_copy",
        Use.CALL,
        "calls batch_set_v1",
        params=("self", "hash_values", "host_indices", "extra_info"),
        mentions=("batch_set_v1",),
    ),
    Seam(
        f"{_SRT}.mem_cache.unified_cache.storage_attachment.StorageAttachment.apply_runtime_config",
        Use.BEFORE,
        "forces hicache_storage_pass_prefix_keys, at start-up and at run time",
        hook=f"{_HOOKS}.pass_prefix_keys",
        params=(
            "self",
            "storage_backend",
            "prefetch_threshold",
            "prefetch_timeout_base",
            "prefetch_timeout_per_ki_token",
            "hicache_storage_pass_prefix_keys",
            "enable_storage",
            "enable_storage_metrics",
            "extra_metric_labels",
        ),
    ),
    Seam(
        f"{_STORAGE}.HiCacheStorage",
        Use.SUBCLASS,
        "the storage backend",
        has=("register_mem_pool_host", "on_host_pools_registered", "get", "set", "batch_get", "batch_set", "clear"),
    ),
    Seam(
        f"{_STORAGE}.HiCacheStorage.exists",
        Use.SUBCLASS,
        "the storage backend's lookup of one page",
        params=("self", "key"),
    ),
    Seam(
        f"{_STORAGE}.HiCacheStorage.batch_exists",
        Use.SUBCLASS,
        "the storage backend's lookup",
        params=("self", "keys", "extra_info"),
    ),
    Seam(
        f"{_STORAGE}.HiCacheStorage.batch_get_v1",
        Use.SUBCLASS,
        "the storage backend's read",
        params=("self", "keys", "host_indices", "extra_info"),
    ),
    Seam(
        f"{_STORAGE}.HiCacheStorage.batch_set_v1",
        Use.SUBCLASS,
        "the storage backend's write",
        params=("self", "keys", "host_indices", "extra_info"),
    ),
    Seam(
        f"{_STORAGE}.HiCacheStorage.batch_exists_v2",
        Use.SUBCLASS,
        "the same for models with side pools",
        params=("self", "keys", "pool_transfers", "extra_info"),
    ),
    Seam(
        f"{_STORAGE}.HiCacheStorage.batch_get_v2",
        Use.SUBCLASS,
        "the same for models with side pools",
        params=("self", "transfers", "extra_info"),
    ),
    Seam(
        f"{_STORAGE}.HiCacheStorage.batch_set_v2",
        Use.SUBCLASS,
        "the same for models with side pools",
        params=("self", "transfers", "extra_info"),
    ),
    Seam(
        f"{_STORAGE}.HiCacheStorage.register_mem_host_pool_v2",
        Use.SUBCLASS,
        "refuses side pools",
        params=("self", "host_pool", "host_pool_name"),
    ),
    Seam(f"{_STORAGE}.HiCacheStorage.get_stats", Use.SUBCLASS, "pages and speeds of transfers", params=("self",)),
    Seam(
        f"{_SRT}.observability.metrics_collector.StorageMetrics",
        Use.CALL,
        "what get_stats returns",
        params=("prefetch_pgs", "backup_pgs", "prefetch_bandwidth", "backup_bandwidth"),
    ),
    Seam(
        f"{_STORAGE}.HiCacheStorageConfig",
        Use.READ,
        "the rank's place in the model, and the extra config",
        has=(
            "tp_rank",
            "tp_size",
            "attn_cp_size",
            "dcp_size",
            "is_mla_model",
            "should_split_heads",
            "extra_config",
        ),
    ),
    Seam(f"{_STORAGE}.HiCacheStorageExtraInfo", Use.READ, "the keys before a batch", has=("prefix_keys",)),
    Seam(f"{_STORAGE}.PoolName", Use.READ, "names the KV cache itself among the pools", has=("KV",)),
    Seam(f"{_STORAGE}.PoolTransfer", Use.READ, "a batch of v2", has=("name", "keys", "host_indices")),
    Seam(
        f"{_STORAGE}.PoolTransferResult",
        Use.CALL,
        "what batch_exists_v2 returns",
        params=("kv_hit_pages", "extra_pool_hit_pages", "restorable_prefix_pages"),
    ),
    Seam(
        f"{_SRT}.runtime_context.get_model",
        Use.CALL,
        "which weights, and how they are computed with, for the namespace; what a pool of bytes holds",
        params=(),
    ),
    Seam(
        f"{_SRT}.runtime_context.get_lora",
        Use.CALL,
        "adapters, which SGLang tells apart by their paths",
        params=(),
    ),
    Seam(
        f"{_SRT}.runtime_context.get_context",
        Use.CALL,
        "the flags of other groups that change K and V",
        params=(),
    ),
    Seam(f"{_SRT}.runtime_context.RuntimeContext.config_bag", Use.CALL, "one group of flags", params=("self", "name")),
    Seam(f"{_SRT}.arg_groups.arg_utils.namespace_of", Use.CALL, "the group of each flag", params=("cls",)),
    Seam(
        f"{_SRT}.server_args.ServerArgs",
        Use.READ,
        "the flags that get_model() and get_lora() have, and their defaults",
        has=(
            "model_path",
            "revision",
            "load_format",
            "dtype",
            "quantization",
            "kv_cache_dtype",
            "weight_cache_mode",
            "enable_lora",
            *sorted(FILES | JSON_TEXTS),
            *(name.rpartition(".")[2] for name in RELEVANT),
        ),
    ),
    Seam(
        f"{_UPDATER}.update_weights_from_disk",
        Use.BEFORE,
        "the weights change, in every rank",
        hook=f"{_HOOKS}.suspend_for_update",
        params=("self", "recv_req"),
    ),
    Seam(
        f"{_UPDATER}.update_weights_from_ipc",
        Use.BEFORE,
        "the weights change, in every rank",
        hook=f"{_HOOKS}.suspend_for_update",
        params=("self", "recv_req"),
    ),
    Seam(
        f"{_UPDATER}.begin_weight_update",
        Use.BEFORE,
        "opens what the next three need; others may write into the weights from here on",
        hook=f"{_HOOKS}.suspend_for_update",
        params=("self", "recv_req"),
    ),
    Seam(
        f"{_UPDATER}.update_weights_from_tensor",
        Use.BEFORE,
        "the weights change, also of a backend that was attached since",
        hook=f"{_HOOKS}.suspend_for_update",
        params=("self", "recv_req"),
    ),
    Seam(
        f"{_UPDATER}.update_weights_from_distributed",
        Use.BEFORE,
        "the weights change, also of a backend that was attached since",
        hook=f"{_HOOKS}.suspend_for_update",
        params=("self", "recv_req"),
    ),
    Seam(
        f"{_UPDATER}.end_weight_update",
        Use.BEFORE,
        "the weights change, also of a backend that was attached since",
        hook=f"{_HOOKS}.suspend_for_update",
        params=("self", "recv_req"),
    ),
    Seam(
        f"{_UPDATER}.check_weights",
        Use.BEFORE,
        "can overwrite the weights, to test updates",
        hook=f"{_HOOKS}.suspend_for_reset",
        params=("self", "recv_req"),
        mentions=("action",),
    ),
    Seam(
        f"{_UPDATER}.release_memory_occupation",
        Use.BEFORE,
        "can give up the weights",
        hook=f"{_HOOKS}.suspend_for_release",
        params=("self", "recv_req"),
        mentions=("tags", "GPU_MEMORY_TYPE_WEIGHTS"),
    ),
    Seam(
        f"{_SRT}.runtime_context.get_exec",
        Use.CALL,
        "whether weights that are given up come back",
        params=(),
    ),
    Seam(
        f"{_SRT}.server_args.ServerArgs",
        Use.READ,
        "the flags of get_exec().features",
        has=("enable_memory_saver", "enable_weights_cpu_backup"),
    ),
    Seam(f"{_SRT}.constants.GPU_MEMORY_TYPE_WEIGHTS", Use.READ, "names the weights among what can be given up"),
    Seam(
        f"{_SRT}.mem_cache.pool_host.mha.AsymmetricMHATokenToKVPoolHost",
        Use.READ,
        "the other kind of host pool that holds K and V alone",
        has=("k_buffer", "v_buffer"),
    ),
    Seam(
        f"{_SRT}.mem_cache.kv_cache_dtype.configure_kv_cache_dtype",
        Use.READ,
        "which fp8 a flag is",
        params=(
            "server_args_kv_cache_dtype",
            "model",
            "model_dtype",
            "is_draft_worker",
            "is_dflash",
            "speculative_draft_attention_backend",
            "speculative_draft_kv_cache_dtype",
        ),
        mentions=("float8_e4m3fn", "float8_e5m2"),
    ),
    Seam(_MHA_HOST, Use.READ, "the host pool's buffers", has=("k_buffer", "v_buffer", "storage_format_tag")),
    Seam(
        f"{_MHA_HOST}.__init__",
        Use.READ,
        "the host pool's layers",
        mentions=("dtype", "page_size", "layer_num", "target_layer_num", "device_k_buffers"),
    ),
    Seam(
        f"{_SRT}.mem_cache.pool_host.base.HostKVCache.__init__",
        Use.READ,
        "the host pool's layout",
        mentions=("layout", "start_layer"),
    ),
    Seam(
        f"{_SRT}.mem_cache.registry.default_radix_cache_factory",
        Use.AROUND,
        "no flag names a radix cache for a storage backend without a host tier",
        hook=f"{_DEVICE_HOOKS}.build_cache",
        params=("ctx",),
        mentions=("create_unified_radix_cache",),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SRT}.mem_cache.registry.create_tree_cache",
        Use.READ,
        "calls the factory that is hooked",
        mentions=("default_radix_cache_factory",),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SRT}.mem_cache.registry.create_unified_radix_cache",
        Use.CALL,
        "builds our radix cache like SGLang's own",
        params=("ctx", "cache_class"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SRT}.mem_cache.registry.TreeCacheBuildContext",
        Use.READ,
        "the rank's place in the model, and the pools",
        has=("params", "enable_hierarchical_cache", "tp_rank", "tp_size"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SRT}.mem_cache.cache_init_params.CacheInitParams",
        Use.READ,
        "the allocator of the token-to-KV pool",
        has=("token_to_kv_pool_allocator",),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SRT}.runtime_context.get_memory",
        Use.CALL,
        "whether our backend is chosen, and its extra config",
        params=(),
        scope=Scope.DEVICE,
    ),
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
        _CACHE,
        Use.SUBCLASS,
        "the radix cache",
        has=(
            "reset",
            "match_prefix",
            "evict",
            "lock",
            "unlock",
            "is_root",
            "path_device_indices",
            "evictable_size",
            "clear_storage_backend",
            "release_host_resources",
            "enable_storage",
            "page_size",
        ),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_CACHE}.__init__",
        Use.READ,
        "what instances of it have",
        params=("self", "params"),
        mentions=(
            "tree_core",
            "tree_components",
            "token_to_kv_pool_allocator",
            "tp_group",
            "attn_tp_group",
            "attn_cp_group",
        ),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_CACHE}._reset_full",
        Use.READ,
        "where the tokens that were loaded for a request are left",
        mentions=("prefetch_loaded_tokens_by_reqid", "prefetch_loaded_storage_start_by_reqid"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_CACHE}.insert",
        Use.CALL,
        "puts a fetched prefix into the tree",
        params=("self", "params"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_CACHE}.evict_for_alloc",
        Use.SUBCLASS,
        "how requests that run get slots: ours give way to them",
        params=("self", "params", "allocation_reclaim_satisfied"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SRT}.mem_cache.allocator.base.BaseTokenToKVPoolAllocator.evict_to_free_tokens",
        Use.READ,
        "calls evict_for_alloc with what is lacking",
        mentions=("evict_for_alloc", "available_size"),
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
    Seam(
        f"{_SRT}.mem_cache.base_prefix_cache.EvictResult",
        Use.READ,
        "what an eviction came to",
        has=("num_tokens_evicted",),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_CACHE}._all_reduce_attn_groups",
        Use.CALL,
        "agrees with the other ranks",
        params=("self", "tensor", "op"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_CACHE}.attach_storage_backend",
        Use.SUBCLASS,
        "a store at run time",
        params=(
            "self",
            "storage_backend",
            "storage_backend_extra_config_json",
            "served_model_name",
            "hicache_storage_prefetch_policy",
            "hicache_write_policy",
        ),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_CACHE}.detach_storage_backend",
        Use.SUBCLASS,
        "no store any more",
        params=("self",),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_RUST_TREE}.backfill_missing_hash_values",
        Use.CALL,
        "nodes that were made while no store was attached",
        params=("self",),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_TREE}.backfill_missing_hash_values",
        Use.CALL,
        "nodes that were made while no store was attached",
        params=("self",),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_CACHE}.is_backuped",
        Use.SUBCLASS,
        "any node's prefix may go on in the store",
        params=("self", "node_id"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_CACHE}.prefetch_from_storage",
        Use.SUBCLASS,
        "a request has arrived",
        params=(
            "self",
            "request",
            "last_host_node_id",
            "new_input_tokens",
            "last_hash",
            "prefix_keys",
            "matched_prefix_tokens",
            "extra_key",
            "cache_salt",
            "storage_hit_end",
        ),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_CACHE}.check_prefetch_progress",
        Use.SUBCLASS,
        "keeps a request that waits out of the batch",
        params=("self", "request"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_CACHE}.finish_storage_prefetch_admission",
        Use.SUBCLASS,
        "a request is admitted and has locked its prefix",
        params=("self", "request", "fulfilled_tokens", "reason"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_CACHE}.release_aborted_request",
        Use.SUBCLASS,
        "a request is gone",
        params=("self", "request"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_CACHE}.on_release",
        Use.SUBCLASS,
        "a request is over",
        params=("self", "req", "checkpointed"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_CACHE}.checkpoint",
        Use.SUBCLASS,
        "a request's pages are in the tree, and may be written",
        params=("self", "req", "up_to", "kwargs"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_RUST_TREE}.get_prefix_hash_values",
        Use.CALL,
        "the hashes of the pages before a node",
        params=("self", "node_id"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_RUST_TREE}.get_hash_values",
        Use.CALL,
        "the hashes of a node's pages",
        params=("self", "node_id"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_TREE}.get_prefix_hash_values",
        Use.CALL,
        "the hashes of the pages before a node",
        params=("self", "node_id"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_TREE}.get_hash_values",
        Use.CALL,
        "the hashes of a node's pages",
        params=("self", "node_id"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_TREE}._add_new_node",
        Use.READ,
        "nodes have hashes where enable_storage is set",
        mentions=("enable_storage", "compute_node_hash_values"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SRT}.mem_cache.unified_cache.component_type.ComponentType",
        Use.READ,
        "whether a model has plain KV alone",
        has=("FULL",),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SRT}.mem_cache.base_prefix_cache.MatchPrefixParams",
        Use.CALL,
        "what the tree has of a prompt",
        params=("key", "cow_mamba", "req"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SRT}.mem_cache.base_prefix_cache.MatchResult",
        Use.READ,
        "the same",
        has=("device_prefix_len", "last_device_node"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SRT}.mem_cache.base_prefix_cache.InsertParams",
        Use.CALL,
        "a fetched prefix, whose slots before prev_prefix_len are the tree's",
        has=("key", "value", "prev_prefix_len", "inserted_len"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SRT}.mem_cache.base_prefix_cache.EvictParams",
        Use.CALL,
        "makes room for a fetch",
        has=("num_tokens",),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SRT}.mem_cache.base_prefix_cache.TreeLock",
        Use.READ,
        "the node that is locked",
        has=("node",),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SRT}.mem_cache.radix_cache.RadixKey",
        Use.CALL,
        "a prompt with its namespace",
        params=("token_ids", "extra_key", "is_bigram", "limit", "cache_salt"),
        has=("page_aligned",),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SRT}.mem_cache.utils.get_storage_hash_str",
        Use.CALL,
        "the hashes that host mode's pages have",
        params=("key", "prior_hash", "page_size"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SRT}.mem_cache.allocator.base.BaseTokenToKVPoolAllocator",
        Use.CALL,
        "slots",
        has=("alloc", "free", "available_size", "get_kvcache"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SRT}.mem_cache.memory_pool.MHATokenToKVPool",
        Use.READ,
        "the pool that holds K and V alone",
        has=("is_quantized_kv_cache",),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SRT}.mem_cache.memory_pool.MHATokenToKVPool.__init__",
        Use.READ,
        "its buffers and their layout",
        mentions=("k_buffer", "v_buffer", "kv_cache_layout", "start_layer"),
        scope=Scope.DEVICE,
    ),
    Seam(
        f"{_SRT}.platforms.cpu.CpuSRTPlatform",
        Use.SUBCLASS,
        "a CPU without sgl-kernel",
        has=("_enum", "get_dispatch_key_name"),
        scope=Scope.CPU_ENGINE,
    ),
    Seam(
        f"{_SRT}.platforms.device_mixin.PlatformEnum",
        Use.READ,
        "marks the platform as out of tree",
        has=("OOT",),
        scope=Scope.CPU_ENGINE,
    ),
    Seam(
        f"{_SRT}.entrypoints.engine._set_envs_and_config",
        Use.AFTER,
        "SGLang forces spawn, so that every process imports it again, and one NUMA node a rank",
        hook=f"{_CPU}.prepare_children",
        params=("server_args",),
        mentions=("set_start_method",),
        scope=Scope.CPU_ENGINE,
    ),
    Seam(
        f"{_MHA_HOST}.__init__",
        Use.BEFORE,
        "the host pool pins its memory with CUDA",
        hook=f"{_CPU}.without_pinning",
        params=(
            "self",
            "buffer_info",
            "host_to_device_ratio",
            "host_size",
            "page_size",
            "layout",
            "pin_memory",
            "device",
            "allocator_type",
            "device_capacity_tokens",
            "start_layer",
            "end_layer",
            "draft_buffer_infos",
            "write_back_staging",
            "pool_label",
            "head_group_num",
            "host_token_capacity",
        ),
        scope=Scope.CPU_ENGINE,
    ),
    Seam(
        f"{_MHA_HOST}.load_to_device_per_layer",
        Use.REPLACE,
        "pages move with CUDA operators",
        hook=f"{_CPU}.load_layer",
        params=(
            "self",
            "device_pool",
            "host_indices",
            "device_indices",
            "layer_id",
            "io_backend",
            "is_draft",
        ),
        mentions=("device_k_buffers", "device_v_buffers", "target_layer_num"),
        scope=Scope.CPU_ENGINE,
    ),
    Seam(
        f"{_MHA_HOST}.backup_from_device_all_layer",
        Use.REPLACE,
        "pages move with CUDA operators",
        hook=f"{_CPU}.backup_layers",
        params=("self", "device_pool", "host_indices", "device_indices", "io_backend"),
        mentions=("device_k_buffers", "device_v_buffers"),
        scope=Scope.CPU_ENGINE,
    ),
)


def check_version() -> str | None:
    """What is wrong with the installed SGLang's version, or None."""
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    return None if found == SGLANG_VERSION else f"found sglang {found}, expected {SGLANG_VERSION}"


def check_seam(seam: Seam) -> str | None:
    """What is wrong with one seam (what was found and what was expected), or None. Imports the seam's module."""
    try:
        target = pkgutil.resolve_name(seam.path)
    except (ImportError, AttributeError) as error:
        return f"{seam.path} not found ({error})"
    if seam.params is not None:
        found = tuple(inspect.signature(target).parameters) if callable(target) else None
        if found != seam.params:
            expected = f"expected ({', '.join(seam.params)})"
            return f"{seam.path}: found {_describe(found)}, {expected}"
    absent = [name for name in seam.has if name not in _members(target)]
    absent += [name for name in seam.mentions if name not in _mentioned(target)]
    return f"{seam.path}: expected {', '.join(absent)}, found none of that name" if absent else None


def check_seams(scopes: Collection[Scope] = tuple(Scope)) -> list[str]:
    """Every mismatch between the table and the installed SGLang, version first. An empty list is a pass."""
    version = check_version()
    mismatches = [] if version is None else [version]
    for seam in SEAMS:
        if seam.scope in scopes and (mismatch := check_seam(seam)) is not None:
            mismatches.append(mismatch)
    return mismatches


def _describe(params: tuple[str, ...] | None) -> str:
    return "no callable" if params is None else f"({', '.join(params)})"


def _members(target: Any) -> set[str]:
    """Attributes of a class and its fields: a field without a default is no attribute of the class."""
    fields = {name for cls in getattr(target, "__mro__", ()) for name in inspect.get_annotations(cls)}
    return fields | set(dir(target))


def _mentioned(target: Any) -> set[str]:
    """Names that the code of a function uses, nested functions included. Hooks are looked through."""
    function = inspect.unwrap(target)
    pending = [function.__code__] if isinstance(function, types.FunctionType) else []
    names: set[str] = set()
    while pending:
        code = pending.pop()
        names.update(code.co_names)
        pending.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return names
