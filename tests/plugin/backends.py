"""Host pools of SGLang, and what it passes to a storage backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
from sglang.srt.mem_cache.pool_host.common import ShmHostTensorAllocator
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import (
    AsymmetricMHATokenToKVPoolHost,
    MHATokenToKVPoolHost,
)
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from harness.waiting import wait_until
from sgl_kvfetch.plugin.host.storage import KVFetchStorage
from tests.segments import page_hashes

P = TypeVar("P")
PAGE_SIZE, LAYERS, HEADS, DIM, POOL_PAGES = 4, 5, 2, 48, 40


def bare(kind: type[P], attributes: Mapping[str, Any]) -> P:
    """Return one of SGLang's pools with only what the backend reads: its constructor is not called."""
    pool = object.__new__(kind)
    for name, value in attributes.items():
        setattr(pool, name, value)
    return pool


def shape_of(layout: str, layers: int, heads: int, dim: int) -> tuple[int, ...]:
    return {
        "layer_first": (layers, POOL_PAGES * PAGE_SIZE, heads, dim),
        "page_first": (POOL_PAGES * PAGE_SIZE, layers, heads, dim),
        "page_first_direct": (POOL_PAGES, layers, PAGE_SIZE, heads, dim),
        "page_head": (POOL_PAGES, heads, PAGE_SIZE, layers, dim),
    }[layout]


def numbers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _of_all_pools(layout: str, dtype: torch.dtype) -> dict[str, Any]:
    layers = {"layer_num": LAYERS, "target_layer_num": LAYERS, "start_layer": 0}
    return {"layout": layout, "page_size": PAGE_SIZE, "dtype": dtype, **layers}


def make_pool(
    layout: str = "page_first_direct",
    v_dim: int = DIM,
    kind: type[MHATokenToKVPoolHost] | None = None,
    *,
    is_shared: bool = True,
    **changes: Any,
) -> MHATokenToKVPoolHost:
    """Return one of SGLang's host pools, filled with numbers. ``is_shared``: whether the data plane can map it, as
    where SGLang was started with our backend."""
    k, v = (numbers(shape_of(layout, LAYERS, HEADS, dim), seed=dim) for dim in (DIM, v_dim))
    own = {"kv_buffer": (k, -v), "device_k_buffers": (torch.empty(0),)}
    kind = kind or (MHATokenToKVPoolHost if v_dim == DIM else AsymmetricMHATokenToKVPoolHost)
    pool = bare(kind, _of_all_pools(layout, torch.float32) | own | changes)
    if is_shared:
        pool.kv_buffer = share(pool, *pool.kv_buffer)
    return pool


def share(pool: Any, *buffers: torch.Tensor) -> tuple[torch.Tensor, ...]:
    pool.allocator = ShmHostTensorAllocator()
    return tuple(pool.allocator.allocate(tuple(x.shape), x.dtype, "cpu").copy_(x) for x in buffers)


def make_mla_pool(layout: str = "page_first_direct", dtype: torch.dtype = torch.float32) -> MLATokenToKVPoolHost:
    latent, rotated = 48, 16
    own: dict[str, Any] = {"kv_lora_rank": latent, "qk_rope_head_dim": rotated, "kv_cache_dim": latent + rotated}
    own["device_kv_buffers"] = (torch.empty(0),)
    pool = bare(MLATokenToKVPoolHost, _of_all_pools(layout, dtype) | own)
    (pool.kv_buffer,) = share(pool, numbers(shape_of(layout, LAYERS, 1, latent + rotated), seed=0).to(dtype))
    return pool


def make_fp8_pool(dtype: torch.dtype) -> MHATokenToKVPoolHost:
    """Return an fp8 pool as SGLang keeps it: as bytes."""
    pool = make_pool()
    pool.kv_buffer = share(pool, *(buffer.to(dtype).view(torch.uint8) for buffer in pool.kv_buffer))
    pool.dtype = torch.uint8
    return pool


def make_side_pool(seed: int = 0, layout: str = "page_first_direct", **changes: Any) -> MHATokenToKVPoolHost:
    """Return one of SGLang's pools, filled with numbers, with only what its whole pages need."""
    layers, heads, dim = 2, 2, 16
    attributes: dict[str, Any] = dict(
        layout=layout,
        page_size=PAGE_SIZE,
        dtype=torch.bfloat16,
        layer_num=layers,
        head_num=heads,
        head_dim=dim,
        device="cpu",
        pin_memory=False,
        kv_buffer=numbers((2, *shape_of(layout, layers, heads, dim)), seed).to(torch.bfloat16),
    )
    return bare(MHATokenToKVPoolHost, attributes | changes)


def make_states(conv_dtype: torch.dtype = torch.bfloat16) -> MambaPoolHost:
    info = MambaStateBufferInfo(temporal=torch.randn(2, 4, 2, 6, 5), conv=(torch.randn(2, 4, 7, 3).to(conv_dtype),))
    pool = MambaPoolHost(info, 1.0, 0, device_capacity=4, pin_memory=False, layout="page_first_direct")
    fill(pool.temporal_buffer, *pool.conv_buffer)
    return pool


def make_indexer(layout: str = "page_first_direct") -> tuple[MLATokenToKVPoolHost, DSAIndexerPoolHost]:
    """Return a pool of latent vectors, and one of random indexer keys beside it, as DeepSeek V3.2 has them. SGLang's
    device pool needs a GPU: its constructor is not called."""
    kv_pool = make_mla_pool(layout)
    buffers = [torch.zeros(1, dtype=torch.uint8) for _ in range(3)]
    attributes: dict[str, Any] = dict(
        device="cpu",
        store_dtype=torch.bfloat16,
        start_layer=0,
        end_layer=3,
        layer_num=3,
        index_head_dim=128,
        quant_block_size=128,
        page_size=PAGE_SIZE,
        index_page_size=PAGE_SIZE,
        skip_topk_layers=[False, True, False],
        index_key_cache=SimpleNamespace(buffer=buffers),
    )
    device = bare(DSATokenToKVPool, attributes)
    kv_pool.page_num, kv_pool.size = POOL_PAGES, POOL_PAGES * PAGE_SIZE
    pool = DSAIndexerPoolHost(make_dsa_indexer_pool_decl(device), kv_pool, pin_memory=False)
    fill(pool.index_k_with_scale_buffer)
    return kv_pool, pool


def fill(*buffers: torch.Tensor) -> None:
    for buffer in buffers:
        buffer.view(torch.uint8).random_(255)


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


def make_operation(
    start_s: float, names: Sequence[str] = (), num_tokens: int = 1024, *, expired: bool = False
) -> SimpleNamespace:
    """Return what the backend reads of SGLang's prefetch of some pages."""
    fields: dict[str, Any] = {"start_time": start_s, "stats_requested_tokens": num_tokens, "deadline_expired": expired}
    fields |= {"request_id": "", "all_hash_values": names, "hash_value": names, "pool_transfers": None}
    return SimpleNamespace(**fields, is_terminated=lambda: expired)


def transfer(
    names: Sequence[str],
    pages: Sequence[int] | None = None,
    pool: PoolName = PoolName.SWA,
    policy: str = "trailing_pages",
) -> PoolTransfer:
    indices = None if pages is None else tokens(list(pages))
    return PoolTransfer(name=pool, keys=list(names), host_indices=indices, hit_policy=PoolHitPolicy(policy))
