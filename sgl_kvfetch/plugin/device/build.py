"""Builds device mode's cache inside SGLang's scheduler process."""

from __future__ import annotations

import atexit
import logging
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_unified_radix_cache
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_memory

from sgl_kvfetch import timeline
from sgl_kvfetch.codec import Nvdec
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plane import parse_config
from sgl_kvfetch.plugin import weight_updates
from sgl_kvfetch.plugin.data_plane import engine_nvdec, open_engine_plane
from sgl_kvfetch.plugin.device.cache import KVFetchRadixCache
from sgl_kvfetch.plugin.device.pages import DevicePages, pool_device
from sgl_kvfetch.plugin.host.pages import is_mla
from sgl_kvfetch.plugin.launch_check import read_extra_config

logger = logging.getLogger(__name__)


def build_radix_cache(ctx: TreeCacheBuildContext) -> KVFetchRadixCache:
    """Build the cache and attach its store. Raises ConfigError and UnsupportedError, which stop SGLang's start."""
    timeline.start(ctx.tp_rank)
    cache = create_unified_radix_cache(ctx, cache_class=KVFetchRadixCache)
    assert isinstance(cache, KVFetchRadixCache)
    if cache.tree_components != (ComponentType.FULL,):
        raise UnsupportedError(
            f"device mode supports only plain KV caches; this model's has {', '.join(map(str, cache.tree_components))}"
        )
    allocator = ctx.params.token_to_kv_pool_allocator
    pool = allocator.get_kvcache()
    pages, nvdec = _open_pages(pool, cache.page_size, ctx.tp_worker), engine_nvdec(pool_device(pool))
    rank = SimpleNamespace(tp_rank=ctx.tp_rank, tp_size=ctx.tp_size, is_mla_model=is_mla(pool))
    cache.set_connect(partial(_connect, cache, pages, nvdec, rank, allocator.size))
    cache.connect(get_memory().hicache_storage_backend_extra_config)
    pool.register_layer_transfer_counter(cache.early_starts)
    atexit.register(cache.release_host_resources)
    return cache


def _open_pages(pool: Any, page_size: int, tp_worker: Any) -> DevicePages:
    """Return access to the pool's pages. Raises UnsupportedError for a pool or device that is not supported."""
    device = torch.device(pool.device)
    if device.type == "cpu":
        return DevicePages(pool, page_size)
    if device.type != "cuda":
        raise UnsupportedError(f"device mode does not support {device}: add --enable-hierarchical-cache")
    logger.warning(
        "kvfetch: device mode on a GPU has not been run by its authors yet, only tested without one; "
        "--enable-hierarchical-cache gives host mode"
    )
    from sgl_kvfetch.codec import Device
    from sgl_kvfetch.plugin.device.cuda_pages import CudaPages

    gpu = Device(pool_device(pool))
    return CudaPages(pool, page_size, gpu, tp_worker.model_runner.forward_stream)


def _connect(
    cache: KVFetchRadixCache,
    pages: DevicePages,
    nvdec: Nvdec | None,
    rank: SimpleNamespace,
    pool_tokens: int,
    extra_config: str | None,
) -> None:
    """Attach a store as ``extra_config`` says. Raises ConfigError and UnsupportedError."""
    extra, threshold_tokens = read_extra_config(extra_config)
    config = parse_config(extra)
    plane = open_engine_plane(config, rank, pages, nvdec)
    is_writer = not rank.is_mla_model or rank.tp_rank == 0  # all ranks have the same latent vectors
    backend = cache.start(
        config, plane, pages, pool_tokens=pool_tokens, threshold_tokens=threshold_tokens, is_writer=is_writer
    )
    weight_updates.register(backend.access, config.model_id)
    counter = cache.early_starts if config.early_start else None
    cache.token_to_kv_pool_allocator.get_kvcache().register_layer_transfer_counter(counter)
    ready = (
        "all bytes of its stored prefix are here" if config.early_start else "its whole stored prefix is in the pool"
    )
    logger.info("kvfetch runs in device mode: a request starts when %s", ready)
