"""Fetches: pages are transmitted, and restored round by round into slots that are given late."""

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
    """What becomes of a round that is waited for, the worst first."""

    ENDED = 0  # the fetch has ended before it
    STOP = 1  # its bytes are here, but what is left would be computed faster
    WANTED = 2  # its bytes are here


class RoundStarts(NamedTuple):
    start: int  # a `RoundStart`


class Reads:
    """Begun on the scheduler's thread, which awaits each round, and gives it its slots."""

    def __init__(
        self, plane: DataPlane, verdicts: Verdicts, pages: DevicePages, index_pool: Executor, report: Report
    ) -> None:
        """``index_pool``: where to wait for the numbers of slots."""
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

        ``link_ticket`` is reported when the link could serve another fetch beside this one, ``end_ticket`` when all is
        over.
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
        """What is still on its way is not wanted any more."""
        self._plane.cancel(call.work, is_miss=False)

    def await_round(self, ticket: Ticket[RoundStarts], call: FetchCall, index: int, num_left: int) -> None:
        """Report when a round's first bytes are here, or the fetch has ended. ``num_left``: pages from this round
        on."""
        call.here[index].add_done_callback(partial(self._round_here, ticket, index, num_left))

    def _round_here(self, ticket: Ticket[RoundStarts], index: int, num_left: int, here: Future[Cost | None]) -> None:
        start = RoundStart.ENDED
        try:
            if (cost := here.result()) is not None:
                # The first round was decided on when it was looked up.
                is_wanted = index == 0 or self._verdicts.is_fetched(num_left, cost, 0)
                start = RoundStart.WANTED if is_wanted else RoundStart.STOP
        finally:
            self._report(ticket, RoundStarts(start))

    def restore_round(self, ticket: Ticket[PageCount], call: FetchCall, index: int, slots: torch.Tensor) -> GuardedSink:
        """Restore a round into ``slots``, until what is returned is closed. Reports how many pages, from its first on;
        then nothing is written any more."""
        self._pages.fence()
        sink = GuardedSink(self._pages)
        self._index_pool.submit(self._give, ticket, call, index, slots, sink)
        return sink

    def _give(
        self, ticket: Ticket[PageCount], call: FetchCall, index: int, slots: torch.Tensor, sink: GuardedSink
    ) -> None:
        try:
            # On a GPU this waits for it.
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
        """Before slots that were restored to go on, into the tree or back to the allocator."""
        self._pages.publish()
