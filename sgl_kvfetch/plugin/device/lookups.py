"""Lookups, on the event loop: which pages the store has, and whether to fetch them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import NamedTuple

from sgl_kvfetch import metrics
from sgl_kvfetch.config import KVFetchConfig
from sgl_kvfetch.errors import KVFetchError
from sgl_kvfetch.fetch.finder import PageFinder
from sgl_kvfetch.fetch.plan import PageSource
from sgl_kvfetch.loop import LoopThread
from sgl_kvfetch.plugin.client import count_miss
from sgl_kvfetch.plugin.device.board import Report, Ticket
from sgl_kvfetch.plugin.device.recompute import Verdicts
from sgl_kvfetch.plugin.device.work import Work
from sgl_kvfetch.plugin.page_hashes import hash_bytes

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class LookupWork(Work):
    hashes: list[str] = field(default_factory=list)  # of all pages asked for; there whatever the store answers
    sources: list[PageSource] = field(default_factory=list)
    num_chosen: int = 0  # pages, if they are to be fetched
    deadline_s: float = 0.0  # when what was found must be here, in time.monotonic()


class Found(NamedTuple):
    """What a lookup has come to: how many pages are stored, from the first on, and whether to fetch them (1) or not
    (0). So pages count that all ranks have, and they are fetched if all ranks want to."""

    num_pages: int
    is_fetched: int


class Lookups:
    """Begun on the scheduler's thread."""

    def __init__(
        self,
        config: KVFetchConfig,
        loop: LoopThread,
        finder: PageFinder,
        verdicts: Verdicts,
        hash_pool: Executor,
        report: Report,
    ) -> None:
        self._config = config
        self._loop = loop
        self._finder = finder
        self._verdicts = verdicts
        self._hash_pool = hash_pool
        self._report = report
        self.num_chosen = 0  # pages that were found, and that are to be fetched, since the start

    def begin(
        self, ticket: Ticket[Found], hash_pages: Callable[[], list[str]], num_ahead: Callable[[], int]
    ) -> LookupWork:
        """Find the longest stored run of some pages, and decide whether to fetch it.

        ``num_ahead``: pages that are to be fetched before these. Both are called on another thread.
        """
        work = LookupWork(self._loop)
        self._loop.submit(self._look_up(work, ticket, hash_pages, num_ahead))
        return work

    async def _look_up(
        self, work: LookupWork, ticket: Ticket[Found], hash_pages: Callable[[], list[str]], num_ahead: Callable[[], int]
    ) -> None:
        is_fetched = True
        try:
            work.task = asyncio.current_task()
            loop = asyncio.get_running_loop()
            work.hashes = await loop.run_in_executor(self._hash_pool, hash_pages)
            if not work.cancelled:
                work.sources = await self._finder.find(hash_bytes(work.hashes), self._config.lookup_timeout_s)
                is_fetched = self._verdicts.is_fetched(work.sources, num_ahead())
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
            self._report(ticket, Found(len(work.sources), int(is_fetched)))
