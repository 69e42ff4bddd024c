"""A small segment in a real directory store, which holds back or spoils what it reads as tests tell it to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.memory_pool import MemoryPool
from harness.metrics import own_metric
from harness.waiting import WAIT_S, until_idle
from sgl_kvfetch.codec.bitstream.base import Decoders
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.plane.fetch.fetcher import Fetcher, FetchResult, PoolPages
from sgl_kvfetch.plane.fetch.link import Link
from sgl_kvfetch.plane.fetch.offers import Chooser, Tolerance
from sgl_kvfetch.plane.fetch.plan import PageSource, SpanPart
from sgl_kvfetch.plane.fetch.pool import DecodePool
from sgl_kvfetch.plane.write.writer import commit_segment
from sgl_kvfetch.tools.encoder import make_targets, transcode
from sgl_kvfetch.types import TENSORS, TensorName
from tests import fetchers
from tests.segments import SMALL, make_segment

NUM_PAGES = 8


class PoisonedPool(MemoryPool):
    """What was not written shows."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(SMALL, num_pages, 57.0)

    def is_poisoned(self, page: int) -> bool:
        return all(bool((self.values[t][page] == 57.0).all()) for t in TENSORS)


class SpoiltStore(LocalStore):
    """Reads wait while the gate is closed. Those from a given byte of an object on fail, or have a byte flipped."""

    flip_from: int | None = None
    fail_from: int | None = None
    num_gets = 0
    is_damaged = False  # what it finds on its disk when a reader reports damage
    answers: asyncio.Event | None = None  # reports are answered once this is set

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = asyncio.Event()
        self.gate.set()
        self.reports: list[str] = []

    async def report_damage(self, manifest_name: str) -> bool:
        self.reports.append(manifest_name)
        if self.answers is not None:
            await self.answers.wait()
        return self.is_damaged and await self.delete(manifest_name)

    async def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        self.num_gets += 1
        await self.gate.wait()
        if self.fail_from is not None and start >= self.fail_from:
            raise StoreError("server", "as told")
        data = await super().get(name, start, length)
        if data is not None and self.flip_from is not None and start >= self.flip_from:
            return bytes([data[0] ^ 1]) + data[1:]
        return data


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SpoiltStore]:
    store = SpoiltStore(tmp_path)
    yield store
    await store.close()


@pytest.fixture
async def segment(store: SpoiltStore) -> tuple[CodedSegment, dict[TensorName, torch.Tensor]]:
    coded, values = make_segment(SMALL, NUM_PAGES, span_pages=2)
    await store.put(coded.data_name, coded.data)
    await store.put(coded.manifest.key.manifest_name, coded.manifest.encode())
    pages = {t: v.view(NUM_PAGES, SMALL.page_size, *v.shape[1:]) for t, v in values.items()}
    return coded, pages


@pytest.fixture
def decoders() -> Iterator[DecodePool[Decoders]]:
    with closing(DecodePool[Decoders]([{}] * 2)) as decoders:
        yield decoders


MakeFetcher = Callable[..., Fetcher]


@pytest.fixture
def make_fetcher(store: SpoiltStore, decoders: DecodePool[Decoders]) -> MakeFetcher:
    """Makes fetchers that report damage, unless a test says otherwise."""
    return partial(fetchers.make_fetcher, store, decoders, may_delete=True)


@pytest.fixture
def fetcher(make_fetcher: MakeFetcher) -> Fetcher:
    """With room for a part of a segment."""
    return make_fetcher(inflight_bytes=4000)


Segment = tuple[CodedSegment, dict[TensorName, torch.Tensor]]


def sources(segment: Segment, pages: Sequence[int]) -> list[PageSource]:
    reader = SegmentReader(segment[0].manifest, make_quantiser("exact"))
    return [PageSource(reader, page) for page in pages]


def holds(pool: PoisonedPool, segment: Segment, pages: Sequence[int], pool_pages: Sequence[int]) -> bool:
    return all(torch.equal(pool.read(t, pool_pages), segment[1][t][list(pages)]) for t in TENSORS)


async def fetch(
    fetcher: Fetcher, wanted: Sequence[PageSource], pool: PoisonedPool, pool_pages: Sequence[int]
) -> FetchResult:
    return await fetcher.fetch(wanted, PoolPages(pool, pool_pages), WAIT_S)


async def assert_nothing_held(fetcher: Fetcher) -> None:
    """Assert that no task, no bytes and no transfer are left once all reads have been answered."""
    await until_idle()
    assert own_metric("sgl_kvfetch_queued_bytes", queue="read") == 0  # what was requested, and is not restored
    assert fetcher.link.outstanding_bytes == 0


class Recorder(Chooser):
    """Takes the ways to read a span in turn, and keeps which spans it was asked for."""

    def __init__(self, fetcher: Fetcher) -> None:
        super().__init__(Tolerance(), fetcher.pool, fetcher.link)
        self.fetcher = fetcher
        self.spans: list[int] = []

    def choose(self, part: SpanPart, *args: Any) -> SegmentReader:
        self.spans.append(part.span)
        ways = list(part.reader.ways(0))
        return ways[len(self.spans) % len(ways)]


@pytest.fixture
async def made(segment: Segment, store: SpoiltStore) -> CodedSegment:
    coded = transcode(segment[0].manifest, segment[0].data, make_targets(["hevc", "zstd"], ["240p"]))
    await commit_segment(store, coded)
    return coded


@pytest.fixture
def recorder(make_fetcher: MakeFetcher) -> Recorder:
    """Of a fetcher whose spans are read in the ways that this takes."""
    fetcher = make_fetcher()
    fetcher.reads.chooser = recorder = Recorder(fetcher)
    return recorder


def wanted(made: CodedSegment) -> list[PageSource]:
    reader = SegmentReader(made.manifest, make_quantiser("exact"))
    return [PageSource(reader, page) for page in range(8)]


def measured_link(size_bytes: int, bytes_per_s: float, num_transfers: int = 1) -> Link:
    seconds = size_bytes / bytes_per_s
    ahead_s = -num_transfers * seconds
    link = Link(lambda: time.monotonic() + ahead_s)
    for _ in range(num_transfers):
        started_s = time.monotonic() + ahead_s
        link.started(size_bytes)
        ahead_s += seconds
        link.ended(size_bytes, started_s, is_whole=True)
    return link
