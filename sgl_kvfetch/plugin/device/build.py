"""Builds device mode's cache inside SGLang's scheduler process."""

from __future__ import annotations

import atexit
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_unified_radix_cache
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_memory

from sgl_kvfetch import timeline
from sgl_kvfetch.codecs.nvdec import Nvdec
from sgl_kvfetch.config import KVFetchConfig, parse_config
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plugin import weight_updates
from sgl_kvfetch.plugin.device.backend import DeviceBackend
from sgl_kvfetch.plugin.device.board import Report
from sgl_kvfetch.plugin.device.cache import KVFetchRadixCache
from sgl_kvfetch.plugin.device.pages import DevicePages
from sgl_kvfetch.plugin.device.prefill import PrefillSpeed
from sgl_kvfetch.plugin.engine_nvdec import engine_nvdec
from sgl_kvfetch.plugin.launch_check import read_extra_config
from sgl_kvfetch.plugin.namespace import engine_heads
from sgl_kvfetch.plugin.page_hashes import compile_hash_function
from sgl_kvfetch.plugin.plane import open_plane
from sgl_kvfetch.plugin.quantiser import engine_quantiser, require_own_profile

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Rank:
    """This rank's place in the model, as SGLang tells storage backends."""

    tp_rank: int
    tp_size: int


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
    pages, nvdec = _open_pages(pool, cache.page_size, ctx.tp_worker), engine_nvdec(pool.k_buffer[0].device)
    compile_hash_function()
    cache.set_connect(partial(_connect, cache, pages, nvdec, _Rank(ctx.tp_rank, ctx.tp_size), allocator.size))
    cache.connect(get_memory().hicache_storage_backend_extra_config)
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
    from sgl_kvfetch.cuda_streams import CudaDevice
    from sgl_kvfetch.plugin.device.cuda_pages import CudaPages

    gpu = CudaDevice(pool.k_buffer[0].device)
    return CudaPages(pool, page_size, gpu, tp_worker.model_runner.forward_stream)


def _connect(
    cache: KVFetchRadixCache,
    pages: DevicePages,
    nvdec: Nvdec | None,
    rank: _Rank,
    pool_tokens: int,
    extra_config: str | None,
) -> None:
    """Attach a store as ``extra_config`` says. Raises ConfigError and UnsupportedError."""
    extra, threshold_tokens = read_extra_config(extra_config)
    config = parse_config(extra)
    backend = cache.start(
        partial(_make_backend, config, pages, nvdec, rank, cache.prefill_speed),
        max_fetch_tokens=int(pool_tokens * config.device_pool_share),
        round_tokens=config.round_tokens,
        threshold_tokens=threshold_tokens,
        order=config.fetch_order,
    )
    weight_updates.register(backend.access, config.model_id)


def _make_backend(
    config: KVFetchConfig,
    pages: DevicePages,
    nvdec: Nvdec | None,
    rank: _Rank,
    speed: PrefillSpeed,
    report: Report,
) -> DeviceBackend:
    quantiser = engine_quantiser(config, rank, pages.geometry, pages.first_layer)
    heads = engine_heads(config, quantiser, rank, pages.geometry, pages.first_layer)
    require_own_profile(config, quantiser, heads.namespace)
    plane = open_plane(config, quantiser, heads, rank.tp_rank, pages, nvdec)
    return DeviceBackend(config, plane, pages, heads, speed, report)
