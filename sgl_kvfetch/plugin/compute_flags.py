"""Describes SGLang's flags that change the values of K and V, besides the weights, in one short string."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from sgl_kvfetch.codec import digest_file, digest_files

logger = logging.getLogger(__name__)

# All fields of the group ``model`` count except these. So a field that another SGLang adds counts until it is known.
IRRELEVANT = frozenset(
    {
        # Parts of the namespace already.
        "model_path",
        "revision",
        "dtype",
        "quantization",
        # The location of the same files, how they are read, and what is checked, written or deleted on the way.
        "download_dir",
        "model_checksum",
        "modelopt_checkpoint_save_path",
        "modelopt_export_path",
        "delete_ckpt_after_loading",
        "startup_weight_load_mode",
        "weight_loader_disable_mmap",
        "weight_loader_prefetch_checkpoints",
        "weight_loader_prefetch_num_threads",
        "weight_loader_drop_cache_after_load",
        # Weights from elsewhere than the model's files: `namespace.py` and `weight_updates.py` require a model_id.
        "remote_instance_weight_loader_seed_instance_ip",
        "remote_instance_weight_loader_seed_instance_service_port",
        "remote_instance_weight_loader_send_weights_group_ports",
        "remote_instance_weight_loader_backend",
        "remote_instance_weight_loader_start_seed_via_transfer_engine",
        "engine_info_bootstrap_port",
        "modelexpress_config",
        "checkpoint_engine_wait_weights_before_ready",
        "weight_cache_mode",
        "weight_cache_socket",
        "weight_cache_timeout",
        # A flag of the draft model, which is in ``DRAFT``.
        "decrypted_draft_config_file",
    }
)
# Of the other groups, only these fields count. Kernels and parallelism change nothing but the rounding.
RELEVANT = (
    "exec.dllm.dllm_algorithm",
    "exec.dllm.dllm_algorithm_config",
    "exec.comm.enable_quant_communications",
    "exec.moe.enable_w4a4_mxfp4_megamoe",
    "exec.moe.flashinfer_mxfp4_moe_precision",
    "exec.moe.kt_weight_path",
    "exec.moe.kt_method",
    "exec.moe.kt_num_gpu_experts",
    "exec.moe.kt_max_deferred_experts_per_token",
    # Users of these flags want the last bit to be reproducible.
    "exec.deterministic.enable_deterministic_inference",
    "exec.deterministic.rl_on_policy_target",
    "observability.forward_hooks",
    "mm.mm_process_config",
    "mm.trust_mm_content_hashes",
)
# These fields count for a draft model's KV cache.
DRAFT = (
    "model.decrypted_draft_config_file",
    "spec.enable_multi_layer_eagle",
    "spec.speculative_algorithm",
    "spec.speculative_draft_kv_cache_dtype",
    "spec.speculative_draft_model_quantization",
    "spec.speculative_draft_sink_size",
    "spec.speculative_draft_window_size",
    "spec.speculative_enable_w4a4_mxfp4_megamoe",
)
# Paths: the content of the files counts, not their location.
FILES = frozenset(
    {
        "quantization_param_path",
        "decrypted_config_file",
        "decrypted_draft_config_file",
        "modelopt_checkpoint_restore_path",
        "rl_quant_profile",
        "dllm_algorithm_config",
        "kt_weight_path",
    }
)
JSON_TEXTS = frozenset({"json_model_override_args", "model_loader_extra_config"})


def compute_flags() -> str:
    """Return ``dtype=...;quantization=...``, with a digest of the flags that differ from SGLang's defaults, if any.

    Call this where SGLang's resolved config is published. It reads the files that flags name.
    """
    from sglang.srt.runtime_context import get_model

    model = get_model()
    text = f"dtype={model.dtype};quantization={model.quantization}"
    digest = _digest(_counts)
    return f"{text};{digest}" if digest else text


def draft_flags() -> str:
    """Return a digest of the flags that change a draft model's KV cache and differ from SGLang's defaults, if any.

    Call this where SGLang's resolved config is published. It reads the files that flags name.
    """
    return _digest(lambda group, name: f"{group}.{name}" in DRAFT)


def _counts(group: str, name: str) -> bool:
    return name not in IRRELEVANT if group == "model" else f"{group}.{name}" in RELEVANT


def _digest(counts: Callable[[str, str], bool]) -> str:
    changed = dict(_changed_flags(counts))
    if not changed:
        return ""
    logger.info("kvfetch: flags that are part of the namespace: %s", ", ".join(sorted(changed)))
    return f"flags={xxhash.xxh3_64_hexdigest(msgspec.json.encode(changed, order='sorted'))}"


def _changed_flags(counts: Callable[[str, str], bool]) -> Iterator[tuple[str, Any]]:
    """Yield the name and JSON value of each flag that counts and differs from SGLang's default."""
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.server_args import ServerArgs

    groups = namespace_of(ServerArgs)
    for field in msgspec.structs.fields(ServerArgs):
        group = groups[field.name]
        if not counts(group, field.name):
            continue
        value = _comparable(field.name, _resolved(group, field.name))
        default = field.default_factory() if callable(field.default_factory) else field.default
        if value != _comparable(field.name, default):
            yield field.name, value


def _resolved(group: str, name: str) -> Any:
    from sglang.srt.runtime_context import get_context

    top, *subgroups = group.split(".")
    bag = get_context().config_bag(top)
    for subgroup in subgroups:
        bag = getattr(bag, subgroup)
    return getattr(bag, name)


def _comparable(name: str, value: Any) -> Any:
    """Convert a flag's value so that values of equal meaning become equal. Values of unknown types become text."""
    if name in FILES and value is not None:
        return _path_digest(Path(value))
    if name in JSON_TEXTS:
        try:
            return json.loads(value or "{}")
        except ValueError:
            return value
    if value in ("", [], {}):  # SGLang resolves some unset flags to one of these
        return None
    return msgspec.to_builtins(value, enc_hook=repr)


def _path_digest(path: Path) -> str:
    """Return a digest of a file, or of all files below a folder and their names. Without a file, return the path."""
    if path.is_file():
        return digest_file(path)
    files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else []
    return digest_files(path, files) if files else str(path)
