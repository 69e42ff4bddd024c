"""Brings the bytes of units: the chunks of a run of cells, from where they are. The store is asked last.

They may be in three places before. `memory_cache` keeps what has been read and written lately. *Begun* bytes are left
of spans that a fetch has used in part: SGLang fetches in batches of 128 pages, and the next batch, or the next turn of
a conversation, begins with the rest of the span. And a lookup in host mode reads *ahead* what its fetches will want, in
order, while SGLang makes room for it.

What must hold:

* **Bytes are bounded twice.** Those that are read ahead and those of fetches take from different budgets. With one,
  bytes that wait for their fetch could fill it, and that fetch may come only after another one, which waits for bytes:
  a circle.
* **All units of a span have one reader**: the one with which some of it was read already, or the one that is chosen
  when the first is asked for.
* **Damage is reported, not judged.** Only the store can tell damage on its disk from damage on the way here. Whatever
  is kept of a damaged object is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from sgl_kvfetch import metrics, timeline
from sgl_kvfetch.codec import CellChunks, SegmentReader
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.plane.fetch.link import BytesBudget, Link
from sgl_kvfetch.plane.fetch.offers import Chooser
from sgl_kvfetch.plane.fetch.plan import (
    PageSource,
    ReadSize,
    ReadUnit,
    SpanKey,
    SpanPart,
    UnitKey,
    read_units,
    span_parts,
)
from sgl_kvfetch.plane.memory_cache import Held, MemoryCache
from sgl_kvfetch.side_by_side import together
from sgl_kvfetch.stores import Store

logger = logging.getLogger(__name__)

_MAX_REPORTS = 4  # at once; a segment for which there is no room is reported when it is read again

# Yields the units of a lookup's pages that are still to be read. The argument says which spans to leave out.
Units = Callable[[Callable[[SpanKey], bool]], Iterator[ReadUnit]]
Transmit = Callable[[ReadUnit], Coroutine[Any, Any, memoryview]]
Places = Callable[[ReadUnit], list[CellChunks] | None]  # as `Destination.places`


@dataclass(slots=True, eq=False)
class _Lookup:
    """The state of one lookup's read-ahead."""

    taken: set[SpanKey] = field(default_factory=set)  # spans that fetches have begun to read
    dropped: set[str] = field(default_factory=set)  # data objects of which nothing more is to be read
    has_failed: bool = False


class AheadReader:
    """Reads units and keeps their bytes until a fetch takes them or they expire. Belongs to one event loop."""

    def __init__(self, link: Link, budget: BytesBudget, transmit: Transmit) -> None:
        """``budget`` bounds the bytes kept."""
        self._link = link
        self._budget = budget
        self._transmit = transmit
        self._reads: dict[UnitKey, tuple[ReadUnit, asyncio.Task[memoryview], asyncio.TimerHandle]] = {}
        self._by_span: defaultdict[SpanKey, set[UnitKey]] = defaultdict(set)  # of `_reads`
        self._lookups: dict[_Lookup, asyncio.Task[None]] = {}

    def begin(self, units: Units, expire_s: float) -> None:
        """Read ``units`` and keep each for ``expire_s`` seconds. After this time, no more units are requested."""
        loop = asyncio.get_running_loop()
        lookup = _Lookup()
        task = self._lookups[lookup] = loop.create_task(self._read(lookup, units, expire_s))
        timer = loop.call_later(expire_s, task.cancel)
        task.add_done_callback(partial(self._ended, lookup, timer))

    def find_reader(self, key: SpanKey) -> SegmentReader | None:
        """Return the reader with which a span is read ahead, or None."""
        return next((self._reads[unit][0].reader for unit in self._by_span.get(key, ())), None)

    async def take(self, unit: ReadUnit) -> memoryview | None:
        """Return the unit's bytes once they have come; None if they are not read ahead. Raises StoreError."""
        if unit.key not in self._reads:
            return None
        task = self._take(unit)
        try:
            return await task
        finally:
            self._budget.release(unit.size_bytes)

    def _take(self, unit: ReadUnit) -> asyncio.Task[memoryview]:
        """Return the task that reads the unit's bytes, which are to be released to the budget."""
        _, task, timer = self._reads.pop(unit.key)
        self._by_span[unit.span_key].remove(unit.key)
        if not self._by_span[unit.span_key]:
            del self._by_span[unit.span_key]
        timer.cancel()  # it refers to this object, and so keeps bytes alive
        return task

    def leave_out(self, unit: ReadUnit) -> None:
        """Record that a fetch reads this unit's span: what is left of it is not read ahead any more."""
        for lookup in self._lookups:
            lookup.taken.add(unit.span_key)

    def drop_units(self, data_name: str | None = None) -> None:
        """Drop all units, or all of this data object. No lookup reads more of what is dropped."""
        for lookup, task in self._lookups.items():
            if data_name is None:
                task.cancel()
            else:
                lookup.dropped.add(data_name)
        for key in [key for key in self._reads if data_name in (None, key[0])]:
            self._drop(key)

    async def _read(self, lookup: _Lookup, units: Units, expire_s: float) -> None:
        loop = asyncio.get_running_loop()
        # Make the next unit, and choose how to read its span, only when the link has room again: later is better.
        for unit in units(lookup.taken.__contains__):
            if self._is_needless(unit, lookup):
                continue
            await self._budget.acquire(unit.size_bytes)
            if self._is_needless(unit, lookup):  # it may have changed meanwhile
                self._budget.release(unit.size_bytes)
                continue
            task = loop.create_task(self._transmit(unit))
            task.add_done_callback(partial(self._read_ended, lookup, unit.key))
            self._by_span[unit.span_key].add(unit.key)
            self._reads[unit.key] = unit, task, loop.call_later(expire_s, self._drop, unit.key)
            await asyncio.sleep(0)  # let the task send its request
            await self._link.may_read()
            if lookup.has_failed:
                return

    def _is_needless(self, unit: ReadUnit, lookup: _Lookup) -> bool:
        is_gone = unit.reader.data_name in lookup.dropped
        return unit.key in self._reads or unit.span_key in lookup.taken or is_gone

    def _read_ended(self, lookup: _Lookup, key: UnitKey, task: asyncio.Task[memoryview]) -> None:
        """Keep no failure for a later fetch: the segment may have been written again, or the store be back."""
        if task.cancelled() or task.exception() is None:  # this marks an error as retrieved
            return
        lookup.has_failed = True
        if key in self._reads and self._reads[key][1] is task:
            self._drop(key)

    def _ended(self, lookup: _Lookup, timer: asyncio.TimerHandle, _: asyncio.Task[None]) -> None:
        del self._lookups[lookup]
        timer.cancel()

    def _drop(self, key: UnitKey) -> None:
        unit, _, _ = self._reads[key]
        self._take(unit).cancel()
        self._budget.release(unit.size_bytes)


class UnitReader:
    """Reads units of one store. Belongs to one event loop."""

    def __init__(
        self,
        store: Store,
        chooser: Chooser,
        *,
        read_size: ReadSize,
        inflight_bytes: int,
        may_delete: bool,
        memory: MemoryCache | None = None,
    ) -> None:
        """``inflight_bytes`` bounds the bytes that are under way, or wait to be restored. ``may_delete``: report
        damaged segments to the store, which deletes them if they are damaged there. ``memory`` keeps what is read."""
        self._store = store
        self.chooser, self.link = chooser, chooser.link
        self.memory = memory or MemoryCache()
        self._read_size = read_size
        self._ahead_budget = BytesBudget(max(1, inflight_bytes // 2), self._report_queue)
        self.budget = BytesBudget(max(1, inflight_bytes - inflight_bytes // 2), self._report_queue)  # of fetches
        self._may_delete = may_delete
        self._reports: dict[str, asyncio.Task[None]] = {}  # running, by the manifest's name
        self.ahead = AheadReader(self.link, self._ahead_budget, self._read_whole)
        self._begun: OrderedDict[UnitKey, tuple[ReadUnit, memoryview]] = OrderedDict()
        self._begun_bytes = inflight_bytes // 8

    def drop_unused(self) -> None:
        """Drop all bytes that running fetches do not use."""
        self._begun.clear()
        self.ahead.drop_units()
        self.memory.drop()

    def read_ahead(self, sources: Sequence[PageSource], expire_s: float) -> None:
        """Start to transmit the bytes of these pages, as link and budget allow, and keep them for ``expire_s``
        seconds."""
        due_s = time.monotonic() + self.chooser.tolerance.within_s
        self.ahead.begin(partial(self._units_ahead, span_parts(sources), due_s), expire_s)

    async def probe(self, sources: Sequence[PageSource]) -> None:
        """Measure the link again with the first bytes of pages that will not be fetched, if that is due."""
        if size_bytes := self.link.begin_probe():
            with contextlib.suppress(StoreError):
                for unit in islice(read_units(sources[0].reader, 0, ReadSize(size_bytes)), 2):
                    await self._received(unit)  # not into memory, where all units of a span are cut alike

    def _units_ahead(
        self, parts: Sequence[SpanPart], due_s: float, is_taken: Callable[[SpanKey], bool]
    ) -> Iterator[ReadUnit]:
        unasked = sum(part.reader.cells_per_span for part in parts)
        for part in parts:
            if not is_taken(part.key):
                for unit in self.units(part, due_s, unasked):
                    if unit.key not in self._begun and not self.memory.has(unit.reader, part.span):
                        yield unit
            unasked -= part.reader.cells_per_span

    def units(
        self, part: SpanPart, due_s: float, num_unasked: int, takes: Callable[[SegmentReader], bool] = lambda _: True
    ) -> list[ReadUnit]:
        """Return the units to read of a span, all with one reader: with that with which some of it was read already, or
        the one that is chosen now. ``num_unasked`` counts the cells not requested yet, including those of the span.
        ``due_s``: when the fetch should end. ``takes``: as in `Destination`."""
        reader = part.reader
        if self.chooser.is_free(reader):
            others = (unit.reader for unit, _ in self._begun.values() if unit.span_key == part.key)
            begun = self.ahead.find_reader(part.key) or next(others, None)
            # The segment may have been rewritten meanwhile, with other spans or cells.
            if begun is not None and begun.has_cells_of(reader) and takes(begun):
                reader = begun
            else:
                left_s, is_here = due_s - time.monotonic(), partial(self.memory.has, span=part.span)
                reader = self.chooser.choose(part, left_s, num_unasked, takes, is_here)
        return read_units(reader, part.span, self._read_size)

    async def chunks_of(
        self, unit: ReadUnit, held: Held, places_of: Places, request: timeline.Request, *, is_used_again: bool
    ) -> Sequence[CellChunks]:
        """Return the chunks of a unit's cells. ``held``: what memory keeps of its fetch. ``is_used_again``: whether
        another fetch will want them. Raises StoreError."""
        _, data = self._begun.get(unit.key, (None, None))
        if (chunks := held.chunks(unit)) is not None:
            return chunks
        if data is None and (data := await self.ahead.take(unit)) is None:
            if (places := held.places(unit)) is not None:
                await self._transmit(unit, request, unit.by_object(places))
                held.received(unit)
                return places
            if len(unit.reads) == 1 and not is_used_again and (places := places_of(unit)) is not None:
                await self._transmit(unit, request, unit.by_object(places))
                return places
            data = await self._read_whole(unit, request)
        chunks = unit.split(data)
        if (kept := held.put(unit, chunks)) is not chunks:
            return kept
        if is_used_again:
            self._keep_begun(unit, data)
        return chunks

    def _keep_begun(self, unit: ReadUnit, data: memoryview) -> None:
        """Keep these bytes, and evict older ones if there is no room, but never those of the same span."""
        self._begun[unit.key] = unit, data
        self._begun.move_to_end(unit.key)
        while sum(len(each) for _, each in self._begun.values()) > self._begun_bytes:
            oldest, (other, _) = next(iter(self._begun.items()))
            if other.span_key == unit.span_key:
                return
            del self._begun[oldest]

    def drop_kept(self, data_name: str) -> None:
        """Drop the bytes of a data object that are kept for later: they have been found wrong."""
        for key in [key for key in self._begun if key[0] == data_name]:
            del self._begun[key]
        self.memory.drop(data_name)

    def report_damage(self, reader: SegmentReader) -> None:
        """Have the store check a segment, in the background: what is damaged there is deleted, so that it is written
        again. Only the store can tell that from damage on the way to us. It remembers what it has found sound."""
        name = reader.manifest.key.manifest_name
        if self._may_delete and name not in self._reports and len(self._reports) < _MAX_REPORTS:
            self._reports[name] = asyncio.get_running_loop().create_task(self._report(name, reader.data_name))

    async def _report(self, name: str, data_name: str) -> None:
        try:
            if await self._store.report_damage(name):
                logger.warning("the store has deleted the damaged segment %s", name)
                self.ahead.drop_units(data_name)
                self.drop_kept(data_name)  # of what came since the damage was found
        except StoreError as e:
            logger.debug("cannot report the damaged segment %s: %s", name, e)
        finally:
            del self._reports[name]

    async def _read_whole(self, unit: ReadUnit, request: timeline.Request = timeline.NOBODY) -> memoryview:
        """Do as `_received`, and keep the bytes in memory. Raises StoreError."""
        data = await self._received(unit, request)
        self.memory.put(unit, data)
        return data

    async def _received(self, unit: ReadUnit, request: timeline.Request = timeline.NOBODY) -> memoryview:
        """Return the bytes of all the unit's objects, one behind the other. Raises StoreError."""
        data = np.empty(unit.size_bytes, dtype=np.uint8).data
        into = []
        end = 0
        for _, first, last in unit.reads:
            begin, end = end, end + last - first
            into.append([data[begin:end]])
        await self._transmit(unit, request, into)
        return data

    async def _transmit(self, unit: ReadUnit, request: timeline.Request, into: Sequence[list[memoryview]]) -> None:
        """Read the unit's bytes. ``into``: the pieces of memory for those of each object. Raises StoreError."""
        started_s, is_whole = time.monotonic(), False
        self.link.started(unit.size_bytes)
        try:
            reads = [self._read(*each) for each in zip(unit.reads, into, strict=True)]
            if len(reads) == 1:
                await reads[0]  # not in a task of its own, which would send its request later
            else:
                await together(reads)
            is_whole = True
        except asyncio.CancelledError:
            self.link.give_up()
            raise
        finally:
            self.link.ended(unit.size_bytes, started_s, is_whole=is_whole)
        ended_s = time.monotonic()
        metrics.STAGE_SECONDS.labels("transmit").observe(ended_s - started_s)
        metrics.WIRE_BYTES.labels("read").inc(unit.size_bytes)
        timeline.add(request, "transmit", started_s, ended_s, bytes=unit.size_bytes)

    async def _read(self, place: tuple[str, int, int], into: Sequence[memoryview]) -> None:
        name, start, _ = place
        if not await self._store.read(name, start, into):
            raise StoreError("missing", f"{name} is not in the store")

    def _report_queue(self) -> None:
        used = self._ahead_budget.used_bytes + self.budget.used_bytes
        metrics.QUEUED_BYTES.labels("read").set(used)
