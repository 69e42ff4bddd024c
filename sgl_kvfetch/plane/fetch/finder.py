"""Finds where pages are stored: makes lookups, remembers their results, and pauses if the store keeps failing.

A lookup asks for the longest stored run of a prompt's pages, and gets manifests. None is trusted: each is checked, and
must hold the pages that were asked for, at their place in the sequence. The run ends in front of the first that does
not. A rank needs pages of all its heads. Ranks of another TP size have written other heads, into other folders; so
several folders are asked at once, and what they have is joined where together they have all heads (`join_heads`). Where
others fail or are slow, the rank's own folder counts alone.

A prompt is looked up and then fetched, by SGLang's threads, with only the hashes in common. So results are remembered
between the two, by page, within bounds: pages that a lookup of many prompts has pushed out are asked for again.
Manifests in use are shared by requests, and decoded off the event loop unless they are small.

After three failures in a row, of lookups or of fetches, lookups stop for 1 to 30 s (`Breaker`): a store that hangs
costs a request its timeout, and must not cost every request that.

**Side pools.** Manifests name their pages, too (codec/container/sides.py). `usable_runs` says which runs of pages have
those that they need, and `SideFetcher` reads them.

`StoredPrompts` is what both modes have of all that, once audits have cut it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from sgl_kvfetch import metrics, timeline
from sgl_kvfetch.codec import Manifest, Quantiser, SegmentReader, SidePlace, decode_manifest, open_manifest
from sgl_kvfetch.errors import FormatError, KVFetchError, StoreError
from sgl_kvfetch.keys import HeadSlice
from sgl_kvfetch.metrics import count_miss, counted, miss, record_reason
from sgl_kvfetch.plane.choice import FetchOrder
from sgl_kvfetch.plane.fetch.offers import Tolerance
from sgl_kvfetch.plane.fetch.plan import PageSource
from sgl_kvfetch.plane.memory_cache import MemoryCache
from sgl_kvfetch.protocol import Arena, KVFetchConfig, Room, messages as m
from sgl_kvfetch.reasons import Reason
from sgl_kvfetch.side_by_side import Tasks, side_by_side
from sgl_kvfetch.stores import Breaker, SegmentHit, Store
from sgl_kvfetch.types import SideKey

if TYPE_CHECKING:
    from sgl_kvfetch.plane.store import StoreClient

KV_POOL = "kv"
_READS = 8  # at a time
_READ_BYTES = 8 << 20  # neighbouring pages are read together up to this size


@dataclass(frozen=True, slots=True)
class Usable:
    """``lengths``: the runs that have all their side pages. ``stored``: the longest run for each pool alone."""

    lengths: tuple[int, ...]
    stored: dict[str, int]

    def up_to(self, num_pages: int) -> Usable:
        """Return what there is of the first ``num_pages``."""
        lengths = tuple(length for length in self.lengths if length <= num_pages)
        return Usable(lengths, {pool: min(num_pages, number) for pool, number in self.stored.items()})


def usable_runs(sources: Sequence[PageSource], trailing: Mapping[str, int]) -> Usable:
    """Return which runs of pages, from the first on, can be used. ``trailing``: as in `messages.Stage`.

    The rules are SGLang's (``HiCacheFile.batch_exists_v2``).
    """
    lengths, stored = set(range(1, len(sources) + 1)), {}
    for pool, num_trailing in trailing.items():
        found = set()
        num_there = 0  # pages in front of here, without a gap
        for end, source in enumerate(sources, 1):
            num_there = num_there + 1 if (pool, source.page) in source.reader.side_places else 0
            if num_there >= min(num_trailing or end, end):
                found.add(end)
        stored[pool] = max(found, default=0)
        lengths &= found
    return Usable(tuple(sorted(lengths)), stored)


@dataclass(frozen=True, slots=True)
class _Read:
    """Neighbouring side pages of an object. ``pages``: indices into the request, in the order of their bytes."""

    source: PageSource
    pages: tuple[int, ...]
    places: tuple[SidePlace, ...]

    @property
    def size_bytes(self) -> int:
        return sum(place.size_bytes for place in self.places)


class SideFetcher:
    """Fetches the side pages of one store. Belongs to one event loop."""

    def __init__(self, store: Store, finder: PageFinder, report_damage: Callable[[SegmentReader], None]) -> None:
        """``report_damage`` is called for segments whose side pages are missing or broken."""
        self._store = store
        self._finder = finder
        self._report_damage = report_damage

    async def fetch(
        self,
        hashes: Sequence[bytes],
        sources: Sequence[PageSource],
        pool: str,
        num_bytes: int,
        deadline_s: float,
        into: dict[int, bytearray],
    ) -> None:
        """Fetch pages of one side pool, ``num_bytes`` each. Those that are there and verified are put ``into`` it by
        their index, on some thread, also after this has ended. Those that nobody stored are not there; those that fail
        count as misses. Raises TimeoutError at ``deadline_s``, of time.monotonic()."""
        failures: list[KVFetchError] = []

        async def read(each: _Read) -> None:
            try:
                await self._read(each, num_bytes, into)
            except KVFetchError as e:
                failures.append(e)
                count_miss("fetch", e)
                if isinstance(e, FormatError):
                    metrics.CORRUPT_CHUNKS.inc()
                if isinstance(e, FormatError) or (isinstance(e, StoreError) and e.reason == "missing"):
                    self._report_damage(each.source.reader)

        try:
            async with asyncio.timeout(deadline_s - time.monotonic()):
                await side_by_side(_READS, _reads(sources, pool), read)
        except TimeoutError as e:
            self._finder.fetched(hashes, [e], is_of_sides=True)
            raise
        self._finder.fetched(hashes if failures else (), failures, is_of_sides=True)

    async def _read(self, each: _Read, num_bytes: int, into: dict[int, bytearray]) -> None:
        for place in each.places:
            if (found := place.page).num_bytes != num_bytes:
                raise FormatError(f"a side page of {found.pool} has {found.num_bytes} bytes, expected {num_bytes}")
        first = each.places[0]
        started_s = time.monotonic()
        data = memoryview(bytearray(each.size_bytes))
        if not await self._store.read(first.data_name, first.start, [data]):
            raise StoreError("missing", f"{first.data_name} is not in the store")
        metrics.STAGE_SECONDS.labels("transmit").observe(time.monotonic() - started_s)
        metrics.WIRE_BYTES.labels("read").inc(len(data))

        def decode() -> None:
            for page, place in zip(each.pages, each.places, strict=True):
                start = place.start - first.start
                into[page] = place.decode(data[start : start + place.size_bytes])

        await asyncio.to_thread(decode)


def _reads(sources: Sequence[PageSource], pool: str) -> list[_Read]:
    reads: list[_Read] = []
    for page, source in enumerate(sources):
        place = source.reader.side_places.get((pool, source.page))
        if place is None:
            continue
        last = reads[-1] if reads else None
        if (
            last is not None
            and last.places[-1].data_name == place.data_name
            and last.places[-1].start + last.places[-1].size_bytes == place.start
            and last.size_bytes + place.size_bytes <= _READ_BYTES
        ):
            reads[-1] = _Read(last.source, (*last.pages, page), (*last.places, place))
        else:
            reads.append(_Read(source, (page,), (place,)))
    return reads


_MAX_KNOWN_PAGES = 1 << 15  # remembered between a lookup and its fetch
# Of manifests, as stored, that are remembered or in use; decoded they take up to ten times as much.
_MAX_HELD_BYTES = 16 << 20
_READER_BYTES = 8192  # what a reader takes however small its manifest is, as if it were stored
_LOOKUPS_AT_ONCE = 8  # each may hold an answer
_FEW_BYTES = 64 << 10  # of manifests: the event loop decodes so many itself, in a few milliseconds
_TURN_S = 0.002  # of the event loop, for one lookup
_LIST_EVERY_S = 60.0  # how long ranks of a TP size that is new to the store may go unnoticed
_LIST_AGAIN_S = 5.0  # after there was no answer: a store that does not list costs few lookups the wait for it
_OTHERS_PART = 3 / 4  # of a lookup's timeout, for other folders; a local cache answers for a dead store after 1/2
_MOST_TURNS = 8  # of a lookup between TP sizes that have each written a part of the prefix


class PageFinder:
    """Finds the pages of one rank, whatever the TP size of those who wrote them. Belongs to one event loop.

    Ranks of other TP sizes write other runs of heads, each into a folder of its own. The store is asked now and then
    which folders there are; lookups go to those that have heads of the rank, and to no others. If these fail, the
    rank's own segments are found all the same.

    If lookups or fetches fail several times in a row, lookups pause for a while.
    """

    def __init__(
        self,
        store: Store,
        heads: HeadSlice,
        quantiser: Quantiser,
        on_fault: Callable[[KVFetchError], None],
        on_answer: Callable[[float], None] = lambda seconds: None,
        engine_codecs: Collection[str] = (),
        tolerance: Tolerance | None = None,
        memory: MemoryCache | None = None,
    ) -> None:
        """``on_fault`` gets the error for each unusable segment that the store returned, ``on_answer`` the seconds of
        each lookup. ``engine_codecs``: as for `Tolerance.reader`. Segments that are coarser than ``tolerance``
        allows are not used. The store is not asked for what is in ``memory``."""
        self._memory = memory or MemoryCache()
        self._on_answer = on_answer
        self._store = store
        self._heads = heads
        self._quantiser = quantiser
        self._on_fault = on_fault
        self._engine_codecs = engine_codecs
        self._tolerance = tolerance or Tolerance()
        self._lookups = Breaker()
        self._fetches = Breaker()
        self._side_fetches = Breaker()  # its own: before each of these, a fetch of KV has succeeded
        self._known: OrderedDict[bytes, PageSource] = OrderedDict()
        # Readers in use, by folder and stored manifest: requests for the same pages share them.
        self._readers: weakref.WeakValueDictionary[tuple[str, bytes], SegmentReader] = weakref.WeakValueDictionary()
        self._asking = asyncio.Semaphore(_LOOKUPS_AT_ONCE)
        self._decoding = asyncio.Lock()
        self._siblings: list[HeadSlice] = []
        self._list_from_s = float("-inf")  # when to ask for folders again
        self._listing = asyncio.Lock()
        self._is_off = False

    async def find_pages(
        self, hashes: Sequence[bytes], timeout_s: float, position: int | None = None, *, with_sides: bool = False
    ) -> list[PageSource]:
        """Find the longest run of these pages, in memory and then in the store. ``position``: of the first one in the
        sequence, if that is known. ``with_sides``: with the side pages that the store has by now, which memory does not
        know. Raises StoreError, TimeoutError."""
        if self._is_off:
            record_reason(Reason.AUDITED)
            return []
        known = [] if with_sides else self._in_place(self._memory.find(hashes), position)
        if len(known) < len(hashes):
            # From where a segment begins: by names, none is found that begins before (`Store.lookup`).
            first = len(known) - _num_begun(known)
            place = known[0].position + first if known else position
            try:
                found = await self._ask_store(hashes[first:], timeout_s, place)
                known = known + found[len(known) - first :]
            except (StoreError, TimeoutError) as e:
                if not known:
                    raise
                self._on_fault(e if isinstance(e, StoreError) else StoreError("timeout", "no answer to a lookup"))
        if known and len(known) < len(hashes) and _leaves(known[-1], hashes[len(known)]):
            record_reason(Reason.DIVERGES)
            metrics.DIVERGED_PAGES.inc(len(hashes) - len(known))
        self._remember(hashes, known)
        return known

    async def _ask_store(self, hashes: Sequence[bytes], timeout_s: float, position: int | None) -> list[PageSource]:
        started_s = time.monotonic()
        if self.is_paused:
            metrics.STORE_DOWN.set(True)
            raise StoreError("skipped", "lookups are paused because the store keeps failing")
        try:
            async with asyncio.timeout(timeout_s):
                until_s = asyncio.get_running_loop().time() + _OTHERS_PART * timeout_s
                sources = self._in_place(await self._find_in_all(hashes, until_s), position)
        except (StoreError, TimeoutError):
            self._lookups.failed(time.monotonic())
            metrics.STORE_DOWN.set(self.is_paused)
            raise
        self._lookups.succeeded()
        seconds = time.monotonic() - started_s
        metrics.STAGE_SECONDS.labels("lookup").observe(seconds)
        self._on_answer(seconds)
        return sources

    async def _find_in_all(self, hashes: Sequence[bytes], until_s: float) -> list[PageSource]:
        """``until_s``: when to go on without what other folders have, in the loop's time. Raises StoreError if the
        rank's own folder cannot be looked up in."""
        try:
            async with asyncio.TaskGroup() as group:
                own = group.create_task(self._look_up(self._heads, hashes))
                others = group.create_task(self._look_up_each(list(self._siblings), hashes, until_s))
                group.create_task(self._list_siblings(until_s))
        except ExceptionGroup as e:
            raise e.exceptions[0] from None
        answers: dict[HeadSlice, list[PageSource] | None] = {self._heads: own.result(), **others.result()}
        asked = [each for each in self._siblings if each not in answers]
        runs: dict[HeadSlice, list[PageSource]] = {}  # from the first page on that is not in `pages`
        pages: list[PageSource] = []
        for _ in range(_MOST_TURNS):
            answers |= await self._look_up_each(asked, hashes[len(pages) :], until_s)
            runs = {each: run for each, run in (runs | answers).items() if run is not None}
            answers = {}
            more = join_heads(self._heads.heads, {each.heads: run for each, run in runs.items()})
            pages += more
            # A run that ends before the others' may go on behind them: a server has computed what it did not find.
            asked = [each for each, run in runs.items() if len(run) < len(more)]
            runs = {each: run[len(more) :] for each, run in runs.items()}
            if not asked or len(pages) == len(hashes):
                break
        return pages

    def _in_place(self, pages: list[PageSource], position: int | None) -> list[PageSource]:
        """Return the pages up to the first whose segments were written for another place in the sequence: rotations
        depend on the place. ``position``: of the first page; None to take it as the first segment has it."""
        for i, page in enumerate(pages):
            expected = i + (pages[0].position if position is None else position)
            for each in (page, *page.others):
                if (found := each.position) != expected:
                    stem = each.reader.manifest.key.stem
                    self._on_fault(FormatError(f"{stem}: expected page {expected} of the sequence, found {found}"))
                    return pages[:i]
        return pages

    async def _list_siblings(self, until_s: float) -> None:
        """Ask which folders have heads of this rank, once a minute. Without an answer, the known ones are kept."""
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout_at(until_s), self._listing:
                if time.monotonic() > self._list_from_s:
                    self._list_from_s = time.monotonic() + _LIST_AGAIN_S
                    self._siblings = self._heads.siblings(await self._store.folders(self._heads.namespace.digest()))
                    self._list_from_s = time.monotonic() + _LIST_EVERY_S

    async def _look_up_each(
        self, asked: Sequence[HeadSlice], hashes: Sequence[bytes], until_s: float
    ) -> dict[HeadSlice, list[PageSource] | None]:
        """Look up in several folders at once. Return None for one that fails or is not done in time."""

        async def look_up(each: HeadSlice) -> list[PageSource] | None:
            try:
                async with asyncio.timeout_at(until_s):
                    return await self._look_up(each, hashes)
            except StoreError as e:
                self._on_fault(e)
            except TimeoutError:
                self._on_fault(StoreError("timeout", f"looking up {len(hashes)} pages in {each.folder}: no answer"))
            return None

        return dict(zip(asked, await asyncio.gather(*map(look_up, asked)), strict=True))

    async def _look_up(self, heads: HeadSlice, hashes: Sequence[bytes]) -> list[PageSource]:
        async with self._asking:
            lookup = await self._store.lookup(heads.folder, hashes)
            metrics.record_success("lookup")
            metrics.WIRE_BYTES.labels("lookup").inc(sum(len(hit.manifest) for hit in lookup.hits))
            metrics.STORE_DOWN.set(self.is_paused)
            async with self._decoding:
                return await self._sources(heads, lookup.hits, hashes)

    async def recall(self, hashes: Sequence[bytes], timeout_s: float) -> list[PageSource]:
        """Return the sources that earlier lookups found. Call `find_pages` if any is unknown or expired."""
        known = [source for page_hash in hashes if (source := self._known.get(page_hash)) is not None]
        now_s = time.time()
        if len(known) < len(hashes) or any(source.reader.manifest.is_expired(now_s) for source in known):
            return await self.find_pages(hashes, timeout_s)
        return known

    def fetched(
        self, missing: Sequence[bytes], failures: Sequence[KVFetchError | TimeoutError], *, is_of_sides: bool = False
    ) -> None:
        """Update the memory and the breakers from a fetch. ``missing``: pages that are not there. ``is_of_sides``:
        whether they are side pages."""
        # They may be evicted or corrupt: ask the store again.
        for page_hash in missing:
            self._known.pop(page_hash, None)
        breaker = self._side_fetches if is_of_sides else self._fetches
        if any(isinstance(f, TimeoutError) or (isinstance(f, StoreError) and f.reason != "missing") for f in failures):
            breaker.failed(time.monotonic())
        else:
            breaker.succeeded()
            metrics.record_success("fetch")

    def turn(self, *, is_on: bool) -> None:
        """Find nothing from now on, since what is stored is wrong; or find pages again."""
        if not is_on:
            self.forget_pages()
        self._is_off = not is_on

    def forget_pages(self) -> None:
        self._known.clear()

    @property
    def is_paused(self) -> bool:
        """Whether lookups are paused now."""
        now_s = time.monotonic()
        return any(each.is_open(now_s) for each in (self._lookups, self._fetches, self._side_fetches))

    async def _sources(self, heads: HeadSlice, hits: Sequence[SegmentHit], hashes: Sequence[bytes]) -> list[PageSource]:
        """Return the sources of the pages in ``hits``, up to the first that cannot be used, or for which there is no
        room. Manifests are decoded on another thread, unless they are small."""
        are_few = sum(len(hit.manifest) for hit in hits) <= _FEW_BYTES
        free_bytes = await self._make_room(sum(len(hit.manifest) + _READER_BYTES for hit in hits))
        sources: list[PageSource] = []
        turn_ends_s = time.monotonic() + _TURN_S
        for hit in hits:
            if time.monotonic() > turn_ends_s:
                await asyncio.sleep(0)
                turn_ends_s = time.monotonic() + _TURN_S
            name = heads.folder, hit.manifest
            asked = tuple(hashes[len(sources) : len(sources) + hit.num_pages])
            try:
                reader = self._readers.get(name)
                if reader is None:
                    free_bytes -= len(hit.manifest) + _READER_BYTES
                    if free_bytes < 0:
                        held = f"manifests in use take {_MAX_HELD_BYTES} bytes"
                        raise StoreError("too_large", f"{held}; there is no room for one of {len(hit.manifest)} bytes")
                    make = partial(self._reader, heads, hit.manifest)
                    reader = make() if are_few else await asyncio.to_thread(make)
                    self._readers[name] = reader
                if asked != reader.manifest.page_hashes[hit.first_page : hit.first_page + len(asked)]:
                    raise FormatError("the store's answer holds other pages than the lookup requested")
            except KVFetchError as e:
                self._on_fault(e)
                break
            sources += [PageSource(reader, hit.first_page + i) for i in range(len(asked))]
        return sources

    def own_reader(self, manifest: Manifest) -> SegmentReader:
        """Return the reader of a segment that this rank has written. Raises KVFetchError."""
        return self._reader(self._heads, manifest.encode())

    def _reader(self, heads: HeadSlice, manifest_bytes: bytes) -> SegmentReader:
        manifest = decode_manifest(manifest_bytes)
        if manifest.is_encrypted:
            manifest = open_manifest(manifest, self._store.keys)
        heads.require_same(manifest.heads)
        return self._tolerance.reader(manifest, self._quantiser, self._heads.heads, self._engine_codecs)

    async def _make_room(self, num_bytes: int) -> int:
        """Forget pages until there is room for manifests of so many bytes. Return how much room there is."""
        while (free := _MAX_HELD_BYTES - self._held_bytes()) < num_bytes and self._known:
            for page_hash in list(self._known)[: -(-len(self._known) // 2)]:
                del self._known[page_hash]
            await asyncio.sleep(0)  # counting and freeing thousands of manifests takes milliseconds
        return free

    def _held_bytes(self) -> int:
        counted = (name for name, reader in self._readers.items() if not self._memory.keeps(reader))
        return sum(len(name[1]) + _READER_BYTES for name in counted)

    def _remember(self, hashes: Sequence[bytes], sources: Sequence[PageSource]) -> None:
        for page_hash, source in zip(hashes, sources, strict=False):
            self._known[page_hash] = source
            self._known.move_to_end(page_hash)
        while len(self._known) > _MAX_KNOWN_PAGES:
            self._known.popitem(last=False)


def _num_begun(pages: Sequence[PageSource]) -> int:
    """Return how many of these pages are of a segment that goes on behind them."""
    return min(len(pages), (pages[-1].page + 1) % pages[-1].reader.manifest.num_pages) if pages else 0


def _leaves(last: PageSource, next_hash: bytes) -> bool:
    """Return whether the segment of a prompt's last stored page goes on with another page than the prompt. Where the
    segment ends with that page, nothing is known."""
    return last.reader.manifest.page_hashes[last.page + 1 :][:1] not in ((), (next_hash,))


def join_heads(heads: range, runs: Mapping[range, Sequence[PageSource]]) -> list[PageSource]:
    """Return the longest run of pages of which all ``heads`` are stored.

    ``runs``: for ranges of heads, sources of the pages from the first on, as many as are stored. Of ranges that are
    equally useful, the first is used. All heads are counted in the model.
    """
    pages: list[PageSource] = []
    for end in sorted({len(run) for run in runs.values()}):
        parts = [runs[each][len(pages) : end] for each in _cover(heads, [r for r in runs if len(runs[r]) >= end])]
        if not parts:
            break
        if len(parts) == 1:
            pages += parts[0]
        else:
            pages += [replace(first, others=tuple(others)) for first, *others in zip(*parts, strict=True)]
    return pages


def _cover(heads: range, ranges: Sequence[range]) -> list[range]:
    """Return the fewest of these ranges that have all ``heads``, in their order; none if some heads are missing."""
    cover: list[range] = []
    head = heads.start
    while head < heads.stop:
        reached = max((r for r in ranges if head in r), key=lambda r: min(r.stop, heads.stop), default=None)
        if reached is None:
            return []
        cover.append(reached)
        head = reached.stop
    return cover


class StoredPrompts:
    """What the store has of prompts, for both modes: `Prefetcher` brings it in host mode, `Stager` in device mode.

    Belongs to one event loop. ``order``: what is left to the engine delays the prompts behind it. ``sides`` fetches
    side pages, and ``side_bytes`` has the size of one in each pool."""

    def __init__(
        self,
        config: KVFetchConfig,
        heads: HeadSlice,
        client: StoreClient,
        arena: Arena,
        room: Room,
        side_bytes: Mapping[str, int],
        num_served: Callable[[Sequence[bytes], Sequence[PageSource], bool], int],
    ) -> None:
        """``room`` allocates bytes of ``arena``. ``num_served`` returns how many of the pages that were found are to be
        served; the last argument says whether some are of use without the others."""
        self.config, self.geometry, self.client = config, heads.geometry, client
        self.order = FetchOrder(heads.geometry.page_size, may_compute=config.recompute == "auto")
        self.arena, self.room = arena, room
        self.tasks = Tasks()
        self.side_bytes = side_bytes
        self.sides = SideFetcher(client.store, client.finder, client.reads.report_damage)
        self._num_served = num_served

    async def find(
        self, command: m.Stage, hashes: Sequence[bytes], request: timeline.Request, most_pages: int
    ) -> tuple[list[PageSource], Usable]:
        """Return where the pages are that are to be served, and, if side pools are needed, which runs can be used. If
        shorter runs are of use, there are ``most_pages`` at most."""
        started_s = time.monotonic()
        sources: list[PageSource] = []
        usable = Usable((), {})
        with counted("lookup"):
            timeout_s, with_sides = self.config.lookup_timeout_s, bool(command.trailing)
            sources = await self.client.finder.find_pages(hashes, timeout_s, with_sides=with_sides)
            if with_sides:
                usable = await asyncio.to_thread(usable_runs, sources, command.trailing)
                usable.stored[KV_POOL] = len(sources)
                sources = sources[: max(usable.lengths, default=0)]
            is_divisible = not m.is_for_its_end(command.trailing)
            num_served = self._num_served(hashes, sources[: most_pages if is_divisible else None], is_divisible)
            if num_served < len(sources):
                usable = usable.up_to(num_served)
                sources = sources[: max(usable.lengths, default=0) if with_sides else num_served]
        metrics.LOOKUP_PAGES.labels("hit").inc(len(sources))
        metrics.LOOKUP_PAGES.labels("miss").inc(len(hashes) - len(sources))
        timeline.add(request, "lookup", started_s, time.monotonic(), pages=len(hashes), found=len(sources))
        return sources, usable

    def leave_to_engine(self, sources: Sequence[PageSource]) -> None:
        """Record that computing these pages is sooner. The link is measured again all the same, now and then."""
        self.tasks.begin(self.client.reads.probe(sources))
        record_reason(Reason.SOONER)

    def put_sides(self, sides: Mapping[SideKey, bytearray], ends: ExitStack) -> m.SidePages | None:
        """Put side pages into shared memory, until ``ends`` is closed; None, which is a miss, if there is no room."""
        place = self.put(list(sides.values()), ends)
        return None if place is None else m.SidePages(place, tuple(sides))

    def put(self, pieces: Sequence[bytes | bytearray], ends: ExitStack) -> int | None:
        """Put bytes into shared memory, one piece after another, until ``ends`` is closed. Return where they are; None,
        which is a miss, if there is no room."""
        num_bytes = sum(map(len, pieces))
        place = self.room.allocate(num_bytes, 0) if num_bytes <= self.room.num_bytes else None
        if place is None:
            miss("fetch", "no_slots")
            return None
        ends.callback(self.room.free, place)
        into, begin = self.arena.buffer(place, num_bytes), 0
        for piece in pieces:
            into[begin : (begin := begin + len(piece))] = piece
        return place
