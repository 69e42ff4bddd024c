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

import torch

from sgl_kvfetch import metrics
from sgl_kvfetch.config import KVFetchConfig
from sgl_kvfetch.errors import KVFetchError
from sgl_kvfetch.fetch.fetcher import FetchResult
from sgl_kvfetch.fetch.plan import PageSource
from sgl_kvfetch.fetch.sink import GuardedSink
from sgl_kvfetch.keys import Namespace
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.loop import LoopThread
from sgl_kvfetch.plugin.client import count_miss, open_client
from sgl_kvfetch.plugin.device.board import Ticket
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
_PIECES = 4  # a copy goes into the queue in pieces of at most so much of it

Report = Callable[[Ticket, int], None]


@dataclass(slots=True, eq=False)
class Work:
    """Something under way. ``cancel`` makes it end soon; it still reports."""

    ticket: Ticket
    cancelled: bool = False
    task: asyncio.Task[None] | None = None  # set on the event loop


@dataclass(slots=True, eq=False)
class LookupWork(Work):
    """The number reported is ``len(sources)``."""

    hashes: list[str] = field(default_factory=list)  # of all pages asked for; there whatever the store answers
    sources: list[PageSource] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class FetchWork(Work):
    sink: GuardedSink = field(kw_only=True)


@dataclass(slots=True, eq=False)
class CopyWork(Work):
    source: GuardedSource = field(kw_only=True)


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
        self, config: KVFetchConfig, pages: DevicePages, namespace: Namespace, quantiser: Quantiser, report: Report
    ) -> None:
        self._config = config
        self._pages = pages
        self._namespace = namespace
        self._quantiser = quantiser
        self._report = report
        self._suspended: str | None = None
        self._closed = False
        self._decode_pool = ThreadPoolExecutor(config.codec_threads, "kvfetch-decode")
        self._encode_pool = ThreadPoolExecutor(config.codec_threads, "kvfetch-encode")
        self._copy_pool = ThreadPoolExecutor(1, "kvfetch-copy")
        self._hash_pool = ThreadPoolExecutor(1, "kvfetch-hash")
        self._loop = LoopThread("kvfetch")
        try:
            self._loop.run(self._start(), _START_S)
        except BaseException:
            self._loop.close()
            raise
        logger.info("kvfetch in device mode: %s, namespace %s: %s", config.store, namespace.digest(), namespace)

    async def _start(self) -> None:
        client = open_client(
            self._config,
            self._namespace,
            self._quantiser,
            decode_pool=self._decode_pool,
            encode_pool=self._encode_pool,
            on_lookup_fault=partial(count_miss, "lookup"),
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
        if not isinstance(work, CopyWork):
            self._loop.submit(_cancel(work))

    # Lookup

    def begin_lookup(self, ticket: Ticket, hash_pages: Callable[[], list[str]]) -> LookupWork:
        """Find the longest stored run of some pages."""
        work = LookupWork(ticket)
        self._loop.submit(self._lookup(work, hash_pages))
        return work

    async def _lookup(self, work: LookupWork, hash_pages: Callable[[], list[str]]) -> None:
        try:
            work.task = asyncio.current_task()
            loop = asyncio.get_running_loop()
            work.hashes = await loop.run_in_executor(self._hash_pool, hash_pages)
            if not work.cancelled:
                work.sources = await self._finder.find(_as_bytes(work.hashes), self._config.lookup_timeout_s)
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
            self._report(work.ticket, len(work.sources))

    # Read

    def read_ahead(self, sources: Sequence[PageSource]) -> None:
        """Begin to transmit what a fetch that must wait for slots will need, as far as there is room."""
        self._loop.submit(self._read_ahead(sources))

    async def _read_ahead(self, sources: Sequence[PageSource]) -> None:
        self._fetcher.read_ahead(sources, expire_s=self._config.fetch_timeout_s)

    def begin_fetch(
        self, ticket: Ticket, hashes: Sequence[str], sources: Sequence[PageSource], slots: torch.Tensor
    ) -> FetchWork:
        """Restore pages into ``slots``. When it is reported, nothing is written there any more."""
        work = FetchWork(ticket, sink=GuardedSink(self._pages))
        self._loop.submit(self._fetch(work, hashes, sources, slots))
        return work

    async def _fetch(
        self, work: FetchWork, hashes: Sequence[str], sources: Sequence[PageSource], slots: torch.Tensor
    ) -> None:
        result = FetchResult(0, (), False)
        try:
            work.task = asyncio.current_task()
            if not work.cancelled:
                pool_pages = self._pages.page_indices(slots)
                result = await self._fetcher.fetch(sources, pool_pages, work.sink, self._config.fetch_timeout_s)
                self._finder.fetched(_as_bytes(hashes), sources, result)
        except asyncio.CancelledError:
            metrics.MISSES.labels("fetch", "cancelled").inc()
        except Exception:
            logger.exception("kvfetch fetch failed")
            metrics.MISSES.labels("fetch", "internal").inc()
        finally:
            work.sink.close()
            self._count_read(len(sources), result)
            self._report(work.ticket, result.num_pages)

    def _count_read(self, asked: int, result: FetchResult) -> None:
        for failure in result.failures:
            count_miss("fetch", failure)
        if result.timed_out:
            count_miss("fetch", TimeoutError(f"not all pages came within {self._config.fetch_timeout_s:g} s"))
        metrics.FETCHED_PAGES.labels("hit").inc(result.num_pages)
        metrics.FETCHED_PAGES.labels("miss").inc(asked - result.num_pages)
        metrics.RAW_BYTES.labels("read").inc(result.num_pages * self._pages.geometry.page_bytes)

    # Write

    def begin_write(self, ticket: Ticket, run: PageRun) -> CopyWork:
        """Copy pages out of the pool and queue them for writing. Reports how many, from the first on, were queued; the
        pages' owner may have them back then."""
        work = CopyWork(ticket, source=GuardedSource(self._pages))
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
        pools: tuple[Executor, ...] = (self._hash_pool, self._copy_pool, self._decode_pool, self._encode_pool)
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)


async def _cancel(work: Work) -> None:
    if work.task is not None:
        work.task.cancel()


def _as_bytes(hashes: Sequence[str]) -> list[bytes]:
    return [bytes.fromhex(h) for h in hashes]
