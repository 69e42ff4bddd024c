"""Lookups: find out which pages the store has, and decide whether to fetch them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from sgl_kvfetch import metrics
from sgl_kvfetch.config import KVFetchConfig
from sgl_kvfetch.dataplane.plane import DataPlane, Find
from sgl_kvfetch.plugin.device.board import Report, Ticket
from sgl_kvfetch.plugin.device.recompute import Verdicts
from sgl_kvfetch.plugin.page_hashes import hash_bytes

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class LookupWork:
    """A lookup under way. Its result is reported exactly once, whatever happens to it."""

    hashes: list[str] = field(default_factory=list)  # of all requested pages, whether stored or not
    page_hashes: list[bytes] = field(default_factory=list)  # the same hashes as bytes
    find: Find | None = None
    number: int | None = None  # the data plane's number for this lookup
    num_chosen: int = 0  # pages to be fetched
    deadline_s: float = 0.0  # by when the found pages must arrive, in time.monotonic()
    cancelled: bool = False


class Finding(NamedTuple):
    """The result of a lookup: how many pages are stored, from the first on, and whether to fetch them (1 or 0). The
    minimum over ranks keeps the pages that all ranks have, and fetches them only if all ranks want to."""

    num_pages: int
    is_fetched: int


class Lookups:
    """Runs lookups in the background. The scheduler's thread begins them."""

    def __init__(
        self, config: KVFetchConfig, plane: DataPlane, verdicts: Verdicts, hash_pool: Executor, report: Report
    ) -> None:
        self._config = config
        self._plane = plane
        self._verdicts = verdicts
        self._hash_pool = hash_pool
        self._report = report
        self.num_chosen = 0  # found pages that are to be fetched, counted since the start

    def begin(
        self,
        work: LookupWork,
        ticket: Ticket[Finding],
        hash_pages: Callable[[], list[str]],
        num_ahead: Callable[[], int],
    ) -> None:
        """Find the longest stored run of some pages, and decide whether to fetch it.

        ``num_ahead`` returns how many pages will be fetched before these. Both callables run on other threads.
        """
        self._hash_pool.submit(self._look_up, work, ticket, hash_pages, num_ahead)

    def cancel(self, work: LookupWork) -> None:
        """Let a lookup end soon. Its result is still reported."""
        work.cancelled = True
        if work.number is not None:
            self._plane.cancel(work.number)

    def forget(self, work: LookupWork) -> None:
        """Note that the pages that a lookup found will not be fetched."""
        if work.number is not None:
            self._plane.forget(work.number)

    def _look_up(
        self,
        work: LookupWork,
        ticket: Ticket[Finding],
        hash_pages: Callable[[], list[str]],
        num_ahead: Callable[[], int],
    ) -> None:
        try:
            work.hashes = hash_pages()
            work.page_hashes = hash_bytes(work.hashes)
            if not work.cancelled:
                found = partial(self._found, work, ticket, num_ahead)
                work.number = self._plane.look_up(work.page_hashes, found)
                if work.cancelled:  # in the meantime
                    self._plane.cancel(work.number)
                return
        except Exception:
            logger.exception("kvfetch lookup failed")
            metrics.MISSES.labels("lookup", "internal").inc()
        self._report(ticket, Finding(0, 1))

    def _found(self, work: LookupWork, ticket: Ticket[Finding], num_ahead: Callable[[], int], find: Find) -> None:
        """Decide and report. Runs on the thread that receives from the data plane."""
        is_fetched = True
        try:
            work.find = find
            if find.num_pages:
                is_fetched = self._verdicts.is_fetched(find.num_pages, find.cost, num_ahead())
            work.deadline_s = time.monotonic() + self._config.fetch_timeout_s
            if is_fetched:
                work.num_chosen = find.num_pages
                self.num_chosen += work.num_chosen
        finally:
            self._report(ticket, Finding(find.num_pages, int(is_fetched)))
