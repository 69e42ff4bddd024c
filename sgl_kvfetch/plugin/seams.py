"""Every place where we hook into SGLang, checked before a launch.

SGLang has a storage backend's interface and hooks on functions (before, after, around, instead of). The interface does
not suffice: SGLang accepts only names that it knows, tells a backend nothing of weights that change or of requests that
gave up, and has no backend without a host tier. Patching a copy of SGLang would be a fork. So functions are hooked, and
three things could go wrong, silently:

* **A target that is gone.** SGLang's plugin loader only logs errors, and the backend would be missing without a word.
  So all hooks are rows of a table. `register.py` installs them, and the gate checks that each target exists, before a
  model is loaded.
* **A target that means something else now.** No check sees that. So rows hold for the releases of `versions.py`, and
  any other release stops the launch. tests/plugin/test_sglang.py compares signatures, and all else that we rely on.
* **A hook that acts where it should not.** Each does nothing unless the backend in question is ours.

A hook is not for what the interface can do. A row goes when SGLang takes the patch that its ``patch`` names.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from sgl_kvfetch.plugin.versions import SGLANG_VERSIONS, WITH_LINKER, before, check_version, since, table_version

Kind = Literal["before", "after", "around", "replace"]  # the values of SGLang's ``HookType``


@dataclass(frozen=True, slots=True)
class Seam:
    """A function of SGLang with a hook of ours, in the releases ``versions``. If SGLang has the name ``patch``, one of
    `patches/` was applied to it. Then the hook is left out; with ``is_patched``, it is installed only then."""

    path: str
    kind: Kind
    hook: str
    versions: tuple[str, ...] = SGLANG_VERSIONS
    patch: str | None = None
    is_patched: bool = False


def rows_of(hooks: str, *rows: tuple[str, Kind, str], **fields: Any) -> Iterator[Seam]:
    """Yield a seam for each row: the path in SGLang, the kind, and the hook's name in the module ``hooks``."""
    for path, kind, name in rows:
        yield Seam(path, kind, f"{hooks}.{name}", **fields)


_HOOKS = "sgl_kvfetch.plugin.hooks"
_VERSION_HOOKS = "sgl_kvfetch.plugin.versions"
_ADAPTER_HOOKS = "sgl_kvfetch.plugin.adapters"
_DEVICE_HOOKS = "sgl_kvfetch.plugin.device.waiting_queue"
_SRT = "sglang.srt"
_LORA = f"{_SRT}.lora"
_FACTORY = f"{_SRT}.mem_cache.storage.backend_factory.StorageBackendFactory"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_CONTROLLER = f"{_SRT}.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
_ATTACHMENT = f"{_SRT}.mem_cache.unified_cache.storage_attachment.StorageAttachment"
_GRAPH_RUNNER = f"{_SRT}.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"

# Names that SGLang has only with one of `patches/`.
WEIGHTS_CHANGE = f"{_UPDATER}.weights_will_change"
REGISTERED_NAMES = f"{_SRT}.arg_groups.choices.add_hicache_storage_backend_choices"

# The comment above each row says what SGLang does there, or does not do.

# Accept the backend's name, and refuse a launch that cannot work.
GATE: tuple[Seam, ...] = (
    *rows_of(
        _HOOKS,
        # Entry point of the command line: a launch that cannot work stops with one message.
        (f"{_SRT}.server_args.prepare_server_args", "after", "gate_command_line"),
        # Entry point of every launch (sgl.Engine too), before a model is looked at.
        (f"{_SRT}.server_args.ServerArgs.resolve_once", "before", "gate_launch"),
        # Makes pages of one token where nobody wants another size: the user, the model, or the attention backend.
        (f"{_SRT}.arg_groups.pipeline._page_size_default", "after", "choose_page_size"),
    ),
    # --hicache-storage-backend has fixed choices.
    *rows_of(
        _HOOKS,
        (f"{_SRT}.server_args.ServerArgs.add_cli_args", "after", "allow_choice"),
        patch=REGISTERED_NAMES,
    ),
)

SEAMS: tuple[Seam, ...] = (
    *GATE,
    *rows_of(
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
    *rows_of(_HOOKS, (WEIGHTS_CHANGE, "before", "suspend_for_update"), patch=WEIGHTS_CHANGE, is_patched=True),
    *rows_of(
        _ADAPTER_HOOKS,
        # Loads the first adapters, in every rank.
        (f"{_LORA}.lora_manager.LoRAManager.init_state", "before", "watch_adapters"),
        # Is the first to change the weights of an adapter, whether they came from files or in a request.
        (f"{_LORA}.lora.LoRAAdapter._normalize_weights", "before", "record_adapter"),
        # Tells the pages of adapters apart by ids, which say nothing of the adapters' weights.
        (f"{_SRT}.managers.schedule_batch.Req.__init__", "after", "name_by_content"),
    ),
    *rows_of(
        _HOOKS,
        # Empties the tree. No page of former weights is left in it.
        (f"{_SRT}.mem_cache.unified_radix_cache.UnifiedRadixCache.reset", "after", "record_empty_tree"),
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
    *rows_of(
        _HOOKS,
        # Gives the zero-copy interface to a fixed list of names, and does not detach a backend that refuses pools;
        # runs at start-up and at run time.
        (f"{_CONTROLLER}.attach_storage_backend", "around", "attach_backend"),
        patch=REGISTERED_NAMES,
    ),
    # Its _create_builtin_backend refuses a registered name unless SGLang knows it.
    *rows_of(
        _HOOKS,
        (f"{_FACTORY}._do_create_backend", "around", "create_backend"),
        versions=since("0.5.23"),
        patch=REGISTERED_NAMES,
    ),
    *rows_of(_HOOKS, (f"{_FACTORY}.create_backend", "around", "create_backend"), versions=before("0.5.23")),
    *rows_of(
        _VERSION_HOOKS,
        # Copies pages to the host pool while a forward pass may still write them.
        (f"{_SRT}.managers.cache_controller.HiCacheController.start_writing", "before", "fence_writes"),
        # Replays a graph of a whole forward pass while its layers may still be loaded.
        (f"{_GRAPH_RUNNER}.execute", "before", "wait_for_layers"),
        versions=before("0.5.23"),
    ),
    # For device mode alone.
    *rows_of(
        _DEVICE_HOOKS,
        # Looks at every request of waiting_queue.
        (f"{_SCHEDULER}._get_new_batch_prefill_raw", "around", "form_batch"),
        # These three refuse without a host tier.
        (f"{_SCHEDULER}.clear_hicache_storage_wrapped", "around", "clear_store"),
        (f"{_SCHEDULER}.attach_hicache_storage_wrapped", "around", "attach_store"),
        (f"{_SCHEDULER}.detach_hicache_storage_wrapped", "around", "detach_store"),
        versions=WITH_LINKER,
    ),
)


def installed_seams(table: Iterable[Seam] = SEAMS) -> list[Seam]:
    """Return the seams of a table that hold for the installed SGLang."""
    version = table_version()
    rows = [seam for seam in table if version in seam.versions]
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


def check_seams(table: Iterable[Seam] = SEAMS) -> list[str]:
    """Return all mismatches between a table and the installed SGLang, version first. An empty list is a pass. What
    keeps modules from being imported is one mismatch, however many of them it is."""
    faults = [fault for seam in installed_seams(table) if (fault := _fault(seam.path)) is not None]
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


def install(seams: Iterable[Seam]) -> None:
    """Register the hooks of some seams with SGLang. Raises ImportError, and registers none, if one cannot be
    imported."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for seam, hook in [(seam, find(seam.hook)) for seam in seams]:  # all can be imported, or none is registered
        HookRegistry.register(seam.path, hook, HookType(seam.kind))
