"""The supported releases of SGLang, and what differs between them. `seams.py` says which rows hold for which release.

SGLang changes its internals in every release. What one release lacks, this module makes up for; nothing else asks for
the version.
"""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

from sgl_kvfetch.errors import UnsupportedError

SGLANG_VERSIONS = ("0.5.22", "0.5.23")
NEWEST = SGLANG_VERSIONS[-1]
OVERRIDE = "KVFETCH_SGLANG"  # in the environment: another version that may run at the operator's own risk


def since(release: str) -> tuple[str, ...]:
    """Return the supported releases from this one on. Rows and conditions then need no change for the next release."""
    return tuple(version for version in SGLANG_VERSIONS if _numbers(version) >= _numbers(release))


def before(release: str) -> tuple[str, ...]:
    """Return the supported releases before this one. Once there are none, a test finds the rows that can go."""
    return tuple(version for version in SGLANG_VERSIONS if _numbers(version) < _numbers(release))


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


WITH_LINKER = since("0.5.23")  # have an external linker that others can fill: device mode needs it


def check_version() -> str | None:
    """Return what is wrong with the installed SGLang's version, or None."""
    found = installed_version()
    if found in (*SGLANG_VERSIONS, os.environ.get(OVERRIDE)):
        return None
    return (
        f"found sglang {found}, expected {' or '.join(SGLANG_VERSIONS)} "
        f"({OVERRIDE}={found} in the environment tries it at your own risk)"
    )


def table_version() -> str:
    """Return the version whose rows hold: the installed one if it is supported, else the newest."""
    found = installed_version()
    return found if found in SGLANG_VERSIONS else NEWEST


def installed_version() -> str:
    """Return the installed SGLang's version, or "none"."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "none"


# What 0.5.22 lacks. Each function looks for the feature, and not for the version, so that a later release needs no
# change here.


def announce_pools(backend: Any) -> None:
    """Call ``on_host_pools_registered`` of a storage backend that was attached, as SGLang itself does from 0.5.23 on.
    Raises what the backend raises."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

    if not hasattr(HiCacheStorage, "on_host_pools_registered"):
        backend.on_host_pools_registered()


def dcp_size(storage_config: Any) -> int:
    """Return over how many ranks decode context parallelism spreads a sequence's tokens. 0.5.22 does not tell storage
    backends."""
    if hasattr(storage_config, "dcp_size"):
        return int(storage_config.dcp_size)
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().attn_dcp_size)


def budget_pages(operation: Any, page_size: int) -> int:
    """Return the number of pages for which the policy `timeout` gives a prefetch time. 0.5.22 counts the pages that
    were found; later releases count the requested ones."""
    if hasattr(operation, "deadline_expired"):
        return int(operation.stats_requested_tokens // page_size)
    return len(operation.hash_value)


def is_deadline_expired(operation: Any, elapsed_s: float, budget_s: float) -> bool:
    """Return whether the policy `timeout` ended a prefetch. 0.5.22 does not record it, so compare the times."""
    return bool(getattr(operation, "deadline_expired", elapsed_s > budget_s))


def require_distinct_images() -> None:
    """Raise UnsupportedError if 0.5.22 runs a model that takes images.

    Its page hashes have only 30 bits of an image. With many images in a store, a prompt with one image would get the KV
    cache of another.
    """
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.schedule_batch import MultimodalDataItem
    from sglang.srt.runtime_context import get_server_args

    if hasattr(MultimodalDataItem, "padding_sequence"):
        return
    if ModelConfig.from_server_args(get_server_args()).is_multimodal:
        raise UnsupportedError(
            f"sglang {installed_version()} tells images apart by 30 bits, too few for a store: update it to {NEWEST}"
        )


def fence_writes(controller: Any) -> None:
    """Before ``HiCacheController.start_writing``: let copies to the host pool wait for the forward pass that runs.

    Without that, 0.5.22 may copy a finished request's last page before its last token is there.
    """
    if controller.load_fence_stream is not None:  # the stream of forward passes
        controller.l2_transfer_engine.device_to_host_stream.wait_stream(controller.load_fence_stream)


def wait_for_layers(runner: Any, forward_batch: Any, **kwargs: Any) -> None:
    """Before ``PrefillCudaGraphRunner.execute``: let a graph of a whole forward pass wait for the last layer's load.

    0.5.22 waits only in the pools' accessors, which such a graph does not call.
    """
    if runner._is_full_backend:
        counter = runner.model_runner.token_to_kv_pool.layer_transfer_counter
        if counter is not None and counter.consumer_index >= 0:
            counter.wait_until(counter.num_layers - 1)
