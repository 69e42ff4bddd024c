"""The disk tier: the disk answers for a store that fails, and for no other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from harness.reading import read_bytes
from harness.store_process import StoreProcess
from harness.waiting import WAIT_S, until
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.plane.disk_tier import DiskTier
from sgl_kvfetch.stores.base import Lookup
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.stores.remote import Breaker, HttpOptions
from sgl_kvfetch.testing import FOLDER, expiring, page_hashes, parts, put_segment
from tests.plane.disk_tier.tiers import CHAIN, MANIFEST_NAME, PIECE, SEGMENT, Events, MakeTier, RemoteStore, fill, read


@pytest.mark.process
async def test_a_killed_server(tmp_path: Path, make: MakeTier, events: Events) -> None:
    with StoreProcess(tmp_path / "served") as server:
        tier = make(HttpStore(server.url, options=HttpOptions(timeout_s=WAIT_S, max_attempts=1)))
        await put_segment(tier, SEGMENT)
        await fill(tier, events)
        server.kill()

        async def is_skipped() -> bool:
            found = await tier.lookup(FOLDER, CHAIN)
            assert found.from_cache
            assert await read(tier) == SEGMENT.data
            return events.outages[-1] == "skipped"

        await until(is_skipped)
        server.start()
        await until(lambda: _is_answered_by_the_store(tier))


async def _is_answered_by_the_store(tier: DiskTier) -> bool:
    return not (await tier.lookup(FOLDER, CHAIN)).from_cache


@pytest.mark.parametrize("reason", ["server", "timeout", "protocol"])
async def test_lookups_are_answered_from_the_disk_while_the_store_fails(
    reason: str, tier: DiskTier, remote: RemoteStore, events: Events
) -> None:
    await fill(tier, events)
    tier._store_health = Breaker(first_pause_s=WAIT_S)
    remote.error = StoreError(reason, "as told")  # type: ignore[arg-type]
    for _ in range(5):
        found = await tier.lookup(FOLDER, CHAIN)
        assert parts(found) == [(0, 64)]
        assert found.from_cache
    assert events.outages == [reason] * 3 + ["skipped"] * 2
    assert (await tier.lookup(FOLDER, page_hashes(3, "other"))) == Lookup((), from_cache=True)
    assert await read(tier) == SEGMENT.data
    # What the disk does not have fails as it would without a tier.
    await tier._disk.delete(SEGMENT.data_name)
    with pytest.raises(StoreError, match="as told"):
        await read_bytes(tier, SEGMENT.data_name, 0, PIECE)


async def test_expired_segments_are_not_found_while_the_store_fails(
    tier: DiskTier, remote: RemoteStore, events: Events, later: Callable[[float], None]
) -> None:
    segment = expiring(SEGMENT, time.time() + 3600)
    await put_segment(remote, segment)
    await fill(tier, events, segment)
    remote.error = StoreError("server", "as told")
    later(3500)
    assert parts(await tier.lookup(FOLDER, CHAIN)) == [(0, 64)]
    later(3700)
    assert await tier.lookup(FOLDER, CHAIN) == Lookup((), from_cache=True)


async def test_a_store_that_hangs_leaves_time_for_the_disk(make: MakeTier, remote: RemoteStore, events: Events) -> None:
    tier = make(lookup_timeout_s=0.01)
    await fill(make(), events)
    remote.hangs = True
    assert (await tier.lookup(FOLDER, CHAIN)).from_cache
    assert events.outages == ["timeout"]


@pytest.mark.parametrize("reason", ["unauthorised", "invalid"])
async def test_what_the_store_refuses_is_refused(
    reason: str, tier: DiskTier, remote: RemoteStore, events: Events
) -> None:
    await fill(tier, events)
    for _ in range(5):
        remote.error = StoreError(reason, "as told")  # type: ignore[arg-type]
        with pytest.raises(StoreError, match="as told"):
            await tier.lookup(FOLDER, CHAIN)
    assert not events.outages


async def test_the_disk_does_not_answer_for_a_store_that_has_nothing(
    tier: DiskTier, remote: RemoteStore, events: Events
) -> None:
    await fill(tier, events)
    await remote.delete(MANIFEST_NAME)
    assert await tier.lookup(FOLDER, CHAIN) == Lookup(())


async def test_if_both_fail_the_stores_error_is_raised(
    tier: DiskTier, remote: RemoteStore, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(namespace: str, page_hashes: Sequence[bytes]) -> Lookup:
        raise StoreError("io", "the disk")

    monkeypatch.setattr(tier._disk, "lookup", fail)
    remote.error = StoreError("refused", "the store")
    with pytest.raises(StoreError, match="the store"):
        await tier.lookup(FOLDER, CHAIN)
    assert events.failures == {"lookup io": 1}
    assert not events.outages
