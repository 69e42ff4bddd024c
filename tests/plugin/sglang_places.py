"""Every place in SGLang that we depend on, with what we expect there.

``params`` are the exact parameter names of a callable, ``has`` are fields or attributes of a class, and ``mentions``
are names that a function's own code must use: attributes that only exist on instances. ``versions`` are the releases
that a row holds for; with ``patch``, it holds where SGLang has this name.
"""

from __future__ import annotations

from dataclasses import dataclass

from sgl_kvfetch.plugin.namespace import DRAFT, FILES, JSON_TEXTS, RELEVANT
from sgl_kvfetch.plugin.seams import REGISTERED_NAMES, WEIGHTS_CHANGE
from sgl_kvfetch.plugin.versions import SGLANG_VERSIONS, before, since


@dataclass(frozen=True)
class Place:
    path: str
    why: str
    params: tuple[str, ...] | None = None
    has: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()
    versions: tuple[str, ...] = SGLANG_VERSIONS
    patch: str | None = None


BEFORE_23, SINCE_23 = before("0.5.23"), since("0.5.23")

PLACES: tuple[Place, ...] = (
    Place(
        "sglang.srt.plugins.hook_registry.HookRegistry.register",
        "installs the hooks of this table",
        params=("target", "hook", "hook_type", "source"),
    ),
    Place(
        "sglang.srt.plugins.hook_registry.HookType",
        "names the kinds of hook",
        has=("BEFORE", "AFTER", "AROUND", "REPLACE"),
    ),
    Place(
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        "--hicache-storage-backend has fixed choices",
        params=("parser",),
    ),
    Place(
        "sglang.srt.disaggregation.mooncake.conn.MooncakeKVSender",
        "on a CPU engine, page numbers are sent as they are",
        has=("supports_host_tensor_indices",),
        versions=SINCE_23,
    ),
    Place(
        "sglang.srt.server_args.prepare_server_args",
        "the command line's way in: a launch that cannot work stops with one message",
        params=("argv",),
    ),
    Place(
        "sglang.srt.server_args.ServerArgs.resolve_once",
        "every launch's way in (sgl.Engine too), before a model is looked at",
        params=("self",),
    ),
    Place(
        "sglang.srt.arg_groups.pipeline._page_size_default",
        "the last to choose a page size: one token where the user, the model and the attention backend want no other",
        params=("view",),
    ),
    Place(
        "sglang.srt.environ.envs",
        "the switches that the gate looks at",
        has=("SGLANG_VIT_ENABLE_CUDA_GRAPH", "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"),
    ),
    Place(
        "sglang.srt.server_args.ServerArgs",
        "the flags that the gate looks at",
        has=(
            "hicache_storage_backend",
            "hicache_storage_backend_extra_config",
            "enable_hierarchical_cache",
            "hicache_mem_layout",
            "hicache_host_memory_mode",
            "pp_size",
            "disaggregation_decode_enable_offload_kvcache",
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
    ),
    Place(
        "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController.parse_storage_backend_extra_config",
        "reads the extra config as SGLang will: JSON or @file, SGLang's own keys taken out",
        params=("storage_backend_extra_config",),
    ),
    Place(
        "sglang.srt.runtime_context.get_model",
        "which weights, and how they are computed with, for the namespace; what a pool of bytes holds",
        params=(),
    ),
    Place("sglang.srt.distributed.parallel_state.get_tp_group", "the ranks that take one profile", params=()),
    Place(
        "sglang.srt.distributed.parallel_state.GroupCoordinator",
        "the same",
        has=("rank_in_group", "all_gather_object"),
    ),
    Place("sglang.srt.runtime_context.get_server_args", "the model's config, for its number of heads", params=()),
    Place(
        "sglang.srt.configs.model_config.ModelConfig.from_server_args",
        "the model's config",
        params=("server_args", "model_path", "model_revision", "is_draft_model", "context_length", "kwargs"),
    ),
    Place(
        "sglang.srt.configs.model_config.ModelConfig.get_total_num_kv_heads",
        "how many heads there are if several ranks have the same one",
        params=("self",),
    ),
    Place(
        "sglang.srt.managers.schedule_batch.Req.__init__",
        "SGLang's span of a request, of which that of its fetch is a child",
        mentions=("time_stats",),
    ),
    Place("sglang.srt.observability.req_time_stats.ReqTimeStatsBase", "the same", has=("trace_ctx",)),
    Place(
        "sglang.srt.observability.trace.TraceReqContext.__setstate__",
        "the same",
        mentions=("tracing_enable", "root_span_context"),
    ),
    Place(
        "sglang.srt.observability.trace_async.TraceReqContextAsync.__setstate__",
        "the same",
        mentions=("tracing_enable", "root_span_context"),
    ),
    Place("sglang.srt.observability.trace.TraceNullContext", "a request that is not traced", has=("tracing_enable",)),
    Place(
        "sglang.srt.runtime_context.process_model_config",
        "whether the model's code reads the length, and which layers its pools have",
        params=(),
    ),
    Place(
        "sglang.srt.model_loader.utils.get_resolved_model_impl",
        "whether SGLang has code for the model",
        params=("model_config",),
    ),
    Place("sglang.srt.configs.model_config.ModelImpl", "the same", has=("SGLANG", "TRANSFORMERS")),
    Place("sglang.srt.runtime_context.get_lora", "whether there are LoRA adapters", params=()),
    Place(
        "sglang.srt.lora.lora_manager.LoRAManager.init_state",
        "loads the first adapters",
        params=("self", "max_lora_rank", "target_modules", "lora_paths"),
        mentions=("init_lora_adapters",),
    ),
    Place(
        "sglang.srt.lora.lora_manager.LoRAManager.prepare_lora_batch",
        "makes pinned tensors for each batch, through the backend of LoRA's kernels",
        params=("self", "forward_batch"),
    ),
    Place(
        "sglang.srt.lora.lora_manager.LoRAManager.load_lora_weights",
        "keeps loaded adapters by their ids",
        mentions=("loras", "lora_id", "initialize_weights"),
    ),
    Place(
        "sglang.srt.lora.lora_manager.LoRAManager.init_lora_shapes",
        "the layers that adapters can have",
        mentions=("target_modules",),
    ),
    Place(
        "sglang.srt.lora.lora.LoRAAdapter._process_weight",
        "keeps the weights of an adapter as they come",
        mentions=("layers", "weights", "embedding_layers", "added_tokens_embeddings"),
    ),
    Place(
        "sglang.srt.lora.lora.LoRAAdapter.initialize_weights",
        "then changes them",
        mentions=("_process_weight", "_normalize_weights"),
    ),
    Place(
        "sglang.srt.lora.lora.LoRAAdapter.initialize_weights_from_tensors",
        "the same for an adapter in a request",
        mentions=("_process_weight", "_normalize_weights"),
    ),
    Place("sglang.srt.lora.lora.LoRAAdapter._normalize_weights", "the weights are complete", params=("self",)),
    Place("sglang.srt.lora.lora_config.LoRAConfig.__init__", "an adapter's config", mentions=("hf_config",)),
    Place(
        "sglang.srt.managers.schedule_batch.Req.__init__",
        "ends the key of a request with the id of its adapter",
        mentions=("extra_key", "lora_id"),
    ),
    Place("sglang.srt.runtime_context.get_serving", "the name that the model is served under", params=()),
    Place("sglang.srt.runtime_context.get_spec", "the draft model", params=()),
    Place("sglang.srt.runtime_context.get_context", "the flags of other groups that change K and V", params=()),
    Place("sglang.srt.runtime_context.RuntimeContext.config_bag", "one group of flags", params=("self", "name")),
    Place("sglang.srt.arg_groups.arg_utils.namespace_of", "the group of each flag", params=("cls",)),
    Place(
        "sglang.srt.server_args.ServerArgs",
        "the flags that get_model(), get_lora() and get_spec() have, and their defaults",
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
            "speculative_draft_load_format",
            "speculative_draft_model_path",
            "speculative_draft_model_revision",
            *(name.rpartition(".")[2] for name in (*RELEVANT, *DRAFT)),
        ),
    ),
    Place(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_disk",
        "the weights change, in every rank",
        params=("self", "recv_req"),
    ),
    Place(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_ipc",
        "the weights change, in every rank",
        params=("self", "recv_req"),
    ),
    Place(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.begin_weight_update",
        "opens what the next three need; others may write into the weights from here on",
        params=("self", "recv_req"),
    ),
    Place(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_tensor",
        "the weights change, also of a backend that was attached since",
        params=("self", "recv_req"),
    ),
    Place(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_distributed",
        "the weights change, also of a backend that was attached since",
        params=("self", "recv_req"),
    ),
    Place(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.end_weight_update",
        "the weights change, also of a backend that was attached since",
        params=("self", "recv_req"),
    ),
    Place(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.check_weights",
        "can overwrite the weights, to test updates",
        params=("self", "recv_req"),
        mentions=("action",),
    ),
    Place(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.release_memory_occupation",
        "can give up the weights",
        params=("self", "recv_req"),
        mentions=("tags", "GPU_MEMORY_TYPE_WEIGHTS"),
    ),
    Place(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.reset",
        "no page of former weights is left",
        params=("self",),
    ),
    Place("sglang.srt.runtime_context.get_exec", "whether weights that are given up come back", params=()),
    Place(
        "sglang.srt.server_args.ServerArgs",
        "the flags of get_exec().features",
        has=("enable_memory_saver", "enable_weights_cpu_backup"),
    ),
    Place("sglang.srt.constants.GPU_MEMORY_TYPE_WEIGHTS", "names the weights among what can be given up"),
    Place(WEIGHTS_CHANGE, "the weights change", params=("self", "recv_req"), patch=WEIGHTS_CHANGE),
    Place(REGISTERED_NAMES, "adds our name to the choices", patch=REGISTERED_NAMES),
    Place(
        "sglang.srt.arg_groups.choices.HICACHE_STORAGE_BACKEND_CHOICES",
        "has our name once",
        has=("append",),
        patch=REGISTERED_NAMES,
    ),
    Place(
        "sglang.srt.mem_cache.storage.backend_factory.StorageBackendFactory.register_backend",
        "registers our storage backend",
        params=("name", "module_path", "class_name"),
    ),
    Place(
        "sglang.srt.mem_cache.hicache_storage.HiCacheStorage",
        "asks a storage backend what it needs",
        has=("supports_zero_copy", "requires_prefix_keys"),
        patch=REGISTERED_NAMES,
    ),
    Place(
        "sglang.srt.mem_cache.storage.backend_factory.StorageBackendFactory._do_create_backend",
        "a registered name is refused by _create_builtin_backend unless SGLang knows it",
        params=("backend_name", "storage_config", "mem_pool_host", "kwargs"),
        versions=SINCE_23,
    ),
    Place(
        "sglang.srt.mem_cache.storage.backend_factory.StorageBackendFactory.create_backend",
        "the same, before it was split in two",
        params=("backend_name", "storage_config", "mem_pool_host", "kwargs"),
        versions=BEFORE_23,
    ),
    Place(
        "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController.attach_storage_backend",
        "registers the side pools, and says so, after all that it undoes when it fails",
        params=(
            "self",
            "storage_backend",
            "prefetch_threshold",
            "model_name",
            "storage_backend_extra_config",
            "host_pools",
        ),
        mentions=("attach_storage_backend", "register_mem_host_pool_v2"),
    ),
    Place(
        "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController.attach_storage_backend",
        "says that all pools are known",
        mentions=("on_host_pools_registered",),
        versions=SINCE_23,
    ),
    Place(
        "sglang.srt.managers.cache_controller.HiCacheController.attach_storage_backend",
        "the zero-copy interface is given to a fixed list of names; runs at start-up and at run time",
        params=("self", "storage_backend", "prefetch_threshold", "model_name", "storage_backend_extra_config"),
        mentions=(
            "storage_backend_type",
            "page_get_func",
            "page_set_func",
            "_page_get_zero_copy",
            "_page_set_zero_copy",
        ),
    ),
    Place(
        "sglang.srt.managers.cache_controller.HiCacheController._page_get_zero_copy",
        "calls batch_get_v1",
        params=("self", "operation", "hash_values", "host_indices", "extra_info"),
        mentions=("batch_get_v1", "storage_backend"),
    ),
    Place(
        "sglang.srt.managers.cache_controller.HiCacheController._stop_storage_threads",
        "sets the event on which a fetch gives up, before it joins the thread that waits for it",
        params=("self",),
        mentions=("storage_stop_event",),
    ),
    Place(
        "sglang.srt.managers.cache_controller.PrefetchOperation.is_terminated",
        "says that SGLang waits for a fetch no longer",
        params=("self",),
    ),
    Place(
        "sglang.srt.managers.cache_controller.HiCacheController._page_set_zero_copy",
        "calls batch_set_v1",
        params=("self", "hash_values", "host_indices", "extra_info"),
        mentions=("batch_set_v1",),
    ),
    Place(
        "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController._storage_hit_query",
        "looks up the pages of one prefetch after another, on one thread",
        mentions=("all_hash_values", "batch_exists", "batch_exists_v2"),
    ),
    Place(
        "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController._page_transfer",
        "reads the pages of one prefetch after another, on one thread",
        params=("self", "operation"),
    ),
    Place(
        "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.PrefetchOperation.__init__",
        "whether the policy's budget ended a prefetch",
        mentions=("deadline_expired",),
        versions=SINCE_23,
    ),
    Place(
        "sglang.srt.managers.cache_controller.PrefetchOperation.__init__",
        "when a prefetch began",
        mentions=("start_time", "monotonic"),
    ),
    Place(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache._prefetch_timeout_check_linear_func",
        "the budget of the policy `timeout`",
        params=("self", "operation"),
        mentions=("start_time", "hash_value", "prefetch_timeout_base", "prefetch_timeout_per_page"),
        versions=BEFORE_23,
    ),
    Place(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache._start_storage_prefetch_wait",
        "the budget of the policy `timeout`",
        params=("self", "operation"),
        mentions=(
            "prefetch_stop_policy",
            "stats_requested_tokens",
            "prefetch_timeout_base",
            "prefetch_timeout_per_page",
            "page_size",
        ),
        versions=SINCE_23,
    ),
    Place(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache._can_terminate_prefetch",
        "the other two policies",
        params=("self", "operation"),
        mentions=("prefetch_stop_policy",),
    ),
    Place(
        "sglang.srt.mem_cache.unified_cache.storage_attachment.StorageAttachment.apply_runtime_config",
        "sets what a prefetch may take, and hicache_storage_pass_prefix_keys, at start-up and at run time",
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
    Place(
        "sglang.srt.mem_cache.hicache_storage.HiCacheStorage",
        "the storage backend",
        has=("register_mem_pool_host", "get", "set", "batch_get", "batch_set", "clear"),
    ),
    Place(
        "sglang.srt.mem_cache.hicache_storage.HiCacheStorage.exists",
        "the storage backend's lookup of one page",
        params=("self", "key"),
    ),
    Place(
        "sglang.srt.mem_cache.hicache_storage.HiCacheStorage.batch_exists",
        "the storage backend's lookup",
        params=("self", "keys", "extra_info"),
    ),
    Place(
        "sglang.srt.mem_cache.hicache_storage.HiCacheStorage.batch_get_v1",
        "the storage backend's read",
        params=("self", "keys", "host_indices", "extra_info"),
    ),
    Place(
        "sglang.srt.mem_cache.hicache_storage.HiCacheStorage.batch_set_v1",
        "the storage backend's write",
        params=("self", "keys", "host_indices", "extra_info"),
    ),
    Place(
        "sglang.srt.mem_cache.hicache_storage.HiCacheStorage.batch_exists_v2",
        "the same for models with side pools",
        params=("self", "keys", "pool_transfers", "extra_info"),
    ),
    Place(
        "sglang.srt.mem_cache.hicache_storage.HiCacheStorage.batch_get_v2",
        "the same for models with side pools",
        params=("self", "transfers", "extra_info"),
    ),
    Place(
        "sglang.srt.mem_cache.hicache_storage.HiCacheStorage.batch_set_v2",
        "the same for models with side pools",
        params=("self", "transfers", "extra_info"),
    ),
    Place(
        "sglang.srt.mem_cache.hicache_storage.HiCacheStorage.register_mem_host_pool_v2",
        "brings the side pools, before the next",
        params=("self", "host_pool", "host_pool_name"),
    ),
    Place(
        "sglang.srt.mem_cache.hicache_storage.HiCacheStorage.on_host_pools_registered",
        "says that all pools are known",
        params=("self",),
        versions=SINCE_23,
    ),
    Place(
        "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
        "._page_backup_with_stable_layout",
        "announces side pages, then writes their KV, on one thread, while all stay where they are",
        params=("self", "operation"),
        mentions=("batch_set_v2", "_page_backup"),
    ),
    Place(
        "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController._page_transfer_sidecar",
        "reads side pages after all KV is there",
        params=("self", "operation", "kv_completed_pages"),
        mentions=("batch_get_v2",),
    ),
    Place(
        "sglang.srt.mem_cache.hicache_storage.PoolHitPolicy",
        "which side pages a prefix needs",
        has=("ALL_PAGES", "TRAILING_PAGES"),
    ),
    Place(
        "sglang.srt.mem_cache.pool_host.base.HostKVCache",
        "reads and writes whole pages, as bytes",
        has=("get_data_page", "set_from_flat_data_page", "get_dummy_flat_data_page"),
    ),
    Place(
        "sglang.srt.mem_cache.hicache_storage.HiCacheStorage.get_stats",
        "pages and speeds of transfers",
        params=("self",),
    ),
    Place(
        "sglang.srt.observability.metrics_collector.StorageMetrics",
        "what get_stats returns",
        params=("prefetch_pgs", "backup_pgs", "prefetch_bandwidth", "backup_bandwidth"),
    ),
    Place(
        "sglang.srt.mem_cache.hicache_storage.HiCacheStorageConfig",
        "the rank's place in the model, and the extra config",
        has=(
            *("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_size"),
            *("is_mla_model", "should_split_heads", "extra_config"),
        ),
    ),
    Place(
        "sglang.srt.mem_cache.hicache_storage.HiCacheStorageConfig",
        "over how many ranks decoding shares tokens",
        has=("dcp_size",),
        versions=SINCE_23,
    ),
    Place(
        "sglang.srt.managers.schedule_batch.MultimodalDataItem",
        "page hashes cover more of an image than 30 bits",
        has=("padding_sequence",),
        versions=SINCE_23,
    ),
    Place(
        "sglang.srt.configs.model_config.ModelConfig.__init__",
        "whether a model takes images",
        mentions=("is_multimodal",),
        versions=BEFORE_23,
    ),
    Place("sglang.srt.runtime_context.get_parallel", "the same", params=(), versions=BEFORE_23),
    Place("sglang.srt.runtime_context.ParallelContext", "the same", has=("attn_dcp_size",), versions=BEFORE_23),
    Place(
        "sglang.srt.managers.cache_controller.HiCacheController.start_writing",
        "copies pages to the host pool",
        params=("self",),
        mentions=("submit_device_to_host",),
        versions=BEFORE_23,
    ),
    Place(
        "sglang.srt.managers.cache_controller.HiCacheController.start_loading",
        "has the stream of forward passes",
        mentions=("load_fence_stream", "wait_stream"),
        versions=BEFORE_23,
    ),
    Place(
        "sglang.srt.mem_cache.l2_transfer.L2TransferEngine.submit_device_to_host",
        "has the stream of these copies",
        mentions=("device_to_host_stream",),
        versions=BEFORE_23,
    ),
    Place(
        "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.execute",
        "replays a graph of a whole pass",
        params=("self", "forward_batch", "kwargs"),
        versions=BEFORE_23,
    ),
    Place(
        "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.__init__",
        "whether a graph is of a whole pass",
        mentions=("_is_full_backend", "model_runner"),
        versions=BEFORE_23,
    ),
    Place(
        "sglang.srt.managers.cache_controller.LayerDoneCounter.__init__",
        "what such a graph waits for",
        mentions=("num_layers", "consumer_index"),
        versions=BEFORE_23,
    ),
    Place(
        "sglang.srt.mem_cache.hicache_storage.HiCacheStorageExtraInfo", "the keys before a batch", has=("prefix_keys",)
    ),
    Place(
        "sglang.srt.mem_cache.hicache_storage.PoolHitPolicy",
        "which pages of a side pool a prefix needs",
        has=("ALL_PAGES", "TRAILING_PAGES"),
    ),
    Place(
        "sglang.srt.mem_cache.hicache_storage.PoolName",
        "names the pools",
        has=("KV", "MAMBA", "DRAFT", "DRAFT_INDEXER", "DRAFT_SWA"),
    ),
    Place("sglang.srt.mem_cache.hicache_storage.PoolTransfer", "a batch of v2", has=("name", "keys", "host_indices")),
    Place(
        "sglang.srt.mem_cache.hicache_storage.PoolTransferResult",
        "what batch_exists_v2 returns",
        params=("kv_hit_pages", "extra_pool_hit_pages", "restorable_prefix_pages"),
    ),
    Place(
        "sglang.srt.mem_cache.pool_host.mha.AsymmetricMHATokenToKVPoolHost",
        "the other kind of host pool that holds K and V alone",
        has=("k_buffer", "v_buffer"),
    ),
    Place(
        "sglang.srt.mem_cache.kv_cache_dtype.configure_kv_cache_dtype",
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
    Place(
        "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost",
        "the host pool's buffers",
        has=("k_buffer", "v_buffer", "storage_format_tag"),
    ),
    Place(
        "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost.__init__",
        "the host pool's layers",
        mentions=("dtype", "page_size", "layer_num", "target_layer_num", "device_k_buffers"),
    ),
    Place(
        "sglang.srt.mem_cache.pool_host.mla.MLATokenToKVPoolHost.__init__",
        "the host pool of latent vectors",
        mentions=("kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "device_kv_buffers", "target_layer_num"),
    ),
    Place(
        "sglang.srt.mem_cache.pool_host.base.host_memory_budget_bytes",
        "the memory that host pools leave free, which the CPU engine lowers",
        mentions=("HICACHE_HOST_MEMORY_RESERVE_BYTES",),
    ),
    Place(
        "sglang.srt.mem_cache.pool_host.base.HostKVCache.__init__",
        "the host pool's layout",
        mentions=("layout", "start_layer"),
    ),
    Place(
        "sglang.srt.configs.model_config.ModelConfig._derive_hybrid_model",
        "which layers share the pool of K and V, where others have a pool of windows",
        mentions=("full_attention_layer_ids", "hf_text_config", "hf_config"),
    ),
    *(
        Place(
            path, "which layers share the pool of K and V, where others have states", has=("full_attention_layer_ids",)
        )
        for path in (
            "sglang.srt.configs.lfm2.Lfm2Config",
            "sglang.srt.configs.qwen3_next.Qwen3NextConfig",
            "sglang.srt.configs.nemotron_h.NemotronHConfig",
            "sglang.srt.configs.kimi_linear.KimiLinearConfig",
            "sglang.srt.configs.granitemoehybrid.GraniteMoeHybridConfig",
        )
    ),
    Place(
        "sglang.srt.managers.scheduler.Scheduler._process_hicache_events",
        "runs every step, and calls no cache without a host tier",
        params=("self", "should_retry_storage_prefetch"),
        mentions=("tree_cache", "check_hicache_events"),
    ),
    Place(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        "kvfetch why asks a server for its namespace and its last requests",
        params=("self", "recv_req"),
    ),
    Place(
        "sglang.srt.managers.io_struct.GetInternalStateReqOutput",
        "has what a rank tells of itself",
        has=("internal_state",),
    ),
    Place(
        "sglang.srt.managers.scheduler.Scheduler.process_batch_result",
        "a batch is done: how fast the engine computes prompts",
        params=("self", "batch", "result"),
        mentions=("forward_mode",),
    ),
    Place(
        "sglang.srt.managers.scheduler.Scheduler.run_batch",
        "leaves in the batch when it was launched, by time.monotonic(), and its number",
        mentions=("launch_ts", "monotonic", "forward_iter"),
    ),
    Place(
        "sglang.srt.managers.schedule_batch.ScheduleBatch",
        "what a batch computed, and for whom",
        has=("launch_ts", "extend_num_tokens", "prefix_lens", "forward_mode", "reqs", "decoding_reqs", "forward_iter"),
    ),
    Place(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.copy",
        "what is processed of a batch says how much of each prompt was computed",
        mentions=("extend_lens", "prefix_lens", "decoding_reqs"),
    ),
    Place(
        "sglang.srt.managers.schedule_batch.Req.__init__",
        "a request's prompt, and what keeps it apart from others",
        mentions=("rid", "origin_input_ids", "extra_key", "cache_salt", "multimodal_inputs"),
    ),
    Place(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.write_backup_storage",
        "stores a node",
        params=("self", "node_id"),
    ),
    Place(
        "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface.UnifiedTreeCoreInterface.collect_path_info",
        "the nodes before a node",
        params=("self", "end_node_ids"),
    ),
    Place(
        "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface.TreePathNodeInfo",
        "a node on the way to another",
        has=("node_id",),
    ),
    Place(
        "sglang.srt.mem_cache.memory_pool.KVCache.register_layer_transfer_counter",
        "a forward pass waits for layers that are being restored",
        params=("self", "layer_transfer_counter"),
    ),
    Place(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.get_key_buffer",
        "the same",
        mentions=("layer_transfer_counter", "wait_until", "start_layer"),
    ),
    Place(
        "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool.get_key_buffer",
        "the same",
        mentions=("layer_transfer_counter", "wait_until", "start_layer"),
    ),
    Place(
        "sglang.srt.model_executor.forward_batch_info.ForwardMode.is_extend_without_speculative",
        "whether a batch computes prompts",
        params=("self",),
    ),
    Place(
        "sglang.srt.model_executor.forward_batch_info.ForwardMode.is_split_prefill",
        "whether it does so in parts",
        params=("self",),
    ),
    Place(
        "sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run",
        "calls _process_hicache_events before it forms a batch",
        mentions=("_process_hicache_events",),
    ),
    Place(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.release_memory_occupation",
        "unmaps the pool before it empties the tree",
        params=("self", "recv_req"),
        mentions=("scheduler", "is_fully_idle", "pause", "flush_cache"),
    ),
    Place(
        "sglang.srt.managers.scheduler.Scheduler.clear_hicache_storage_wrapped",
        "refuses to without a host tier",
        params=("self", "recv_req"),
        mentions=("clear_storage_backend",),
    ),
    Place(
        "sglang.srt.managers.scheduler.Scheduler.attach_hicache_storage_wrapped",
        "refuses to without a host tier",
        params=("self", "recv_req"),
        mentions=("enable_hierarchical_cache", "is_fully_idle", "attach_storage_backend"),
    ),
    Place(
        "sglang.srt.managers.scheduler.Scheduler.detach_hicache_storage_wrapped",
        "refuses to without a host tier",
        params=("self", "recv_req"),
        mentions=("enable_hierarchical_cache", "is_fully_idle", "detach_storage_backend"),
    ),
    Place(
        "sglang.srt.managers.io_struct.ClearHiCacheReqOutput",
        "what it answers",
        params=("rid", "http_worker_ipc", "success"),
    ),
    Place(
        "sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw",
        "looks at every request of waiting_queue",
        params=("self", "prefill_delayer_single_pass", "running_batch"),
        mentions=("waiting_queue", "check_prefetch_progress", "pop_prefetch_loaded_span", "storage_hit_start"),
    ),
    Place("sglang.srt.managers.schedule_policy.CLIP_MAX_NEW_TOKENS", "bounds what a request is expected to generate"),
    Place(
        "sglang.srt.managers.schedule_policy.PrefillAdder._get_running_request_total_token_offset",
        "what a running request is expected to need yet, which fetches leave it",
        params=("self", "req"),
        mentions=("ignore_eos", "max_new_tokens", "output_ids", "new_token_ratio"),
    ),
    Place(
        "sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw",
        "has the chunked request and the ratio",
        mentions=("chunked_req", "new_token_ratio_tracker"),
    ),
    Place(
        "sglang.srt.managers.scheduler.Scheduler.init_running_status",
        "has the running requests, and those prefilled last",
        mentions=("running_batch", "last_batch"),
    ),
    Place(
        "sglang.srt.mem_cache.cache_init_params.CacheInitParams",
        "the allocator of the token-to-KV pool",
        has=("token_to_kv_pool_allocator",),
    ),
    Place("sglang.srt.runtime_context.get_memory", "whether our backend is chosen, and its extra config", params=()),
    Place(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache",
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
            "is_write_back",
            "enable_storage",
            "page_size",
        ),
    ),
    Place(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.__init__",
        "what instances of it have",
        params=("self", "params"),
        mentions=(
            "prefetch_threshold",
            "tree_core",
            "tree_components",
            "token_to_kv_pool_allocator",
            "tp_group",
            "attn_tp_group",
            "attn_cp_group",
        ),
    ),
    Place(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache._all_reduce_attn_groups",
        "agrees with the other ranks",
        params=("self", "tensor", "op"),
    ),
    Place(
        "sglang.srt.mem_cache.rust_tree_core.adapter.RustUnifiedTreeCore.get_prefix_hash_values",
        "the hashes of the pages before a node",
        params=("self", "node_id"),
    ),
    Place(
        "sglang.srt.mem_cache.rust_tree_core.adapter.RustUnifiedTreeCore.get_hash_values",
        "the hashes of a node's pages",
        params=("self", "node_id"),
    ),
    Place(
        "sglang.srt.mem_cache.unified_cache.unified_tree_core.UnifiedTreeCore.get_prefix_hash_values",
        "the hashes of the pages before a node",
        params=("self", "node_id"),
    ),
    Place(
        "sglang.srt.mem_cache.unified_cache.unified_tree_core.UnifiedTreeCore.get_hash_values",
        "the hashes of a node's pages",
        params=("self", "node_id"),
    ),
    Place(
        "sglang.srt.mem_cache.unified_cache.unified_tree_core.UnifiedTreeCore._add_new_node",
        "nodes have hashes where enable_storage is set",
        mentions=("enable_storage", "compute_node_hash_values"),
    ),
    Place(
        "sglang.srt.mem_cache.unified_cache.component_type.ComponentType",
        "whether a model has plain KV alone",
        has=("FULL",),
    ),
    Place(
        "sglang.srt.mem_cache.base_prefix_cache.MatchPrefixParams",
        "what the tree has of a prompt",
        params=("key", "cow_mamba", "req"),
    ),
    Place(
        "sglang.srt.mem_cache.base_prefix_cache.MatchResult",
        "the same",
        has=("device_prefix_len", "last_device_node", "host_hit_length"),
    ),
    Place(
        "sglang.srt.mem_cache.base_prefix_cache.InsertParams",
        "a fetched prefix, whose slots before prev_prefix_len are the tree's",
        has=("key", "value", "prev_prefix_len", "inserted_len"),
    ),
    Place("sglang.srt.mem_cache.base_prefix_cache.EvictParams", "makes room for a fetch", has=("num_tokens",)),
    Place("sglang.srt.mem_cache.base_prefix_cache.TreeLock", "the node that is locked", has=("node",)),
    Place(
        "sglang.srt.mem_cache.radix_cache.RadixKey",
        "a prompt with its namespace",
        params=("token_ids", "extra_key", "is_bigram", "limit", "cache_salt"),
        has=("page_aligned",),
    ),
    Place(
        "sglang.srt.mem_cache.utils.get_storage_hash_str",
        "the hashes that host mode's pages have",
        params=("key", "prior_hash", "page_size"),
    ),
    Place(
        "sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator",
        "slots",
        has=("alloc", "free", "available_size", "get_kvcache"),
    ),
    Place(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool",
        "the pool that holds K and V alone",
        has=("is_quantized_kv_cache",),
    ),
    Place(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.__init__",
        "its buffers and their layout",
        mentions=("k_buffer", "v_buffer", "kv_cache_layout"),
    ),
    Place(
        "sglang.srt.mem_cache.memory_pool.KVCache.__init__",
        "the first of its layers",
        mentions=("start_layer",),
    ),
    Place(
        "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool.__init__",
        "the pool of latent vectors",
        mentions=("kv_lora_rank", "use_dsa", "kv_buffer"),
    ),
    Place(
        "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry.register",
        "how a model with MLA attends, by backend",
        params=("backend_name", "handler_func"),
    ),
    Place(
        "sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods.AttnForwardMethod",
        "the ways to attend",
        has=("MLA",),
    ),
    Place(
        "sglang.kernels.ops.speculative.spec_tree.build_tree_kernel_efficient_func",
        "has a Triton kernel",
        mentions=("_is_xpu",),
        versions=SINCE_23,
    ),
    Place(
        "sglang.kernels.ops.speculative.cache_locs.assign_extend_cache_locs_func",
        "has a Triton kernel",
        mentions=("_is_xpu",),
    ),
    Place(
        "sglang.srt.arg_groups.speculative_hook._check_oot_speculative_algorithm",
        "asks the platform",
        mentions=("supports_speculative_algorithm",),
        versions=SINCE_23,
    ),
    Place(
        "sglang.srt.mem_cache.kv_cache_builder.maybe_register_hicache_draft",
        "adds a draft model's pools after the storage backend was attached",
        mentions=("register_sidecar_pool",),
    ),
    Place(
        "sglang.srt.platforms.cpu.CpuSRTPlatform", "a CPU without sgl-kernel", has=("_enum", "get_dispatch_key_name")
    ),
    Place("sglang.srt.platforms.device_mixin.PlatformEnum", "marks the platform as out of tree", has=("OOT",)),
    Place(
        "sglang.srt.entrypoints.engine._set_envs_and_config",
        "SGLang forces spawn, so that every process imports it again, and one NUMA node a rank",
        params=("server_args",),
        mentions=("set_start_method",),
    ),
    Place(
        "sglang.srt.mem_cache.pool_host.base.HostKVCache.__init__",
        "the host pool pins its memory with CUDA",
        mentions=("pin_memory",),
    ),
    Place(
        "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost.load_to_device_per_layer",
        "pages move with CUDA operators",
        params=("self", "device_pool", "host_indices", "device_indices", "layer_id", "io_backend", "is_draft"),
        mentions=("device_k_buffers", "device_v_buffers"),
    ),
    Place(
        "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost.backup_from_device_all_layer",
        "pages move with CUDA operators",
        params=("self", "device_pool", "host_indices", "device_indices", "io_backend"),
        mentions=("device_k_buffers", "device_v_buffers"),
    ),
    Place(
        "sglang.srt.platforms.cpu.CpuSRTPlatform",
        "whether states of linear attention may be kept at page boundaries",
        has=("support_mamba_cache_extra_buffer",),
    ),
    Place(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_decode",
        "pins tensors",
        mentions=("pin_memory", "mamba_track_mask"),
    ),
    Place(
        "sglang.srt.mem_cache.pool_host.mamba.MambaPoolHost.load_to_device_per_layer",
        "states move with CUDA operators",
        mentions=("_copy_tensor_pf_lf", "_transfer_slot_states"),
    ),
    Place(
        "sglang.srt.mem_cache.pool_host.mamba.MambaPoolHost.backup_from_device_all_layer",
        "states move with CUDA operators",
        mentions=("_copy_tensor_all_layers_lf_pf", "_transfer_slot_states"),
    ),
    Place(
        "sglang.srt.mem_cache.pool_host.mamba.MambaPoolHost._copy_tensor_pf_lf",
        "copies with PyTorch for an NPU",
        params=("src", "dst", "src_indices", "dst_indices", "layer_id", "num_layers", "io_backend"),
        mentions=("index_copy_",),
    ),
    Place(
        "sglang.srt.mem_cache.pool_host.mamba.MambaPoolHost._copy_tensor_all_layers_lf_pf",
        "copies with PyTorch for an NPU",
        mentions=("index_copy_",),
    ),
    Place("sglang.kernels.ops.attention.fla.chunk_delta_h.CHUNK_SIZE", "the tokens of a chunk"),
    # The linker
    Place(
        "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinker",
        "what a linker must implement",
        has=(
            "lookup",
            "load",
            "start_layer_wise_loading",
            "finish_layer_wise_loading",
            "cancel_queued_load",
            "offload",
            "num_completed_offloads",
            "pop_completed_offload",
            "reset",
            "close",
        ),
        versions=SINCE_23,
    ),
    Place(
        "sglang.srt.mem_cache.unified_cache.unified_cache_linker.LayerWiseLoadCounter",
        "the forward pass waits by it",
        has=("update_producer", "set_consumer", "complete", "fail", "wait_until", "finish", "reset"),
        versions=SINCE_23,
    ),
    Place(
        "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper.match",
        "asks the linker for all pages that the tree lacks, also of a request that has just arrived",
        params=("self", "key", "req", "result"),
        mentions=("lookup", "_tail_hashes"),
        versions=SINCE_23,
    ),
    Place(
        "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper._offload_node",
        "notes the node of each offload, in order, when the linker has taken it",
        params=("self", "node_id", "transfers"),
        mentions=("pending_offloads", "offload"),
        versions=SINCE_23,
    ),
    Place(
        "sglang.srt.mem_cache.unified_cache.unified_cache_linker._PendingOffload",
        "the node of an offload",
        has=("lock_node_id",),
        versions=SINCE_23,
    ),
    Place(
        "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper.release_request",
        "cancels the load of a request that is gone before its batch begins",
        mentions=("cancel_queued_load",),
        versions=SINCE_23,
    ),
    Place(
        "sglang.srt.mem_cache.unified_cache.linker_factory.create_unified_cache_linker",
        "constructs our linker",
        params=("server_args", "params", "backend", "config", "components", "forward_stream"),
        versions=SINCE_23,
    ),
    Place(
        "sglang.srt.mem_cache.unified_cache.linker_config.UnifiedCacheLinkerConfig",
        "names our class",
        has=("linker", "linker_module_path", "linker_extra_config"),
        versions=SINCE_23,
    ),
    Place(
        "sglang.srt.server_args.ServerArgs",
        "the flags that the gate sets for the linker",
        has=("unified_cache_external_linker_backend", "unified_cache_external_linker_config"),
        versions=SINCE_23,
    ),
    Place(
        "sglang.srt.mem_cache.hicache_storage.PoolTransfer",
        "the pages of an offload, a look-up or a load",
        has=("name", "keys", "device_indices"),
        versions=SINCE_23,
    ),
    Place(
        "sglang.srt.managers.schedule_batch.Req.init_next_round_input",
        "matches a request that has arrived",
        params=("self", "tree_cache", "cow_mamba"),
        versions=SINCE_23,
    ),
    Place(
        "sglang.srt.managers.schedule_batch.split_cached_prefix_by_tier",
        "counts what a linker has loaded as storage",
        params=("prefix_len", "host_hit_len", "storage_hit_len", "storage_hit_start", "host_hit_is_storage"),
        versions=SINCE_23,
    ),
    Place(
        "sglang.srt.managers.io_struct.AttachHiCacheStorageReqOutput",
        "answers an operator",
    ),
    Place(
        "sglang.srt.managers.io_struct.DetachHiCacheStorageReqOutput",
        "answers an operator",
    ),
)
