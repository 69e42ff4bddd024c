from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import torch

from harness.metrics import own_metric
from harness.waiting import WAIT_S, LoopClock, until_idle
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.codec.container.objects import Content
from sgl_kvfetch.codec.container.pages import RawPages
from sgl_kvfetch.codec.container.segment import SegmentSpec, encode_pages
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.keys import SegmentKey
from sgl_kvfetch.plane.write.gather import PageBatch
from sgl_kvfetch.plane.write.writer import Writer, commit_segment
from sgl_kvfetch.types import TENSORS
from tests.codec.container import test_levels as levels
from tests.codec.quant.profiles import values_of
from tests.segments import SMALL, make_heads, make_values, page_hashes

Make = Callable[..., Writer]
SPEC = SegmentSpec(make_heads(SMALL), make_quantiser("exact"), "zstd", "240p", 4)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LocalStore]:
    store = LocalStore(tmp_path)
    yield store
    await store.close()


@pytest.fixture
async def make(store: LocalStore) -> AsyncIterator[Make]:
    made = []
    with ThreadPoolExecutor(2) as pool:

        def build(spec: SegmentSpec = SPEC, **changes: float) -> Writer:
            options: dict[str, float] = dict(queue_bytes=1 << 20, linger_s=0.01, retire_s=0.05) | changes
            made.append(Writer(store, spec, pool, max_segment_pages=16, **options))  # type: ignore[arg-type]
            return made[-1]

        yield build
        for writer in made:
            await writer.close()


def batch(first_page: int, num_pages: int, seed: str = "") -> PageBatch:
    values = make_values(SMALL, num_pages)
    pages = RawPages(*(values[t].view(-1, SMALL.page_size, *values[t].shape[1:]) for t in TENSORS))
    previous = page_hashes(1, seed, first_page - 1)[0] if first_page else None
    return PageBatch(first_page, previous, page_hashes(num_pages, seed, first_page), [pages])


async def write(writer: Writer, first_page: int, num_pages: int, seed: str = "") -> None:
    writer.add(batch(first_page, num_pages, seed))
    await writer.drain()


def lengths_in(names: list[str]) -> list[int]:
    """Return the lengths of the segments whose manifests are named."""
    return sorted(int(name.split("/")[1].split("-")[0]) for name in names if name.endswith(".kvm"))


async def lengths(store: LocalStore) -> list[int]:
    return lengths_in([info.name async for info in store.list()])


def queued_bytes() -> float:
    return own_metric("sgl_kvfetch_queued_bytes", queue="write")


async def found(store: LocalStore, num_pages: int) -> list[int]:
    lookup = await store.lookup(SPEC.heads.folder, page_hashes(num_pages))
    return [hit.num_pages for hit in lookup.hits]


async def test_segments_of_a_span_are_written_again_once(
    store: LocalStore, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans have four pages here. What is sent twice is no more than that, and nothing is read back."""
    put = Mock(wraps=store.put)
    monkeypatch.setattr(store, "put", put)
    writer = make()
    await write(writer, 0, 7)
    assert await found(store, 7) == [4, 2, 1]
    await write(writer, 7, 9)
    assert await found(store, 16) == [4, 4, 8]
    await until_idle()  # the pieces are deleted
    assert await lengths(store) == [4, 4, 8]
    assert lengths_in([call.args[0] for call in put.mock_calls]) == [1, 1, 2, 4, 4, 8]


@pytest.mark.parametrize("is_gone", [False, True])
async def test_pieces_stay_until_no_reader_should_use_them(store: LocalStore, make: Make, is_gone: bool) -> None:
    """Or longer, if the whole is gone, as when it was found damaged: the pieces are all that is left of these pages."""
    clock = LoopClock()
    writer = make(retire_s=600.0)
    for first in (2, 0):
        await write(writer, first, 2)
    assert await lengths(store) == [2, 2, 4]
    if is_gone:
        assert await store.delete(SegmentKey(SPEC.heads.folder, 4, page_hashes(4)[3]).manifest_name)
    await clock.advance(600.0)
    await until_idle()
    assert await lengths(store) == ([2, 2] if is_gone else [4])


async def test_pieces_of_other_prompts_that_found_no_room_or_have_changed_are_not_joined(
    store: LocalStore, make: Make
) -> None:
    writer = make()
    await write(writer, 0, 2)
    await write(writer, 2, 2, "other")
    changed = batch(0, 2)
    changed.sides["swa", 0] = torch.zeros(8, dtype=torch.uint8)  # which a join would lose
    writer.add(changed)
    await writer.drain()
    await write(writer, 2, 2)
    small = make(queue_bytes=4)
    for first in (4, 6):
        await write(small, first, 2)
    assert await lengths(store) == [2] * 5


async def test_what_expires_is_not_prolonged_by_joining_or_writing_and_is_written_again_then(
    store: LocalStore, make: Make, later: Callable[[float], None]
) -> None:
    writer = make(ttl_s=100.0, retire_s=600.0)
    await write(writer, 0, 2)
    later(80)
    await write(writer, 0, 2)
    await write(writer, 2, 2)
    assert await found(store, 4) == [4]
    later(110)
    assert await found(store, 4) == []
    await write(writer, 0, 2)
    assert await found(store, 2) == [2]
    later(205)
    assert await found(store, 2) == [2]
    later(220)
    assert await found(store, 2) == []
    await write(writer, 2, 2)
    assert await lengths(store) == [2]  # it is not joined with what has expired


async def test_the_memory_of_pages_is_given_back_while_their_segment_is_put(
    store: LocalStore, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, put, are_freed = make(), store.put, []

    async def put_and_look(name: str, data: Content) -> None:
        are_freed.append(is_referred_to() is None)
        await put(name, data)

    monkeypatch.setattr(store, "put", put_and_look)
    pages = batch(0, 3)
    (whole,) = pages.pieces
    assert isinstance(whole, RawPages)
    is_referred_to = weakref.ref(whole.k)
    del whole
    writer.add(pages)
    del pages
    await writer.drain()
    assert are_freed == [True] * 4
    assert await found(store, 3) == [2, 1]


async def test_spans_are_not_encoded_ahead_without_bound(store: LocalStore, make: Make) -> None:
    writer = make(linger_s=WAIT_S, queue_bytes=2)
    for first in (0, 4):
        writer.add(batch(first, 4))
    assert len(writer._coding) == 1
    await writer.drain()
    assert await found(store, 8) == [8]


async def test_whole_spans_are_encoded_before_their_segment_is_cut(store: LocalStore, make: Make) -> None:
    """Their room shrinks to what is coded, and the segment is the one that is encoded at once."""
    writer = make(linger_s=WAIT_S)
    pages = batch(0, 9)
    (whole,) = pages.pieces
    assert isinstance(whole, RawPages)
    writer.add(pages)
    while writer._coding:
        await asyncio.gather(*writer._coding.values())
    assert await found(store, 9) == []
    assert 0 < queued_bytes() < pages.size_bytes
    await writer.drain()
    assert queued_bytes() == 0
    assert await found(store, 9) == [8, 1]
    key = SegmentKey(SPEC.heads.folder, 8, page_hashes(8)[-1])
    content = await store.get(key.manifest_name)
    assert content is not None
    expected = encode_pages(SPEC, [whole.some(slice(0, 8))], 0, None, page_hashes(8)).joined()
    assert decode_manifest(content) == expected.manifest


@pytest.mark.parametrize("refines", [True, False])
@pytest.mark.parametrize(
    ("stored", "written", "are_levels_back"),
    [([4], 4, True), ([2, 2], 4, True), ([4], 2, False)],
    ids=["the same", "halves", "a part"],  # of which the last two pages would be lost
)
async def test_segments_that_have_lost_levels_are_written_again_by_servers_that_read_no_coarse_values(
    store: LocalStore, make: Make, stored: list[int], written: int, are_levels_back: bool, refines: bool
) -> None:
    for index, num_pages in enumerate(stored):
        coded = levels.make(levels.SPEC, index * num_pages, num_pages)
        (variant,) = coded.manifest.variants
        lost = msgspec.structs.replace(coded.manifest, variants=(variant.with_levels(1),))
        await commit_segment(store, replace(coded, manifest=lost, level_data=coded.level_data[:1]))
    page_size = levels.GEOMETRY.page_size
    values = (x[: written * page_size].bfloat16() for x in values_of(levels.KLT.profile, 64))
    pages = RawPages(*(x.view(-1, page_size, *x.shape[1:]) for x in values))
    writer = make(levels.SPEC, refines=refines)
    writer.add(PageBatch(0, None, page_hashes(written), [pages]))
    await writer.drain()
    await until_idle()  # what is replaced is deleted
    hits = (await store.lookup(levels.SPEC.heads.folder, page_hashes(written))).hits
    dropped = [decode_manifest(hit.manifest).variants[0].num_dropped for hit in hits]
    assert dropped == ([0] if refines and are_levels_back else [levels.LEVELS - 2] * len(stored))
    assert len(await lengths(store)) == len(dropped)
