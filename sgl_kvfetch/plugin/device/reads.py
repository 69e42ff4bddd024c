"""Transmits pages and restores them round by round, into slots that a round gets only after its first bytes."""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import NamedTuple

import torch

from sgl_kvfetch import metrics
from sgl_kvfetch.dataplane.plane import Cost, DataPlane, FetchCall
from sgl_kvfetch.fetch.rounds import Destination
from sgl_kvfetch.fetch.sink import GuardedSink
from sgl_kvfetch.plugin.device.board import Done, PageCount, Report, Ticket
from sgl_kvfetch.plugin.device.lookups import LookupWork
from sgl_kvfetch.plugin.device.pages import DevicePages
from sgl_kvfetch.plugin.device.recompute import Verdicts

logger = logging.getLogger(__name__)


class RoundStart(enum.IntEnum):
    """The outcome of waiting for a round, worst first, since the minimum over ranks counts."""

    ENDED = 0  # the fetch ended before this round
    STOP = 1  # its first bytes are here, but computing the remaining pages would be faster
    WANTED = 2  # its first bytes are here


class RoundStarts(NamedTuple):
    start: int  # a `RoundStart`


class Reads:
    """Transmits and restores pages. The scheduler's thread begins this, awaits each round and gives it its slots."""

    def __init__(
        self, plane: DataPlane, verdicts: Verdicts, pages: DevicePages, index_pool: Executor, report: Report
    ) -> None:
        """``index_pool`` runs ``page_indices``, which may wait for the GPU."""
        self._plane = plane
        self._verdicts = verdicts
        self._pages = pages
        self._index_pool = index_pool
        self._report = report

    def begin(
        self,
        request_id: str,
        lookup: LookupWork,
        pages: range,
        round_ends: Sequence[int],
        link_ticket: Ticket[Done],
        end_ticket: Ticket[Done],
    ) -> FetchCall:
        """Begin to transmit pages that a lookup found, in rounds that end before the pages ``round_ends``.

        ``link_ticket`` is reported when the link could serve another fetch beside this one, ``end_ticket`` when the
        fetch is over.
        """
        call = self._plane.fetch(
            lookup.page_hashes[pages.start : pages.stop],
            [page - pages.start for page in round_ends],
            lookup.deadline_s,
            found=lookup.number,
            first_page=pages.start,
            request_id=request_id,
        )
        call.link.add_done_callback(lambda _: self._report(link_ticket, Done()))
        call.end.add_done_callback(lambda _: self._report(end_ticket, Done()))
        return call

    def stop(self, call: FetchCall) -> None:
        """Cancel what is still being transmitted or restored."""
        self._plane.cancel(call.work, is_miss=False)

    def await_round(self, ticket: Ticket[RoundStarts], call: FetchCall, index: int, num_left: int) -> None:
        """Report when a round's first bytes are here, or when the fetch has ended. ``num_left``: the number of pages
        from this round on."""
        call.here[index].add_done_callback(partial(self._round_here, ticket, index, num_left))

    def _round_here(self, ticket: Ticket[RoundStarts], index: int, num_left: int, here: Future[Cost | None]) -> None:
        start = RoundStart.ENDED
        try:
            if (cost := here.result()) is not None:
                # The lookup already decided on the first round.
                is_wanted = index == 0 or self._verdicts.is_fetched(num_left, cost, 0)
                start = RoundStart.WANTED if is_wanted else RoundStart.STOP
        finally:
            self._report(ticket, RoundStarts(start))

    def restore_round(self, ticket: Ticket[PageCount], call: FetchCall, index: int, slots: torch.Tensor) -> GuardedSink:
        """Restore a round into ``slots`` until the returned sink is closed. Reports how many of the round's pages, from
        the first on, were restored; nothing writes to ``slots`` after the report."""
        self._pages.fence()
        sink = GuardedSink(self._pages)
        self._index_pool.submit(self._give, ticket, call, index, slots, sink)
        return sink

    def _give(
        self, ticket: Ticket[PageCount], call: FetchCall, index: int, slots: torch.Tensor, sink: GuardedSink
    ) -> None:
        try:
            # On a GPU, this waits for the device.
            pool_pages = self._pages.page_indices(slots)
        except Exception:
            logger.exception("kvfetch round not restored")
            metrics.MISSES.labels("fetch", "internal").inc()
            sink.close()
            self._report(ticket, PageCount(0))
            return
        self._plane.give(call, index, Destination(pool_pages, sink))
        call.over[index].add_done_callback(partial(self._round_over, ticket, sink))

    def _round_over(self, ticket: Ticket[PageCount], sink: GuardedSink, over: Future[int]) -> None:
        sink.close()
        self._report(ticket, PageCount(over.result()))

    def publish(self) -> None:
        """Call this before restored slots go on, into the tree or back to the allocator."""
        self._pages.publish()
