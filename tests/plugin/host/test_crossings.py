"""Each pair of features in host mode, as SGLang's threads use the backend (tests/crossings.py)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

from harness.metrics import own_metric
from harness.waiting import wait_until
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.plugin import identity, weight_updates
from sgl_kvfetch.plugin.host.pool import pages_view
from sgl_kvfetch.plugin.host.storage import KVFetchStorage
from sgl_kvfetch.stores.base import WrappedStore
from sgl_kvfetch.types import TENSORS
from tests.codec.quant.profiles import make_profile
from tests.crossings import Pair, assert_memory_is_read, is_cut, let_happen, to_run
from tests.plugin.backends import (
    DIM,
    HEADS,
    LAYERS,
    PAGE_SIZE,
    POOL_PAGES,
    Make,
    after,
    keys,
    make_cache,
    make_operation,
    make_pool,
    make_side_pool,
    tokens as slots,
    transfer,
)
from tests.plugin.planes import Served
from tests.segments import there_and_back

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

AUDITED = 128 // PAGE_SIZE
SERVED = 4  # pages of a hit that is audited
TARGET_KL = 3e-5
SIDE_POOLS = {"side pages": PoolName.SWA, "draft model": PoolName.DRAFT}


@pytest.fixture(autouse=True)
def _engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights have not changed, and all layers are in its pool."""
    monkeypatch.setattr(weight_updates, "_state", weight_updates._State())
    monkeypatch.setattr(identity, "pool_layers", lambda: None)


@pytest.mark.parametrize("pair", to_run("host"), ids=str)
def test_two_features(pair: Pair, make: Make, served: Served, tmp_path: Path) -> None:
    """Ranks store and fetch by themselves; SGLang gives all of them the shortest hit."""
    audits = {result: own_metric("sgl_kvfetch_audits_total", result=result) for result in ("sound", "beyond", "failed")}

    def since(result: str) -> float:
        return own_metric("sgl_kvfetch_audits_total", result=result) - audits[result]

    hit = POOL_PAGES
    num_ranks = 1 + ("TP 2" in pair)
    for number in range(num_ranks):
        hit = _Rank(number, num_ranks, pair, make, served, tmp_path).play(hit)
        if is_cut(pair):
            wait_until(lambda number=number: since("sound") >= number + 1)  # type: ignore[misc]
    assert since("beyond") == since("failed") == 0


class _Rank:
    def __init__(self, number: int, num_ranks: int, pair: Pair, make: Make, served: Served, folder: Path) -> None:
        self.pair, self._make, self._served = pair, make, served
        self._place = {"tp_rank": number, "tp_size": num_ranks}
        self._num_pages = SERVED + (AUDITED if "audits" in pair else 4)  # less than the pool has
        self._names = keys(self._num_pages, "an adapter" if "LoRA" in pair else "")
        self._pool = make_pool()
        self._sides = {pool: make_side_pool() for feature, pool in SIDE_POOLS.items() if feature in pair}
        # Side pages of a window are for the end of a prefix alone; a draft model has one for each page of KV.
        all_pages, ends = [*range(self._num_pages)], [SERVED - 1, self._num_pages - 1]
        self._side_pages = {pool: all_pages if pool == PoolName.DRAFT else ends for pool in self._sides}
        self._views = [pages_view(x, self._pool.layout, PAGE_SIZE) for x in self._pool.kv_buffer]
        self._quantiser: KltQuantiser | None = None
        if "levels" in pair:
            profile = make_profile(
                num_layers=LAYERS, num_heads=num_ranks * HEADS, head_dim=DIM, cell_layers=LAYERS, cell_heads=1
            )
            self._quantiser = KltQuantiser(profile, TARGET_KL)
        self._config = self._config_of_features(folder)
        self._compute("weights")
        self.backend = self._open()

    def _config_of_features(self, folder: Path) -> dict[str, Any]:
        (folder / "key").write_text("0f" * 32)
        profile = folder / "profile"
        if self._quantiser is not None:
            self._quantiser.profile.save(profile)
        of_features: dict[str, dict[str, Any]] = {
            "audits": {"audit_share": 1},
            "levels": {"profile": str(profile), "target_kl": TARGET_KL, "codec": "ans", "levels": {"count": 3}},
            "encryption": {"key_file": str(folder / "key")},
            "`memory_cache`": {"memory_cache": "4MiB"},
        }
        config: dict[str, Any] = {"model_id": "weights"}
        for feature in self.pair:
            config |= of_features.get(feature, {})
        return config

    def _open(self, **changes: Any) -> KVFetchStorage:
        return self._make(self._pool, sides=self._sides, place=self._place, **self._config | changes)

    def _compute(self, weights: str) -> None:
        """Draw values, which stand for what the engine computes by these weights."""
        seeds = torch.Generator().manual_seed(len(weights))
        self._values = [torch.randn(x[: self._num_pages].shape, generator=seeds) for x in self._views]
        self._side_values = {
            pool: torch.randn(side.kv_buffer[:, : self._num_pages].shape, generator=seeds).to(side.kv_buffer.dtype)
            for pool, side in self._sides.items()
        }

    def play(self, most: int) -> int:
        """Return how many pages the last fetch may load. ``most``: what others found."""
        if "LoRA" in self.pair:
            own, self._names = self._names, keys(self._num_pages, "another adapter")
            self.store()
            self._names = own
            assert self.found() == 0
        self.store()
        let_happen(self.pair, self)
        with assert_memory_is_read(self.pair):
            for _ in range(2):
                hit = min(most, self.found())
                assert hit == (SERVED if is_cut(self.pair) else self._num_pages)
                self.fetch(hit)
        return hit

    def store(self) -> None:
        """In two parts, so that there are side pages for the end of each."""
        self._fill(range(self._num_pages), [*range(self._num_pages)])
        self._hand_over(0, SERVED, [*range(self._num_pages)])
        self._hand_over(SERVED, self._num_pages, [*range(self._num_pages)])

    def _fill(self, pages: range, places: list[int]) -> None:
        """Put computed pages of the prompt into these pages of the pool."""
        for view, values in zip(self._views, self._values, strict=True):
            view[places] = values[[*pages]]
        for pool, side in self._sides.items():
            side.kv_buffer[:, places] = self._side_values[pool][:, [*pages]]

    def _hand_over(self, first: int, end: int, places: list[int]) -> None:
        names = self._names[first:end]
        for pool, of_side in self._side_pages.items():
            if pages := [page for page in of_side if first <= page < end]:
                announced = transfer([self._names[page] for page in pages], [places[page] for page in pages], pool)
                assert self.backend.batch_set_v2([announced]) == {pool: [True] * len(pages)}
        there = slots(places[first:end])
        assert self.backend.batch_set_v1(names, there, after(self._names[:first])) == [True] * len(names)
        self._served.write_all()

    def found(self) -> int:
        """Return how long a prefix SGLang would fetch."""
        wants: list[PoolTransfer] = []
        for pool in self._sides:
            policy = "all_pages" if pool == PoolName.DRAFT else "trailing_pages"
            wants.append(transfer([] if pool == PoolName.DRAFT else ["__placeholder__"], pool=pool, policy=policy))
        return max(self.backend.batch_exists_v2(self._names, wants).restorable_prefix_pages, default=0)

    def fetch(self, num_pages: int) -> None:
        """Fetch a prefix to other places than it was stored from, compute the rest, and compare everything."""
        places = torch.randperm(POOL_PAGES, generator=torch.Generator().manual_seed(1))[: self._num_pages].tolist()
        buffers = [*self._views, *(side.kv_buffer.transpose(0, 1) for side in self._sides.values())]
        for buffer in buffers:
            buffer.fill_(float("nan"))
        names = self._names[:num_pages]
        assert self.backend.batch_get_v1(names, slots(places[:num_pages])) == [True] * num_pages
        of_sides = {
            pool: [page for page in pages if page < num_pages][0 if pool == PoolName.DRAFT else -1 :]
            for pool, pages in self._side_pages.items()
        }
        for pool, pages in of_sides.items():
            asked = transfer([self._names[page] for page in pages], [places[page] for page in pages], pool)
            assert self.backend.batch_get_v2([asked]) == {pool: [True] * len(pages)}
        self._check(num_pages, places, of_sides)
        self._fill(range(num_pages, self._num_pages), places[num_pages:])
        if num_pages < self._num_pages:
            self._hand_over(num_pages, self._num_pages, places)

    def _check(self, num_pages: int, places: list[int], of_sides: dict[PoolName, list[int]]) -> None:
        expected = dict(zip(TENSORS, (values[:num_pages].flatten(0, 1) for values in self._values), strict=True))
        if self._quantiser is not None:
            expected = there_and_back(self._quantiser, expected)
        for view, values in zip(self._views, expected.values(), strict=True):
            fetched = view[places[:num_pages]].flatten(0, 1)
            torch.testing.assert_close(fetched, values, rtol=0, atol=0 if self._quantiser is None else 1e-4)
            assert bool(view[_others(places[:num_pages])].isnan().all()), "a page of nobody was written to"
        for pool, pages in of_sides.items():
            side, there = self._sides[pool].kv_buffer, [places[page] for page in pages]
            assert torch.equal(side[:, there], self._side_values[pool][:, pages])
            assert bool(side[:, _others(there)].isnan().all()), "a side page of nobody was written to"

    def abort(self) -> None:
        """While its pages are read, as SGLang does by ending its threads' wait."""
        is_asked = iter([False])
        operation = make_operation(time.monotonic(), self._names)
        self.backend.be_patient(make_cache("wait_complete"), 600.0, 0.0)
        self.backend.begin_transfer(operation, lambda: next(is_asked, True))
        with self._reads_hang():
            assert self.found()
            there = self.backend.batch_get_v1(self._names, slots([*range(self._num_pages)]))
        assert not any(there) or "`memory_cache`" in self.pair
        self.backend.begin_transfer(operation, lambda: False)

    @contextmanager
    def _reads_hang(self) -> Iterator[None]:
        store: Any = self._served.service.client.store
        while isinstance(store._store, WrappedStore):  # one with keys
            store = store._store
        get, is_over = store.get, threading.Event()

        async def wait_and_get(*args: Any) -> bytes | None:
            while not is_over.is_set():  # noqa: ASYNC110 -- set from another thread
                await asyncio.sleep(0.001)
            return await get(*args)

        store.__dict__["get"] = wait_and_get
        try:
            yield
        finally:
            is_over.set()
            store.__dict__["get"] = get

    def restart(self) -> None:
        num_started = len(self._served.services)
        former = self.backend._plane._peer
        former.running.kill()
        wait_until(lambda: self.backend._plane._peer is not former)
        assert len(self._served.services) == num_started + 1

    def update(self) -> None:
        """As an operator does it: nothing is read or written until the store is attached under another name."""
        weight_updates.weights_change("a crossing")
        assert self.found() == 0
        assert self.backend.batch_get_v1(self._names, slots([*range(self._num_pages)])) == [False] * self._num_pages
        self._compute("new weights")
        self.store()  # nothing is written
        weight_updates.tree_is_empty()
        self.backend.close()
        self.backend = self._open(model_id="new weights")
        assert self.found() == 0
        self.store()


def _others(pages: list[int]) -> torch.Tensor:
    others = torch.ones(POOL_PAGES, dtype=torch.bool)
    others[pages] = False
    return others
