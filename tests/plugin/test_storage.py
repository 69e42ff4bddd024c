"""Tests that call the backend as SGLang's threads do, with a directory store. tests/e2e has whole engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo, PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mha_mxfp8 import MHATokenToKVPoolMXFP8Host

from sgl_kvfetch.dataplane import client
from sgl_kvfetch.errors import ConfigError, UnsupportedError
from sgl_kvfetch.plugin import plane as plane_module
from sgl_kvfetch.plugin import storage as storage_module
from sgl_kvfetch.plugin.host_pages import HostPages
from sgl_kvfetch.plugin.storage import KVFetchStorage
from sgl_kvfetch.types import KVGeometry
from tests.codecs.fake_nvenc import install
from tests.plugin.planes import Served
from tests.segments import make_heads, page_hashes

PAGE_SIZE, LAYERS, HEADS, DIM, POOL_PAGES = 4, 5, 2, 48, 40


def make_pool(
    layout: str = "page_first_direct",
    k_dim: int = DIM,
    v_dim: int = DIM,
    kind: type[MHATokenToKVPoolHost] | None = None,
    **changes: Any,
) -> MHATokenToKVPoolHost:
    """Return one of SGLang's host pools, filled with numbers, with only what the backend reads."""

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
    return pool


def make_fp8_pool(dtype: torch.dtype) -> MHATokenToKVPoolHost:
    """Return an fp8 pool as SGLang keeps it: as bytes."""
    pool = make_pool()
    pool.kv_buffer = tuple(buffer.to(dtype).view(torch.uint8) for buffer in pool.kv_buffer)
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
    return HiCacheStorageConfig(**fields | changes)


Make = Callable[..., KVFetchStorage]


@pytest.fixture
def served() -> Served:
    return Served()


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: Served) -> Iterator[Make]:
    """Builds backends on one store. The namespace, which would ask a running engine, is a fixed one."""

    def namespace(config: Any, quantiser: Any, storage_config: Any, geometry: KVGeometry, first_layer: int) -> Any:
        return make_heads(geometry, quantiser)

    monkeypatch.setattr(storage_module, "engine_heads", namespace)
    monkeypatch.setattr(plane_module, "_launch", served.launch)
    monkeypatch.setattr(plane_module, "run", partial(plane_module.run, on_service=served.add))
    made: list[KVFetchStorage] = []

    def build(pool: MHATokenToKVPoolHost | None = None, *, linger_s: float = 0.01, **config: Any) -> KVFetchStorage:
        monkeypatch.setattr(client, "_LINGER_S", linger_s)
        extra = {"store": f"file://{tmp_path}", "codec": "zstd"} | config
        made.append(KVFetchStorage(storage_config(extra_config=extra), pool or make_pool()))
        return made[-1]

    yield build
    for backend in made:
        backend.close()


def keys(num_pages: int, seed: str = "", first_page: int = 0) -> list[str]:
    return [h.hex() for h in page_hashes(num_pages, seed, first_page)]


def tokens(pages: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(PAGE_SIZE) + page * PAGE_SIZE for page in pages])


def after(names: list[str]) -> HiCacheStorageExtraInfo:
    return HiCacheStorageExtraInfo(prefix_keys=names)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def store_pages(backend: KVFetchStorage, names: list[str], pages: list[int], before: list[str] | None = None) -> None:
    assert backend.batch_set_v1(names, tokens(pages), after(before or [])) == [True] * len(names)
    wait_until(lambda: backend.batch_exists([*(before or []), *names]) == len(names) + len(before or []))


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
@pytest.mark.parametrize("v_dim", [DIM, 64])
def test_pages_are_restored_to_other_places(make: Make, layout: str, v_dim: int) -> None:
    pool = make_pool(layout, v_dim=v_dim)
    backend = make(pool)
    before = HostPages(pool)
    expected = {t: before.read(t, range(7)) for t in ("k", "v")}
    store_pages(backend, keys(7), list(range(7)))
    elsewhere = [39, 12, 20, 21, 30, 8, 10]
    assert backend.batch_get_v1(keys(7), tokens(elsewhere)) == [True] * 7
    for tensor in ("k", "v"):
        assert torch.equal(before.read(tensor, elsewhere), expected[tensor])
        assert torch.equal(before.read(tensor, range(7)), expected[tensor])


def test_batches_of_one_prefix_are_gathered_and_found_by_others(make: Make, tmp_path: Path) -> None:
    writer = make(linger_s=0.2)
    names = keys(16)
    for first in range(0, 16, 2):
        info = after(names[:first])
        assert all(writer.batch_set_v1(names[first : first + 2], tokens([first, first + 1]), info))
    wait_until(lambda: writer.batch_exists(names) == 16)
    assert [p.name.split("-")[0] for p in tmp_path.rglob("*.kvm")] == ["16"]
    reader = make(make_pool("layer_first"))
    assert reader.batch_exists(names[:5] + keys(5, "other")) == 5
    assert reader.batch_exists(keys(5, "other")) == 0
    # A fetch needs no lookup before it, may start anywhere, and stops where the store does.
    assert reader.batch_get_v1(names[3:] + keys(2, "other"), tokens(list(range(15)))) == [True] * 13 + [False] * 2


def test_a_full_queue_takes_what_fits_and_says_so(make: Make) -> None:
    backend = make(write_queue_bytes=1 << 20, linger_s=30)
    page_bytes = backend._pages.geometry.page_bytes
    fits = (1 << 20) // page_bytes
    results = [backend.batch_set_v1(keys(1, str(i)), tokens([0]), after([])) for i in range(fits)]
    assert results == [[True]] * fits
    started_s = time.monotonic()
    assert backend.batch_set_v1(keys(1, "more"), tokens([0]), after([])) == [False]
    assert 0.5 < time.monotonic() - started_s < 3


def test_a_batch_larger_than_the_queue_is_written_in_pieces(make: Make) -> None:
    backend = make(write_queue_bytes=1 << 20)
    num_pages = 2 * (1 << 20) // backend._pages.geometry.page_bytes
    names = keys(num_pages)
    pages = [page % POOL_PAGES for page in range(num_pages)]
    assert backend.batch_set_v1(names, tokens(pages), after([])) == [True] * num_pages
    wait_until(lambda: backend.batch_exists(names) == num_pages)


def test_a_suspended_backend_neither_reads_nor_writes(make: Make, tmp_path: Path) -> None:
    backend = make()
    store_pages(backend, keys(2), [0, 1])
    backend.access.suspend("other weights")
    assert backend.batch_exists(keys(2)) == 0
    assert backend.batch_get_v1(keys(2), tokens([3, 4])) == [False, False]
    assert backend.batch_set_v1(keys(2, "new"), tokens([0, 1]), after([])) == [True, True]
    backend.close()
    assert len(list(tmp_path.rglob("*.kvm"))) == 1


def test_a_fetch_ends_when_sglang_gives_it_up(make: Make, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make()
    store_pages(backend, keys(2), [0, 1])

    async def hang(*args: Any) -> bytes:
        await asyncio.sleep(60)
        return b""

    backend.batch_exists(keys(2, "other"))  # so that nothing is read ahead
    monkeypatch.setattr(served.service.client.store, "get", hang)
    served.service.client.fetcher._ahead._reads.clear()
    started_s = time.monotonic()
    given_up = iter([False, False, True])
    assert backend.fetch_pages(keys(2), tokens([3, 4]), lambda: next(given_up)) == 0
    assert time.monotonic() - started_s < 2


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


def test_a_store_that_is_gone_is_left_alone_for_a_while(make: Make) -> None:
    backend = make(store="http://127.0.0.1:9", lookup_timeout_s=0.3)
    for _ in range(3):
        assert backend.batch_exists(keys(3)) == 0
    started_s = time.monotonic()
    assert backend.batch_exists(keys(3)) == 0
    assert time.monotonic() - started_s < 0.1
    assert backend.batch_get_v1(keys(1), tokens([0])) == [False]


def test_v2_serves_the_kv_pool_and_refuses_others(make: Make) -> None:
    backend = make()
    transfer = PoolTransfer(name=PoolName.KV, host_indices=tokens([0, 1]), keys=keys(2))
    assert backend.batch_set_v2([transfer], after([])) == {PoolName.KV: [True, True]}
    wait_until(lambda: backend.batch_exists_v2(keys(2)).kv_hit_pages == 2)
    assert backend.batch_exists_v2(keys(3)).restorable_prefix_pages == [1, 2]
    assert backend.batch_get_v2([transfer]) == {PoolName.KV: [True, True]}
    with pytest.raises(UnsupportedError, match="side pool 'mamba'"):
        backend.register_mem_host_pool_v2(make_pool(), PoolName.MAMBA)


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
        ({"is_mla_model": True}, "MLA"),
        ({"attn_cp_size": 2}, "context parallelism"),
        ({"should_split_heads": True}, "tp_lcm_size"),
    ],
)
def test_unsupported_configs_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    config = storage_config(extra_config={"store": "file:///nowhere"}, **change)
    with pytest.raises(UnsupportedError, match=message):
        KVFetchStorage(config, make_pool())


def test_pools_that_are_not_supported_are_refused() -> None:
    config = storage_config(extra_config={"store": "file:///nowhere"})
    for change, message in (
        ({"storage_format_tag": "x"}, "'x'"),
        ({"target_layer_num": 4}, "draft"),
        ({"kind": MHATokenToKVPoolMXFP8Host}, "MHATokenToKVPoolMXFP8Host are not supported"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            KVFetchStorage(config, make_pool(**change))
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
    assert pages.geometry.torch_dtype == pages.read("k", [0]).dtype == dtype
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
    got, expected = (HostPages(pool).read("k", pages).float() for pages in ([10, 11, 12], [0, 1, 2]))
    torch.testing.assert_close(got, expected, rtol=0.13, atol=0.03)


@pytest.mark.parametrize("flag", ["mxfp8", "nvfp4", "bfloat16"])
def test_other_bytes_are_refused(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    monkeypatch.setattr("sglang.srt.runtime_context.get_model", lambda: SimpleNamespace(kv_cache_dtype=flag))
    with pytest.raises(UnsupportedError, match=f"bytes .*{flag}.* is not supported"):
        HostPages(make_fp8_pool(torch.float8_e5m2))


def test_bad_config_is_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="codec = 'av1'"):
        make(codec="av1")


def test_nvenc_encodes_what_is_written(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    nvc = install(monkeypatch)
    backend = make(codec="hevc", quantiser="uint8")
    num_tried = len(nvc.calls)
    store_pages(backend, keys(4), [0, 1, 2, 3])
    assert len(nvc.calls) > num_tried
    elsewhere = [39, 12, 20, 21]
    assert backend.batch_get_v1(keys(4), tokens(elsewhere)) == [True] * 4
    for config in ({"codec": "zstd"}, {"codec": "hevc", "mode": "read_only"}):
        calls = len(nvc.calls)
        make(**config)
        assert len(nvc.calls) == calls


def test_without_nvenc_it_starts(make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    caplog.set_level("INFO")
    make(codec="hevc")
    assert caplog.text.count("kvfetch: HEVC is encoded on the CPU: RuntimeError: there is no GPU") == 1
