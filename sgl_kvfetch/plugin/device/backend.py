"""Device mode's work in the data plane and on other threads: lookups, fetches, and copies to be written.

The scheduler's thread begins each piece of work. Its result is reported to the board exactly once, whatever happens.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from sgl_kvfetch import metrics, timeline
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.openmp import use_one_thread
from sgl_kvfetch.plane import (
    Cost,
    DataPlane,
    Decision,
    Destination,
    FetchCall,
    FetchLag,
    FetchOrRecompute,
    Found,
    FramePool,
    GuardedSink,
    KVFetchConfig,
    LayerProgress,
    PagePool,
    counted,
)
from sgl_kvfetch.plugin.device.board import Board, Done, PageCount, Ticket
from sgl_kvfetch.plugin.device.pages import GuardedSource, SlotPages
from sgl_kvfetch.plugin.page_hashes import hash_bytes
from sgl_kvfetch.plugin.prefill import PrefillMeter
from sgl_kvfetch.plugin.weight_updates import Access

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)


@dataclass(slots=True, eq=False)
class LookupWork:
    """A lookup under way."""

    hashes: list[str] = field(default_factory=list)  # of all requested pages, whether stored or not
    page_hashes: list[bytes] = field(default_factory=list)  # the same hashes as bytes
    number: int | None = None  # the data plane's number for this lookup
    num_chosen: int = 0  # pages to be fetched
    deadline_s: float = 0.0  # by when the found pages must arrive, in time.monotonic()
    expected_s: float | None = None  # when the fetch should end, if no other one is ahead of it; as `deadline_s`


class Finding(NamedTuple):
    """The result of a lookup: how many pages are stored, from the first on, and whether to fetch them (1 or 0). The
    minimum over ranks keeps the pages that all ranks have, and fetches them only if all ranks want to."""

    num_pages: int
    is_fetched: int


class RoundStart(enum.IntEnum):
    """The outcome of waiting for a round, worst first, since the minimum over ranks counts."""

    ENDED = 0  # the fetch ended before this round
    STOP = 1  # its first bytes are here, but computing the remaining pages would be faster
    WANTED = 2  # its first bytes are here


class RoundStarts(NamedTuple):
    start: int  # a `RoundStart`


class Certainty(NamedTuple):
    """Says whether the rest of a fetch will be restored in time for its request to start: see `messages.Certain`."""

    is_certain: int  # 1 or 0


class Copied(NamedTuple):
    """The result of a copy: how many pages were queued for writing, from the first on, and whether all pages of earlier
    copies are still queued or written (1), or some of them may be lost (0)."""

    num_pages: int
    is_intact: int


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Pages in the pool that are consecutive in their sequence. ``slots``: one per token."""

    first_page: int  # position in the sequence
    previous_hash: str | None  # hash of the page before, None at the sequence's start
    page_hashes: Sequence[str]
    slots: torch.Tensor


class Filling:
    """Slots that are being filled."""

    def __init__(self, pages: SlotPages, slots: torch.Tensor) -> None:
        """``slots``: one per token."""
        geometry = pages.geometry
        num_pages = slots.numel() // geometry.page_size
        self.slots = slots
        self._pages = pages.open_round(slots)
        assert isinstance(self._pages, PagePool | FramePool)
        self.sink = GuardedSink(self._pages)
        self.layers = LayerProgress(geometry.num_layers, num_pages * geometry.num_heads)
        self.destination = Destination(pages.page_indices(slots), self.sink, self.layers)

    def close(self) -> None:
        """Stop all writes to the slots."""
        self.sink.close()
        self.layers.end()

    def publish(self) -> None:
        """Pass on what is restored: see `SlotPages.publish`."""
        self._pages.publish()


class DeviceBackend:
    """The data plane of one rank, and the threads that feed it."""

    def __init__(
        self,
        config: KVFetchConfig,
        plane: DataPlane,
        pages: SlotPages,
        meter: PrefillMeter,
        board: Board,
        *,
        is_writer: bool = True,
    ) -> None:
        """``plane`` is closed together with this backend. ``board`` gets the result of each piece of work. If
        ``is_writer`` is false, pages are reported as copied and are not: all ranks must hold the same locks."""
        self.access = Access(config)
        self.plane = plane
        self.num_chosen = 0  # found pages that are to be fetched, counted since the start
        self._config = config
        self._is_writer = is_writer
        self.pages = pages
        self._report = board.report
        self._speed, self._engine = meter.speed, meter.queue
        self._choice = FetchOrRecompute()
        self._lag = FetchLag()
        self._copy_pool = ThreadPoolExecutor(1, "kvfetch-copy", use_one_thread)
        self._num_losses = 0  # of the data plane, as far as reported

    def close(self) -> None:
        """Write what is queued, within a few seconds, and release threads and processes. Idempotent."""
        self.plane.close()
        self._copy_pool.shutdown(wait=False, cancel_futures=True)
        self.pages.close()

    # Lookups

    def look_up(
        self,
        request: timeline.Request,
        work: LookupWork,
        ticket: Ticket[Finding],
        hash_pages: Callable[[], list[str]],
        num_ahead: Callable[[], int],
        position: int,
    ) -> None:
        """Find the longest stored run of some pages, and decide whether to fetch it. ``num_ahead`` returns how many
        pages will be fetched before these. ``position``: of the first page in the sequence. Raises nothing."""
        with counted("lookup"):
            work.hashes = hash_pages()
            work.page_hashes = hash_bytes(work.hashes)
        if not work.page_hashes:
            self._report(ticket, Finding(0, 1))
            return
        found = partial(self._found, request, time.monotonic(), work, ticket, num_ahead)
        work.number = self.plane.look_up(work.page_hashes, found, position=position)

    def cancel_lookup(self, work: LookupWork) -> None:
        """Let a lookup end soon. Its result is still reported."""
        if work.number is not None:
            self.plane.cancel(work.number)

    def forget_found(self, work: LookupWork) -> None:
        """Note that the pages that a lookup found will not be fetched."""
        if work.number is not None:
            self.plane.forget_lookup(work.number)

    def _found(
        self,
        request: timeline.Request,
        started_s: float,
        work: LookupWork,
        ticket: Ticket[Finding],
        num_ahead: Callable[[], int],
        found: Found,
    ) -> None:
        """Decide and report. Runs on the scheduler's thread, unless the data plane has ended."""
        is_fetched = True
        now_s = time.monotonic()
        try:
            if found.num_pages:
                ahead = num_ahead()
                is_fetched = self._is_fetched(found.num_pages, found.cost, now_s, ahead)
                if not ahead and found.cost.seconds is not None:
                    work.expected_s = now_s + found.cost.seconds
            else:
                self._computes(len(work.hashes) * self.pages.geometry.page_size, now_s)
            work.deadline_s = now_s + self._config.fetch_timeout_s
            timeline.add(request, "lookup", started_s, now_s, pages=len(work.hashes), found=found.num_pages)
            if is_fetched:
                work.num_chosen = found.num_pages
                self.num_chosen += work.num_chosen
        finally:
            self._report(ticket, Finding(found.num_pages, int(is_fetched)))

    def _is_fetched(self, num_pages: int, cost: Cost, now_s: float, num_ahead: int | None = None) -> bool:
        """Return whether to fetch ``num_pages`` pages. ``cost``: of these pages alone. ``num_ahead``: pages that will
        be fetched before them; each is assumed to cost as much. None if the fetch has begun already. Ranks may differ,
        so they must agree before they act."""
        num_tokens, times = num_pages * self.pages.geometry.page_size, 1 + (num_ahead or 0) / num_pages
        decision = Decision(True, "configured")
        if self._config.recompute == "auto":
            stages = (None if seconds is None else times * seconds for seconds in (cost.transmit_s, cost.decode_s))
            sooner_s = self._compute_s(num_pages, now_s)
            if sooner_s is not None and num_ahead is not None:
                sooner_s -= self._lag.seconds(now_s)
            decision = self._choice.decide(num_tokens, Cost(*stages), sooner_s)
        decision.count(num_tokens)
        if not decision.is_fetched:
            self._computes(num_tokens, now_s)
        return decision.is_fetched

    def _compute_s(self, num_pages: int, now_s: float) -> float | None:
        """Return how much longer a request would take without the pages: it waits for the engine, which computes them.
        None if that is not known."""
        saved_s = self._speed.seconds_saved(num_pages * self.pages.geometry.page_size)
        return None if saved_s is None else saved_s + self._engine.seconds(now_s)

    def _computes(self, num_tokens: int, now_s: float) -> None:
        """Note that the engine is to compute so many tokens of a prompt."""
        self._engine.add(self._speed.seconds_for(num_tokens) or 0.0, now_s)

    # Fetches

    def fetch(
        self,
        request: timeline.Request,
        lookup: LookupWork,
        pages: range,
        round_ends: Sequence[int],
        link_ticket: Ticket[Done],
        early_ticket: Ticket[Certainty] | None,
        num_left: int,
        first: Filling | None,
    ) -> FetchCall:
        """Begin to transmit pages that a lookup found, in rounds that end before the pages ``round_ends``.

        ``link_ticket`` is reported when the link could serve another fetch, too.
        ``early_ticket`` is reported when the rest will be restored in time for the request to start: it has
        ``num_left`` more tokens to compute. None if no request starts early. ``first``: for the first round, if there
        are slots for it already.
        """
        may_end = self._config.recompute == "auto"  # because the engine would compute the rest sooner
        compute_s = self._compute_s(len(pages), time.monotonic()) if may_end else None
        call = self.plane.fetch(
            lookup.page_hashes[pages.start : pages.stop],
            [page - pages.start for page in round_ends],
            lookup.deadline_s,
            found=lookup.number,
            first_page=pages.start,
            request=request,
            early_s=(self._speed.seconds_for(num_left) or 0.0) if early_ticket is not None else 0.0,
            destination=None if first is None else first.destination,
            compute_s=math.inf if compute_s is None else compute_s,
        )
        if early_ticket is not None:
            call.certain.add_done_callback(lambda done: self._report(early_ticket, Certainty(int(done.result()))))
        call.link.add_done_callback(lambda _: self._report(link_ticket, Done()))
        if self._config.recompute == "auto":
            call.end.add_done_callback(partial(self._measure, lookup, call, len(pages)))
        return call

    def _measure(self, lookup: LookupWork, call: FetchCall, num_pages: int, _: Future[None]) -> None:
        """Compare when a whole fetch has ended with what was expected."""
        if lookup.expected_s is not None and sum(over.result() for over in call.over) == num_pages == lookup.num_chosen:
            self._lag.ended(time.monotonic(), lookup.expected_s)

    def await_end(self, ticket: Ticket[Done], call: FetchCall) -> None:
        """Report when a fetch is over."""
        call.end.add_done_callback(lambda _: self._report(ticket, Done()))

    def await_round(self, ticket: Ticket[RoundStarts], call: FetchCall, index: int, num_left: int) -> None:
        """Report when a round's first bytes are here, or when the fetch has ended. ``num_left``: the number of pages
        from this round on."""
        call.here[index].add_done_callback(partial(self._round_here, ticket, index, num_left))

    def _round_here(self, ticket: Ticket[RoundStarts], index: int, num_left: int, here: Future[Cost | None]) -> None:
        start = RoundStart.ENDED
        try:
            if (cost := here.result()) is not None:
                # The lookup already decided on the first round.
                is_wanted = index == 0 or self._is_fetched(num_left, cost, time.monotonic())
                start = RoundStart.WANTED if is_wanted else RoundStart.STOP
        finally:
            self._report(ticket, RoundStarts(start))

    def restore_round(self, ticket: Ticket[PageCount], call: FetchCall, index: int, filling: Filling) -> None:
        """Restore a round into slots, until ``filling`` is closed. Reports how many of the round's pages, from the
        first on, were restored; nothing writes to the slots after the report."""
        if index not in call.destinations:
            self.plane.give(call, index, filling.destination)
        call.over[index].add_done_callback(partial(self._round_over, ticket, filling))

    def _round_over(self, ticket: Ticket[PageCount], filling: Filling, over: Future[int]) -> None:
        filling.close()
        self._report(ticket, PageCount(over.result()))

    # Copies

    def copy_pages(self, ticket: Ticket[Copied], run: SlotRun) -> GuardedSource:
        """Copy pages out of the pool and queue them for writing. The pages are free for reuse after the report, or once
        the returned source is closed."""
        source = GuardedSource(self.pages.open_reads(run.slots))
        self._copy_pool.submit(self._copy, ticket, run, source)
        return source

    def _copy(self, ticket: Ticket[Copied], run: SlotRun, source: GuardedSource) -> None:
        if not self._is_writer:
            self._report(ticket, Copied(len(run.page_hashes), 1))
            return
        num_queued = 0
        try:
            previous = None if run.previous_hash is None else hash_bytes([run.previous_hash])[0]
            hashes, pool_pages = hash_bytes(run.page_hashes), self.pages.page_indices(run.slots)
            quantise = partial(source.quantise, run.first_page)
            num_queued = self.plane.write(
                run.first_page, previous, hashes, pool_pages, source.read, read_quantised=quantise
            )
        except Exception:
            logger.exception("kvfetch copy failed")
        finally:
            if dropped := len(run.page_hashes) - num_queued:
                metrics.WRITTEN_PAGES.labels("dropped_full").inc(dropped)
                _limited.warning("full", f"{dropped} pages not written: the queue is full, or the cache was flushed")
            losses, self._num_losses = self._num_losses, self.plane.num_losses
            self._report(ticket, Copied(num_queued, int(losses == self._num_losses)))
