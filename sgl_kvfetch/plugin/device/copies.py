"""Copies pages out of the pool for writing, on a separate thread."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import torch

from sgl_kvfetch import metrics
from sgl_kvfetch.dataplane.plane import DataPlane
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.plugin.device.board import PageCount, Report, Ticket
from sgl_kvfetch.plugin.device.pages import DevicePages, GuardedSource
from sgl_kvfetch.plugin.page_hashes import hash_bytes
from sgl_kvfetch.plugin.queueing import PageRun, queue_pages

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Pages in the pool that are consecutive in their sequence. ``slots``: one per token."""

    first_page: int  # position in the sequence
    previous_hash: str | None  # hash of the page before, None at the sequence's start
    page_hashes: Sequence[str]
    slots: torch.Tensor


class Copies:
    """Runs copies in the background. The scheduler's thread begins them."""

    def __init__(self, plane: DataPlane, pages: DevicePages, copy_pool: Executor, report: Report) -> None:
        self._plane = plane
        self._pages = pages
        self._copy_pool = copy_pool
        self._report = report

    def begin(self, ticket: Ticket[PageCount], run: SlotRun) -> GuardedSource:
        """Copy pages out of the pool and queue them for writing. Reports how many were queued, from the first on. The
        pages are free for reuse after the report, or once the returned source is closed."""
        self._pages.fence()
        source = GuardedSource(self._pages)
        self._copy_pool.submit(self._copy, ticket, run, source)
        return source

    def _copy(self, ticket: Ticket[PageCount], run: SlotRun, source: GuardedSource) -> None:
        num_queued = 0
        try:
            num_queued = self._queue(run, source)
        except Exception:
            logger.exception("kvfetch copy failed")
        finally:
            if dropped := len(run.page_hashes) - num_queued:
                metrics.WRITTEN_PAGES.labels("dropped_full").inc(dropped)
                _limited.warning("full", f"{dropped} pages not written: the queue is full, or the cache was flushed")
            self._report(ticket, PageCount(num_queued))

    def _queue(self, run: SlotRun, source: GuardedSource) -> int:
        previous_hash = None if run.previous_hash is None else hash_bytes([run.previous_hash])[0]
        pool_pages = self._pages.page_indices(run.slots)
        return queue_pages(
            self._plane, PageRun(run.first_page, previous_hash, hash_bytes(run.page_hashes), pool_pages), source.read
        )
