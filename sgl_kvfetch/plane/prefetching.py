"""Host mode: reads prompts ahead, and restores them right into SGLang's host pool.

SGLang first asks how many pages there are (`messages.LookUp`), then finds room in its host pool, and then takes the
pages in batches, prompt by prompt (`messages.FetchPages`), and side pages pool by pool (`messages.FetchSide`). So a
lookup only begins to read bytes, as far as the budget allows, and leaves no state here: the finder remembers what was
found, `UnitReader` what was read, and the order which prompt comes next. A fetch has two states:

* **Under way**, with a task. It ends when all has come that comes. Then it is over, but for side pages that have come.
* **Side pages lie in shared memory**, until they are released.

**SGLang may give up at any moment**, and use the places in its pool for something else. So a fetch that was released is
answered all the same, and only when nothing writes to the pool any more.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import ExitStack

import msgspec

from sgl_kvfetch import timeline
from sgl_kvfetch.keys import split_hashes
from sgl_kvfetch.metrics import counted, miss, reasons_here, shortfall
from sgl_kvfetch.plane.fetch.fetcher import FetchResult, PoolPages
from sgl_kvfetch.plane.fetch.finder import StoredPrompts
from sgl_kvfetch.plane.fetch.plan import PageSource
from sgl_kvfetch.protocol import Emit, StridedPages, messages as m


class Prefetcher:
    """Carries out `messages.LookUp`, `FetchPages` and `FetchSide`. Belongs to one event loop."""

    def __init__(self, prompts: StoredPrompts, answer: Emit, pool: StridedPages) -> None:
        """``answer``: as for `Service`. ``pool``: where fetched pages go."""
        self._prompts, self._answer, self._pool = prompts, answer, pool
        self._config, self._order, self._client = prompts.config, prompts.order, prompts.client
        self._under_way: dict[int, asyncio.Task[None]] = {}  # fetches, by number
        self._lying: dict[int, ExitStack] = {}  # side pages in shared memory, by number

    def look_up(self, command: m.LookUp) -> None:
        self._prompts.tasks.begin(self._look_up(command))

    def fetch(self, command: m.FetchPages | m.FetchSide) -> None:
        fetch = self._fetch_side(command) if isinstance(command, m.FetchSide) else self._fetch_pages(command)
        self._under_way[command.work] = self._prompts.tasks.begin(fetch)

    def release(self, work: int) -> None:
        """End a fetch soon, or free its side pages."""
        if work in self._under_way:
            # Not at once: a task that is cancelled before its first step never runs, not even its ``finally``.
            asyncio.get_running_loop().call_soon(self._under_way.pop(work).cancel)
        elif work in self._lying:
            self._lying.pop(work).close()

    async def _look_up(self, command: m.LookUp) -> None:
        """Look pages up, and begin to read those that are to be fetched."""
        hashes = split_hashes(command.hashes)
        sources: list[PageSource] = []
        reasons = reasons_here()
        found = m.Found(command.work)
        try:
            request = timeline.Request(command.request_id, command.traceparent)
            sources, usable = await self._prompts.find(command, hashes, request, len(hashes))
            cost = self._client.fetcher.cost(sources)
            if self._order.looked_up(hashes, len(sources), cost, command.saved_s, time.monotonic()):
                self._client.reads.read_ahead(sources, expire_s=self._config.fetch_timeout_s)
                found = m.Found(command.work, len(sources), len(sources), "", usable.lengths, usable.stored)
            elif sources:
                self._prompts.leave_to_engine(sources)
                found = m.Found(command.work, 0, len(sources))
            else:
                found = m.Found(command.work, stored=usable.stored)
        finally:
            reason = shortfall(reasons) if found.num_pages < len(hashes) else ""
            self._answer(msgspec.structs.replace(found, reason=reason))

    async def _fetch_pages(self, command: m.FetchPages) -> None:
        """Restore pages to the engine's pool."""
        finder, hashes, began_s = self._client.finder, split_hashes(command.hashes), time.monotonic()
        turn = self._order.turn_of(hashes, began_s, is_first=command.is_first)
        deadline_s = min(command.deadline_s, turn.end_s)
        result = FetchResult()
        reasons = reasons_here()
        try:
            with counted("fetch"):
                if finder.is_paused:  # the store keeps failing: do not try, although pages were found
                    miss("fetch", "skipped")
                    return
                sources = await finder.recall(hashes, self._config.lookup_timeout_s)
                result = await self._client.fetcher.fetch(
                    sources,
                    PoolPages(self._pool, command.places[: len(sources)]),
                    max(0.0, deadline_s - time.monotonic()),
                    compute_s=turn.compute_pages_s(len(hashes)) if command.is_divisible else math.inf,
                )
                if result.is_read:  # else it says nothing of the store
                    finder.fetched(hashes[result.num_pages :], result.failures)
        finally:
            is_whole = result.num_pages == len(hashes)
            if command.is_last or not is_whole:
                self._order.ended(time.monotonic(), is_whole=is_whole)
            result.count(len(hashes), self._prompts.geometry.page_bytes)
            self._under_way.pop(command.work, None)
            self._answer(m.Fetched(command.work, result.num_pages, shortfall(reasons)))

    async def _fetch_side(self, command: m.FetchSide) -> None:
        """Put those of a side pool's pages into shared memory that come until the deadline."""
        finder, hashes, pool = self._client.finder, split_hashes(command.hashes), command.pool
        come: dict[int, bytearray] = {}  # which threads fill that may outlive this
        reasons = reasons_here()
        try:
            with counted("fetch"):
                deadline_s = min(command.deadline_s, self._order.end_s)  # they follow the present prefix
                left_s = deadline_s - time.monotonic()
                sources = await finder.recall(hashes, min(left_s, self._config.lookup_timeout_s))
                num_bytes = self._prompts.side_bytes[pool]
                await self._prompts.sides.fetch(hashes, sources, pool, num_bytes, deadline_s, come)
        finally:
            sides = {(pool, page): content for page, content in sorted(come.items())}
            is_wanted, ends, places = command.work in self._under_way, ExitStack(), None
            if is_wanted and sides and (places := self._prompts.put_sides(sides, ends)):
                self._lying[command.work] = ends
            self._under_way.pop(command.work, None)
            reason = shortfall(reasons) if len(come) < len(hashes) else ""
            num_pages = len(sides) if places else 0
            self._answer(m.Fetched(command.work, num_pages, reason, places))
