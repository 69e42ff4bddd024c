"""Rounds of a fetch, and its progress: each round gets its destination as late as possible, and they end in order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sgl_kvfetch.errors import KVFetchError
from sgl_kvfetch.plane.fetch.plan import PageSource, SpanPart, span_parts
from sgl_kvfetch.plane.fetch.sink import Destination
from sgl_kvfetch.plane.memory_cache import Held


class Round:
    """A run of a fetch's pages that gets its destination only when its first bytes have arrived.

    So no slots need to be reserved for bytes that are still in flight. Belongs to one event loop. Shield the futures
    when you await them, because others await them too.
    """

    def __init__(self, first_page: int, end_page: int) -> None:
        """The round holds pages ``[first_page, end_page)`` of the fetch."""
        loop = asyncio.get_running_loop()
        self.first_page = first_page
        self.end_page = end_page
        self.wanted: asyncio.Future[bool] = loop.create_future()  # False: the round ended before
        self.destination: asyncio.Future[Destination | None] = loop.create_future()  # None: it gets none
        self.done: asyncio.Future[int] = loop.create_future()  # length of the restored run

    def want(self) -> None:
        """Note that the round's first bytes have arrived."""
        if not self.wanted.done():
            self.wanted.set_result(True)

    def give(self, destination: Destination | None) -> None:
        """Set the destination; None ends the fetch here. A round that has ended closes the destination's sink."""
        if not self.destination.done():
            self.destination.set_result(destination)
        elif destination is not None:
            destination.sink.close()

    def end(self, num_pages: int) -> None:
        """End the round: nothing is written to its pages afterwards. Only the first call has an effect."""
        if self.done.done():
            return
        if not self.wanted.done():
            self.wanted.set_result(False)
        self.give(None)
        if (destination := self.destination.result()) is not None:
            destination.sink.close()
        self.done.set_result(num_pages)


class FetchProgress:
    """Tracks which parts of a fetch are restored, in the request's order, and ends its rounds accordingly."""

    def __init__(self, sources: Sequence[PageSource], rounds: Sequence[Round]) -> None:
        """``rounds`` must be contiguous and cover all of ``sources``."""
        self.parts: list[tuple[Round, SpanPart]] = [
            (each, part) for each in rounds for part in span_parts(sources[each.first_page : each.end_page])
        ]  # in the order of their first pages; several may hold a page, each some of its heads
        self.failures: list[KVFetchError] = []
        self.num_transmitting = 0  # units
        self.num_waiting = 0  # units that have arrived and wait for their round's destination
        self.is_late = False  # the rest would arrive after the deadline
        self.held = Held()  # spans whose bytes are in memory
        self._rounds = rounds
        self._cells_left = [part.reader.cells_per_span for _, part in self.parts]
        self.num_unasked = sum(self._cells_left)  # cells whose bytes are not requested yet
        # Before the first page of a part, all earlier pages are in the parts before it.
        self._pages_before = [*(each.first_page + part.request_pages[0] for each, part in self.parts), len(sources)]
        self._end = len(self.parts)  # the first part that failed or is not wanted
        self._num_whole = 0
        self._num_ended = 0  # rounds

    def is_wanted(self, part: int) -> bool:
        return part < self._end

    def restored(self, part: int, num_cells: int) -> None:
        self._cells_left[part] -= num_cells

    def fail(self, part: int, error: KVFetchError | None) -> None:
        """End the fetch before this part. ``error`` is None if the part is not wanted."""
        if error is not None:
            self.failures.append(error)
        self._end = min(self._end, part)

    def advance(self) -> bool:
        """End the rounds that are complete, in order. Return whether every part before the first failure is done."""
        while self._num_whole < self._end and not self._cells_left[self._num_whole]:
            self._num_whole += 1
        while self._num_ended < len(self._rounds) and self._rounds[self._num_ended].end_page <= self.num_pages:
            self._end_round(self._rounds[self._num_ended])
            self._num_ended += 1
        return self._num_whole == self._end

    def end(self) -> None:
        """End all rounds."""
        for each in self._rounds[self._num_ended :]:
            self._end_round(each)

    def left_bytes(self, sizes: Sequence[int]) -> float:
        """Return how many bytes are not restored yet. ``sizes``: each part's bytes."""
        return sum(
            size * left / part.reader.cells_per_span
            for size, left, (_, part) in zip(sizes, self._cells_left, self.parts, strict=True)
        )

    @property
    def share_left(self) -> float:
        """Return the share of the pages that is not part of the restored run yet."""
        return 1 - self.num_pages / self._pages_before[-1]

    @property
    def num_pages(self) -> int:
        """Return the length of the restored run, from the first page."""
        return self._pages_before[self._num_whole]

    def _end_round(self, each: Round) -> None:
        each.end(max(0, min(self.num_pages, each.end_page) - each.first_page))
