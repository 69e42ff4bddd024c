"""The storage backend with SGLang's own pools for states and for an indexer's keys, called as HiCache calls it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKOnlyPool
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKOnlyPoolHost

from harness.waiting import wait_until
from sgl_kvfetch.plugin import identity, starting
from sgl_kvfetch.plugin.host.pool import HostPages
from sgl_kvfetch.plugin.host.side_pools import SidePools
from sgl_kvfetch.plugin.host.storage import KVFetchStorage
from sgl_kvfetch.types import TENSORS
from tests.codec.quant.profiles import make_profile, values_of
from tests.plugin.backends import (
    LAYERS,
    PAGE_SIZE,
    POOL_PAGES,
    after,
    keys,
    make_mla_pool,
    make_pool,
    storage_config,
    tokens,
)
from tests.plugin.planes import Served, store_in
from tests.segments import make_heads


def make_states(conv_dtype: torch.dtype = torch.bfloat16, **changes: Any) -> MambaPoolHost:
    """Return a pool of random states, as those of a hybrid model with two layers that have states."""
    info = MambaStateBufferInfo(temporal=torch.randn(2, 4, 2, 6, 5), conv=(torch.randn(2, 4, 7, 3).to(conv_dtype),))
    settings: dict[str, Any] = dict(device_capacity=4, pin_memory=False, layout="page_first_direct")
    pool = MambaPoolHost(info, 1.0, 0, **settings | changes)
    fill(pool.temporal_buffer, *pool.conv_buffer)
    return pool


def make_indexer(kv_pool: HostKVCache, layout: str) -> DSAIndexerPoolHost:
    """Return a pool of random indexer keys beside a pool of latent vectors, as DeepSeek V3.2 has them. SGLang's device
    pool needs a GPU: its constructor is not called."""
    device = object.__new__(DSATokenToKVPool)
    buffers = [torch.zeros(1, dtype=torch.uint8) for _ in range(3)]
    attributes: dict[str, Any] = dict(
        device="cpu",
        store_dtype=torch.bfloat16,
        start_layer=0,
        end_layer=3,
        layer_num=3,
        index_head_dim=128,
        quant_block_size=128,
        page_size=kv_pool.page_size,
        index_page_size=kv_pool.page_size,
        skip_topk_layers=[False, True, False],
        index_key_cache=SimpleNamespace(buffer=buffers),
    )
    vars(device).update(attributes)
    kv_pool.layout, kv_pool.page_num, kv_pool.size = layout, POOL_PAGES, POOL_PAGES * kv_pool.page_size
    pool = DSAIndexerPoolHost(make_dsa_indexer_pool_decl(device), kv_pool, pin_memory=False)
    fill(pool.index_k_with_scale_buffer)
    return pool


def make_minimax_indexer(kv_pool: HostKVCache, layout: str) -> MHATokenToKOnlyPoolHost:
    """Return a pool of random indexer keys beside a pool of K and V, as MiniMax M3 has them."""
    device = MHATokenToKOnlyPool(8, kv_pool.page_size, torch.bfloat16, 1, 16, 2, "cpu", False)
    kv_pool.layout, kv_pool.page_num, kv_pool.size = layout, POOL_PAGES, POOL_PAGES * kv_pool.page_size
    pool = MHATokenToKOnlyPoolHost(device, kv_pool, layout, pin_memory=False)
    fill(pool.k_buffer)
    return pool


def fill(*buffers: torch.Tensor) -> None:
    for buffer in buffers:
        buffer.view(torch.uint8).random_(255)


@pytest.fixture
def open_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Opens backends, with data planes of their own, on one store."""
    monkeypatch.setattr(starting, "engine_heads", lambda c, quantiser, s, geometry, *_: make_heads(geometry, quantiser))
    served = Served()
    monkeypatch.setattr(starting, "_launch", served.launch)
    made: list[KVFetchStorage] = []

    def build(
        kv_pool: HostKVCache, is_mla: bool = False, profile: Path | None = None, **side_pools: HostKVCache
    ) -> KVFetchStorage:
        extra = {"store": url, "codec": "zstd", "lookup_timeout_s": 600, "fetch_timeout_s": 600}
        extra |= {"recompute": "never", "audit_share": 0}  # whatever the machine measures, and no hit is cut
        extra |= {} if profile is None else {"profile": str(profile)}
        backend = KVFetchStorage(storage_config(extra_config=extra, is_mla_model=is_mla), kv_pool)
        for name, pool in side_pools.items():
            backend.register_mem_host_pool_v2(pool, PoolName(name))
        backend.on_host_pools_registered()
        made.append(backend)
        return backend

    with store_in(tmp_path, monkeypatch) as url:
        yield build
        for backend in made:
            backend.close()


def state_of(key: str, slot: int | None = None) -> PoolTransfer:
    indices = None if slot is None else torch.tensor([slot])
    return PoolTransfer(PoolName.MAMBA, indices, keys=[key], hit_policy=PoolHitPolicy.TRAILING_PAGES)


def write(backend: KVFetchStorage, names: list[str], pages: list[int], before: list[str], side: PoolTransfer) -> None:
    assert backend.batch_set_v2([side]) == {side.name: [True] * len(side.keys or [])}
    assert backend.batch_set_v1(names, tokens(pages), after(before)) == [True] * len(names)


def test_a_state_is_restored_byte_by_byte_and_bounds_the_hit(open_backend: Any) -> None:
    states, names = make_states(), keys(9)
    writer = open_backend(make_pool(), mamba=states)
    write(writer, names[:4], [0, 1, 2, 3], [], state_of(names[3], 2))
    write(writer, names[4:7], [4, 5, 6], names[:4], state_of(names[6], 0))
    assert all(writer.batch_set_v1(names[7:], tokens([7, 8]), after(names[:7])))
    wait_until(lambda: writer.batch_exists(names) == 9)
    expected = [states.get_data_page(slot) for slot in (2, 0)]
    writer.close()

    others = make_states()
    reader = open_backend(make_pool(), mamba=others)
    found = reader.batch_exists_v2(names, [state_of("__placeholder__")])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages[PoolName.MAMBA]) == (7, 7)
    assert found.restorable_prefix_pages == [4, 7]
    untouched = others.get_data_page(1)
    for end, slot, content in ((4, 4, expected[0]), (7, 3, expected[1])):
        assert all(reader.batch_get_v1(names[:end], tokens(list(range(20, 20 + end)))))
        assert reader.batch_get_v2([state_of(names[end - 1], slot)]) == {PoolName.MAMBA: [True]}
        assert torch.equal(others.get_data_page(slot), content)
    assert reader.batch_get_v2([state_of(names[8], 1)]) == {PoolName.MAMBA: [False]}
    assert torch.equal(others.get_data_page(1), untouched)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
@pytest.mark.parametrize(
    ("is_mla", "make_kv", "make_keys"), [(True, make_mla_pool, make_indexer), (False, make_pool, make_minimax_indexer)]
)
def test_the_keys_of_an_indexer_are_restored_with_each_page(
    open_backend: Any, layout: str, is_mla: bool, make_kv: Any, make_keys: Any
) -> None:
    kv_pool, names = make_kv(layout), keys(5)
    indexer = make_keys(kv_pool, layout)
    writer = open_backend(kv_pool, is_mla=is_mla, indexer=indexer)
    write(writer, names[:3], [0, 1, 2], [], indexer_keys(names[:3], [0, 1, 2]))
    assert all(writer.batch_set_v1(names[3:], tokens([3, 4]), after(names[:3])))  # without the indexer's keys
    wait_until(lambda: writer.batch_exists(names) == 5)
    size = kv_pool.page_size
    expected = [indexer.get_data_page(page * size) for page in range(3)]
    writer.close()

    kv_pool = make_kv(layout)
    others = make_keys(kv_pool, layout)
    reader = open_backend(kv_pool, is_mla=is_mla, indexer=others)
    found = reader.batch_exists_v2(names, [indexer_keys(names)])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [1, 2, 3])
    elsewhere = [30, 8, 12]
    assert all(reader.batch_get_v1(names[:3], tokens(elsewhere)))
    assert reader.batch_get_v2([indexer_keys(names[:3], elsewhere)]) == {PoolName.INDEXER: [True] * 3}
    for page, content in zip(elsewhere, expected, strict=True):
        restored = others.get_data_page(page * size)
        assert torch.equal(restored.view(torch.uint8), content.view(torch.uint8))  # some are NaN


def test_keys_of_an_indexer_are_exact_beside_latent_vectors_of_klt(
    open_backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "pool_layers", lambda: None)
    monkeypatch.setattr(starting, "require_own_profile", lambda *args: None)
    profile = make_profile(num_layers=LAYERS, num_heads=1, head_dim=16, v_head_dim=48, cell_heads=1)
    profile.save(tmp_path / "mla.profile")
    kv_pool, names = make_mla_pool(), keys(3)
    values = values_of(profile, 3 * PAGE_SIZE)
    HostPages(kv_pool).write(range(LAYERS), range(1), range(3), values)
    indexer = make_indexer(kv_pool, "page_first_direct")
    writer = open_backend(kv_pool, is_mla=True, profile=tmp_path / "mla.profile", indexer=indexer)
    write(writer, names, [0, 1, 2], [], indexer_keys(names, [0, 1, 2]))
    wait_until(lambda: writer.batch_exists(names) == 3)

    restored_pool = make_mla_pool()
    others = make_indexer(restored_pool, "page_first_direct")
    reader = open_backend(restored_pool, is_mla=True, profile=tmp_path / "mla.profile", indexer=others)
    elsewhere = [30, 8, 12]
    assert reader.batch_exists_v2(names, [indexer_keys(names)]).kv_hit_pages == 3
    assert all(reader.batch_get_v1(names, tokens(elsewhere)))
    assert reader.batch_get_v2([indexer_keys(names, elsewhere)]) == {PoolName.INDEXER: [True] * 3}
    for page, place in enumerate(elsewhere):
        restored, stored = (each.get_data_page(at * PAGE_SIZE) for each, at in ((others, place), (indexer, page)))
        assert torch.equal(restored.view(torch.uint8), stored.view(torch.uint8))
    for tensor, x in zip(TENSORS, values, strict=True):
        restored = HostPages(restored_pool).read(tensor, elsewhere).flatten(0, 1)
        assert not torch.equal(restored, x)
        assert (restored - x).square().mean() < 0.1 * x.square().mean()


def indexer_keys(names: list[str], pages: list[int] | None = None) -> PoolTransfer:
    """As HiCache resolves them: with the indices of their KV."""
    return PoolTransfer(
        PoolName.INDEXER, None if pages is None else tokens(pages), keys=names, indices_from_pool=PoolName.KV
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_states_of_another_dtype_are_not_exchanged(dtype: torch.dtype) -> None:
    assert _identity(make_states()) == _identity(make_states())
    assert _identity(make_states()) != _identity(make_states(dtype))


def _identity(pool: HostKVCache) -> str:
    sides = SidePools()
    sides.add_pool(PoolName.MAMBA, pool)
    return sides.identity(0, 1, is_mla=False)


def test_a_backend_that_does_not_write_forgets_states_at_once(open_backend: Any) -> None:
    """HiCache announces them all the same; the slots are given to other states later."""
    backend = open_backend(make_pool(), mamba=make_states())
    backend.access.suspend("other weights")
    assert backend.batch_set_v2([state_of(keys(1)[0], 2)]) == {PoolName.MAMBA: [True]}
    assert backend._sides.take_announced(keys(1)) == {}
