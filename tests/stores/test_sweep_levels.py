"""What goes wrong while a sweep drops last levels: what it drops is in `test_life`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.plane.write.writer import commit_segment
from sgl_kvfetch.stores.base import AdminStore
from sgl_kvfetch.stores.upkeep import ORPHAN_AGE_S, plan_sweep, sweep_segments
from tests.codec.container.test_levels import segment
from tests.directory.test_dropped_levels import WHOLE, chain
from tests.segments import using
from tests.stores.conftest import opened
from tests.tools.conftest import kvfetch, kvfetch_json

pytestmark = pytest.mark.process

NUM = 3
LAST = len(segment().level_data[-1])


@pytest.fixture(params=["directory", "bucket", "bucket with index"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AdminStore]:
    """A store of three segments."""
    async with opened(request.param, tmp_path, request) as store:
        for number in range(NUM):
            await commit_segment(store, chain(number))
        yield store


async def lost(store: AdminStore) -> list[int | None]:
    """Return how many levels each segment has lost, None for those that are gone."""
    contents = [await store.peek(chain(number).manifest.key.manifest_name) for number in range(NUM)]
    return [None if each is None else decode_manifest(each).variants[0].num_dropped for each in contents]


async def named(store: AdminStore) -> set[str]:
    """Return the names of all data, and require that manifests name all of it."""
    names = {info.name async for info in store.list() if not info.name.endswith(".kvm")}
    manifests = [await store.peek(chain(number).manifest.key.manifest_name) for number in range(NUM)]
    assert names == {name for each in manifests if each is not None for name in decode_manifest(each).data_names}
    return names


async def test_a_segment_that_is_written_again_meanwhile_keeps_its_data(store: AdminStore) -> None:
    """After its level was dropped, and before the level's data is deleted."""
    plan = await plan_sweep(store, NUM * WHOLE - LAST // 2, drop_levels=1)
    (coarser,) = plan.coarser
    number = next(n for n in range(NUM) if chain(n).manifest.key == coarser.segment.key)
    drop_level = store.coarsen

    async def drop_and_write(name: str) -> object:
        dropped = await drop_level(name)
        await commit_segment(store, chain(number))
        return dropped

    store.coarsen = drop_and_write  # type: ignore[method-assign, assignment]
    swept = await sweep_segments(store, plan.doomed, 0, plan.coarser)
    assert (swept.num_levels, swept.num_objects) == (1, 0)
    assert await lost(store) == [0] * NUM
    await named(store)


async def test_a_manifest_that_cannot_be_read_ends_no_sweep(store: AdminStore) -> None:
    """Neither while it is planned nor while it runs."""
    broken = chain(0).manifest.key.manifest_name

    def failing(method: Callable[[str], Awaitable[Any]]) -> Callable[[str], Awaitable[Any]]:
        async def fail(name: str) -> Any:
            if name == broken:
                raise StoreError("io", "cannot be read")
            return await method(name)

        return fail

    capacity = NUM * (WHOLE - LAST) + 64 * NUM
    plan = await plan_sweep(store, capacity, drop_levels=1)
    store.peek = failing(store.peek)  # type: ignore[method-assign, assignment]
    store.coarsen = failing(store.coarsen)  # type: ignore[method-assign, assignment]
    planned = await plan_sweep(store, capacity, drop_levels=1)
    assert chain(0).manifest.key not in {each.segment.key for each in planned.coarser}
    assert planned.stored_bytes - planned.freed_bytes <= capacity  # others make room
    swept = await sweep_segments(store, (), 0, plan.coarser)
    assert swept.failures == {broken: "cannot be read"}
    assert swept.num_objects == NUM - 1


async def test_levels_that_an_interrupted_sweep_has_left_are_deleted(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for number in range(NUM):
        await commit_segment(store, chain(number))
    name = chain(0).manifest.key.manifest_name
    (left,) = await store.coarsen(name)
    capacity = (await plan_sweep(store, None)).stored_bytes - 1
    assert (await plan_sweep(store, capacity, drop_levels=1)).coarser[0].segment.key != chain(0).manifest.key
    old_s = time.time() - ORPHAN_AGE_S - 60
    os.utime(tmp_path / left, (old_s, old_s))
    plan = await plan_sweep(store, capacity, drop_levels=1)
    swept = await sweep_segments(store, plan.doomed, 0, plan.coarser)
    assert (swept.num_levels, swept.num_objects) == (0, 1)
    assert left not in await named(store)
    await store.close()


def test_gc_says_which_levels_it_drops(tmp_path: Path) -> None:
    async def fill(store: LocalStore) -> None:
        for number in range(NUM):
            await commit_segment(store, chain(number))

    using(LocalStore(tmp_path), fill)
    options = (str(tmp_path), "--capacity", f"{NUM * WHOLE - 1}B", "--drop-levels", "1", "--grace", "0", "--yes")
    planned = kvfetch_json("gc", *options, "--dry-run")
    assert (list(planned["coarser"].values()), planned["evicted"], planned["planned_bytes"]) == ([1], [], LAST)
    (stem,) = planned["coarser"]
    shown = kvfetch("gc", *options, "--dry-run").output
    assert f"{stem}  " in shown
    assert "would delete 0 segments" in shown
    assert "and 1 levels of others" in shown
    swept = json.loads(kvfetch("gc", *options, "--json").stdout)["deleted"]
    assert (swept["num_levels"], swept["num_objects"], swept["num_bytes"]) == (1, 1, LAST)
