"""Every place where we hook into SGLang, checked before a launch.

SGLang has a storage backend's interface and hooks on functions (before, after, around, instead of). The interface does
not suffice: SGLang accepts only names that it knows, tells a backend nothing of weights that change or of requests that
gave up, and has no backend without a host tier. Patching a copy of SGLang would be a fork. So functions are hooked, and
three things could go wrong, silently:

* **A target that is gone.** SGLang's plugin loader only logs errors, and the backend would be missing without a word.
  So all hooks are rows of one table. `register.py` installs them, and the gate checks that each target exists, before
  a model is loaded.
* **A target that means something else now.** No check sees that. So rows hold for the releases of `versions.py`, and
  any other release stops the launch. tests/plugin/test_sglang.py compares signatures, and all else that we rely on.
* **A hook that acts where it should not.** Each does nothing unless the backend in question is ours; scopes say which
  are installed at all.

A hook is not for what the interface can do. A row goes when SGLang takes the patch that its ``patch`` names.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from sgl_kvfetch.plugin.versions import SGLANG_VERSIONS, WITH_LINKER, before, check_version, since, table_version


class Scope(enum.Enum):
    """When a hook is needed."""

    GATE = "gate"  # to accept the backend's name and to refuse a launch that cannot work
    HOST = "host"  # for the storage backend behind the host pool
    DEVICE = "device"  # for the linker without a host tier
    CPU_ENGINE = "cpu_engine"  # to run without an accelerator


Kind = Literal["before", "after", "around", "replace"]  # the values of SGLang's ``HookType``


@dataclass(frozen=True, slots=True)
class Seam:
    """A function of SGLang with a hook of ours, in the releases ``versions``. If SGLang has the name ``patch``, one of
    `patches/` was applied to it. Then the hook is left out; with ``is_patched``, it is installed only then."""

    path: str
    kind: Kind
    hook: str
    scope: Scope
    versions: tuple[str, ...] = SGLANG_VERSIONS
    patch: str | None = None
    is_patched: bool = False


def _seams(scope: Scope, hooks: str, *rows: tuple[str, Kind, str], **fields: Any) -> Iterator[Seam]:
    """Yield a seam for each row: the path in SGLang, the kind, and the hook's name in the module ``hooks``."""
    for path, kind, name in rows:
        yield Seam(path, kind, f"{hooks}.{name}", scope, **fields)


_HOOKS = "sgl_kvfetch.plugin.hooks"
_VERSION_HOOKS = "sgl_kvfetch.plugin.versions"
_ADAPTER_HOOKS = "sgl_kvfetch.plugin.adapters"
_DEVICE_HOOKS = "sgl_kvfetch.plugin.device.waiting_queue"
_CPU_HOOKS = "sgl_kvfetch.plugin.cpu.platform"
_CPU_KERNELS = "sgl_kvfetch.plugin.cpu.kernels"
_SRT = "sglang.srt"
_HOST_POOLS = "sglang.srt.mem_cache.pool_host"
_MHA_POOL = f"{_HOST_POOLS}.mha.MHATokenToKVPoolHost"
_MLA_POOL = f"{_HOST_POOLS}.mla.MLATokenToKVPoolHost"
_MAMBA_POOL = f"{_HOST_POOLS}.mamba.MambaPoolHost"
_TORCH_ATTENTION = f"{_SRT}.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_LORA = f"{_SRT}.lora"
_CONV1D = "sglang.kernels.ops.mamba.causal_conv1d_triton"
_MAMBA_2 = "sglang.kernels.ops.mamba.triton_ops"
_FLA = "sglang.kernels.ops.attention.fla"
_PROJECTIONS = "sglang.kernels.ops.attention.triton_gdn_fused_proj"
_GATED = f"{_FLA}.fused_recurrent.fused_recurrent_gated_delta_rule"
_FACTORY = f"{_SRT}.mem_cache.storage.backend_factory.StorageBackendFactory"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_CONTROLLER = f"{_SRT}.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
_ATTACHMENT = f"{_SRT}.mem_cache.unified_cache.storage_attachment.StorageAttachment"
_GRAPH_RUNNER = f"{_SRT}.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"

# Names that SGLang has only with one of `patches/`.
WEIGHTS_CHANGE = f"{_UPDATER}.weights_will_change"
REGISTERED_NAMES = f"{_SRT}.arg_groups.choices.add_hicache_storage_backend_choices"
EXTENDS_ALONE = f"{_TORCH_ATTENTION}._attend_in_blocks"

# The comment above each row says what SGLang does there, or does not do.
SEAMS: tuple[Seam, ...] = (
    *_seams(
        Scope.GATE,
        _HOOKS,
        # Entry point of the command line: a launch that cannot work stops with one message.
        (f"{_SRT}.server_args.prepare_server_args", "after", "gate_command_line"),
        # Entry point of every launch (sgl.Engine too), before a model is looked at.
        (f"{_SRT}.server_args.ServerArgs.resolve_once", "before", "gate_launch"),
        # Makes pages of one token where nobody wants another size: the user, the model, or the attention backend.
        (f"{_SRT}.arg_groups.pipeline._page_size_default", "after", "choose_page_size"),
    ),
    # --hicache-storage-backend has fixed choices.
    *_seams(
        Scope.GATE,
        _HOOKS,
        (f"{_SRT}.server_args.ServerArgs.add_cli_args", "after", "allow_choice"),
        patch=REGISTERED_NAMES,
    ),
    *_seams(
        Scope.HOST,
        _HOOKS,
        # Changes the weights, in every rank, if it finds them.
        (f"{_UPDATER}.update_weights_from_disk", "around", "watch_disk_update"),
        # Changes the weights, in every rank.
        (f"{_UPDATER}.update_weights_from_ipc", "before", "suspend_for_update"),
        # Opens the update that the next three need; from here on, others may write into the weights.
        (f"{_UPDATER}.begin_weight_update", "before", "suspend_for_update"),
        # Change the weights, also for a backend that was attached after the update was opened.
        (f"{_UPDATER}.update_weights_from_tensor", "before", "suspend_in_session"),
        (f"{_UPDATER}.update_weights_from_distributed", "before", "suspend_in_session"),
        (f"{_UPDATER}.end_weight_update", "before", "suspend_in_session"),
        # Can overwrite the weights, to test updates.
        (f"{_UPDATER}.check_weights", "before", "suspend_for_reset"),
        # Can release the weights.
        (f"{_UPDATER}.release_memory_occupation", "before", "suspend_for_release"),
        patch=WEIGHTS_CHANGE,
    ),
    # With the patch, SGLang calls this before it does any of these.
    *_seams(
        Scope.HOST, _HOOKS, (WEIGHTS_CHANGE, "before", "suspend_for_update"), patch=WEIGHTS_CHANGE, is_patched=True
    ),
    *_seams(
        Scope.HOST,
        _ADAPTER_HOOKS,
        # Loads the first adapters, in every rank.
        (f"{_LORA}.lora_manager.LoRAManager.init_state", "before", "watch_adapters"),
        # Is the first to change the weights of an adapter, whether they came from files or in a request.
        (f"{_LORA}.lora.LoRAAdapter._normalize_weights", "before", "note_adapter"),
        # Tells the pages of adapters apart by ids, which say nothing of the adapters' weights.
        (f"{_SRT}.managers.schedule_batch.Req.__init__", "after", "name_by_content"),
    ),
    *_seams(
        Scope.HOST,
        _HOOKS,
        # Empties the tree. No page of former weights is left in it.
        (f"{_SRT}.mem_cache.unified_radix_cache.UnifiedRadixCache.reset", "after", "note_empty_tree"),
        # Chooses the memory of host pools by the name of the backend, and does not know this one.
        (f"{_SRT}.mem_cache.hybrid_cache.hybrid_pool_assembler._get_allocator_type", "after", "share_host_pool"),
        # Looks up the pages of a prefetch; the backend is not told for which request.
        (f"{_CONTROLLER}._storage_hit_query", "before", "begin_lookup"),
        # Reads the pages of a prefetch, KV first; the backend is not told when the request stops waiting.
        (f"{_CONTROLLER}._page_transfer", "before", "begin_transfer"),
        # Handles a finished batch, which shows how fast the engine computes prompts, and which a calibration may use.
        (f"{_SCHEDULER}.process_batch_result", "after", "measure_prompts"),
        # Tells operators what the scheduler runs with.
        (f"{_SCHEDULER}.get_internal_state", "after", "tell_status"),
        # Stores a node once, when it has reached the host pool.
        (f"{_SRT}.mem_cache.unified_radix_cache.UnifiedRadixCache.write_backup_storage", "around", "store_node"),
        # Runs every step, on all ranks alike.
        (f"{_SCHEDULER}._process_hicache_events", "after", "step_profile"),
        # Sets what a prefetch may take, and hicache_storage_pass_prefix_keys, at start-up and at run time.
        (f"{_ATTACHMENT}.apply_runtime_config", "before", "configure_prefetches"),
    ),
    *_seams(
        Scope.HOST,
        _HOOKS,
        # Gives the zero-copy interface to a fixed list of names, and does not detach a backend that refuses side pools;
        # runs at start-up and at run time.
        (f"{_CONTROLLER}.attach_storage_backend", "around", "attach_backend"),
        patch=REGISTERED_NAMES,
    ),
    # Its _create_builtin_backend refuses a registered name unless SGLang knows it.
    *_seams(
        Scope.HOST,
        _HOOKS,
        (f"{_FACTORY}._do_create_backend", "around", "create_backend"),
        versions=since("0.5.23"),
        patch=REGISTERED_NAMES,
    ),
    *_seams(Scope.HOST, _HOOKS, (f"{_FACTORY}.create_backend", "around", "create_backend"), versions=before("0.5.23")),
    *_seams(
        Scope.HOST,
        _VERSION_HOOKS,
        # Copies pages to the host pool while a forward pass may still write them.
        (f"{_SRT}.managers.cache_controller.HiCacheController.start_writing", "before", "fence_writes"),
        # Replays a graph of a whole forward pass while its layers may still be loaded.
        (f"{_GRAPH_RUNNER}.execute", "before", "wait_for_layers"),
        versions=before("0.5.23"),
    ),
    *_seams(
        Scope.DEVICE,
        _DEVICE_HOOKS,
        # Looks at every request of waiting_queue.
        (f"{_SCHEDULER}._get_new_batch_prefill_raw", "around", "form_batch"),
        # These three refuse without a host tier.
        (f"{_SCHEDULER}.clear_hicache_storage_wrapped", "around", "clear_store"),
        (f"{_SCHEDULER}.attach_hicache_storage_wrapped", "around", "attach_store"),
        (f"{_SCHEDULER}.detach_hicache_storage_wrapped", "around", "detach_store"),
        versions=WITH_LINKER,
    ),
    *_seams(
        Scope.CPU_ENGINE,
        _CPU_HOOKS,
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
        (f"{_LORA}.lora_manager.LoRAManager.init_state", "around", "make_plain_tensors"),
        (f"{_LORA}.lora_manager.LoRAManager.prepare_lora_batch", "around", "make_plain_tensors"),
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
    *_seams(
        Scope.CPU_ENGINE,
        "sgl_kvfetch.plugin.cpu.attention",
        (f"{_TORCH_ATTENTION}._run_sdpa_forward_extend", "replace", "attend_to_prefix"),
        patch=EXTENDS_ALONE,
    ),
    *_seams(
        Scope.CPU_ENGINE,
        _CPU_KERNELS,
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


def installed_seams(scopes: Collection[Scope] = tuple(Scope)) -> list[Seam]:
    """Return the seams of some scopes that hold for the installed SGLang."""
    version = table_version()
    rows = [seam for seam in SEAMS if seam.scope in scopes and version in seam.versions]
    patched = {patch for patch in {seam.patch for seam in rows} if patch is not None and has(patch)}
    return [seam for seam in rows if (seam.patch in patched) == seam.is_patched]


def has(path: str) -> bool:
    """Return whether SGLang has this dotted name. Imports its module."""
    try:
        find(path)
    except (ImportError, AttributeError):
        return False
    return True


def find(path: str) -> Any:
    """Return what has this dotted name. Imports the modules in it, as far as there are any.

    Raises ImportError, with the cause, if one of them cannot be imported, and AttributeError if there is no such name.
    `pkgutil.resolve_name` takes a module that fails for one that does not exist, and so does not say why.
    """
    name, *rest = path.split(".")
    found = _import(name)
    while rest:
        try:
            found = _import(f"{name}.{rest[0]}")
        except ModuleNotFoundError as error:
            if error.name != f"{name}.{rest[0]}":
                raise
            break
        name = f"{name}.{rest.pop(0)}"
    for attribute in rest:
        found = getattr(found, attribute)
    return found


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            raise
        raise ImportError(f"{name} cannot be imported: {error}", name=name) from error
    except Exception as error:  # of SGLang and all that it imports: a shared library is missing, a package is too old
        raise ImportError(f"{name} cannot be imported: {type(error).__name__}: {error}", name=name) from error


def check_name(path: str) -> str | None:
    """Return what is wrong with a dotted name, or None. Imports its module."""
    fault = _fault(path)
    return fault and fault[1]


def check_seams(scopes: Collection[Scope] = tuple(Scope)) -> list[str]:
    """Return all mismatches between the table and the installed SGLang, version first. An empty list is a pass. What
    keeps modules from being imported is one mismatch, however many of them it is."""
    faults = [fault for seam in installed_seams(scopes) if (fault := _fault(seam.path)) is not None]
    first_of_cause = {cause: text for cause, text in reversed(faults)}
    wrong_version = check_version()
    return [*([wrong_version] if wrong_version else []), *reversed(first_of_cause.values())]


def _fault(path: str) -> tuple[str, str] | None:
    """Return the cause for which a dotted name is not there, and the cause with the name; None if it is there."""
    try:
        find(path)
    except AttributeError as error:
        return path, f"{path} not found ({error})"
    except ImportError as error:
        return str(error.__cause__ or error), str(error)
    return None
