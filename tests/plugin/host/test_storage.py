"""Tests that call the backend as SGLang's threads do, with a directory store. tests/e2e has whole engines."""

from __future__ import annotations

import threading
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host.mha_mxfp8 import MHATokenToKVPoolMXFP8Host

from harness.waiting import wait_until
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.engine import data_plane as plane_module
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.keys import label_of_request
from sgl_kvfetch.plugin import status
from sgl_kvfetch.plugin.host import storage as storage_module
from sgl_kvfetch.plugin.host.pool import HostPages, pages_view
from sgl_kvfetch.plugin.host.side_pools import SidePools
from sgl_kvfetch.plugin.host.storage import KVFetchStorage
from sgl_kvfetch.reasons import Reason
from tests.plugin.backends import (
    DIM,
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
    values_in,
)
from tests.plugin.planes import Served
from tests.plugin.queues import fill_queue, note_refusals
from tests.reasons import assert_counted


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
@pytest.mark.parametrize(("v_dim", "is_shared"), [(DIM, True), (64, True), (64, False)])
def test_pages_are_restored_to_other_places(make: Make, layout: str, v_dim: int, is_shared: bool) -> None:
    """``is_shared``: whether the data plane puts them there by itself."""
    pool = make_pool(layout, v_dim=v_dim, is_shared=is_shared)
    backend = make(pool)
    before = HostPages(pool)
    expected = {t: values_in(before, t, range(7)) for t in ("k", "v")}
    store_pages(backend, keys(7), list(range(7)))
    elsewhere = [39, 12, 20, 21, 30, 8, 10]
    assert backend.batch_get_v1(keys(7), tokens(elsewhere)) == [True] * 7
    for tensor in ("k", "v"):
        assert torch.equal(values_in(before, tensor, elsewhere), expected[tensor])
        assert torch.equal(values_in(before, tensor, range(7)), expected[tensor])


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latent_vectors_are_restored_to_other_places(make: Make, layout: str, dtype: torch.dtype) -> None:
    pool = make_mla_pool(layout, dtype)
    expected = pages_view(pool.kv_buffer, layout, PAGE_SIZE)[:7].clone()
    backend = make(pool)
    store_pages(backend, keys(7), list(range(7)))
    elsewhere = [39, 12, 20, 21, 30, 8, 10]
    assert backend.batch_get_v1(keys(7), tokens(elsewhere)) == [True] * 7
    after = pages_view(pool.kv_buffer, layout, PAGE_SIZE)
    assert torch.equal(after[elsewhere], expected)
    assert torch.equal(after[:7], expected)


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


@pytest.mark.parametrize("num_waiting", [0, POOL_PAGES])
def test_pages_wait_in_the_host_pool_while_it_has_room_for_others(
    make: Make, served: Served, monkeypatch: pytest.MonkeyPatch, num_waiting: int
) -> None:
    """``num_waiting``: pages of prompts that SGLang would write next."""
    monkeypatch.setattr(plane_module, "_WRITE_S", 0.01)
    backend, stop = make(write_queue_bytes=1 << 20), threading.Event()
    waiting: Queue[Any] = Queue()
    waiting.put(SimpleNamespace(hash_value=keys(num_waiting)))
    waiting.put(None)  # SGLang's, when it stops
    cache = make_cache()
    cache.cache_controller.backup_queue, cache.cache_controller.storage_stop_event = waiting, stop
    backend.be_patient(cache, 1.0, 0.0)
    free = fill_queue(backend._plane)
    refusals = note_refusals(backend._plane, monkeypatch)
    if not num_waiting:

        def free_at_last() -> None:
            wait_until(lambda: len(refusals) == 3)
            free()

        threading.Thread(target=free_at_last).start()
    assert backend.batch_set_v1(keys(1), tokens([0]), after([])) == [not num_waiting]
    if not num_waiting:
        served.write_all()
        fill_queue(backend._plane)
        stop.set()
        assert backend.batch_set_v1(keys(1, "more"), tokens([0]), after([])) == [False]


def test_a_batch_larger_than_the_queue_is_written_in_pieces(make: Make) -> None:
    backend = make(write_queue_bytes=1 << 20)
    num_pages = 2 * (1 << 20) // HostPages(make_pool()).geometry.page_bytes
    names = keys(num_pages)
    pages = [page % POOL_PAGES for page in range(num_pages)]
    assert backend.batch_set_v1(names, tokens(pages), after([])) == [True] * num_pages
    wait_until(lambda: backend.batch_exists(names) == num_pages)


def test_a_bug_is_a_miss(make: Make, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make()
    store_pages(backend, keys(2), [0, 1])

    async def fail(*args: object) -> list[object]:
        raise ZeroDivisionError

    monkeypatch.setattr(served.service.client.finder, "find_pages", fail)
    backend.begin_lookup("asked" * 1000)
    with assert_counted("lookup", Reason.INTERNAL):
        assert backend.batch_exists(keys(2)) == 0
    decided = status._state.recent[-1]
    assert (decided.request_id, decided.reason) == (label_of_request("asked" * 1000), Reason.INTERNAL)


def test_a_corrupt_segment_heals(make: Make, tmp_path: Path) -> None:
    backend = make()
    store_pages(backend, keys(2), [0, 1])
    (path,) = tmp_path.rglob("*.kvd")
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    other = make()
    assert other.batch_exists(keys(2)) == 2
    assert other.batch_get_v1(keys(2), tokens([3, 4])) == [False, False]
    wait_until(lambda: other.batch_exists(keys(2)) == 0)
    store_pages(other, keys(2), [0, 1])
    assert other.batch_get_v1(keys(2), tokens([3, 4])) == [True, True]


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


def test_clear_empties_only_this_namespace(make: Make) -> None:
    exact, uint8 = make(), make(quantiser="uint8")
    store_pages(exact, keys(3), [0, 1, 2])
    store_pages(uint8, keys(3), [0, 1, 2])
    exact.clear()
    assert exact.batch_exists(keys(3)) == 0
    assert uint8.batch_exists(keys(3)) == 3


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_cp_size": 2}, "context parallelism"),
        ({"should_split_heads": True}, "tp_lcm_size"),
    ],
)
def test_unsupported_configs_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    config = storage_config(extra_config={"store": "http://nowhere"}, **change)
    with pytest.raises(UnsupportedError, match=message):
        KVFetchStorage(config, make_pool())


def test_pools_that_are_not_supported_are_refused() -> None:
    config = storage_config(extra_config={"store": "http://nowhere"})
    for change, message in (
        ({"storage_format_tag": "x"}, "'x'"),
        ({"kind": MHATokenToKVPoolMXFP8Host}, "MHATokenToKVPoolMXFP8Host are not supported"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            KVFetchStorage(config, make_pool(**change))
    packed = make_mla_pool()
    packed.kv_cache_dim += 16
    with pytest.raises(UnsupportedError, match="latent vectors that SGLang keeps with their scales"):
        KVFetchStorage(config, packed)
    pool = make_pool()
    pool.layout = "page_unified"
    with pytest.raises(UnsupportedError, match="page_unified is not supported; use one of layer_first"):
        KVFetchStorage(config, pool)


@pytest.mark.parametrize(
    ("flag", "dtype"),
    [("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2), ("auto", torch.float8_e4m3fn)],
)
def test_flags_tell_the_fp8_type(make: Make, monkeypatch: pytest.MonkeyPatch, flag: str, dtype: torch.dtype) -> None:
    monkeypatch.setattr("sglang.srt.runtime_context.get_model", lambda: SimpleNamespace(kv_cache_dtype=flag))
    pool = make_fp8_pool(dtype)
    backend = make(pool, quantiser="exact")
    pages = HostPages(pool)
    assert pages.geometry.torch_dtype == values_in(pages, "k", [0]).dtype == dtype
    expected = [buffer[:7].clone() for buffer in pool.kv_buffer]
    store_pages(backend, keys(7), list(range(7)))
    assert backend.batch_get_v1(keys(7), tokens(list(range(20, 27)))) == [True] * 7
    for buffer, values in zip(pool.kv_buffer, expected, strict=True):
        assert torch.equal(buffer[20:27], values)
        assert torch.equal(buffer[:7], values)


def test_fp8_may_be_quantised(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.srt.runtime_context.get_model", lambda: SimpleNamespace(kv_cache_dtype="fp8_e4m3"))
    backend = make(pool := make_fp8_pool(torch.float8_e4m3fn), quantiser="uint8")
    store_pages(backend, keys(3), [0, 1, 2])
    assert backend.batch_get_v1(keys(3), tokens([10, 11, 12])) == [True] * 3
    got, expected = (values_in(HostPages(pool), "k", pages).float() for pages in ([10, 11, 12], [0, 1, 2]))
    torch.testing.assert_close(got, expected, rtol=0.13, atol=0.03)


@pytest.mark.parametrize("flag", ["mxfp8", "nvfp4", "bfloat16"])
def test_other_bytes_are_refused(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    monkeypatch.setattr("sglang.srt.runtime_context.get_model", lambda: SimpleNamespace(kv_cache_dtype=flag))
    with pytest.raises(UnsupportedError, match=f"bytes .*{flag}.* is not supported"):
        HostPages(make_fp8_pool(torch.float8_e5m2))


def test_small_pages_are_warned_of(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    make(make_pool("layer_first"))
    assert caplog.text.count("pages of 4 tokens make lookups slow") == 1
    assert "--page-size 64 is recommended" in caplog.text
    caplog.clear()
    make(make_pool("layer_first", page_size=16))
    assert "make lookups slow" not in caplog.text


@pytest.mark.parametrize("is_at_start", [True, False])
def test_a_draft_models_pool_is_stored_whenever_sglang_adds_it(
    monkeypatch: pytest.MonkeyPatch, is_at_start: bool
) -> None:
    """At a start SGLang adds it after it has attached the backend, and before it if the backend is attached later."""
    planes: list[SimpleNamespace] = []

    def open_plane(*args: Any, pool: Any) -> SimpleNamespace:
        planes.append(SimpleNamespace(pools=list(args[-1]._pools), has_draft=args[-1].has_draft, is_open=True))
        planes[-1].close = lambda plane=planes[-1]: setattr(plane, "is_open", False)
        return planes[-1]

    monkeypatch.setattr(storage_module, "open_engine_plane", open_plane)
    backend = KVFetchStorage(storage_config(extra_config={"store": "http://nowhere"}), make_pool())
    if is_at_start:
        backend.on_host_pools_registered()
        backend.register_mem_host_pool_v2(make_pool(), PoolName.DRAFT)
    else:
        backend.register_mem_host_pool_v2(make_pool(), PoolName.DRAFT)
        backend.on_host_pools_registered()
    (plane,) = [plane for plane in planes if plane.is_open]
    assert (plane.pools, plane.has_draft) == ([PoolName.DRAFT], True)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
@pytest.mark.parametrize("is_shared", [True, False])
def test_layers_of_a_draft_model_in_the_pool_are_stored_and_restored(make: Make, layout: str, is_shared: bool) -> None:
    """They come back bit by bit beside the model's, which are quantised."""
    pool = make_pool(layout, target_layer_num=LAYERS - 1, is_shared=is_shared)
    writer = make(pool, quantiser="uint8")
    assert writer.batch_set_v1(keys(4), tokens([0, 1, 2, 3]), after([])) == [True] * 4
    wait_until(lambda: writer.batch_exists(keys(4)) == 4)
    empty = make_pool(layout, target_layer_num=LAYERS - 1, is_shared=is_shared)
    for x in empty.kv_buffer:
        x.zero_()
    reader = make(empty, quantiser="uint8")
    assert reader.batch_exists_v2(keys(4), []).extra_pool_hit_pages == {PoolName.KV: 4}
    assert reader.batch_get_v1(keys(4), tokens([7, 5, 2, 9])) == [True] * 4
    for before, now in zip(pool.kv_buffer, empty.kv_buffer, strict=True):
        stored, restored = (pages_view(x, layout, PAGE_SIZE) for x in (before, now))
        assert torch.equal(restored[[7, 5, 2, 9], :, -1], stored[:4, :, -1])
        torch.testing.assert_close(restored[[7, 5, 2, 9], :, :-1], stored[:4, :, :-1], rtol=0, atol=0.05)
        assert not restored[[0, 1, 3, 4, 6]].any()


def test_pages_without_layers_of_a_draft_model_are_not_used(make: Make, tmp_path: Path) -> None:
    """Where an object with their bytes is gone, the hit ends."""
    writer = make(make_pool(target_layer_num=LAYERS - 1))
    writer.batch_set_v1(keys(4), tokens([0, 1, 2, 3]), after([]))
    wait_until(lambda: writer.batch_exists(keys(4)) == 4)
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


def test_a_draft_models_heads_are_not_taken_from_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """With MLA one rank writes for all, but a draft model may have K and V, of which each rank has some heads."""
    monkeypatch.setattr(SidePools, "page_bytes", {PoolName.DRAFT: 1})
    sides = SidePools()
    sides.add_pool(PoolName.DRAFT, make_mla_pool())
    assert sides.identity(0, 2, is_mla=True) == sides.identity(1, 2, is_mla=True)
    sides.add_pool(PoolName.DRAFT, make_pool())
    assert sides.identity(0, 2, is_mla=False) != sides.identity(1, 2, is_mla=False)
    with pytest.raises(UnsupportedError, match="side pools draft differ between ranks"):
        sides.identity(0, 2, is_mla=True)
