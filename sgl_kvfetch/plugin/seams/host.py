"""What host mode needs: a storage backend behind the host pool."""

from __future__ import annotations

from sgl_kvfetch.plugin.seams.seam import Seam, Use

_HOOKS = "sgl_kvfetch.plugin.hooks"
_SRT = "sglang.srt"
_STORAGE = "sglang.srt.mem_cache.hicache_storage"
_CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"
_MHA_HOST = "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost"

HOST: tuple[Seam, ...] = (
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
)
