"""Read-ahead: reads the pages that a lookup found before a fetch needs them, in order, within a budget of bytes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sgl_kvfetch.codec import SegmentReader
from sgl_kvfetch.plane.fetch.link import BytesBudget, Link
from sgl_kvfetch.plane.fetch.plan import ReadUnit, SpanKey, UnitKey

# Yields the units of a lookup's pages that are still to be read. The argument says which spans to leave out.
Units = Callable[[Callable[[SpanKey], bool]], Iterator[ReadUnit]]


@dataclass(slots=True, eq=False)
class _Lookup:
    """The state of one lookup's read-ahead."""

    taken: set[SpanKey] = field(default_factory=set)  # spans that fetches have begun to read
    dropped: set[str] = field(default_factory=set)  # data objects of which nothing more is to be read
    has_failed: bool = False


class AheadReader:
    """Reads units and keeps their bytes until a fetch takes them or they expire. Belongs to one event loop."""

    def __init__(
        self,
        link: Link,
        budget: BytesBudget,
        transmit: Callable[[ReadUnit], Coroutine[Any, Any, memoryview]],
    ) -> None:
        """``budget`` bounds the bytes kept. Whoever takes a unit must release its bytes to this budget."""
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

    def take_read(self, unit: ReadUnit) -> asyncio.Task[memoryview] | None:
        """Return the task that reads the unit's bytes, or None. The caller must release them to the budget."""
        if unit.key not in self._reads:
            return None
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
        task = self.take_read(unit)
        assert task is not None
        task.cancel()
        self._budget.release(unit.size_bytes)
