"""What the engine needs to run without an accelerator."""

from __future__ import annotations

from sgl_kvfetch.plugin.seams.seam import Scope, Seam, Use

_CPU = "sgl_kvfetch.plugin.cpu_engine"
_SRT = "sglang.srt"
_MHA_HOST = "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost"

CPU_ENGINE: tuple[Seam, ...] = (
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
