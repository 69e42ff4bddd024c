"""Pages that ranks of another TP size wrote: found, read and restored."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch

from harness.memory_pool import MemoryPool
from harness.waiting import WAIT_S, LoopClock, until
from sgl_kvfetch.codec.bitstream.base import Decoders
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.codec.quant.base import Quantiser
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import KVFetchError, StoreError
from sgl_kvfetch.keys import HeadSlice
from sgl_kvfetch.plane.fetch.fetcher import FetchResult, PoolPages
from sgl_kvfetch.plane.fetch.finder import PageFinder
from sgl_kvfetch.plane.fetch.plan import PageSource, span_parts
from sgl_kvfetch.plane.fetch.pool import DecodePool
from sgl_kvfetch.plane.write.writer import commit_segment
from sgl_kvfetch.stores.base import Lookup
from sgl_kvfetch.types import TENSORS, KVGeometry
from tests.codec.quant.profiles import make_profile
from tests.fetchers import make_fetcher
from tests.segments import make_heads, make_segment, make_values, page_hashes

GEOMETRY = KVGeometry(num_layers=5, num_heads=4, k_head_dim=16, v_head_dim=16, page_size=4, dtype="bfloat16")
NUM_PAGES = 8
EXACT = make_quantiser("exact")
VALUES = make_values(GEOMETRY, NUM_PAGES)


class CountingStore(LocalStore):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked: list[str] = []  # lookups, by the heads of their folders, and "folders", their listing
        self.faults: dict[str, StoreError | None] = {}  # of what is asked; None hangs
        self.read_bytes = 0  # of data
        self.num_hanging = 0

    async def ask(self, what: str) -> None:
        self.asked.append(what)
        if (error := self.faults.get(what)) is not None:
            raise error
        if what in self.faults:
            self.num_hanging += 1
            await asyncio.Event().wait()

    async def folders(self, digest: str = "") -> frozenset[str]:
        await self.ask("folders")
        return await super().folders(digest)

    async def lookup(self, namespace: str, page_hashes: Sequence[bytes]) -> Lookup:
        await self.ask(namespace.partition(".")[2])
        return await super().lookup(namespace, page_hashes)

    async def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        self.read_bytes += length or 0
        return await super().get(name, start, length)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[CountingStore]:
    store = CountingStore(tmp_path)
    yield store
    await store.close()


async def write(
    store: LocalStore, heads: range, first_page: int = 0, end_page: int = NUM_PAGES, **options: object
) -> CodedSegment:
    """Store pages as one segment, as a rank with these heads does."""
    tokens = slice(first_page * GEOMETRY.page_size, end_page * GEOMETRY.page_size)
    values = {t: x[tokens] for t, x in VALUES.items()}
    options = {"cell_heads": 1, "first_page": first_page, **options}
    coded, _ = make_segment(GEOMETRY, end_page - first_page, values=values, heads=heads, **options)  # type: ignore[arg-type]
    await commit_segment(store, coded)
    return coded


class Rank:
    """Finds and fetches all pages for a rank with these heads."""

    def __init__(self, store: LocalStore, heads: range, quantiser: Quantiser = EXACT, model: str = "m") -> None:
        self.heads = HeadSlice(make_heads(GEOMETRY, quantiser, model).namespace, heads)
        self.faults: list[KVFetchError] = []
        self.finder = PageFinder(store, self.heads, quantiser, self.faults.append)
        self.store = store
        self.pool = MemoryPool(self.heads.geometry, NUM_PAGES, 57.0)

    async def find(self) -> list[PageSource]:
        return await self.finder.find_pages(page_hashes(NUM_PAGES), WAIT_S)

    async def fetch(self, sources: Sequence[PageSource]) -> FetchResult:
        with closing(DecodePool[Decoders]([{}] * 2)) as decoders:
            fetcher = make_fetcher(self.store, decoders, read_bytes=1 << 20)
            return await fetcher.fetch(sources, PoolPages(self.pool, range(len(sources))), WAIT_S)

    async def gets(self, num_pages: int) -> bool:
        found = await self.find()
        assert len(found) == num_pages
        assert (await self.fetch(found)).num_pages == num_pages
        return self.holds(num_pages)

    def holds(self, num_pages: int) -> bool:
        """Whether the first pages are restored, and the others untouched."""
        for t in TENSORS:
            mine = VALUES[t].view(NUM_PAGES, GEOMETRY.page_size, *VALUES[t].shape[1:])
            found = self.pool.read(t, range(NUM_PAGES))
            expected = mine[:, :, :, self.heads.heads.start : self.heads.heads.stop].clone()
            expected[num_pages:] = 57.0
            if not torch.equal(found, expected):
                return False
        return True


@pytest.mark.parametrize("heads", [range(2, 4), range(1, 2)])
async def test_a_rank_reads_its_own_heads_of_a_larger_one(store: CountingStore, heads: range) -> None:
    coded = await write(store, range(4))
    rank = Rank(store, heads)
    found = await rank.find()
    assert len(found) == NUM_PAGES
    assert (await rank.fetch(found)).num_pages == NUM_PAGES
    assert rank.holds(NUM_PAGES)
    # And no other bytes.
    reader = SegmentReader(coded.manifest, EXACT)
    own = [c for c in coded.manifest.cells() if coded.manifest.grid.heads(c.head_block).start in heads]
    expected = sum(map(reader.coded_bytes, own))
    assert store.read_bytes == sum(part.size_bytes for part in span_parts(found)) == expected
    assert expected < len(coded.data) * (len(heads) + 1) / 4


@pytest.mark.parametrize("heads", [range(4), range(2)])
async def test_a_rank_joins_the_heads_of_smaller_ones(store: CountingStore, heads: range) -> None:
    for head in range(4):
        await write(store, range(head, head + 1), span_pages=2 if head % 2 else 4)
    assert await Rank(store, heads).gets(NUM_PAGES)


async def test_as_few_segments_are_read_as_have_all_heads(store: CountingStore) -> None:
    for heads in (range(1), range(1, 2), range(2), range(2, 4)):
        await write(store, heads)
    assert [len(page.others) for page in await Rank(store, range(4)).find()] == [1] * NUM_PAGES


async def test_a_prefix_ends_where_a_head_is_missing(store: CountingStore) -> None:
    await write(store, range(2))
    await write(store, range(2, 4), 0, 4)
    assert await Rank(store, range(4)).gets(4)
    assert len(await Rank(store, range(2)).find()) == NUM_PAGES


async def test_a_fetch_ends_where_a_head_fails(store: CountingStore) -> None:
    await write(store, range(2), span_pages=8)
    await write(store, range(2, 4), 0, 4)
    bad = await write(store, range(2, 4), 4, 8)
    rank = Rank(store, range(4))
    found = await rank.find()
    assert len(found) == NUM_PAGES
    await store.delete(bad.data_name)
    result = await rank.fetch(found)
    assert result.num_pages == 4
    assert {f.reason for f in result.failures if isinstance(f, StoreError)} == {"missing"}


async def test_each_tp_size_may_have_a_part_of_the_prefix(store: CountingStore) -> None:
    await write(store, range(4), 0, 4)
    await write(store, range(2), 4, 6)
    await write(store, range(4), 6, 8)
    assert await Rank(store, range(2)).gets(NUM_PAGES)
    store.asked.remove("folders")
    assert store.asked == ["0-2", "0-4"] * 2  # what ended early is asked for again behind the others
    assert len(await Rank(store, range(2, 4)).find()) == 4


@pytest.mark.parametrize("heads", [range(2), range(4)])
async def test_klt(store: CountingStore, heads: range) -> None:
    klt = KltQuantiser(make_profile(num_layers=5, num_heads=4, cell_heads=1, num_sinks=1), step=1.0)
    pools = []
    for model, written in (("own", [heads]), ("other", [range(4)] if len(heads) == 2 else [range(2), range(2, 4)])):
        for each in written:
            await write(store, each, quantiser=klt, model=model)
        rank = Rank(store, heads, klt, model)
        assert (await rank.fetch(await rank.find())).num_pages == NUM_PAGES
        pools.append(rank.pool)
    assert all(torch.equal(pools[0].values[t], pools[1].values[t]) for t in TENSORS)
    assert not torch.equal(pools[0].values["k"], torch.full_like(pools[0].values["k"], 57.0))


async def find_while_others_hang(rank: Rank, store: CountingStore, clock: LoopClock) -> list[PageSource]:
    """Find all pages. The time of other folders is up once one hangs; the rank's own has a quarter of the wait left."""
    store.num_hanging = 0
    finding = asyncio.create_task(rank.find())
    await until(lambda: store.num_hanging > 0)
    await clock.advance(WAIT_S * 3 / 4)
    return await finding


# A rank finds its own segments whatever becomes of lookups in other folders.


@pytest.mark.parametrize("error", [StoreError("server", "as told"), None])
async def test_a_folder_that_fails_or_hangs_counts_as_empty(store: CountingStore, error: StoreError | None) -> None:
    await write(store, range(2), 0, 4)
    await write(store, range(4))
    store.faults = {"0-4": error}
    rank, clock = Rank(store, range(2)), LoopClock()
    for _ in range(2):  # the second time, both folders are known from the start
        assert len(await (rank.find() if error else find_while_others_hang(rank, store, clock))) == 4
    assert [str(e) for e in rank.faults] == [
        "as told" if error else f"looking up 8 pages in {rank.heads.namespace.digest()}.0-4: no answer"
    ] * 2
    store.faults = {}
    assert len(await rank.find()) == NUM_PAGES
    store.faults = {"0-2": StoreError("server", "its own must answer")}
    with pytest.raises(StoreError, match="its own must answer"):
        await rank.find()


async def test_a_listing_that_hangs_is_not_waited_for(store: CountingStore) -> None:
    store.faults = {"folders": None}
    await write(store, range(2))
    assert len(await find_while_others_hang(Rank(store, range(2)), store, LoopClock())) == NUM_PAGES


async def test_one_a_lookup_and_one_a_minute_where_all_have_one_tp_size(
    store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a lookup costs: folders with other heads are not asked. A listing that failed is soon made again."""
    now_s = 1000.0
    monkeypatch.setattr("sgl_kvfetch.plane.fetch.finder.time.monotonic", lambda: now_s)
    for heads in (range(2), range(2, 4)):
        await write(store, heads, 0, 4)
    rank = Rank(store, range(2))
    store.faults = {"folders": StoreError("server", "as told")}
    assert len(await rank.find()) == 4
    store.faults = {}
    now_s += 6
    for _ in range(5):
        assert len(await rank.find()) == 4
    assert Counter(store.asked) == {"folders": 2, "0-2": 6}
    now_s += 61
    await rank.find()
    assert Counter(store.asked) == {"folders": 3, "0-2": 7}
