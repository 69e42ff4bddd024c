"""The hooks that let SGLang run without an accelerator, and the general plugin that installs them. SGLang calls
``register`` in each of its processes.

The table is one like `sgl_kvfetch.plugin.seams` has, and is checked and installed by the same functions.
"""

from __future__ import annotations

import logging

from sgl_kvfetch.plugin.seams import Seam, check_seams, install, installed_seams, rows_of
from sglang_on_cpu.platform import is_active

logger = logging.getLogger(__name__)

_SRT = "sglang.srt"
_HOST_POOLS = f"{_SRT}.mem_cache.pool_host"
_MHA_POOL = f"{_HOST_POOLS}.mha.MHATokenToKVPoolHost"
_MLA_POOL = f"{_HOST_POOLS}.mla.MLATokenToKVPoolHost"
_MAMBA_POOL = f"{_HOST_POOLS}.mamba.MambaPoolHost"
_TORCH_ATTENTION = f"{_SRT}.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_CONV1D = "sglang.kernels.ops.mamba.causal_conv1d_triton"
_MAMBA_2 = "sglang.kernels.ops.mamba.triton_ops"
_FLA = "sglang.kernels.ops.attention.fla"
_PROJECTIONS = "sglang.kernels.ops.attention.triton_gdn_fused_proj"
_GATED = f"{_FLA}.fused_recurrent.fused_recurrent_gated_delta_rule"
_EXTENDS_ALONE = f"{_TORCH_ATTENTION}._attend_in_blocks"  # SGLang has it only with one of `patches/`

# The comment above each row says what SGLang does there, or does not do.
SEAMS: tuple[Seam, ...] = (
    *rows_of(
        "sglang_on_cpu.platform",
        # Forces spawn, so that every process imports SGLang again, and one NUMA node per rank.
        (f"{_SRT}.entrypoints.engine._set_envs_and_config", "after", "prepare_children"),
        # Chooses how a model with MLA attends by the name of the backend, and does not know this one.
        (f"{_SRT}.entrypoints.engine._set_envs_and_config", "after", "attend_in_latent_space"),
        # Pins tensors on the way to the device, without asking whether there is one that copies from them.
        (f"{_SRT}.entrypoints.engine._set_envs_and_config", "after", "leave_tensors_unpinned"),
        # Leaves 10 GiB of the host's memory to others, and starts nothing where there is less.
        (f"{_SRT}.entrypoints.engine._set_envs_and_config", "after", "leave_less_memory_free"),
        # Sends the numbers of pages from pinned memory.
        (f"{_SRT}.entrypoints.engine._set_envs_and_config", "after", "send_page_numbers_as_they_are"),
        # Chooses the kernels of speculation by the kind of device.
        (f"{_SRT}.entrypoints.engine._set_envs_and_config", "after", "speculate_in_triton"),
        # Write layers with sliding windows to a pool of their own, but read them at the other layers' slots.
        (f"{_TORCH_ATTENTION}._run_sdpa_forward_extend", "before", "look_in_window_pool"),
        (f"{_TORCH_ATTENTION}._run_sdpa_forward_decode", "before", "look_in_window_pool"),
        # Make pinned tensors for adapters: once for each layer, and for each batch.
        (f"{_SRT}.lora.lora_manager.LoRAManager.init_state", "around", "make_plain_tensors"),
        (f"{_SRT}.lora.lora_manager.LoRAManager.prepare_lora_batch", "around", "make_plain_tensors"),
        # Pin the host pool's memory with CUDA.
        (f"{_HOST_POOLS}.base.HostKVCache.__init__", "before", "without_pinning"),
        (f"{_MAMBA_POOL}.__init__", "before", "without_pinning"),
        # Move pages and states with CUDA operators.
        (f"{_MHA_POOL}.load_to_device_per_layer", "replace", "load_layer"),
        (f"{_MHA_POOL}.backup_from_device_all_layer", "replace", "backup_layers"),
        (f"{_MLA_POOL}.load_to_device_per_layer", "replace", "load_layer"),
        (f"{_MLA_POOL}.backup_from_device_all_layer", "replace", "backup_layers"),
        (f"{_MAMBA_POOL}._copy_tensor_pf_lf", "before", "copy_by_indexing"),
        (f"{_MAMBA_POOL}._copy_tensor_all_layers_lf_pf", "before", "copy_by_indexing"),
    ),
    # Computes, for a few new tokens behind a long prefix, the attention of all tokens.
    *rows_of(
        "sglang_on_cpu.attention",
        (f"{_TORCH_ATTENTION}._run_sdpa_forward_extend", "replace", "attend_to_prefix"),
        patch=_EXTENDS_ALONE,
    ),
    *rows_of(
        "sglang_on_cpu.kernels",
        # Run Triton kernels, for which a CPU has no compiler.
        (f"{_CONV1D}.causal_conv1d_fn", "replace", "convolve_prompts"),
        (f"{_CONV1D}.causal_conv1d_update", "replace", "convolve_tokens"),
        (f"{_MAMBA_2}.ssd_combined.mamba_chunk_scan_combined", "replace", "scan_prompts"),
        (f"{_MAMBA_2}.mamba_ssm.selective_state_update", "replace", "scan_tokens"),
        (f"{_FLA}.chunk.chunk_gated_delta_rule", "replace", "apply_delta_rule"),
        (f"{_GATED}_packed_decode", "replace", "apply_delta_rule_to_tokens"),
        (f"{_FLA}.kda.chunk_kda", "replace", "apply_kimi_delta_rule"),
        (f"{_FLA}.fused_recurrent.fused_recurrent_kda_packed_decode", "replace", "apply_kimi_delta_rule_to_tokens"),
        (f"{_FLA}.layernorm_gated.rms_norm_gated", "replace", "normalise_and_gate"),
        (f"{_FLA}.fused_norm_gate.rms_norm_gated", "replace", "normalise_and_gate_rows"),
        # Run a Triton kernel for each token, which the interpreter does, but slowly.
        (f"{_PROJECTIONS}.fused_qkvzba_split_reshape_cat_contiguous", "replace", "split_projections"),
        (f"{_SRT}.layers.attention.linear.gdn_backend.fused_gdn_gating", "replace", "gate_delta_rule"),
        ("sglang.kernels.ops.elementwise.elementwise.fused_sigmoid_mul", "replace", "gate_attention"),
        # Calls convolutions that its module imports for accelerators alone.
        (f"{_SRT}.layers.attention.mamba.mamba.MambaMixer2.__init__", "after", "bind_convolutions"),
    ),
)


def register() -> None:
    """Register the hooks of ``SEAMS``, or none of them if there is an accelerator or SGLang does not match."""
    if not is_active():
        return
    if mismatches := check_seams(SEAMS):
        logger.warning("sglang_on_cpu is off: %s", "; ".join(mismatches))
    else:
        install(installed_seams(SEAMS))
