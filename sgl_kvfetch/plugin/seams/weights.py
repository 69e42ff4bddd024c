"""What both modes need to know of the weights: which they are, how they are computed with, and when they change."""

from __future__ import annotations

from sgl_kvfetch.plugin.compute_flags import FILES, JSON_TEXTS, RELEVANT
from sgl_kvfetch.plugin.seams.seam import Seam, Use

_HOOKS = "sgl_kvfetch.plugin.hooks"
_SRT = "sglang.srt"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"

WEIGHTS: tuple[Seam, ...] = (
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
        f"{_SRT}.mem_cache.unified_radix_cache.UnifiedRadixCache.reset",
        Use.AFTER,
        "no page of former weights is left",
        hook=f"{_HOOKS}.note_empty_tree",
        params=("self",),
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
)
