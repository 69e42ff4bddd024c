"""Pins, in every store that keeps them, and what they do to eviction."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from harness.small_segments import FOLDER, head_slice, make_segment, page_hashes, parts, put_segment
from sgl_kvfetch.directory.catalog import Catalog
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import FormatError
from sgl_kvfetch.stores.notes import Pin, decode_pin, put_pin
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


async def test_pins_never_stop_writes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(tmp_path, 4.5) as store:
        for chain in CHAINS[:6]:
            await put_pin(store, pin_of(chain))  # of nothing that is stored
        for segment in SEGMENTS[:6]:
            await put_segment(store, segment)
        assert parts(await store.lookup(FOLDER, CHAINS[5])) == [(0, 16)]
        assert (await store.usage()).num_evicted >= 2
    assert "pinned segments are evicted" in caplog.text


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
