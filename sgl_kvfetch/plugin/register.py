"""Our backend among SGLang's: its name, what it needs, whether a launch has chosen it, and the general plugin that
installs the hooks of the seam table. SGLang calls ``register`` in each of its processes."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sgl_kvfetch.errors import KVFetchError, SeamError, UnsupportedError
from sgl_kvfetch.plugin.seams import GATE, REGISTERED_NAMES, check_name, check_seams, has, install, installed_seams

if TYPE_CHECKING:
    from sgl_kvfetch.plugin.device.linker import KVFetchLinker

logger = logging.getLogger(__name__)

BACKEND = "kvfetch"
_EXTRA_PACKAGES = ("av", "cryptography", "zstandard")  # of the extra `codec`, which SGLang may come without
LINKER_MODULE = "sgl_kvfetch.plugin.device.linker"


def is_chosen(memory: Any) -> bool:
    """Return whether SGLang's resolved config of the group ``memory`` has our backend, in either mode. Device mode is
    there as a linker: see `launch_check.use_linker`."""
    linker = getattr(memory, "unified_cache_external_linker_config", None)
    is_linker = isinstance(linker, dict) and linker.get("linker_module_path") == LINKER_MODULE
    return is_linker or memory.hicache_storage_backend == BACKEND


def linker_of(cache: Any) -> KVFetchLinker | None:
    """Return our linker of a radix cache, or None. Hooks are there without our backend, too, so this must not import
    the linker, which would load all of the plugin."""
    linker: KVFetchLinker | None = getattr(getattr(cache, "linker", None), "cache_linker", None)
    return linker if getattr(linker, "is_kvfetch", False) else None


def require_packages() -> None:
    """Raise UnsupportedError if a package is missing that every launch with our backend needs."""
    if missing := [name for name in _EXTRA_PACKAGES if not find_spec(name)]:
        raise UnsupportedError(f"{', '.join(missing)} not installed here: pip install '.[codec]' in a checkout")


def register() -> None:
    """Register the hooks of ``SEAMS``. Changes nothing for a launch that does not select our backend.

    If a package of ours is missing, or SGLang does not match ``SEAMS``, only the gate's hooks are registered, as far as
    they fit: they only stop a launch that selects our backend. SGLang merely logs what a plugin raises, so
    ``SystemExit`` stops such a command line here.
    """
    if takes_names := has(REGISTERED_NAMES):
        _add_choice()
    try:
        require_packages()
        if mismatches := check_seams():
            raise SeamError("; ".join(mismatches))
        install(installed_seams())
    except (KVFetchError, ImportError) as error:
        if selects_backend(sys.argv[1:]):
            raise SystemExit(f"sgl_kvfetch: {error}") from error
        logger.warning("sgl_kvfetch is off: %s", error)
        install(seam for seam in installed_seams(GATE) if check_name(seam.path) is None)
    else:
        if takes_names:
            from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

            StorageBackendFactory.register_backend(BACKEND, "sgl_kvfetch.plugin.host.storage", "KVFetchStorage")


def selects_backend(argv: Sequence[str]) -> bool:
    """Return whether a command line names our storage backend."""
    flag = "--hicache-storage-backend"
    return f"{flag}={BACKEND}" in argv or any(pair == (flag, BACKEND) for pair in itertools.pairwise(argv))


def _add_choice() -> None:
    """Let ``--hicache-storage-backend`` accept our name, in an SGLang with patches/0001."""
    from sglang.srt.arg_groups.choices import HICACHE_STORAGE_BACKEND_CHOICES, add_hicache_storage_backend_choices

    if BACKEND not in HICACHE_STORAGE_BACKEND_CHOICES:
        add_hicache_storage_backend_choices([BACKEND])
