"""Side pools as SGLang's threads use them. tests/e2e/test_sliding_window.py has a whole engine."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorage, PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from harness.metrics import own_metric
from harness.waiting import wait_until
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.engine import process
from sgl_kvfetch.errors import StoreError, UnsupportedError
from sgl_kvfetch.plane.write import writer as writer_module
from sgl_kvfetch.plugin.host.side_pools import SidePools
from sgl_kvfetch.plugin.host.storage import KVFetchStorage
from sgl_kvfetch.reasons import Reason
from tests.plugin.backends import (
    PAGE_SIZE,
    Make,
    after,
    keys,
    make_indexer,
    make_pool,
    make_side_pool,
    make_states,
    storage_config,
    tokens,
    transfer,
)
from tests.plugin.planes import Served
from tests.reasons import assert_counted

SWA, INDEXER = PoolName.SWA, PoolName.INDEXER


def page_of(pool: MHATokenToKVPoolHost, page: int) -> torch.Tensor:
    return pool.get_data_page(page * PAGE_SIZE, flat=True).clone()


def store(
    backend: KVFetchStorage, names: list[str], sides: Mapping[PoolName, Mapping[int, int]], before: Sequence[str] = ()
) -> None:
    """Do what SGLang does for one node of its tree. ``sides``: of each pool, where its pages of these are."""
    for pool, places in sides.items():
        if places:
            announced = transfer([names[page] for page in places], list(places.values()), pool)
            assert backend.batch_set_v2([announced]) == {pool: [True] * len(places)}
    pages = list(range(len(names)))
    assert backend.batch_set_v1(names, tokens(pages), after(list(before))) == [True] * len(names)
    written = [*before, *names]
    wait_until(lambda: backend.batch_exists(written) == len(written))


def until_there(backend: KVFetchStorage, names: list[str], num_pages: int, trailing: int = 1) -> None:
    wants = [transfer(["__placeholder__"] * trailing)]
    wait_until(lambda: backend.batch_exists_v2(names, wants).kv_hit_pages == num_pages)


class Kind(NamedTuple):
    """Side pages of a kind of model. ``make``: pools for K and V, and for them. ``stored``: of nine pages, which have
    one, and where. ``elsewhere``: where they are restored to. ``trailing``: how many a prefix needs at its end; 0 for
    one of each page. ``prefixes``: which can be used."""

    pool: PoolName
    make: Callable[[str, int], tuple[Any, Any]]
    stored: dict[int, int]
    elsewhere: list[int]
    trailing: int
    prefixes: list[int]

    def asked(self, names: Sequence[str], places: Sequence[int] | None = None) -> PoolTransfer:
        asked = transfer(names, places, self.pool, "trailing_pages" if self.trailing else "all_pages")
        if places is not None and self.pool == PoolName.MAMBA:
            asked.host_indices = torch.tensor(places)  # slots, and not pages of tokens
        return asked

    def page(self, side: Any, place: int) -> torch.Tensor:
        content = side.get_data_page(place if self.pool == PoolName.MAMBA else place * PAGE_SIZE)
        return content.view(torch.uint8).clone()  # some are NaN


KINDS = {
    "windows": Kind(
        SWA, lambda layout, seed: (make_pool(layout), make_side_pool(seed, layout)), {5: 20, 6: 21}, [3, 30], 2, [7]
    ),
    "states": Kind(
        PoolName.MAMBA, lambda layout, seed: (make_pool(layout), make_states()), {3: 2, 6: 0}, [4, 3], 1, [4, 7]
    ),
    "indexer": Kind(INDEXER, lambda layout, seed: make_indexer(layout), {0: 0, 1: 1, 2: 2}, [30, 8, 12], 0, [1, 2, 3]),
}
LAYOUTS = "layer_first", "page_first", "page_first_direct"


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for name in KINDS for layout in (LAYOUTS if name != "states" else ["page_first_direct"])],
)
def test_side_pages_are_restored_to_other_places_and_bound_the_hit(make: Make, name: str, layout: str) -> None:
    kind, names = KINDS[name], keys(9)
    kv, side = kind.make(layout, 0)
    writer = make(kv, sides={kind.pool: side})
    announced = kind.asked([names[page] for page in kind.stored], list(kind.stored.values()))
    assert writer.batch_set_v2([announced]) == {kind.pool: [True] * len(kind.stored)}
    store(writer, names, {})
    kv, others = kind.make(layout, 1)
    reader = make(kv, sides={kind.pool: others})
    wanted = kind.asked(["__placeholder__"] * kind.trailing)
    found = reader.batch_exists_v2(names + keys(2, "other"), [wanted])
    hit = kind.prefixes[-1]
    assert found.restorable_prefix_pages == kind.prefixes
    assert found.kv_hit_pages == found.extra_pool_hit_pages[kind.pool] == hit
    assert reader.batch_get_v1(names[:hit], tokens(list(range(20, 20 + hit)))) == [True] * hit
    untouched = kind.page(others, 1)
    there = kind.asked([names[page] for page in [*kind.stored, 8]], [*kind.elsewhere, 1])
    assert reader.batch_get_v2([there]) == {kind.pool: [*[True] * len(kind.stored), False]}
    for before, now in zip(kind.stored.values(), kind.elsewhere, strict=True):
        assert torch.equal(kind.page(others, now), kind.page(side, before))
    assert torch.equal(kind.page(others, 1), untouched)


@pytest.mark.skipif(
    not hasattr(HiCacheStorage, "on_host_pools_registered"), reason="SGLang's own backend names no runs before 0.5.23"
)
def test_runs_that_can_be_used_are_those_of_sglangs_own_backend(make: Make, tmp_path: Path) -> None:
    rng = random.Random(0)
    pools = {SWA: make_side_pool(), INDEXER: make_side_pool(1)}
    ours = make(sides=pools)
    theirs = HiCacheFile(storage_config(extra_config={}), str(tmp_path / "files"))
    for name, pool in pools.items():
        theirs.register_mem_host_pool_v2(pool, name)
    for case in range(8):
        names = keys(8, f"case {case}")
        sides = {
            pool: {page: page for page in range(8) if rng.random() < chance}
            for pool, chance in ((SWA, 0.6), (INDEXER, 0.9))
        }
        store(ours, names, sides)
        for name in names:
            theirs.set(name, torch.zeros(1))
        for pool, places in sides.items():
            if places:
                theirs.batch_set_v2([transfer([names[page] for page in places], list(places), pool)])
        for trailing in (1, 2, 5):
            wants = [transfer(["__placeholder__"] * trailing), transfer([], pool=INDEXER, policy="all_pages")]
            for asked in (wants, wants[:1], wants[1:]):
                found, expected = ours.batch_exists_v2(names, asked), theirs.batch_exists_v2(names, asked)
                assert found.restorable_prefix_pages == expected.restorable_prefix_pages, (sides, asked)
                assert found.kv_hit_pages == expected.kv_hit_pages
                # SGLang's backend does not look at further pools once nothing can be used.
                assert found.extra_pool_hit_pages.items() >= expected.extra_pool_hit_pages.items()


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_side_pages_are_added_to_stored_segments(
    make: Make, served: Served, tmp_path: Path, is_encrypted: bool
) -> None:
    """As when SGLang computes a state in the middle of a prefix that is stored."""
    (tmp_path / "keys").write_text("0f" * 32)
    how = {"key_file": str(tmp_path / "keys")} if is_encrypted else {}
    pool, names = make_side_pool(), keys(8)
    backend = make(sides={SWA: pool}, memory_cache="4MiB", **how)
    store(backend, names, {SWA: {7: 7}})
    store(backend, names[:4], {SWA: {3: 3, 2: 2}})
    until_there(backend, names[:5], 4)
    store(backend, names[:4], {SWA: {3: 3}})  # known by now
    (path,) = tmp_path.rglob("*.kvm")
    written = path.read_bytes()
    assert is_encrypted or sum(len(side.pages) for side in decode_manifest(written).sides) == 3
    restored = make_side_pool(seed=1)
    reader = make(sides={SWA: restored}, **how)
    there = [True, True, False, False, False, True]
    assert reader.batch_get_v2([transfer(names[2:], range(30, 36))]) == {SWA: there}
    assert [torch.equal(page_of(restored, 28 + page), page_of(pool, page)) for page in range(2, 8)] == there
    if is_encrypted:
        # A server without the key finds them, cannot use them, and leaves them alone.
        without = make(sides={SWA: make_side_pool(2)})
        assert without.batch_exists(names) == 0
        assert without.batch_set_v1(names, tokens(list(range(8))), after([])) == [True] * 8
        served.write_all()
        assert path.read_bytes() == written


@pytest.mark.parametrize("fault", ["flipped", "missing"])
def test_a_damaged_side_page_is_a_miss_and_is_stored_again(make: Make, tmp_path: Path, fault: str) -> None:
    names, pool = keys(4), make_side_pool()
    store(make(sides={SWA: pool}), names, {SWA: {3: 3}})
    (manifest,) = [decode_manifest(path.read_bytes()) for path in tmp_path.rglob("*.kvm")]
    path = tmp_path / manifest.data_name(manifest.sides[0])
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    reader = make(sides={SWA: make_side_pool(1)})
    until_there(reader, names, 4)
    path.unlink() if fault == "missing" else path.write_bytes(content)
    before = own_metric("sgl_kvfetch_corrupt_chunks_total")
    assert reader.batch_get_v2([transfer(names[3:], [5])]) == {SWA: [False]}
    assert own_metric("sgl_kvfetch_corrupt_chunks_total") == before + (fault == "flipped")
    wait_until(lambda: reader.batch_exists(names) == 0)  # the store has deleted the segment
    store(reader, names, {SWA: {3: 7}})
    until_there(reader, names, 4)


def test_pages_of_another_size_are_misses(make: Make, served: Served) -> None:
    backend = make(sides={SWA: make_side_pool()})
    store(backend, keys(2), {SWA: {1: 1}})
    until_there(backend, keys(2), 2)
    served.service._prompts.side_bytes = {str(SWA): 64}
    with assert_counted("fetch", Reason.FORMAT):
        assert backend.batch_get_v2([transfer(keys(2)[1:], [5])]) == {SWA: [False]}


def test_windows_are_not_served_while_audits_try_again(make: Make, served: Served) -> None:
    backend = make(sides={SWA: make_side_pool()})
    store(backend, keys(2), {SWA: {1: 1}})
    served.service._auditor.is_trying = True
    assert backend.batch_exists_v2(keys(2), [transfer(["__placeholder__"])]).kv_hit_pages == 0


def test_side_pages_that_cannot_be_copied_are_not_there(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_side_pool()
    backend = make(sides={SWA: pool})
    store(backend, keys(2), {SWA: {1: 1}})
    until_there(backend, keys(2), 2)
    with monkeypatch.context() as patch, assert_counted("fetch", Reason.INTERNAL):
        patch.setattr(pool, "set_from_flat_data_page", Mock(side_effect=RuntimeError("no")))
        assert backend.batch_get_v2([transfer(keys(2)[1:], [5])]) == {SWA: [False]}
    assert backend.batch_get_v2([transfer(keys(2)[1:], [5])]) == {SWA: [True]}


def test_an_operation_that_is_broken_off_leaves_no_announced_pages(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang gives their places to other sequences, whose states would be stored as theirs."""
    backend, names = make(sides={SWA: make_side_pool()}), keys(8)
    backend.batch_set_v2([transfer(names[7:], [7])])
    with monkeypatch.context() as failing:
        failing.setattr(backend._plane, "write", Mock(return_value=0))
        assert backend.batch_set_v1(names[:4], tokens(list(range(4))), after([])) == [False] * 4
    store(backend, names, {})
    assert backend.batch_exists_v2(names, [transfer(["__placeholder__"])]).restorable_prefix_pages == []


def test_pages_that_are_added_at_the_same_time_are_kept_as_far_as_readers_accept_them(
    make: Make, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, names = make(sides={SWA: make_side_pool()}), keys(8)
    store(backend, names, {SWA: {7: 7}})

    def add(page: int) -> None:
        backend.batch_set_v2([transfer([names[page]], [page])])
        assert all(backend.batch_set_v1(names[: page + 1], tokens(list(range(page + 1))), after([])))

    add(1)
    add(3)
    served.write_all()
    monkeypatch.setattr(writer_module, "MAX_SIDES", 3)
    add(5)
    served.write_all()
    assert backend.batch_exists_v2(names, [transfer(["__placeholder__"])]).restorable_prefix_pages == [2, 4, 8]


def test_pages_that_the_shared_memory_has_no_room_for_come_in_parts(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "SHARED_BYTES", 1 << 10)
    pool = make_side_pool()
    expected = [page_of(pool, page) for page in range(8)]
    monkeypatch.setattr(process.Setup, "side_part_bytes", 3 * expected[0].nbytes)
    backend = make(sides={SWA: pool})
    store(backend, keys(8), {SWA: {page: page for page in range(8) if page != 4}})
    there = [page != 4 for page in range(8)]
    assert backend.batch_get_v2([transfer(keys(8), range(20, 28))]) == {SWA: there}
    assert [torch.equal(page_of(pool, 20 + page), x) for page, x in enumerate(expected)] == there


def test_a_draft_models_pool_may_come_after_the_start(make: Make) -> None:
    """As when SGLang starts. Where the backend is attached later, it comes before."""
    backend, names = make(), keys(3)
    backend.register_mem_host_pool_v2(pool := make_side_pool(), PoolName.DRAFT)
    expected = page_of(pool, 2)
    store(backend, names, {PoolName.DRAFT: {0: 0, 1: 1, 2: 2}})
    wants = [transfer([], pool=PoolName.DRAFT, policy="all_pages")]
    wait_until(lambda: backend.batch_exists_v2(names, wants).kv_hit_pages == 3)
    assert backend.batch_get_v2([transfer(names[2:], [9], PoolName.DRAFT)]) == {PoolName.DRAFT: [True]}
    assert torch.equal(page_of(pool, 9), expected)


def test_sglang_need_not_wait_for_side_pages_when_it_stops(make: Make, served: Served) -> None:
    backend = make(sides={SWA: make_side_pool()})
    store(backend, keys(2), {SWA: {1: 1}})
    until_there(backend, keys(2), 2)
    arrived = threading.Event()

    async def hang(*args: object) -> bytes:
        arrived.set()
        await asyncio.Event().wait()
        raise AssertionError

    served.service._prompts.sides._store = Mock(read=hang)
    backend._prefetch = replace(backend._prefetch, is_stopping=arrived.is_set)
    assert backend.batch_get_v2([transfer(keys(2)[1:], [5])]) == {SWA: [False]}


def test_an_unknown_policy_is_a_miss(make: Make) -> None:
    backend = make(sides={SWA: make_side_pool()})
    store(backend, keys(2), {SWA: {1: 1}})
    with assert_counted("lookup", Reason.UNSUPPORTED):
        assert backend.batch_exists_v2(keys(2), [transfer([], policy="block_groups")]).kv_hit_pages == 0


def test_lookups_pause_while_side_pages_cannot_be_read(
    make: Make, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, names = make(sides={SWA: make_side_pool()}), keys(2)
    store(backend, names, {SWA: {1: 1}})
    wants = [transfer(["__placeholder__"])]
    fails = Mock(read=Mock(side_effect=StoreError("server", "a test")))
    with monkeypatch.context() as failing:
        failing.setattr(served.service._prompts.sides, "_store", fails)
        num_failed = 0
        while backend.batch_exists_v2(names, wants).kv_hit_pages:
            assert backend.batch_get_v1(names, tokens([4, 5])) == [True, True]
            assert backend.batch_get_v2([transfer(names[1:], [5])]) == {SWA: [False]}
            num_failed += 1
        assert num_failed >= 3
    until_there(backend, names, 2)  # when the pause is over


def test_the_identity_tells_pools_apart_whose_pages_cannot_be_exchanged() -> None:
    def identity(*rank: Any, name: PoolName = SWA, is_mla: bool = False, **pool: Any) -> str:
        return identity_of(name, make_side_pool(**pool), *(rank or (0, 1)), is_mla=is_mla)

    def identity_of(name: PoolName, pool: Any, tp_rank: int, tp_size: int, *stage: int, is_mla: bool = False) -> str:
        sides = SidePools()
        sides.add_pool(str(name), pool)
        return sides.identity(tp_rank, tp_size, is_mla, *stage)

    assert identity() == identity(seed=1)
    different = [identity(), identity(layout="page_first"), identity(name=INDEXER), identity(dtype=torch.float32)]
    different += [identity(0, 2), identity(1, 2), identity(is_mla=True), identity(0, 1, 0, 2), identity(0, 1, 1, 2)]
    dtypes = torch.bfloat16, torch.float16, torch.float32
    different += [identity_of(PoolName.MAMBA, make_states(dtype), 0, 1) for dtype in dtypes]
    assert len(set(different)) == len(different)
    assert identity(1, 2, is_mla=True) == identity(is_mla=True)  # one rank writes for all
    # A draft model may have K and V, of which each rank has some heads, where the model has MLA.
    _, indexer = make_indexer()
    one, other = (identity_of(PoolName.DRAFT, indexer, rank, 2, is_mla=True) for rank in range(2))
    assert one == other
    for name in (PoolName.MAMBA, PoolName.DRAFT):
        with pytest.raises(UnsupportedError, match=f"side pools {name!s} differ between ranks"):
            identity(0, 2, name=name, is_mla=True)


def test_klt_is_refused_in_pipeline_stages(make: Make) -> None:
    with pytest.raises(UnsupportedError, match="'klt' does not support models with side pools in pipeline stages"):
        make(make_pool(), sides={SWA: make_side_pool()}, stages=2, quantiser="klt")
