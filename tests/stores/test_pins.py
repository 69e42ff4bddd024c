"""Pins, in every store that keeps them, and what they do to eviction."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from harness.redis_server import RedisProcess
from harness.s3_server import BUCKET, S3Server
from harness.small_segments import FOLDER, head_slice, make_segment, page_hashes, parts, put_segment
from harness.waiting import WAIT_S
from sgl_kvfetch.directory.catalog import Catalog
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import FormatError, StoreError
from sgl_kvfetch.stores.indexed_s3 import IndexedS3Store
from sgl_kvfetch.stores.notes import PINS, Pin, decode_pin, put_pin
from sgl_kvfetch.stores.redis_index import IndexOptions
from sgl_kvfetch.stores.upkeep import plan_sweep
from tests.directory.conftest import rebuild

pytestmark = pytest.mark.usefixtures("tiny_stores")

CHAINS = [page_hashes(16, branch=str(i)) for i in range(8)]
SEGMENTS = [make_segment(chain, 0, 16) for chain in CHAINS]
SIZE = len(SEGMENTS[0].data) + len(SEGMENTS[0].manifest.encode())


def pin_of(chain: Sequence[bytes], label: str = "") -> Pin:
    return Pin(label, 1, b"".join(chain))


@asynccontextmanager
async def opened(root: Path, num_segments: float | None = None) -> AsyncIterator[LocalStore]:
    """A directory with room for so many segments."""
    capacity = None if num_segments is None else int(num_segments * SIZE)
    store = LocalStore(root, capacity_bytes=capacity, min_free_bytes=0)
    yield store
    await store.close()


@pytest.mark.parametrize("content", [b"", b"nonsense", Pin("", 1, b"x" * 33).encode(), Pin("", 0, b"x" * 32).encode()])
def test_malformed_pins_are_refused(content: bytes) -> None:
    with pytest.raises(FormatError, match="malformed pin"):
        decode_pin(content)


async def test_pinned_segments_are_not_evicted_while_there_are_others(tmp_path: Path) -> None:
    async with opened(tmp_path, 4.5) as store:
        await put_segment(store, SEGMENTS[0])
        await put_pin(store, pin_of(CHAINS[0][:3]))  # a part of the segment is enough
        await put_pin(store, pin_of(CHAINS[1]))  # of what is not stored yet
        for segment in SEGMENTS[1:]:
            await put_segment(store, segment)
        found = [parts(await store.lookup(FOLDER, chain)) == [(0, 16)] for chain in CHAINS]
        assert found[:4] == [True, True, False, False]
        assert found[-1]


async def test_unpinned_segments_are_evicted_again(tmp_path: Path) -> None:
    async with opened(tmp_path, 4.5) as store:
        for number in (0, 1):
            await put_segment(store, SEGMENTS[number])
            await put_pin(store, pin_of(CHAINS[number]))
        await put_pin(store, pin_of(CHAINS[1][:2]))
        for number in (0, 1):
            assert await store.delete_note(PINS, pin_of(CHAINS[number]).name)
        for segment in SEGMENTS[2:]:
            await put_segment(store, segment)
        found = [bool(parts(await store.lookup(FOLDER, chain))) for chain in CHAINS[:2]]
        assert found == [False, True]  # another pin holds the second


async def test_pins_survive_the_loss_of_the_catalog(tmp_path: Path) -> None:
    async with opened(tmp_path, 4.5) as store:
        await put_segment(store, SEGMENTS[0])
        await put_pin(store, pin_of(CHAINS[0]))
        for name in ("0", "0" * 64):
            (tmp_path / ".pins" / name).write_bytes(b"not a pin")  # is skipped
        await rebuild(store)
        for segment in SEGMENTS[1:]:
            await put_segment(store, segment)
        assert parts(await store.lookup(FOLDER, CHAINS[0])) == [(0, 16)]


async def test_a_merged_segment_is_pinned_like_its_halves(tmp_path: Path) -> None:
    async with opened(tmp_path, 4.5) as store:
        for first in (0, 8):
            await put_segment(store, make_segment(CHAINS[0], first, 8))
        await put_pin(store, pin_of(CHAINS[0]))
        await put_segment(store, SEGMENTS[0])
        for first in (0, 8):
            await store.delete(make_segment(CHAINS[0], first, 8).manifest.key.manifest_name)
        for segment in SEGMENTS[1:]:
            await put_segment(store, segment)
        assert parts(await store.lookup(FOLDER, CHAINS[0])) == [(0, 16)]


async def test_a_pin_that_needs_more_than_half_of_the_capacity_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path, 4.5) as store:
        for number in range(3):
            await put_segment(store, SEGMENTS[number])
        for number in range(2):
            await put_pin(store, pin_of(CHAINS[number]))
        with pytest.raises(StoreError, match="the limit is") as caught:
            await put_pin(store, pin_of(CHAINS[2]))
        assert caught.value.reason == "full"
        assert len(await store.notes(PINS)) == 2
        for segment in SEGMENTS[3:]:
            await put_segment(store, segment)
        found = [bool(parts(await store.lookup(FOLDER, chain))) for chain in CHAINS[:3]]
        assert found == [True, True, False]


async def test_pins_never_stop_writes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(tmp_path, 4.5) as store:
        for chain in CHAINS[:6]:
            await put_pin(store, pin_of(chain))  # of nothing that is stored
        for segment in SEGMENTS[:6]:
            await put_segment(store, segment)
        assert parts(await store.lookup(FOLDER, CHAINS[5])) == [(0, 16)]
        assert (await store.usage()).num_evicted >= 2
    assert "pinned segments are evicted" in caplog.text


@pytest.mark.process
async def test_gc_deletes_pinned_segments_last(s3: S3Server, index: RedisProcess) -> None:
    store = IndexedS3Store(f"s3://{BUCKET}/kv", IndexOptions(index.url, timeout_s=WAIT_S), config=s3.config)
    other = make_segment(CHAINS[0], 0, 16, model="another")
    for segment in (*SEGMENTS[:3], other):
        await put_segment(store, segment)
    await put_pin(store, pin_of(CHAINS[0][:5]))  # ends within the segments of two namespaces
    unpinned = {segment.manifest.key for segment in SEGMENTS[1:3]}
    plan = await plan_sweep(store, 2 * SIZE + SIZE // 2)
    assert {segment.key for segment in plan.evicted} == unpinned
    assert 1.5 * SIZE < plan.pinned_bytes < 2.5 * SIZE
    plan = await plan_sweep(store, SIZE + SIZE // 2)
    assert {segment.key for segment in plan.evicted[:2]} == unpinned
    assert (len(plan.evicted), plan.num_pinned_evicted) == (3, 1)
    await store.close()


async def test_a_pin_holds_the_write_lock_for_its_pages_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many folders there are: other writes wait for the lock."""
    statements: list[int] = []
    writing = Catalog.writing

    @contextmanager
    def counted(catalog: Catalog) -> Iterator[sqlite3.Connection]:
        with writing(catalog) as db:
            statements.append(0)

            def count(statement: str) -> None:
                statements[-1] += 1

            db.set_trace_callback(count)
            yield db
            db.set_trace_callback(None)

    chain = page_hashes(256)
    async with opened(tmp_path) as store:
        for model in range(20):
            await put_segment(store, make_segment(chain, 0, 16, model=str(model)))
        monkeypatch.setattr(Catalog, "writing", counted)
        await put_pin(store, pin_of(chain))
        segments = await store.segment_usages(head_slice("7").folder, 1)
    assert [segment.is_pinned for segment in segments] == [True]
    assert max(statements) <= len(chain) + 10
