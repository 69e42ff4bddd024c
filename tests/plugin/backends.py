"""Host pools of SGLang, and what it passes to a storage backend."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo
from sglang.srt.mem_cache.pool_host.common import ShmHostTensorAllocator
from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from harness.waiting import wait_until
from sgl_kvfetch.plugin.host.storage import KVFetchStorage
from tests.segments import page_hashes

PAGE_SIZE, LAYERS, HEADS, DIM, POOL_PAGES = 4, 5, 2, 48, 40


def make_pool(
    layout: str = "page_first_direct",
    k_dim: int = DIM,
    v_dim: int = DIM,
    kind: type[MHATokenToKVPoolHost] | None = None,
    *,
    is_shared: bool = True,
    **changes: Any,
) -> MHATokenToKVPoolHost:
    """Return one of SGLang's host pools, filled with numbers, with only what the backend reads. ``is_shared``: whether
    the data plane can map it, as where SGLang was started with our backend."""

    def buffer(dim: int, sign: int) -> torch.Tensor:
        shape = {
            "layer_first": (LAYERS, POOL_PAGES * PAGE_SIZE, HEADS, dim),
            "page_first": (POOL_PAGES * PAGE_SIZE, LAYERS, HEADS, dim),
            "page_first_direct": (POOL_PAGES, LAYERS, PAGE_SIZE, HEADS, dim),
            "page_head": (POOL_PAGES, HEADS, PAGE_SIZE, LAYERS, dim),
        }[layout]
        return sign * torch.randn(shape, generator=torch.Generator().manual_seed(dim))

    kind = kind or (MHATokenToKVPoolHost if k_dim == v_dim else AsymmetricMHATokenToKVPoolHost)
    pool = object.__new__(kind)
    attributes: dict[str, Any] = dict(
        layout=layout,
        page_size=PAGE_SIZE,
        dtype=torch.float32,
        layer_num=LAYERS,
        target_layer_num=LAYERS,
        start_layer=0,
        kv_buffer=(buffer(k_dim, 1), buffer(v_dim, -1)),
        device_k_buffers=(torch.empty(0),),
    )
    for name, value in (attributes | changes).items():
        setattr(pool, name, value)
    if is_shared:
        pool.kv_buffer = share(pool, *pool.kv_buffer)
    return pool


def share(pool: Any, *buffers: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return copies of a pool's buffers as SGLang allocates them for our backend."""
    pool.allocator = ShmHostTensorAllocator()
    return tuple(pool.allocator.allocate(tuple(x.shape), x.dtype, "cpu").copy_(x) for x in buffers)


def make_mla_pool(layout: str = "page_first_direct", dtype: torch.dtype = torch.float32) -> MLATokenToKVPoolHost:
    """Return one of SGLang's host pools for MLA, filled with numbers, with only what the backend reads."""
    latent, rotated = 48, 16
    shape = {
        "layer_first": (LAYERS, POOL_PAGES * PAGE_SIZE, 1, latent + rotated),
        "page_first": (POOL_PAGES * PAGE_SIZE, LAYERS, 1, latent + rotated),
        "page_first_direct": (POOL_PAGES, LAYERS, PAGE_SIZE, 1, latent + rotated),
    }[layout]
    pool = object.__new__(MLATokenToKVPoolHost)
    attributes: dict[str, Any] = dict(
        layout=layout,
        page_size=PAGE_SIZE,
        dtype=dtype,
        kv_lora_rank=latent,
        qk_rope_head_dim=rotated,
        kv_cache_dim=latent + rotated,
        layer_num=LAYERS,
        target_layer_num=LAYERS,
        start_layer=0,
        kv_buffer=torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype),
        device_kv_buffers=(torch.empty(0),),
    )
    for name, value in attributes.items():
        setattr(pool, name, value)
    (pool.kv_buffer,) = share(pool, pool.kv_buffer)
    return pool


def make_fp8_pool(dtype: torch.dtype) -> MHATokenToKVPoolHost:
    """Return an fp8 pool as SGLang keeps it: as bytes."""
    pool = make_pool()
    pool.kv_buffer = share(pool, *(buffer.to(dtype).view(torch.uint8) for buffer in pool.kv_buffer))
    pool.dtype = torch.uint8
    return pool


def storage_config(**changes: Any) -> HiCacheStorageConfig:
    fields: dict[str, Any] = dict(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=True,
        is_page_first_layout=False,
        model_name="m",
    )
    config = HiCacheStorageConfig(**fields | changes)
    if not hasattr(config, "dcp_size"):  # before 0.5.23
        config.dcp_size = 1
    return config


Make = Callable[..., KVFetchStorage]


def keys(num_pages: int, seed: str = "", first_page: int = 0) -> list[str]:
    return [h.hex() for h in page_hashes(num_pages, seed, first_page)]


def tokens(pages: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(PAGE_SIZE) + page * PAGE_SIZE for page in pages])


def after(names: list[str]) -> HiCacheStorageExtraInfo:
    return HiCacheStorageExtraInfo(prefix_keys=names)


def store_pages(backend: KVFetchStorage, names: list[str], pages: list[int], before: list[str] | None = None) -> None:
    assert backend.batch_set_v1(names, tokens(pages), after(before or [])) == [True] * len(names)
    wait_until(lambda: backend.batch_exists([*(before or []), *names]) == len(names) + len(before or []))


def make_cache(
    policy: str = "timeout",
    base_s: float = 31.0,
    per_ki_token_s: float = 0.0,
    *,
    is_write_back: bool = False,
    host_tokens: int = 64,
    host_memory_mode: str = "cache",
) -> SimpleNamespace:
    """Return what the backend reads of SGLang's radix cache, whose device pool has room for 64 tokens."""
    host_pool = SimpleNamespace(size=host_tokens)
    per_page_s = PAGE_SIZE / 1024 * per_ki_token_s
    return SimpleNamespace(
        prefetch_stop_policy=policy,
        prefetch_timeout_base=base_s,
        prefetch_timeout_per_page=per_page_s,
        page_size=PAGE_SIZE,
        is_write_back=is_write_back,
        cache_controller=SimpleNamespace(mem_pool_host=host_pool, host_memory_mode=host_memory_mode),
        token_to_kv_pool_allocator=SimpleNamespace(size=64),
    )
