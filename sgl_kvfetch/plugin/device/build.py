"""Device mode's cache for the engine that we are in."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_unified_radix_cache
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_memory

from sgl_kvfetch.config import KVFetchConfig, parse_config
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plugin import live
from sgl_kvfetch.plugin.device.backend import DeviceBackend
from sgl_kvfetch.plugin.device.board import Ticket
from sgl_kvfetch.plugin.device.cache import KVFetchRadixCache
from sgl_kvfetch.plugin.device.fetches import hash_tail
from sgl_kvfetch.plugin.device.pages import DevicePages
from sgl_kvfetch.plugin.namespace import engine_namespace
from sgl_kvfetch.plugin.quantiser import engine_quantiser, require_own_profile


@dataclass(frozen=True)
class _Rank:
    """This rank's place in the model, as SGLang tells storage backends."""

    tp_rank: int
    tp_size: int


def build_radix_cache(ctx: TreeCacheBuildContext) -> KVFetchRadixCache:
    """Raises ConfigError and UnsupportedError, which stop SGLang's start."""
    extra, threshold, *_ = HybridCacheController.parse_storage_backend_extra_config(
        get_memory().hicache_storage_backend_extra_config
    )
    config = parse_config(extra)
    cache = create_unified_radix_cache(ctx, cache_class=KVFetchRadixCache)
    assert isinstance(cache, KVFetchRadixCache)
    if cache.tree_components != (ComponentType.FULL,):
        raise UnsupportedError(
            f"device mode stores plain KV caches only; this model's has {', '.join(map(str, cache.tree_components))}"
        )
    allocator = ctx.params.token_to_kv_pool_allocator
    pages = DevicePages(allocator.get_kvcache(), cache.page_size)
    # Compiles SGLang's hash function, which takes a while the first time.
    hash_tail(RadixKey(array("q", range(cache.page_size))), 0, None, cache.page_size)

    def make_backend(report: Callable[[Ticket, int], None]) -> DeviceBackend:
        return _make_backend(config, pages, _Rank(ctx.tp_rank, ctx.tp_size), report)

    backend = cache.start(
        make_backend,
        max_fetch_tokens=int(allocator.size * config.device_pool_share),
        threshold_tokens=threshold,
    )
    live.register(backend, config.model_id)
    return cache


def _make_backend(
    config: KVFetchConfig, pages: DevicePages, rank: _Rank, report: Callable[[Ticket, int], None]
) -> DeviceBackend:
    quantiser = engine_quantiser(config, rank, pages.geometry, pages.first_layer)
    namespace = engine_namespace(config, quantiser, rank, pages.geometry, pages.first_layer)
    require_own_profile(config, quantiser, namespace)
    return DeviceBackend(config, pages, namespace, quantiser, report)
