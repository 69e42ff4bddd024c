from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest

from harness.metrics import own_metric
from harness.small_segments import expiring, put_segment
from harness.waiting import WAIT_S
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import KVFetchError, StoreError
from sgl_kvfetch.keys import HeadSlice
from sgl_kvfetch.metrics import reasons_here
from sgl_kvfetch.plane.fetch.finder import PageFinder
from sgl_kvfetch.plane.fetch.plan import PageSource
from sgl_kvfetch.stores.base import Lookup, SegmentHit, Store
from sgl_kvfetch.stores.remote import Breaker
from tests.segments import as_newer, make_heads, make_segment, page_hashes

NUM_PAGES = 8


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LocalStore]:
    store = LocalStore(tmp_path)
    coded, _ = make_segment(num_pages=NUM_PAGES)
    await store.put(coded.data_name, coded.data)
    await store.put(coded.manifest.key.manifest_name, coded.manifest.encode())
    yield store
    await store.close()


def finder(store: LocalStore, heads: HeadSlice | None = None) -> tuple[PageFinder, list[KVFetchError]]:
    faults: list[KVFetchError] = []
    return PageFinder(store, heads or make_heads(), make_quantiser("exact"), faults.append), faults


@pytest.mark.parametrize(
    ("shared", "others", "diverged"),
    [
        (3, 4, 4),
        (0, 4, 0),  # no stored prompt begins with them
        (NUM_PAGES, 4, 0),  # the stored segment ends there, as one does that a longer prompt goes on from
    ],
)
async def test_pages_that_leave_a_stored_prompt_are_counted(
    store: LocalStore, shared: int, others: int, diverged: int
) -> None:
    pages, faults = finder(store)
    before, reasons = own_metric("sgl_kvfetch_diverged_pages_total"), reasons_here()
    hashes = [*page_hashes(NUM_PAGES)[:shared], *(bytes([i]) * 32 for i in range(others))]
    assert len(await pages.find_pages(hashes, WAIT_S)) == shared
    assert own_metric("sgl_kvfetch_diverged_pages_total") - before == diverged
    assert (reasons, faults) == (["diverges"] if diverged else [], [])


async def test_pages_are_found_and_recalled_without_asking(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    pages, _ = finder(store)
    hashes = page_hashes(NUM_PAGES)
    found = await pages.find_pages([*hashes, bytes(32)], WAIT_S)
    assert [source.page for source in found] == list(range(NUM_PAGES))
    again = await pages.find_pages(hashes, WAIT_S)
    assert {source.reader for source in [*found, *again]} == {found[0].reader}  # requests share manifests

    async def fail(*args: object) -> Lookup:
        raise StoreError("server", "not to be asked")

    monkeypatch.setattr(store, "lookup", fail)
    assert await pages.recall(hashes[3:], WAIT_S) == found[3:]
    pages.fetched(hashes[4:], ())
    assert await pages.recall(hashes[:4], WAIT_S) == found[:4]
    with pytest.raises(StoreError, match="not to be asked"):
        await pages.recall(hashes, WAIT_S)
    pages.forget_pages()
    with pytest.raises(StoreError, match="not to be asked"):
        await pages.recall(hashes[:1], WAIT_S)


async def test_expired_pages_are_not_recalled(store: LocalStore, later: Callable[[float], None]) -> None:
    coded, _ = make_segment(num_pages=NUM_PAGES)
    await put_segment(store, expiring(coded, time.time() + 60))
    pages, _ = finder(store)
    hashes = page_hashes(NUM_PAGES)
    found = await pages.find_pages(hashes, WAIT_S)
    later(50)
    assert await pages.recall(hashes, WAIT_S) == found
    later(70)
    assert await pages.recall(hashes, WAIT_S) == []


def test_a_breaker_opens_after_failures_in_a_row_and_backs_off() -> None:
    breaker = Breaker(threshold=2, first_pause_s=1.0, longest_pause_s=3.0)
    breaker.failed(0.0)
    breaker.succeeded()
    breaker.failed(0.0)
    assert not breaker.is_open(0.0)
    breaker.failed(10.0)
    assert breaker.is_open(10.9)
    assert not breaker.is_open(11.0)
    breaker.failed(11.0)
    assert breaker.is_open(12.9)
    breaker.failed(13.0)
    assert breaker.is_open(15.9)
    assert not breaker.is_open(16.0)


async def test_lookups_pause_after_fetches_that_fail_in_a_row(store: LocalStore) -> None:
    pages, _ = finder(store)
    pages._fetches = Breaker(first_pause_s=WAIT_S)
    hashes = page_hashes(NUM_PAGES)
    await pages.find_pages(hashes, WAIT_S)
    pages.fetched(hashes, [TimeoutError()])
    pages.fetched((), ())
    for _ in range(3):
        assert await pages.find_pages(hashes, WAIT_S)
        pages.fetched(hashes, [TimeoutError()])
    with pytest.raises(StoreError, match="lookups are paused") as caught:
        await pages.find_pages(hashes, WAIT_S)
    assert (caught.value.reason, own_metric("sgl_kvfetch_store_down")) == ("skipped", 1)


async def test_memory_hides_nothing_of_a_segments_rest(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where segments are found by their names, as in a bucket without an index."""
    monkeypatch.setattr(store, "lookup", lambda *what: Store.lookup(store, *what))
    hashes = page_hashes(NUM_PAGES)
    found = await finder(store)[0].find_pages(hashes, WAIT_S)
    pages = PageFinder(store, make_heads(), make_quantiser("exact"), print, memory=Mock(find=lambda _: found[:3]))
    assert [each.page for each in await pages.find_pages(hashes, WAIT_S)] == list(range(NUM_PAGES))


@pytest.mark.parametrize(
    ("seed", "kv_dtype", "fault"),
    [
        ("", "float16", "kv_dtype is 'bfloat16', expected 'float16'"),
        ("others", "bfloat16", "other pages than the lookup requested"),
    ],
)
async def test_a_store_that_answers_with_what_was_not_asked_for(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, seed: str, kv_dtype: str, fault: str
) -> None:
    theirs = await store.lookup(make_heads().folder, page_hashes(NUM_PAGES))
    mine = replace(make_heads(), namespace=replace(make_heads().namespace, kv_dtype=kv_dtype))

    async def answer(*args: object) -> Lookup:
        return theirs

    monkeypatch.setattr(store, "lookup", answer)
    pages, faults = finder(store, mine)
    assert await pages.find_pages(page_hashes(NUM_PAGES, seed), WAIT_S) == []
    assert fault in str(faults[0])


# A store that answers with manifests as large as they may be


def manifests(first_page: int, num_pages: int, padding: int, seed: str = "", shift: int = 0) -> list[bytes]:
    """Manifests of one page each, with so many bytes in a field that readers ignore."""
    manifest = make_segment(num_pages=1)[0].manifest
    previous = page_hashes(1, seed, first_page - 1)[0] if first_page else None
    made = []
    for page, own in enumerate(page_hashes(num_pages, seed, first_page), first_page + shift):
        there = msgspec.structs.replace(manifest, first_page=page, previous_hash=previous, page_hashes=(own,))
        made.append(as_newer(there.encode(), msgspec.msgpack.encode(bytes(padding))))
        previous = own
    return made


def answering(store: LocalStore, monkeypatch: pytest.MonkeyPatch, found: dict[bytes, bytes]) -> None:
    async def answer(_: str, hashes: Sequence[bytes]) -> Lookup:
        return Lookup(tuple(SegmentHit(found[h], 0, 1) for h in itertools.takewhile(found.__contains__, hashes)))

    monkeypatch.setattr(store, "lookup", answer)


async def test_manifests_in_use_have_a_budget_in_bytes(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is only remembered makes room; what a request still uses does not."""
    pages, faults = finder(store)
    made: list[weakref.ref[SegmentReader]] = []
    held: list[PageSource] = []
    for turn in range(12):
        hashes = page_hashes(4, str(turn))
        answering(store, monkeypatch, dict(zip(hashes, manifests(0, 4, 1_000_000, str(turn)), strict=True)))
        found = await pages.find_pages(hashes, WAIT_S)
        made += [weakref.ref(source.reader) for source in found]
        assert len(found) == 4
        assert len({each() for each in made} - {None}) <= 16
        assert (await pages.recall(hashes, WAIT_S))[3] is found[3]
        held += found if turn < 2 else []
    assert faults == []
    del found
    for turn in range(12, 15):
        hashes = page_hashes(4, str(turn))
        answering(store, monkeypatch, dict(zip(hashes, manifests(0, 4, 1_000_000, str(turn)), strict=True)))
        held += await pages.find_pages(hashes, WAIT_S)
    assert len(held) == 16
    assert [str(fault) for fault in faults] == [
        "manifests in use take 16777216 bytes; there is no room for one of 1001022 bytes"
    ]


async def test_an_answer_whose_parts_are_not_neighbours_is_a_fault(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K was rotated for another place in the sequence."""
    parts = manifests(2, 3, 0) + manifests(5, 1, 0, shift=2)
    answering(store, monkeypatch, dict(zip(page_hashes(4, "", 2), parts, strict=True)))
    pages, faults = finder(store)
    assert len(await pages.find_pages(page_hashes(4, "", 2), WAIT_S)) == 3
    assert "expected page 5 of the sequence, found 7" in str(faults[0])


async def test_pages_that_were_written_for_another_place_are_a_fault(store: LocalStore) -> None:
    """Even if all of them are: a request that knows its place compares it."""
    pages, faults = finder(store)
    assert len(await pages.find_pages(page_hashes(NUM_PAGES)[3:], WAIT_S, 3)) == NUM_PAGES - 3
    assert await pages.find_pages(page_hashes(NUM_PAGES), WAIT_S, 4) == []
    assert "expected page 4 of the sequence, found 0" in str(faults[0])
