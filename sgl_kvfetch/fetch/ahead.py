"""Bytes that are read before anybody asks for them: from a lookup on, in sequence, as far as there is room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sgl_kvfetch.fetch.budget import BytesBudget
from sgl_kvfetch.fetch.link import Link
from sgl_kvfetch.fetch.plan import CellsKey, ReadUnit

# What is still to be read of a lookup's pages, made unit by unit. It is told whose cells to leave out.
Units = Callable[[Callable[[CellsKey], bool]], Iterator[ReadUnit]]


@dataclass(slots=True, eq=False)
class _Lookup:
    """What was found by one lookup, while it is read."""

    taken: set[CellsKey] = field(default_factory=set)  # by fetches, which overtook it
    has_failed: bool = False

    def read(self, task: asyncio.Task[bytes]) -> None:
        """A read has ended. Its error, if nobody comes for it, is no one's concern."""
        self.has_failed |= not task.cancelled() and task.exception() is not None


class ReadAhead:
    """Reads, and keeps what was read until a fetch takes it or it expires. Belongs to one event loop."""

    def __init__(
        self,
        link: Link,
        budget: BytesBudget,
        transmit: Callable[[ReadUnit], Coroutine[Any, Any, bytes]],
        on_expired: Callable[[], None],
    ) -> None:
        """``budget``: the room for it. Whoever takes a unit gives its bytes back there."""
        self._link = link
        self._budget = budget
        self._transmit = transmit
        self._on_expired = on_expired
        self._reads: dict[tuple[str, int], tuple[ReadUnit, asyncio.Task[bytes], asyncio.TimerHandle]] = {}
        self._by_cells: dict[CellsKey, ReadUnit] = {}
        self._lookups: dict[_Lookup, asyncio.Task[None]] = {}

    def begin(self, units: Units, expire_s: float) -> None:
        """Read ``units``, and keep each one for ``expire_s``. After as long nothing more is asked for."""
        loop = asyncio.get_running_loop()
        lookup = _Lookup()
        task = self._lookups[lookup] = loop.create_task(self._read(lookup, units, expire_s))
        timer = loop.call_later(expire_s, task.cancel)
        task.add_done_callback(partial(self._ended, lookup, timer))

    def find(self, key: CellsKey) -> ReadUnit | None:
        """What is read ahead of these cells: in which variant."""
        return self._by_cells.get(key)

    def take(self, unit: ReadUnit) -> asyncio.Task[bytes] | None:
        """The bytes, if they are read ahead, and the room that they take."""
        if unit.key not in self._reads:
            return None
        _, task, timer = self._reads.pop(unit.key)
        self._by_cells.pop(unit.cells_key)
        timer.cancel()  # it holds the task, and so the bytes
        return task

    def leave_out(self, unit: ReadUnit) -> None:
        """A fetch asks for the unit. If it is not read ahead by now, it need not be."""
        for lookup in self._lookups:
            lookup.taken.add(unit.cells_key)

    def forget(self, data_name: str) -> None:
        """What comes from there is not to be used."""
        for key in [key for key in self._reads if key[0] == data_name]:
            self._drop(key)

    def clear(self) -> None:
        """Nothing that was read ahead is to be used."""
        for key in list(self._reads):
            self._drop(key)

    async def _read(self, lookup: _Lookup, units: Units, expire_s: float) -> None:
        loop = asyncio.get_running_loop()
        # The next unit is made, and its variant chosen, only when the link has brought what was asked for before.
        for unit in units(lookup.taken.__contains__):
            if unit.cells_key in self._by_cells:
                continue
            await self._budget.acquire(unit.size_bytes)
            if unit.cells_key in self._by_cells or unit.cells_key in lookup.taken:  # while we waited
                self._budget.release(unit.size_bytes)
                continue
            task = loop.create_task(self._transmit(unit))
            task.add_done_callback(lookup.read)
            self._by_cells[unit.cells_key] = unit
            self._reads[unit.key] = unit, task, loop.call_later(expire_s, self._drop, unit.key)
            await asyncio.sleep(0)  # its turn to ask for its bytes
            await self._link.may_read()
            if lookup.has_failed:
                return

    def _ended(self, lookup: _Lookup, timer: asyncio.TimerHandle, _: asyncio.Task[None]) -> None:
        del self._lookups[lookup]
        timer.cancel()

    def _drop(self, key: tuple[str, int]) -> None:
        unit, _, _ = self._reads[key]
        task = self.take(unit)
        assert task is not None
        task.cancel()
        self._budget.release(unit.size_bytes)
        self._on_expired()
