"""Fetches that choose among a segment's variants as they go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import closing

import pytest

from sgl_kvfetch.adapt.decode_profile import DecodeProfile, VariantProfile
from sgl_kvfetch.adapt.policy import LookAhead, Situation
from sgl_kvfetch.adapt.pool import DecodePool
from sgl_kvfetch.container.segment import CodedSegment, SegmentReader
from sgl_kvfetch.encode.targets import make_targets
from sgl_kvfetch.encode.transcode import transcode
from sgl_kvfetch.fetch.fetcher import Fetcher
from sgl_kvfetch.fetch.link import Link
from sgl_kvfetch.fetch.plan import PageSource
from sgl_kvfetch.fetch.sink import GuardedSink
from sgl_kvfetch.fetch.variants import VariantChooser
from sgl_kvfetch.quant import make_quantiser
from sgl_kvfetch.write.commit import commit_segment
from tests.fetch.test_fetcher import PoisonedPool, Segment, SpoiltStore, holds, segment, store

__all__ = ["segment", "store"]  # fixtures

# As if the smaller one (of these numbers, zstd's) were slow to decode.
PROFILE = DecodeProfile(
    device="made up",
    source="for tests",
    variants=(
        VariantProfile(name="zstd", size_bytes=1000, decode_s=(0.2, 0.2)),
        VariantProfile(name="hevc 240p", size_bytes=2000, decode_s=(0.001, 0.001)),
    ),
)


class Recorder:
    """Chooses in turn, and keeps what it was told."""

    name = "recorder"

    def __init__(self) -> None:
        self.situations: list[Situation] = []

    def choose(self, situation: Situation) -> int:
        self.situations.append(situation)
        return situation.available[len(self.situations) % len(situation.available)]


@pytest.fixture
async def made(segment: Segment, store: SpoiltStore) -> CodedSegment:
    coded = transcode(segment[0].manifest, segment[0].data, make_targets(["hevc", "zstd"], ["240p"]))
    await commit_segment(store, coded)
    return coded


@pytest.fixture
async def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
async def fetcher(store: SpoiltStore, recorder: Recorder) -> AsyncIterator[Fetcher]:
    with closing(DecodePool([{}, {}], PROFILE)) as pool:
        yield Fetcher(store, pool, read_bytes=600, inflight_bytes=1 << 20, may_delete=False, policy=recorder)


def wanted(made: CodedSegment) -> list[PageSource]:
    reader = SegmentReader(made.manifest, make_quantiser("exact"))
    return [PageSource(reader, page) for page in range(8)]


async def test_a_span_may_come_from_several_variants(
    fetcher: Fetcher, made: CodedSegment, segment: Segment, recorder: Recorder
) -> None:
    pool = PoisonedPool(8)
    result = await fetcher.fetch(wanted(made), range(8), GuardedSink(pool), 10)
    assert (result.num_pages, result.failures) == (8, ())
    assert holds(pool, segment, range(8), range(8))
    # SMALL has two layer groups: of each of the four spans' two cells each is a run.
    first = recorder.situations[0]
    assert (first.remaining, first.available, first.previous) == (8, (0, 1), None)
    assert [s.remaining for s in recorder.situations] == list(range(8, 0, -1))
    assert sum(s.sizes_bytes[1] for s in recorder.situations) == len(made.data)
    assert sum(s.sizes_bytes[0] for s in recorder.situations) == len(made.variant_data(1))


async def test_what_is_read_ahead_is_not_chosen_again(
    fetcher: Fetcher, made: CodedSegment, segment: Segment, store: SpoiltStore, recorder: Recorder
) -> None:
    fetcher.read_ahead(wanted(made)[:4], expire_s=60)
    await asyncio.sleep(0.1)
    num_gets, num_chosen = store.num_gets, len(recorder.situations)
    assert num_gets == num_chosen == 4
    pool = PoisonedPool(8)
    assert (await fetcher.fetch(wanted(made), range(8), GuardedSink(pool), 10)).num_pages == 8
    assert holds(pool, segment, range(8), range(8))
    assert store.num_gets == len(recorder.situations) == 8
    assert fetcher._ahead._reads == fetcher._ahead._by_cells == {}


async def test_a_segment_in_one_variant_needs_no_choice(
    fetcher: Fetcher, segment: Segment, store: SpoiltStore, recorder: Recorder
) -> None:
    reader = SegmentReader(segment[0].manifest, make_quantiser("exact"))
    pool = PoisonedPool(8)
    sources = [PageSource(reader, page) for page in range(8)]
    assert (await fetcher.fetch(sources, range(8), GuardedSink(pool), 10)).num_pages == 8
    assert holds(pool, segment, range(8), range(8))
    assert not recorder.situations


@pytest.mark.parametrize(("bytes_per_s", "expected"), [(1e3, "zstd"), (1e9, "hevc")])
async def test_slow_links_bring_small_chunks_and_fast_ones_easy_ones(
    made: CodedSegment, bytes_per_s: float, expected: str
) -> None:
    link = Link()
    for _ in range(8):
        link.started(10_000)
        link.ended(10_000, time.monotonic() - 10_000 / bytes_per_s, is_whole=True)
    with closing(DecodePool([{}, {}], PROFILE)) as pool:
        chooser = VariantChooser(LookAhead(), pool, link)
        reader = SegmentReader(made.manifest, make_quantiser("exact"))
        chosen = chooser.choose(reader, chooser.runs(reader, 0)[0], 8)
        assert chosen.variant.codec == expected


async def test_fetches_that_share_link_and_decoders_are_looked_ahead_over_together(
    fetcher: Fetcher, made: CodedSegment, store: SpoiltStore, recorder: Recorder
) -> None:
    store.delay_s = 0.05
    sources = wanted(made)
    first = asyncio.create_task(fetcher.fetch(sources, range(8), GuardedSink(PoisonedPool(8)), 30))
    await asyncio.sleep(0.02)
    alone = recorder.situations[-1].remaining
    second = asyncio.create_task(fetcher.fetch(sources[:2], range(2), GuardedSink(PoisonedPool(8)), 30))
    await asyncio.sleep(0.02)
    assert recorder.situations[-1].remaining > alone
    await asyncio.gather(first, second)
    assert sorted(s.remaining for s in recorder.situations)[0] == 1
    assert fetcher._num_unasked() == 0
