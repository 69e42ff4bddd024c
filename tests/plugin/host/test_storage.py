"""Tests that call the backend as SGLang's threads do, with a directory store. tests/e2e has whole engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host.mha_mxfp8 import MHATokenToKVPoolMXFP8Host

from harness.waiting import wait_until
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plane.choice import Turn
from sgl_kvfetch.plane.fetch.fetcher import FetchResult
from sgl_kvfetch.plugin.host.pool import HostPages, pages_view
from sgl_kvfetch.plugin.host.side_pools import SidePools
from sgl_kvfetch.plugin.host.storage import KVFetchStorage, Rewriting
from tests.plugin.backends import (
    LAYERS,
    PAGE_SIZE,
    POOL_PAGES,
    Make,
    after,
    keys,
    make_cache,
    make_fp8_pool,
    make_mla_pool,
    make_pool,
    storage_config,
    store_pages,
    tokens,
)
from tests.plugin.planes import Served

POOLS: dict[str, Callable[[str], Any]] = {
    "K and V": make_pool,
    "of two sizes": lambda layout: make_pool(layout, v_dim=64),
    "of two sizes, in memory of SGLang's own": lambda layout: make_pool(layout, v_dim=64, is_shared=False),
    "latent vectors": make_mla_pool,
    "latent vectors in bfloat16": lambda layout: make_mla_pool(layout, torch.bfloat16),
}


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
@pytest.mark.parametrize("name", POOLS)
def test_pages_are_restored_to_other_places(make: Make, name: str, layout: str) -> None:
    """The data plane puts them there by itself where the memory is shared."""
    assert_restored(make, POOLS[name](layout))


def assert_restored(make: Make, pool: Any, **config: Any) -> None:
    backend, views = make(pool, **config), HostPages(pool).views
    expected = [view[:7].clone() for view in views]
    store_pages(backend, keys(7), list(range(7)))
    elsewhere = [39, 12, 20, 21, 30, 8, 10]
    assert backend.batch_get_v1(keys(7), tokens(elsewhere)) == [True] * 7
    for view, values in zip(views, expected, strict=True):
        assert torch.equal(view[elsewhere], values)
        assert torch.equal(view[:7], values)


@pytest.mark.parametrize(
    ("flag", "dtype"),
    [("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2), ("auto", torch.float8_e4m3fn)],
)
def test_flags_tell_the_fp8_type(make: Make, monkeypatch: pytest.MonkeyPatch, flag: str, dtype: torch.dtype) -> None:
    monkeypatch.setattr("sglang.srt.runtime_context.get_model", lambda: SimpleNamespace(kv_cache_dtype=flag))
    pool = make_fp8_pool(dtype)
    assert HostPages(pool).geometry.torch_dtype == dtype
    assert_restored(make, pool, quantiser="exact")


def test_batches_of_one_prefix_are_gathered_and_found_by_others(make: Make, served: Served, tmp_path: Path) -> None:
    writer = make(linger_s=600)
    names = keys(16)
    for first in range(0, 16, 2):
        info = after(names[:first])
        assert all(writer.batch_set_v1(names[first : first + 2], tokens([first, first + 1]), info))
    served.write_all()
    assert writer.batch_exists(names) == 16
    assert [p.name.split("-")[0] for p in tmp_path.rglob("*.kvm")] == ["16"]
    reader = make(make_pool("layer_first"))
    assert reader.batch_exists(names[:5] + keys(5, "other")) == 5
    assert reader.batch_exists(keys(5, "other")) == 0
    # A fetch needs no lookup before it, may start anywhere, and stops where the store does.
    assert reader.batch_get_v1(names[3:] + keys(2, "other"), tokens(list(range(15)))) == [True] * 13 + [False] * 2


def test_pages_may_wait_in_the_host_pool_while_it_has_room_for_others(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How they wait, tests/plugin/device/test_choices.py tests."""
    backend, cache, waiting, stop = make(), make_cache(), Queue[Any](), threading.Event()
    controller = cache.cache_controller
    controller.backup_queue, controller.storage_stop_event = waiting, stop
    backend.be_patient(cache, 1.0, 0.0)
    monkeypatch.setattr(backend._plane, "write", write := Mock(return_value=0))
    assert backend.batch_set_v1(keys(1), tokens([0]), after([])) == [False]
    may_wait = write.call_args.kwargs["may_wait"]
    waiting.put(SimpleNamespace(hash_value=keys(POOL_PAGES // 2 - 1)))  # pages of prompts that are written next
    waiting.put(None)  # SGLang's, when it stops
    assert may_wait()
    stop.set()
    assert not may_wait()
    stop.clear()
    waiting.put(SimpleNamespace(hash_value=keys(1)))
    assert not may_wait()


def test_modes(make: Make, tmp_path: Path) -> None:
    store_pages(make(), keys(2), [0, 1])
    write_only = make(mode="write_only")
    assert write_only.batch_exists(keys(2)) == 0
    assert write_only.batch_get_v1(keys(2), tokens([0, 1])) == [False, False]
    read_only = make(mode="read_only")
    assert read_only.batch_set_v1(keys(2, "new"), tokens([0, 1]), after([])) == [True, True]
    assert read_only.batch_exists(keys(2)) == 2
    read_only.close()
    assert len(list(tmp_path.rglob("*.kvm"))) == 1


def test_pages_of_unknown_position_are_not_written(make: Make) -> None:
    assert make().batch_set_v1(keys(2), tokens([0, 1]), HiCacheStorageExtraInfo()) == [False, False]


def test_values_that_cannot_be_quantised_are_dropped(make: Make, tmp_path: Path) -> None:
    pool = make_pool()
    pool.k_buffer[0, 0, 0, 0, 0] = torch.nan
    backend = make(pool, quantiser="uint8")
    backend.batch_set_v1(keys(1), tokens([0]), after([]))
    store_pages(backend, keys(1, "good"), [1])
    assert backend.batch_exists(keys(1)) == 0
    assert len(list(tmp_path.rglob("*.kv?"))) == 2


def test_closing_writes_what_is_queued_and_is_idempotent(make: Make) -> None:
    backend = make(linger_s=60)
    backend.batch_set_v1(keys(3), tokens([0, 1, 2]), after([]))
    backend.close()
    backend.close()
    assert make().batch_exists(keys(3)) == 3


def test_v2_serves_the_kv_pool(make: Make) -> None:
    backend = make()
    transfer = PoolTransfer(name=PoolName.KV, host_indices=tokens([0, 1]), keys=keys(2))
    assert backend.batch_set_v2([transfer], after([])) == {PoolName.KV: [True, True]}
    wait_until(lambda: backend.batch_exists_v2(keys(2)).kv_hit_pages == 2)
    assert backend.batch_exists_v2(keys(3)).restorable_prefix_pages == [1, 2]
    assert backend.batch_get_v2([transfer]) == {PoolName.KV: [True, True]}


def test_stats_are_handed_out_once(make: Make) -> None:
    backend = make()
    store_pages(backend, keys(2), [0, 1])
    backend.batch_get_v1(keys(2), tokens([4, 5]))
    stats = backend.get_stats()
    assert (stats.prefetch_pgs, stats.backup_pgs) == ([2], [2])
    assert stats.prefetch_bandwidth[0] > 0
    assert backend.get_stats().prefetch_pgs == []


def test_what_is_not_supported_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.srt.runtime_context.get_model", lambda: SimpleNamespace(kv_cache_dtype="nvfp4"))
    (packed := make_mla_pool()).kv_cache_dim += 16
    (unified := make_pool()).layout = "page_unified"
    for message, pool, place in (
        ("context parallelism", make_pool(), {"attn_cp_size": 2}),
        ("tp_lcm_size", make_pool(), {"should_split_heads": True}),
        ("'x'", make_pool(storage_format_tag="x"), {}),
        ("MHATokenToKVPoolMXFP8Host are not supported", make_pool(kind=MHATokenToKVPoolMXFP8Host), {}),
        ("latent vectors that SGLang keeps with their scales", packed, {}),
        ("page_unified is not supported; use one of layer_first", unified, {}),
        ("bytes .*nvfp4.* is not supported", make_fp8_pool(torch.float8_e5m2), {}),
    ):
        with pytest.raises(UnsupportedError, match=message):
            KVFetchStorage(storage_config(extra_config={"store": "http://nowhere"}, **place), pool)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
@pytest.mark.parametrize("is_shared", [True, False])
def test_layers_of_a_draft_model_in_a_pool_return(make: Make, served: Served, layout: str, is_shared: bool) -> None:
    """Bit by bit beside the model's, which are quantised."""
    pool = make_pool(layout, target_layer_num=LAYERS - 1, is_shared=is_shared)
    writer = make(pool, quantiser="uint8")
    assert writer.batch_set_v1(keys(4), tokens([0, 1, 2, 3]), after([])) == [True] * 4
    wait_until(lambda: writer.batch_exists(keys(4)) == 4)
    empty = make_pool(layout, target_layer_num=LAYERS - 1, is_shared=is_shared)
    for x in empty.kv_buffer:
        x.zero_()
    reader = make(empty, quantiser="uint8")
    assert reader.batch_exists_v2(keys(4), []).extra_pool_hit_pages == {PoolName.KV: 4}
    with pytest.MonkeyPatch.context() as failing:
        failing.setattr(reader._sides, "write", Mock(side_effect=RuntimeError("no")))
        assert reader.batch_get_v1(keys(4), tokens([7, 5, 2, 9])) == [False] * 4
    served.service._prompts.order._present = Turn(end_s=0.0)  # of the prompt before, which measured the link
    reader._prefetch = replace(reader._prefetch, first_hash=keys(4)[0])
    assert reader.batch_get_v1(keys(4), tokens([7, 5, 2, 9])) == [True] * 4
    for before, now in zip(pool.kv_buffer, empty.kv_buffer, strict=True):
        stored, restored = (pages_view(x, layout, PAGE_SIZE) for x in (before, now))
        assert torch.equal(restored[[7, 5, 2, 9], :, -1], stored[:4, :, -1])
        torch.testing.assert_close(restored[[7, 5, 2, 9], :, :-1], stored[:4, :, :-1], rtol=0, atol=0.05)
        assert not restored[[0, 1, 3, 4, 6]].any()


def test_pages_without_layers_of_a_draft_model_are_not_used(make: Make, served: Served, tmp_path: Path) -> None:
    """Where an object with their bytes is gone, the hit ends. Behind pages that are late, it is not waited for."""
    writer = make(make_pool(target_layer_num=LAYERS - 1), fetch_timeout_s=600)
    writer.batch_set_v1(keys(4), tokens([0, 1, 2, 3]), after([]))
    wait_until(lambda: writer.batch_exists(keys(4)) == 4)
    with pytest.MonkeyPatch.context() as slow:
        slow.setattr(served.service.client.fetcher, "fetch", AsyncMock(return_value=FetchResult(2, late=True)))
        slow.setattr(served.service._prompts.sides, "_store", Mock(read=lambda *_: asyncio.Event().wait()))
        assert writer.batch_get_v1(keys(4), tokens([0, 1, 2, 3])) == [False] * 4
    for path in tmp_path.rglob("*.kvm"):
        manifest = decode_manifest(path.read_bytes())
        for side in manifest.sides:
            (path.parent / Path(manifest.data_name(side)).name).unlink()
    reader = make(make_pool(target_layer_num=LAYERS - 1))
    assert reader.batch_get_v1(keys(4), tokens([0, 1, 2, 3])) == [False] * 4


def test_layers_of_a_draft_model_in_a_side_pool_are_noticed() -> None:
    """A model whose draft layers have windows: SGLang packs them into the windows' pool."""
    sides = SidePools()
    sides.add_pool(PoolName.SWA, make_pool())
    assert not sides.has_draft
    sides.add_pool(PoolName.SWA, make_pool(target_layer_num=LAYERS - 1))
    assert sides.has_draft


def test_nodes_are_stored_once_more_after_a_loss_of_any_rank() -> None:
    """In a tree in which each node stands behind all with smaller ids."""
    others_losses = 0
    core = Mock(collect_path_info=lambda ids: [[Mock(node_id=each) for each in range(1, ids[0] + 1)]])
    cache = Mock(tree_core=core, _all_reduce=lambda least, op: least.clamp_(max=-others_losses))
    rewriting, stored = Rewriting(), list[int]()
    for node_id, own_losses, others_losses, expected in (
        (3, 0, 0, [3]),
        (4, 1, 0, [1, 2, 3, 4]),
        (5, 1, 0, [5]),
        (6, 1, 2, [1, 2, 3, 4, 5, 6]),
        (7, 2, 2, [7]),
    ):
        stored.clear()
        rewriting.store(lambda cache, node_id: stored.append(node_id), cache, node_id, own_losses)
        assert stored == expected, others_losses
