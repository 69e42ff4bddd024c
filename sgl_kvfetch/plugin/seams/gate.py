"""Where a launch goes through: to accept the backend's name, and to refuse what cannot work."""

from __future__ import annotations

from sgl_kvfetch.plugin.seams.seam import Scope, Seam, Use

_HOOKS = "sgl_kvfetch.plugin.hooks"
_SRT = "sglang.srt"

GATE: tuple[Seam, ...] = (
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
)
