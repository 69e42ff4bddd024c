"""What device mode does in the background: lookups, fetches and writes. Nothing here touches SGLang's tree.

The scheduler's thread calls; every call returns at once. What a piece of work came to is reported by the ticket that it
was begun with, once, whatever happens to it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch

from sgl_kvfetch import metrics
from sgl_kvfetch.codecs.nvdec import Nvdec
from sgl_kvfetch.config import KVFetchConfig
from sgl_kvfetch.errors import KVFetchError
from sgl_kvfetch.fetch.fetcher import FetchResult
from sgl_kvfetch.fetch.plan import PageSource, total_bytes
from sgl_kvfetch.fetch.rounds import Destination, Round
from sgl_kvfetch.fetch.sink import GuardedSink
from sgl_kvfetch.keys import Namespace
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.loop import LoopThread
from sgl_kvfetch.plugin.client import count_fetch, count_miss, open_client, open_encoders
from sgl_kvfetch.plugin.device.board import Ticket
from sgl_kvfetch.plugin.device.choice import FetchCost, FetchOrRecompute
from sgl_kvfetch.plugin.device.counts import DECISIONS
from sgl_kvfetch.plugin.device.pages import DevicePages, GuardedSource
from sgl_kvfetch.quant import Quantiser
from sgl_kvfetch.types import TENSORS
from sgl_kvfetch.write.gather import PageBatch

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)

_START_S = 30.0
_CLOSE_S = 3.0  # how long each step of closing may take
_CLEAR_S = 5.0
_WRITE_WAIT_S = 1.0  # how long a copy may wait for room in the write queue, with its pages locked
_DECODE_BYTES = 64 << 20  # of frames and values on their way into the pool
_PIECES = 4  # a copy goes into the queue in pieces of at most so much of it

Report = Callable[[Ticket, int], None]


@dataclass(slots=True, eq=False)
class Work:
    """Something under way. ``cancel`` makes it end soon; all its tickets are still reported."""

    cancelled: bool = False
    task: asyncio.Task[None] | None = None  # set on the event loop


@dataclass(slots=True, eq=False)
class LookupWork(Work):
    """What it reports is `lookup_report` of what it found."""

    hashes: list[str] = field(default_factory=list)  # of all pages asked for; there whatever the store answers
    sources: list[PageSource] = field(default_factory=list)
    num_chosen: int = 0  # pages, if they are to be fetched
    deadline_s: float = 0.0  # when what was found must be here, in time.monotonic()


@dataclass(slots=True, eq=False)
class FetchWork(Work):
    is_stopped: bool = False  # by us, which is no miss
    rounds: list[Round] = field(default_factory=list)  # set on the event loop


@dataclass(frozen=True, slots=True)
class RoundWork:
    sink: GuardedSink


# What a round that is waited for reports. The least of all ranks' counts.
ENDED = 0  # the fetch has ended before it
STOP = 1  # its bytes are here, but what is left would be computed faster
WANTED = 2  # its bytes are here


def lookup_report(num_pages: int, is_fetched: bool) -> int:
    """How many pages are stored, and whether to fetch them, in one number, of which ranks can take the least."""
    return 2 * num_pages + is_fetched


def read_lookup_report(value: int) -> tuple[int, bool]:
    return value // 2, bool(value % 2)


@dataclass(frozen=True, slots=True)
class CopyWork:
    ticket: Ticket
    source: GuardedSource


@dataclass(frozen=True, slots=True)
class PageRun:
    """Consecutive pages in the pool. ``slots``: every token's."""

    first_page: int  # position in the sequence
    previous_hash: str | None  # of the page before, None at the sequence's start
    page_hashes: Sequence[str]
    slots: torch.Tensor


class DeviceBackend:
    """The store's client of one rank, with its threads."""

    def __init__(
        self,
        config: KVFetchConfig,
        pages: DevicePages,
        namespace: Namespace,
        quantiser: Quantiser,
        report: Report,
        nvdec: Nvdec | None = None,
    ) -> None:
        self._config = config
        self._pages = pages
        self._namespace = namespace
        self._quantiser = quantiser
        self._report = report
        self._suspended: str | None = None
        self._closed = False
        self._choice = FetchOrRecompute()
        self.num_chosen = 0  # pages that lookups found, and that are to be fetched, since the start
        self._encoders = open_encoders(config)
        self._encode_pool = ThreadPoolExecutor(config.codec_threads, "kvfetch-encode")
        self._copy_pool = ThreadPoolExecutor(1, "kvfetch-copy")
        self._hash_pool = ThreadPoolExecutor(1, "kvfetch-hash")
        self._loop = LoopThread("kvfetch")
        try:
            self._loop.run(self._start(nvdec), _START_S)
        except BaseException:
            self._loop.close()
            raise
        logger.info("kvfetch in device mode: %s, namespace %s: %s", config.store, namespace.digest(), namespace)
        # docs/decisions/0011-no-early-start.md
        logger.info("kvfetch early start is off: this SGLang's runner cannot wait for a layer that is on its way")

    async def _start(self, nvdec: Nvdec | None) -> None:
        client = open_client(
            self._config,
            self._namespace,
            self._quantiser,
            encode_pool=self._encode_pool,
            on_lookup_fault=partial(count_miss, "lookup"),
            encoders=self._encoders,
            nvdec=nvdec,
            decode_bytes=_DECODE_BYTES,
        )
        self._store, self._finder = client.store, client.finder
        self._fetcher, self._writer = client.fetcher, client.writer

    def suspend(self, reason: str) -> None:
        """Neither read nor write from now on: what the engine computes no longer belongs to this namespace."""
        if self._suspended is None:
            self._suspended = reason
            logger.warning("kvfetch neither reads nor writes any more: %s", reason)

    @property
    def reads(self) -> bool:
        return self._config.reads and self._suspended is None

    @property
    def writes(self) -> bool:
        return self._config.writes and self._suspended is None

    def cancel(self, work: Work) -> None:
        work.cancelled = True
        self._loop.submit(_cancel(work))

    # Lookup

    def begin_lookup(
        self,
        ticket: Ticket,
        hash_pages: Callable[[], list[str]],
        num_ahead: Callable[[], int],
        prefill_s: Callable[[int], float | None],
    ) -> LookupWork:
        """Find the longest stored run of some pages, and decide whether to fetch it.

        ``num_ahead``: pages that are to be fetched before these. ``prefill_s``: what the engine takes to compute so
        many tokens, as measured. Both are called on another thread.
        """
        work = LookupWork()
        self._loop.submit(self._lookup(work, ticket, hash_pages, num_ahead, prefill_s))
        return work

    async def _lookup(
        self,
        work: LookupWork,
        ticket: Ticket,
        hash_pages: Callable[[], list[str]],
        num_ahead: Callable[[], int],
        prefill_s: Callable[[int], float | None],
    ) -> None:
        is_fetched = True
        try:
            work.task = asyncio.current_task()
            loop = asyncio.get_running_loop()
            work.hashes = await loop.run_in_executor(self._hash_pool, hash_pages)
            if not work.cancelled:
                work.sources = await self._finder.find(_as_bytes(work.hashes), self._config.lookup_timeout_s)
                is_fetched = self._is_fetched(work.sources, num_ahead(), prefill_s)
                work.deadline_s = time.monotonic() + self._config.fetch_timeout_s
                if is_fetched:
                    work.num_chosen = len(work.sources)
                    self.num_chosen += work.num_chosen
        except asyncio.CancelledError:
            metrics.MISSES.labels("lookup", "cancelled").inc()
        except (KVFetchError, TimeoutError) as e:
            count_miss("lookup", e)
        except Exception:
            logger.exception("kvfetch lookup failed")
            metrics.MISSES.labels("lookup", "internal").inc()
        finally:
            metrics.LOOKUP_PAGES.labels("hit").inc(len(work.sources))
            metrics.LOOKUP_PAGES.labels("miss").inc(len(work.hashes) - len(work.sources))
            self._report(ticket, lookup_report(len(work.sources), is_fetched))

    def _is_fetched(
        self, sources: Sequence[PageSource], num_ahead: int, prefill_s: Callable[[int], float | None]
    ) -> bool:
        """Whether to fetch these pages, or to have them computed."""
        if not sources:
            return False
        if self._config.recompute == "never":
            DECISIONS.labels("fetch", "configured").inc()
            return True
        num_tokens = len(sources) * self._pages.geometry.page_size
        decision = self._choice.decide(num_tokens, self._cost(sources, num_ahead), prefill_s(num_tokens))
        DECISIONS.labels("fetch" if decision.is_fetched else "recompute", decision.reason).inc()
        return decision.is_fetched

    def _cost(self, sources: Sequence[PageSource], num_ahead: int) -> FetchCost:
        """Pages ahead are taken to be like these."""
        size_bytes = total_bytes(sources) * (1 + num_ahead / len(sources))
        goodput_bps = self._fetcher.link.goodput_bps(time.monotonic())
        decoded_bytes_per_s = self._fetcher.decode_rate.bytes_per_s
        return FetchCost(
            None if goodput_bps is None else size_bytes * 8 / goodput_bps,
            None if decoded_bytes_per_s is None else size_bytes / decoded_bytes_per_s,
        )

    # Read

    def begin_fetch(
        self,
        link_ticket: Ticket,
        end_ticket: Ticket,
        request_id: str,
        deadline_s: float,
        hashes: Sequence[str],
        sources: Sequence[PageSource],
        round_ends: Sequence[int],
    ) -> FetchWork:
        """Begin to transmit pages. Reports on ``link_ticket`` when the link could serve another fetch beside this one,
        and on ``end_ticket`` when all is over.

        Rounds end before the pages ``round_ends``. Await them with `await_round`, and give each one its slots.
        """
        work = FetchWork()
        self._loop.submit(
            self._fetch(work, link_ticket, end_ticket, request_id, deadline_s, hashes, sources, round_ends)
        )
        return work

    async def _fetch(
        self,
        work: FetchWork,
        link_ticket: Ticket,
        end_ticket: Ticket,
        request_id: str,
        deadline_s: float,
        hashes: Sequence[str],
        sources: Sequence[PageSource],
        round_ends: Sequence[int],
    ) -> None:
        result = FetchResult(0, (), False)
        work.task = asyncio.current_task()
        work.rounds = [Round(first, end) for first, end in pairwise((0, *round_ends))]
        reported = False

        def report_link() -> None:
            nonlocal reported
            if not reported:
                reported = True
                self._report(link_ticket, 1)

        try:
            if self._finder.is_paused:  # what was found before need not find out for itself
                metrics.MISSES.labels("fetch", "skipped").inc()
            elif not work.cancelled:
                result = await self._fetcher.fetch_rounds(
                    sources,
                    work.rounds,
                    max(0.0, deadline_s - time.monotonic()),
                    request_id=request_id,
                    on_requested=report_link,
                )
                self._finder.fetched(_as_bytes(hashes), sources, result)
        except asyncio.CancelledError:
            if not work.is_stopped:
                metrics.MISSES.labels("fetch", "cancelled").inc()
        except Exception:
            logger.exception("kvfetch fetch failed")
            metrics.MISSES.labels("fetch", "internal").inc()
        finally:
            for each in work.rounds:
                each.end(0)
            report_link()
            self._report(end_ticket, 1)
            count_fetch(result, self._config.fetch_timeout_s)
            self._count_pages(len(sources), sum(each.done.result() for each in work.rounds))

    def await_round(
        self,
        ticket: Ticket,
        work: FetchWork,
        index: int,
        rest: Sequence[PageSource],
        prefill_s: Callable[[int], float | None],
    ) -> None:
        """Report `WANTED`, `STOP` or `ENDED` when a round's first bytes are here, or the fetch has ended. ``rest``:
        the pages from this round on."""
        self._loop.submit(self._await_round(ticket, work, index, rest, prefill_s))

    async def _await_round(
        self,
        ticket: Ticket,
        work: FetchWork,
        index: int,
        rest: Sequence[PageSource],
        prefill_s: Callable[[int], float | None],
    ) -> None:
        answer = ENDED
        try:
            if await asyncio.shield(work.rounds[index].wanted):
                # The first round was decided on when it was looked up.
                answer = WANTED if index == 0 or self._is_fetched(rest, 0, prefill_s) else STOP
        finally:
            self._report(ticket, answer)

    def stop_fetch(self, work: FetchWork) -> None:
        """The rounds that were not given slots are not wanted any more. All others have ended."""
        work.is_stopped = True
        self.cancel(work)

    def restore_round(self, ticket: Ticket, work: FetchWork, index: int, slots: torch.Tensor) -> RoundWork:
        """Restore a round into ``slots``. Reports how many pages, from its first on; then nothing is written any
        more."""
        self._pages.fence()
        sink = GuardedSink(self._pages)
        self._loop.submit(self._restore_round(ticket, work.rounds, index, slots, sink))
        return RoundWork(sink)

    def publish(self) -> None:
        """Before slots that were restored to go on, into the tree or back to the allocator."""
        self._pages.publish()

    async def _restore_round(
        self, ticket: Ticket, rounds: Sequence[Round], index: int, slots: torch.Tensor, sink: GuardedSink
    ) -> None:
        num_pages = 0
        try:
            # On a GPU this waits for it.
            loop = asyncio.get_running_loop()
            pool_pages = await loop.run_in_executor(self._hash_pool, self._pages.page_indices, slots)
            rounds[index].give(Destination(pool_pages, sink))
            num_pages = await asyncio.shield(rounds[index].done)
        finally:
            sink.close()
            self._report(ticket, num_pages)

    def _count_pages(self, asked: int, got: int) -> None:
        metrics.FETCHED_PAGES.labels("hit").inc(got)
        metrics.FETCHED_PAGES.labels("miss").inc(asked - got)
        metrics.RAW_BYTES.labels("read").inc(got * self._pages.geometry.page_bytes)

    # Write

    def begin_write(self, ticket: Ticket, run: PageRun) -> CopyWork:
        """Copy pages out of the pool and queue them for writing. Reports how many, from the first on, were queued; the
        pages' owner may have them back then."""
        self._pages.fence()
        work = CopyWork(ticket, GuardedSource(self._pages))
        self._copy_pool.submit(self._copy, work, run)
        return work

    def _copy(self, work: CopyWork, run: PageRun) -> None:
        num_queued = 0
        try:
            num_queued = self._queue_pages(work, run)
        except Exception:
            logger.exception("kvfetch copy failed")
        finally:
            if dropped := len(run.page_hashes) - num_queued:
                metrics.WRITTEN_PAGES.labels("dropped_full").inc(dropped)
                _limited.warning("full", f"{dropped} pages not written: the write queue is full, or the cache flushed")
            self._report(work.ticket, num_queued)

    def _queue_pages(self, work: CopyWork, run: PageRun) -> int:
        deadline_s = time.monotonic() + _WRITE_WAIT_S
        hashes, pool_pages = _as_bytes(run.page_hashes), self._pages.page_indices(run.slots)
        page_bytes = self._pages.geometry.page_bytes
        step = max(1, self._config.write_queue_bytes // _PIECES // page_bytes)
        previous = None if run.previous_hash is None else bytes.fromhex(run.previous_hash)
        for first in range(0, len(hashes), step):
            piece = slice(first, first + step)
            num_bytes = len(hashes[piece]) * page_bytes
            if not self._writer.reserve(num_bytes, max(0.0, deadline_s - time.monotonic())):
                return first
            values = {tensor: work.source.read(tensor, pool_pages[piece]) for tensor in TENSORS}
            kept = {tensor: [value] for tensor, value in values.items() if value is not None}
            if len(kept) < len(TENSORS):
                self._writer.release(num_bytes)
                return first
            self._writer.submit(PageBatch(run.first_page + first, previous, hashes[piece], kept))
            previous = hashes[piece][-1]
        return len(hashes)

    # Life

    def clear(self) -> None:
        """Delete the segments of this namespace from the store. Waits. Raises KVFetchError, TimeoutError."""
        self._loop.run(self._clear(), _CLEAR_S)

    async def _clear(self) -> None:
        self._finder.forget()
        await self._store.delete_prefix(self._namespace.digest() + "/")

    def close(self) -> None:
        """Write what is queued, within a few seconds, and release threads and sockets. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for step in (self._writer.drain, self._writer.close, self._store.close):
            try:
                self._loop.run(step(), _CLOSE_S)
            except TimeoutError:
                logger.warning("kvfetch: %s not done after %g s; closing all the same", step.__qualname__, _CLOSE_S)
        self._loop.close()
        self._fetcher.close(wait=False)
        pools: tuple[Executor, ...] = (self._hash_pool, self._copy_pool, self._encode_pool)
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for queue in ("read", "write"):
            metrics.QUEUED_BYTES.labels(queue).set(0)


async def _cancel(work: Work) -> None:
    if work.task is not None:
        work.task.cancel()


def _as_bytes(hashes: Sequence[str]) -> list[bytes]:
    return [bytes.fromhex(h) for h in hashes]
