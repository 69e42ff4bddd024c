"""The general plugin: installs the hooks of the seam table. SGLang calls ``register`` in each of its processes."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Iterable, Sequence

from sgl_kvfetch.errors import KVFetchError, SeamError
from sgl_kvfetch.plugin.backend import BACKEND, require_packages
from sgl_kvfetch.plugin.cpu.platform import is_active
from sgl_kvfetch.plugin.seams import (
    REGISTERED_NAMES,
    Scope,
    Seam,
    check_seam,
    check_seams,
    find,
    has,
    installed_seams,
)

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the hooks of ``SEAMS`` that apply here. Changes nothing for a launch that does not select our backend.

    If a package of ours is missing, or SGLang does not match ``SEAMS``, only the gate's hooks are registered, as far as
    they fit: they only stop a launch that selects our backend. SGLang merely logs what a plugin raises, so
    ``SystemExit`` stops such a command line here.
    """
    if takes_names := has(REGISTERED_NAMES):
        _add_choice()
    try:
        require_packages()
        scopes = needed_scopes()
        if mismatches := check_seams(scopes):
            raise SeamError("; ".join(mismatches))
        _install(installed_seams(scopes))
    except (KVFetchError, ImportError) as error:
        if selects_backend(sys.argv[1:]):
            raise SystemExit(f"sgl_kvfetch: {error}") from error
        logger.warning("sgl_kvfetch is off: %s", error)
        _install(seam for seam in installed_seams({Scope.GATE}) if check_seam(seam) is None)
    else:
        if takes_names:
            from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

            StorageBackendFactory.register_backend(BACKEND, "sgl_kvfetch.plugin.host.storage", "KVFetchStorage")


def needed_scopes() -> set[Scope]:
    """Return the scopes whose hooks are needed on this machine."""
    return {Scope.GATE, Scope.HOST, Scope.DEVICE} | ({Scope.CPU_ENGINE} if is_active() else set())


def selects_backend(argv: Sequence[str]) -> bool:
    """Return whether a command line names our storage backend."""
    flag = "--hicache-storage-backend"
    return f"{flag}={BACKEND}" in argv or any(pair == (flag, BACKEND) for pair in itertools.pairwise(argv))


def _add_choice() -> None:
    """Let ``--hicache-storage-backend`` accept our name, in an SGLang with patches/0001."""
    from sglang.srt.arg_groups.choices import HICACHE_STORAGE_BACKEND_CHOICES, add_hicache_storage_backend_choices

    if BACKEND not in HICACHE_STORAGE_BACKEND_CHOICES:
        add_hicache_storage_backend_choices([BACKEND])


def _install(seams: Iterable[Seam]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for seam, hook in [(seam, find(seam.hook)) for seam in seams]:  # all can be imported, or none is registered
        HookRegistry.register(seam.path, hook, HookType(seam.kind))
