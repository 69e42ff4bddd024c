"""A fetch in rounds: where pages go is told as late as can be."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from sgl_kvfetch.fetch.sink import GuardedSink


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the pages of a round go. The sink is closed when the round ends."""

    pool_pages: Sequence[int]
    sink: GuardedSink


class Round:
    """A run of a fetch's pages, which gets its destination when its first bytes are here.

    So nobody need keep slots free for bytes that are still on their way. Belongs to one event loop. Whoever awaits one
    of the futures must shield it: others await it, too.
    """

    def __init__(self, first_page: int, end_page: int) -> None:
        """Pages ``[first_page, end_page)`` of those that the fetch is asked for."""
        loop = asyncio.get_running_loop()
        self.first_page = first_page
        self.end_page = end_page
        self.wanted: asyncio.Future[bool] = loop.create_future()  # False: the fetch ended before
        self.destination: asyncio.Future[Destination | None] = loop.create_future()  # None: there is none
        self.done: asyncio.Future[int] = loop.create_future()  # how many pages, from its first on, are restored

    def want(self) -> None:
        """Its first bytes are here."""
        if not self.wanted.done():
            self.wanted.set_result(True)

    def give(self, destination: Destination | None) -> None:
        """Say where the pages go; None ends the fetch here. Comes too late for a round that has ended."""
        if not self.destination.done():
            self.destination.set_result(destination)
        elif destination is not None:
            destination.sink.close()

    def end(self, num_pages: int) -> None:
        """Nothing is written from here on. Only the first call counts."""
        if self.done.done():
            return
        if not self.wanted.done():
            self.wanted.set_result(False)
        self.give(None)
        if (destination := self.destination.result()) is not None:
            destination.sink.close()
        self.done.set_result(num_pages)
