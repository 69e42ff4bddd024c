"""Fetches, on the event loop: transmit pages, and restore them round by round into slots that are given late."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch

from sgl_kvfetch import metrics
from sgl_kvfetch.config import KVFetchConfig
from sgl_kvfetch.fetch.fetcher import Fetcher, FetchResult
from sgl_kvfetch.fetch.finder import PageFinder
from sgl_kvfetch.fetch.plan import PageSource
from sgl_kvfetch.fetch.rounds import Destination, Round
from sgl_kvfetch.fetch.sink import GuardedSink
from sgl_kvfetch.loop import LoopThread
from sgl_kvfetch.plugin.client import count_fetch
from sgl_kvfetch.plugin.device.board import Done, PageCount, Report, Ticket
from sgl_kvfetch.plugin.device.pages import DevicePages
from sgl_kvfetch.plugin.device.recompute import Verdicts
from sgl_kvfetch.plugin.device.work import Work
from sgl_kvfetch.plugin.page_hashes import hash_bytes

logger = logging.getLogger(__name__)


class RoundStart(enum.IntEnum):
    """What becomes of a round that is waited for, the worst first."""

    ENDED = 0  # the fetch has ended before it
    STOP = 1  # its bytes are here, but what is left would be computed faster
    WANTED = 2  # its bytes are here


class RoundStarts(NamedTuple):
    start: int  # a `RoundStart`


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Pages to be fetched, in rounds that end before the pages ``round_ends``."""

    request_id: str
    deadline_s: float  # in time.monotonic()
    hashes: Sequence[str]
    sources: Sequence[PageSource]
    round_ends: Sequence[int]
    link_ticket: Ticket[Done]  # up when the link could serve another fetch beside this one
    end_ticket: Ticket[Done]  # up when all is over


@dataclass(slots=True, eq=False)
class FetchWork(Work):
    is_stopped: bool = False  # by us, which is no miss
    rounds: list[Round] = field(default_factory=list)  # set on the event loop

    def stop(self) -> None:
        """The rounds that were not given slots are not wanted any more. All others have ended."""
        self.is_stopped = True
        self.cancel()


class Reads:
    """Begun on the scheduler's thread, which awaits each round, and gives it its slots."""

    def __init__(
        self,
        config: KVFetchConfig,
        loop: LoopThread,
        fetcher: Fetcher,
        finder: PageFinder,
        verdicts: Verdicts,
        pages: DevicePages,
        index_pool: Executor,
        report: Report,
    ) -> None:
        """``index_pool``: where to wait for the numbers of slots."""
        self._config = config
        self._loop = loop
        self._fetcher = fetcher
        self._finder = finder
        self._verdicts = verdicts
        self._pages = pages
        self._index_pool = index_pool
        self._report = report

    def begin(self, request: FetchRequest) -> FetchWork:
        """Begin to transmit pages."""
        work = FetchWork(self._loop)
        self._loop.submit(self._fetch(work, request))
        return work

    async def _fetch(self, work: FetchWork, request: FetchRequest) -> None:
        result = FetchResult(0, (), False)
        work.task = asyncio.current_task()
        work.rounds = [Round(first, end) for first, end in pairwise((0, *request.round_ends))]
        reported = False

        def report_link() -> None:
            nonlocal reported
            if not reported:
                reported = True
                self._report(request.link_ticket, Done())

        try:
            if self._finder.is_paused:  # what was found before need not find out for itself
                metrics.MISSES.labels("fetch", "skipped").inc()
            elif not work.cancelled:
                result = await self._fetcher.fetch_rounds(
                    request.sources,
                    work.rounds,
                    max(0.0, request.deadline_s - time.monotonic()),
                    request_id=request.request_id,
                    on_requested=report_link,
                )
                self._finder.fetched(hash_bytes(request.hashes), request.sources, result)
        except asyncio.CancelledError:
            if not work.is_stopped:
                metrics.MISSES.labels("fetch", "cancelled").inc()
        except Exception:
            _count_fault("fetch failed")
        finally:
            for each in work.rounds:
                each.end(0)
            report_link()
            self._report(request.end_ticket, Done())
            count_fetch(result, self._config.fetch_timeout_s)
            self._count_pages(len(request.sources), sum(each.done.result() for each in work.rounds))

    def await_round(self, ticket: Ticket[RoundStarts], work: FetchWork, index: int, rest: Sequence[PageSource]) -> None:
        """Report when a round's first bytes are here, or the fetch has ended. ``rest``: the pages from this round
        on."""
        self._loop.submit(self._await_round(ticket, work, index, rest))

    async def _await_round(
        self, ticket: Ticket[RoundStarts], work: FetchWork, index: int, rest: Sequence[PageSource]
    ) -> None:
        start = RoundStart.ENDED
        try:
            if await asyncio.shield(work.rounds[index].wanted):
                # The first round was decided on when it was looked up.
                is_wanted = index == 0 or self._verdicts.is_fetched(rest, 0)
                start = RoundStart.WANTED if is_wanted else RoundStart.STOP
        except Exception:
            _count_fault("round not decided on")
        finally:
            self._report(ticket, RoundStarts(start))

    def restore_round(self, ticket: Ticket[PageCount], work: FetchWork, index: int, slots: torch.Tensor) -> GuardedSink:
        """Restore a round into ``slots``, until what is returned is closed. Reports how many pages, from its first on;
        then nothing is written any more."""
        self._pages.fence()
        sink = GuardedSink(self._pages)
        self._loop.submit(self._restore_round(ticket, work, index, slots, sink))
        return sink

    async def _restore_round(
        self, ticket: Ticket[PageCount], work: FetchWork, index: int, slots: torch.Tensor, sink: GuardedSink
    ) -> None:
        num_pages = 0
        try:
            # On a GPU this waits for it.
            loop = asyncio.get_running_loop()
            pool_pages = await loop.run_in_executor(self._index_pool, self._pages.page_indices, slots)
            work.rounds[index].give(Destination(pool_pages, sink))
            num_pages = await asyncio.shield(work.rounds[index].done)
        except Exception:
            _count_fault("round not restored")
        finally:
            sink.close()
            self._report(ticket, PageCount(num_pages))

    def publish(self) -> None:
        """Before slots that were restored to go on, into the tree or back to the allocator."""
        self._pages.publish()

    def _count_pages(self, asked: int, got: int) -> None:
        metrics.FETCHED_PAGES.labels("hit").inc(got)
        metrics.FETCHED_PAGES.labels("miss").inc(asked - got)
        metrics.RAW_BYTES.labels("read").inc(got * self._pages.geometry.page_bytes)


def _count_fault(what: str) -> None:
    """Of our own code. In an ``except``."""
    logger.exception("kvfetch %s", what)
    metrics.MISSES.labels("fetch", "internal").inc()
