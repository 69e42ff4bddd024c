"""The pipeline over a real directory store; faults by a store that delays or spoils what it reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch

from harness.memory_pool import MemoryPool
from sgl_kvfetch.adapt.pool import DecodePool
from sgl_kvfetch.container.segment import CodedSegment, SegmentReader
from sgl_kvfetch.encode.targets import make_targets
from sgl_kvfetch.encode.transcode import transcode
from sgl_kvfetch.errors import CorruptError, StoreError
from sgl_kvfetch.fetch.fetcher import Fetcher, FetchResult
from sgl_kvfetch.fetch.plan import PageSource, read_units, span_parts
from sgl_kvfetch.fetch.sink import GuardedSink
from sgl_kvfetch.quant import make_quantiser
from sgl_kvfetch.stores.local import LocalStore
from sgl_kvfetch.types import TENSORS, TensorName
from sgl_kvfetch.write.commit import commit_segment
from tests.segments import SMALL, make_segment

NUM_PAGES = 8
POISON = 57.0


class PoisonedPool(MemoryPool):
    """What was not written shows."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(SMALL, num_pages, POISON)

    def is_poisoned(self, page: int) -> bool:
        return all(bool((self.values[t][page] == POISON).all()) for t in TENSORS)


class SpoiltStore(LocalStore):
    """Reads that begin in a given part of an object are delayed, fail, or have a byte flipped."""

    delay_s = 0.0
    flip_from: int | None = None
    flips_left = 1 << 30
    fail_from: int | None = None
    num_gets = 0

    async def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        self.num_gets += 1
        await asyncio.sleep(self.delay_s)
        if self.fail_from is not None and start >= self.fail_from:
            raise StoreError("server", "as told")
        data = await super().get(name, start, length)
        if data is not None and self.flip_from is not None and start >= self.flip_from and self.flips_left:
            self.flips_left -= 1
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
def fetcher(store: SpoiltStore) -> Iterator[Fetcher]:
    with closing(DecodePool([{}] * 2)) as pool:
        yield Fetcher(store, pool, read_bytes=600, inflight_bytes=4000, may_delete=True)


Segment = tuple[CodedSegment, dict[TensorName, torch.Tensor]]


def sources(segment: Segment, pages: Sequence[int]) -> list[PageSource]:
    reader = SegmentReader(segment[0].manifest, make_quantiser("exact"))
    return [PageSource(reader, page) for page in pages]


def holds(pool: PoisonedPool, segment: Segment, pages: Sequence[int], pool_pages: Sequence[int]) -> bool:
    return all(torch.equal(pool.read(t, pool_pages), segment[1][t][list(pages)]) for t in TENSORS)


async def fetch(
    fetcher: Fetcher, wanted: Sequence[PageSource], pool: PoisonedPool, pool_pages: Sequence[int], timeout_s: float = 10
) -> FetchResult:
    result = await fetcher.fetch(wanted, pool_pages, GuardedSink(pool), timeout_s)
    assert fetcher._fetch_budget.used_bytes == 0
    return result


@pytest.mark.parametrize(
    "pages", [range(8), range(3), range(5, 8), range(1, 6), [3]], ids=["all", "start", "end", "middle", "one"]
)
async def test_pages_land_where_they_are_wanted(fetcher: Fetcher, segment: Segment, pages: Sequence[int]) -> None:
    pool = PoisonedPool(32)
    pool_pages = [31 - 2 * i for i in range(len(pages))]
    result = await fetch(fetcher, sources(segment, pages), pool, pool_pages)
    assert result == FetchResult(len(pages), (), False)
    assert holds(pool, segment, pages, pool_pages)
    assert all(pool.is_poisoned(page) for page in set(range(32)) - set(pool_pages))


async def test_only_the_spans_that_are_needed_are_read(fetcher: Fetcher, segment: Segment, store: SpoiltStore) -> None:
    units = {span: list(read_units(sources(segment, [0])[0].reader, span, 600)) for span in range(4)}
    assert all(len(u) > 1 for u in units.values())
    await fetch(fetcher, sources(segment, [2, 3, 4]), PoisonedPool(3), [0, 1, 2])
    assert store.num_gets == len(units[1]) + len(units[2])


async def test_what_was_read_ahead_is_not_read_again(fetcher: Fetcher, segment: Segment, store: SpoiltStore) -> None:
    wanted = sources(segment, range(2))
    fetcher.read_ahead(wanted, expire_s=60)
    fetcher.read_ahead(wanted, expire_s=60)
    await asyncio.sleep(0.1)
    ahead = store.num_gets
    assert ahead > 0
    pool = PoisonedPool(2)
    assert (await fetch(fetcher, wanted, pool, [0, 1])).num_pages == 2
    assert holds(pool, segment, range(2), [0, 1])
    reader = wanted[0].reader
    assert store.num_gets == len(list(read_units(reader, 0, 600)))
    assert fetcher._ahead_budget.used_bytes == 0


async def test_a_span_that_two_batches_share_is_read_once(
    fetcher: Fetcher, segment: Segment, store: SpoiltStore
) -> None:
    pool = PoisonedPool(8)
    fetcher.read_ahead(sources(segment, range(1, 6)), expire_s=60)
    assert (await fetch(fetcher, sources(segment, [1, 2]), pool, [1, 2])).num_pages == 2
    assert (await fetch(fetcher, sources(segment, [3, 4, 5]), pool, [3, 4, 5])).num_pages == 3
    assert holds(pool, segment, range(1, 6), range(1, 6))
    reader = sources(segment, [0])[0].reader
    assert store.num_gets == sum(len(list(read_units(reader, span, 600))) for span in range(3))


async def test_begun_spans_of_several_conversations_are_kept_within_bounds(
    store: SpoiltStore, segment: Segment
) -> None:
    wanted = sources(segment, range(8))
    largest = max(unit.size_bytes for span in range(4) for unit in read_units(wanted[0].reader, span, 600))
    with closing(DecodePool([{}] * 2)) as pool:
        fetcher = Fetcher(store, pool, read_bytes=600, inflight_bytes=8 * 20 * largest, may_delete=False)
        for page in (0, 2, 4):
            assert (await fetch(fetcher, wanted[page : page + 1], PoisonedPool(8), [page])).num_pages == 1
        num_gets = store.num_gets
        for page in (1, 3, 5):
            memory = PoisonedPool(8)
            assert (await fetch(fetcher, wanted[page : page + 1], memory, [page])).num_pages == 1
            assert holds(memory, segment, [page], [page])
        assert store.num_gets == num_gets

        bounded = Fetcher(store, pool, read_bytes=600, inflight_bytes=8 * largest, may_delete=False)
        for page in (0, 2, 4):
            await fetch(bounded, wanted[page : page + 1], PoisonedPool(8), [page])
            span = page // 2
            assert {key[1] for key in bounded._begun} == {u.start for u in read_units(wanted[0].reader, span, 600)}


async def test_reading_ahead_is_bounded_and_expires(fetcher: Fetcher, segment: Segment) -> None:
    fetcher.read_ahead(sources(segment, range(8)), expire_s=0.05)
    await asyncio.sleep(0.01)
    assert 0 < fetcher._ahead_budget.used_bytes <= 2000
    await asyncio.sleep(0.2)
    assert fetcher._ahead_budget.used_bytes == 0
    assert fetcher._ahead._reads == fetcher._ahead._by_cells == fetcher._ahead._lookups == {}


async def test_a_failed_read_ahead_fails_the_fetch_that_takes_it(
    fetcher: Fetcher, segment: Segment, store: SpoiltStore
) -> None:
    store.fail_from = 0
    wanted = sources(segment, range(2))
    fetcher.read_ahead(wanted, expire_s=60)
    await asyncio.sleep(0.1)
    store.fail_from = None
    result = await fetch(fetcher, wanted, PoisonedPool(2), [0, 1])
    assert result.num_pages == 0
    assert isinstance(result.failures[0], StoreError)
    assert (await fetch(fetcher, wanted, PoisonedPool(2), [0, 1])).num_pages == 2


async def test_a_corrupt_span_ends_the_hit(fetcher: Fetcher, segment: Segment, store: SpoiltStore) -> None:
    wanted = sources(segment, range(8))
    store.flip_from = next(read_units(wanted[0].reader, 2, 600)).start
    pool = PoisonedPool(8)
    result = await fetch(fetcher, wanted, pool, list(range(8)))
    assert result.num_pages == 4
    assert isinstance(result.failures[0], CorruptError)
    assert holds(pool, segment, range(4), range(4))


async def test_a_segment_that_is_corrupt_twice_is_deleted(
    fetcher: Fetcher, segment: Segment, store: SpoiltStore
) -> None:
    store.flip_from = 0
    await fetch(fetcher, sources(segment, range(8)), PoisonedPool(8), list(range(8)))
    await asyncio.gather(*fetcher._condemning.values())
    store.flip_from = None
    assert [info.name async for info in store.list()] == [segment[0].data_name]
    await asyncio.sleep(0)
    assert fetcher._condemning == {}


async def test_a_segment_that_was_garbled_on_the_way_stays(
    fetcher: Fetcher, segment: Segment, store: SpoiltStore
) -> None:
    store.flip_from, store.flips_left = 0, 1
    assert (await fetch(fetcher, sources(segment, range(2)), PoisonedPool(2), [0, 1])).num_pages == 0
    await asyncio.gather(*fetcher._condemning.values())
    assert len([info async for info in store.list()]) == 2
    assert (await fetch(fetcher, sources(segment, range(2)), PoisonedPool(2), [0, 1])).num_pages == 2


async def test_a_corrupt_segment_that_was_replaced_meanwhile_stays(
    fetcher: Fetcher, segment: Segment, store: SpoiltStore
) -> None:
    """Its new manifest does without the corrupt data."""
    coded, _ = segment
    made = transcode(coded.manifest, coded.data, make_targets(["deflate"], ["240p"]))
    wanted = sources(segment, range(2))
    path = store.root / coded.data_name
    path.write_bytes(bytes([coded.data[0] ^ 1]) + coded.data[1:])
    await commit_segment(store, made)
    assert (await fetch(fetcher, wanted, PoisonedPool(2), [0, 1])).num_pages == 0
    await asyncio.gather(*fetcher._condemning.values())
    assert await store.get(made.manifest.key.manifest_name) == made.manifest.encode()


async def test_any_variant_gives_the_same_pages(fetcher: Fetcher, segment: Segment, store: SpoiltStore) -> None:
    coded, _ = segment
    made = transcode(coded.manifest, coded.data, make_targets(["hevc", "hevc420", "deflate"], ["240p"]))
    await commit_segment(store, made)
    for variant in range(3):
        reader = SegmentReader(made.manifest, make_quantiser("exact"), variant)
        pool = PoisonedPool(8)
        wanted = [PageSource(reader, page) for page in range(8)]
        assert (await fetch(fetcher, wanted, pool, list(range(8)))).num_pages == 8
        assert holds(pool, segment, range(8), range(8))


async def test_bytes_read_ahead_are_let_go_when_they_are_used(
    fetcher: Fetcher, segment: Segment, store: SpoiltStore
) -> None:
    wanted = sources(segment, range(2))
    fetcher.read_ahead(wanted, expire_s=60)
    await asyncio.sleep(0.1)
    (_, task, timer), *_ = fetcher._ahead._reads.values()
    await fetch(fetcher, wanted, PoisonedPool(2), [0, 1])
    assert task.done()
    assert timer.cancelled()


async def test_a_missing_object_is_a_miss(fetcher: Fetcher, segment: Segment, store: SpoiltStore) -> None:
    await store.delete(segment[0].manifest.key.manifest_name)
    await store.delete(segment[0].data_name)
    result = await fetch(fetcher, sources(segment, range(8)), PoisonedPool(8), list(range(8)))
    assert result.num_pages == 0
    assert isinstance(result.failures[0], StoreError)
    assert result.failures[0].reason == "missing"


async def test_after_the_deadline_nothing_is_written(fetcher: Fetcher, segment: Segment, store: SpoiltStore) -> None:
    store.delay_s = 0.3
    pool = PoisonedPool(8)
    result = await fetch(fetcher, sources(segment, range(8)), pool, list(range(8)), timeout_s=0.1)
    assert result.timed_out
    assert result.num_pages == 0
    await asyncio.sleep(0.5)
    assert all(pool.is_poisoned(page) for page in range(8))


async def test_many_fetches_at_once(fetcher: Fetcher, segment: Segment) -> None:
    pools = [PoisonedPool(8) for _ in range(8)]
    wanted = sources(segment, range(8))
    results = await asyncio.gather(*(fetcher.fetch(wanted, list(range(8)), GuardedSink(p), 30) for p in pools))
    assert [r.num_pages for r in results] == [8] * 8
    assert all(holds(pool, segment, range(8), range(8)) for pool in pools)
    assert fetcher._fetch_budget.used_bytes == 0


async def test_a_cancelled_fetch_gives_everything_back(fetcher: Fetcher, segment: Segment, store: SpoiltStore) -> None:
    store.delay_s = 0.2
    sink = GuardedSink(PoisonedPool(8))
    task = asyncio.create_task(fetcher.fetch(sources(segment, range(8)), list(range(8)), sink, 30))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fetcher._fetch_budget.used_bytes == 0
    assert not sink.write("k", 0, [0], torch.zeros(1))


def test_span_parts() -> None:
    coded, _ = make_segment(SMALL, NUM_PAGES, span_pages=4)
    other, _ = make_segment(SMALL, 4, span_pages=4, seed="other")
    exact = make_quantiser("exact")
    first, second = SegmentReader(coded.manifest, exact), SegmentReader(other.manifest, exact)
    wanted = [PageSource(first, p) for p in (2, 3, 4, 5)] + [PageSource(second, p) for p in (0, 1)]
    parts = [(p.reader is first, p.span, p.request_pages, p.span_pages) for p in span_parts(wanted)]
    assert parts == [(True, 0, (0, 1), (2, 3)), (True, 1, (2, 3), (0, 1)), (False, 0, (4, 5), (0, 1))]
