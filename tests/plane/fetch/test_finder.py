from __future__ import annotations

import itertools
import struct
import time
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import xxhash

from harness.metrics import own_metric
from harness.small_segments import expiring, put_segment
from harness.waiting import WAIT_S
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import KVFetchError, NamespaceMismatchError, StoreError
from sgl_kvfetch.keys import HeadSlice
from sgl_kvfetch.metrics import reasons_here
from sgl_kvfetch.plane.fetch.finder import PageFinder
from sgl_kvfetch.plane.fetch.plan import PageSource
from sgl_kvfetch.stores.base import Lookup, SegmentHit
from sgl_kvfetch.stores.remote import Breaker
from sgl_kvfetch.tools.encoder import make_targets, transcode
from tests.segments import make_heads, make_segment, page_hashes

NUM_PAGES = 8


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LocalStore]:
    store = LocalStore(tmp_path)
    coded, _ = make_segment(num_pages=NUM_PAGES)
    await store.put(coded.data_name, coded.data)
    await store.put(coded.manifest.key.manifest_name, coded.manifest.encode())
    yield store
    await store.close()


def _unexpected(fault: KVFetchError) -> None:
    raise fault


def finder(store: LocalStore, heads: HeadSlice | None = None) -> tuple[PageFinder, list[KVFetchError]]:
    faults: list[KVFetchError] = []
    return PageFinder(store, heads or make_heads(), make_quantiser("exact"), faults.append), faults


@pytest.mark.parametrize(
    ("shared", "others", "diverged"),
    [
        (3, 4, 4),
        (3, 1, 1),
        (0, 4, 0),  # no stored prompt begins with them
        (NUM_PAGES, 4, 0),  # the stored segment ends there, as one does that a longer prompt goes on from
        (3, 0, 0),
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


async def test_a_variant_that_video_engines_decode_is_read(tmp_path: Path) -> None:
    coded, _ = make_segment(num_pages=NUM_PAGES)
    coded = transcode(coded.manifest, coded.data, make_targets(["hevc", "hevc420"], ["240p"]))
    store = LocalStore(tmp_path)
    for name, data in coded.data_objects():
        await store.put(name, data)
    await store.put(coded.manifest.key.manifest_name, coded.manifest.encode())
    for engine_codecs, expected in (((), "hevc"), (("hevc", "hevc420"), "hevc"), (("hevc420",), "hevc420")):
        finder = PageFinder(store, make_heads(), make_quantiser("exact"), _unexpected, engine_codecs=engine_codecs)
        found = await finder.find_pages(page_hashes(NUM_PAGES), WAIT_S)
        assert {source.reader.variant.codec for source in found} == {expected}
    await store.close()


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
    assert caught.value.reason == "skipped"


async def test_a_segment_of_another_namespace_is_a_fault_that_names_the_field(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that answers with what was not asked for."""
    theirs = await store.lookup(make_heads().folder, page_hashes(NUM_PAGES))
    mine = replace(make_heads(), namespace=replace(make_heads().namespace, kv_dtype="float16"))

    async def answer(*args: object) -> Lookup:
        return theirs

    monkeypatch.setattr(store, "lookup", answer)
    pages, faults = finder(store, mine)
    assert await pages.find_pages(page_hashes(NUM_PAGES), WAIT_S) == []
    assert isinstance(faults[0], NamespaceMismatchError)
    assert "kv_dtype is 'bfloat16', expected 'float16'" in str(faults[0])


async def test_an_answer_with_other_pages_is_a_fault(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = await store.lookup(make_heads().folder, page_hashes(NUM_PAGES))

    async def answer(*args: object) -> Lookup:
        return theirs

    monkeypatch.setattr(store, "lookup", answer)
    pages, faults = finder(store)
    assert await pages.find_pages(page_hashes(NUM_PAGES, "others"), WAIT_S) == []
    assert "other pages than the lookup requested" in str(faults[0])


# A store that answers with manifests as large as they may be


def manifests(first_page: int, num_pages: int, padding: int, seed: str = "", shift: int = 0) -> list[bytes]:
    """Manifests of one page each, with so many bytes in a field that readers ignore."""
    body = msgspec.msgpack.decode(make_segment(num_pages=1)[0].manifest.encode()[12:-16])
    hashes = page_hashes(num_pages, seed, first_page)
    previous = page_hashes(1, seed, first_page - 1)[0] if first_page else None
    made = []
    for page, own in enumerate(hashes, first_page + shift):
        place = {"first_page": page, "previous_hash": previous, "page_hashes": own, "later": bytes(padding)}
        packed = msgspec.msgpack.encode(body | place)
        head = struct.pack("<4sHHI", b"KVFM", 2, 0, len(packed)) + packed
        made.append(head + xxhash.xxh3_128_digest(head))
        previous = own
    return made


def answering(store: LocalStore, monkeypatch: pytest.MonkeyPatch, found: dict[bytes, bytes]) -> None:
    """Let lookups answer with manifests by page hash."""

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


async def test_requests_for_the_same_pages_share_their_manifests(store: LocalStore) -> None:
    pages, _ = finder(store)
    first = await pages.find_pages(page_hashes(NUM_PAGES), WAIT_S)
    second = await pages.find_pages(page_hashes(NUM_PAGES), WAIT_S)
    assert {source.reader for source in first} == {source.reader for source in second}
    assert len({source.reader for source in first}) == 1


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
    assert len(await pages.find_pages(page_hashes(NUM_PAGES), WAIT_S, 0)) == NUM_PAGES
    assert len(await pages.find_pages(page_hashes(NUM_PAGES)[3:], WAIT_S, 3)) == NUM_PAGES - 3
    assert await pages.find_pages(page_hashes(NUM_PAGES), WAIT_S, 4) == []
    assert "expected page 4 of the sequence, found 0" in str(faults[0])
