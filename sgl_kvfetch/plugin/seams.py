"""Every place where we hook into SGLang, checked before a launch.

SGLang's plugin loader logs what goes wrong and goes on, so a hook that found no target would show as a backend that is
silently not there. `register.py` installs the hooks of this table, and the gate checks it before a launch. SGLang's
version is pinned: what else we use of it, and what our hooks rely on, is checked by tests/plugin/test_sglang.py.
"""

from __future__ import annotations

import enum
import importlib.metadata
import pkgutil
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

SGLANG_VERSION = "0.5.23"


class Scope(enum.Enum):
    """When a hook is needed."""

    GATE = "gate"  # to accept the backend's name and to refuse a launch that cannot work
    HOST = "host"  # for the storage backend behind the host pool
    DEVICE = "device"  # for the radix cache without a host tier
    CPU_ENGINE = "cpu_engine"  # to run without an accelerator


@dataclass(frozen=True, slots=True)
class Seam:
    """A function of SGLang with a hook of ours. ``why``: what SGLang does there, or does not do."""

    path: str
    kind: Literal["before", "after", "around", "replace"]  # the values of SGLang's ``HookType``
    hook: str
    scope: Scope
    why: str


_DEVICE_HOOKS = "sgl_kvfetch.plugin.device.scheduler_hooks"
_HOOKS = "sgl_kvfetch.plugin.hooks"
_CPU = "sgl_kvfetch.plugin.cpu_engine"
_SRT = "sglang.srt"
_HOST_POOL = "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"

SEAMS: tuple[Seam, ...] = (
    Seam(
        f"{_SRT}.server_args.ServerArgs.add_cli_args",
        "after",
        f"{_HOOKS}.allow_choice",
        Scope.GATE,
        "--hicache-storage-backend has fixed choices",
    ),
    Seam(
        f"{_SRT}.server_args.prepare_server_args",
        "after",
        f"{_HOOKS}.gate_command_line",
        Scope.GATE,
        "the command line's way in: a launch that cannot work stops with one message",
    ),
    Seam(
        f"{_SRT}.server_args.ServerArgs.resolve_once",
        "before",
        f"{_HOOKS}.gate_launch",
        Scope.GATE,
        "every launch's way in (sgl.Engine too), before a model is looked at",
    ),
    Seam(
        f"{_UPDATER}.update_weights_from_disk",
        "before",
        f"{_HOOKS}.suspend_for_update",
        Scope.HOST,
        "the weights change, in every rank",
    ),
    Seam(
        f"{_UPDATER}.update_weights_from_ipc",
        "before",
        f"{_HOOKS}.suspend_for_update",
        Scope.HOST,
        "the weights change, in every rank",
    ),
    Seam(
        f"{_UPDATER}.begin_weight_update",
        "before",
        f"{_HOOKS}.suspend_for_update",
        Scope.HOST,
        "opens what the next three need; others may write into the weights from here on",
    ),
    Seam(
        f"{_UPDATER}.update_weights_from_tensor",
        "before",
        f"{_HOOKS}.suspend_for_update",
        Scope.HOST,
        "the weights change, also of a backend that was attached since",
    ),
    Seam(
        f"{_UPDATER}.update_weights_from_distributed",
        "before",
        f"{_HOOKS}.suspend_for_update",
        Scope.HOST,
        "the weights change, also of a backend that was attached since",
    ),
    Seam(
        f"{_UPDATER}.end_weight_update",
        "before",
        f"{_HOOKS}.suspend_for_update",
        Scope.HOST,
        "the weights change, also of a backend that was attached since",
    ),
    Seam(
        f"{_UPDATER}.check_weights",
        "before",
        f"{_HOOKS}.suspend_for_reset",
        Scope.HOST,
        "can overwrite the weights, to test updates",
    ),
    Seam(
        f"{_UPDATER}.release_memory_occupation",
        "before",
        f"{_HOOKS}.suspend_for_release",
        Scope.HOST,
        "can give up the weights",
    ),
    Seam(
        f"{_SRT}.mem_cache.unified_radix_cache.UnifiedRadixCache.reset",
        "after",
        f"{_HOOKS}.note_empty_tree",
        Scope.HOST,
        "no page of former weights is left",
    ),
    Seam(
        f"{_SRT}.mem_cache.storage.backend_factory.StorageBackendFactory._do_create_backend",
        "around",
        f"{_HOOKS}.create_backend",
        Scope.HOST,
        "a registered name is refused by _create_builtin_backend unless SGLang knows it",
    ),
    Seam(
        f"{_SRT}.managers.cache_controller.HiCacheController.attach_storage_backend",
        "after",
        f"{_HOOKS}.use_zero_copy",
        Scope.HOST,
        "the zero-copy interface is given to a fixed list of names; runs at start-up and at run time",
    ),
    Seam(
        f"{_SRT}.mem_cache.unified_cache.storage_attachment.StorageAttachment.apply_runtime_config",
        "before",
        f"{_HOOKS}.pass_prefix_keys",
        Scope.HOST,
        "forces hicache_storage_pass_prefix_keys, at start-up and at run time",
    ),
    Seam(
        f"{_SCHEDULER}._process_hicache_events",
        "after",
        f"{_DEVICE_HOOKS}.step_cache",
        Scope.DEVICE,
        "runs every step, and calls no cache without a host tier",
    ),
    Seam(
        f"{_SCHEDULER}.process_batch_result",
        "after",
        f"{_DEVICE_HOOKS}.measure_batch",
        Scope.DEVICE,
        "a batch is done: how fast the engine computes prompts",
    ),
    Seam(
        f"{_SCHEDULER}.is_fully_idle",
        "after",
        f"{_DEVICE_HOOKS}.count_pending",
        Scope.DEVICE,
        "guards the count of the pool's slots, and its emptying",
    ),
    Seam(f"{_SCHEDULER}.on_idle", "after", f"{_DEVICE_HOOKS}.rest", Scope.DEVICE, "spins while anything is pending"),
    Seam(
        f"{_SCHEDULER}.clear_hicache_storage_wrapped",
        "around",
        f"{_DEVICE_HOOKS}.clear_store",
        Scope.DEVICE,
        "refuses to without a host tier",
    ),
    Seam(
        f"{_SCHEDULER}.attach_hicache_storage_wrapped",
        "around",
        f"{_DEVICE_HOOKS}.attach_store",
        Scope.DEVICE,
        "refuses to without a host tier",
    ),
    Seam(
        f"{_SCHEDULER}.detach_hicache_storage_wrapped",
        "around",
        f"{_DEVICE_HOOKS}.detach_store",
        Scope.DEVICE,
        "refuses to without a host tier",
    ),
    Seam(
        f"{_SCHEDULER}._get_new_batch_prefill_raw",
        "around",
        f"{_DEVICE_HOOKS}.form_batch",
        Scope.DEVICE,
        "looks at every request of waiting_queue",
    ),
    Seam(
        f"{_SRT}.mem_cache.registry.default_radix_cache_factory",
        "around",
        f"{_DEVICE_HOOKS}.build_cache",
        Scope.DEVICE,
        "no flag names a radix cache for a storage backend without a host tier",
    ),
    Seam(
        f"{_SRT}.entrypoints.engine._set_envs_and_config",
        "after",
        f"{_CPU}.prepare_children",
        Scope.CPU_ENGINE,
        "SGLang forces spawn, so that every process imports it again, and one NUMA node a rank",
    ),
    Seam(
        f"{_HOST_POOL}.__init__",
        "before",
        f"{_CPU}.without_pinning",
        Scope.CPU_ENGINE,
        "the host pool pins its memory with CUDA",
    ),
    Seam(
        f"{_HOST_POOL}.load_to_device_per_layer",
        "replace",
        f"{_CPU}.load_layer",
        Scope.CPU_ENGINE,
        "pages move with CUDA operators",
    ),
    Seam(
        f"{_HOST_POOL}.backup_from_device_all_layer",
        "replace",
        f"{_CPU}.backup_layers",
        Scope.CPU_ENGINE,
        "pages move with CUDA operators",
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
    """What is wrong with one seam, or None. Imports the seam's module."""
    try:
        pkgutil.resolve_name(seam.path)
    except (ImportError, AttributeError) as error:
        return f"{seam.path} not found ({error})"
    return None


def check_seams(scopes: Collection[Scope] = tuple(Scope)) -> list[str]:
    """Every mismatch between the table and the installed SGLang, version first. An empty list is a pass."""
    mismatches = [check_version(), *(check_seam(seam) for seam in SEAMS if seam.scope in scopes)]
    return [mismatch for mismatch in mismatches if mismatch is not None]
