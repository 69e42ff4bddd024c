"""The engine's side of the data plane: all that the engine asks of it.

When a data plane dies, its work under way counts as misses (`run`), and the next one is started (`supervisor`). Only
methods whose docstrings say so wait.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future

import msgspec
import torch

from sgl_kvfetch import metrics, timeline
from sgl_kvfetch.codec import SideKey
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.plane import messages as m
from sgl_kvfetch.plane.config import KVFetchConfig
from sgl_kvfetch.plane.fetch.sink import Destination
from sgl_kvfetch.plane.launch import Launch
from sgl_kvfetch.plane.run import ANSWER_S, Quantising, ReadPages, ReadSide, TakeSide
from sgl_kvfetch.plane.staging import StagedValues
from sgl_kvfetch.plane.supervisor import Supervisor
from sgl_kvfetch.types import KVGeometry

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)

# Shared memory for values on their way to the engine: this, or twice the size of a page with all its side pages. That
# for pages on their way to the store is the write queue. Memory that is never used takes no space.
SHARED_BYTES = 64 << 20
_QUEUE_BYTES = KVFetchConfig.model_fields["write_queue_bytes"].default
_WRITE_S = 1.0  # how long to wait for room for pages
_WRITES_S = 4.0  # after which no further part of the pages is begun: SGLang waits 10 s for this thread when it stops it
# Pages that may wait longer do so until there was no room for _NO_ROOM_S, for them and for those before them. There is
# a pause between attempts: one fails at once while a data plane is restarted.
_NO_ROOM_S, _PAUSE_S = 30.0, 0.1

PART_BYTES = 16 << 20  # of pages that are copied at once
_QUANTISED_BYTES = 32 << 20  # the same of their values, if they come quantised: a third of it is copied


class DataPlane(Supervisor):
    """One rank's data plane. Call ``close`` at the end."""

    def __init__(self, start: m.Start, geometry: KVGeometry, launch: Launch, staging_bytes: int = 0) -> None:
        """Start the data plane and wait until it serves. ``staging_bytes``: the shared memory for values that wait to
        be taken. Raises KVFetchError if the data plane refuses the config or fails."""
        self._numbers = itertools.count(1)
        self._refused_s = math.inf  # since when no pages were queued that might have waited
        least_bytes = 2 * (geometry.page_bytes + sum(start.sides.values()))
        queue_bytes = max(start.config.get("write_queue_bytes", _QUEUE_BYTES), least_bytes)
        self._queue_bytes = queue_bytes
        value_bytes = (staging_bytes or max(SHARED_BYTES, least_bytes)) + start.config.get("memory_cache", 0)
        super().__init__(start, geometry, launch, queue_bytes, value_bytes)

    @property
    def memory(self) -> torch.Tensor:
        """The shared memory in which prompts are staged, uint8, and behind it that of `memory_cache`."""
        return self._run.values.whole

    # Reading

    def look_up(
        self,
        hashes: Sequence[bytes],
        on_found: Callable[[m.Found], None],
        *,
        trailing: Mapping[str, int] | None = None,
    ) -> int:
        """Find the longest stored run of these pages. ``on_found`` is called once, on any thread. Return the number.
        ``trailing``: as in `messages.LookUp`."""
        work = next(self._numbers)
        command = m.LookUp(work, b"".join(hashes), dict(trailing or {}))
        found = self._run.ask(command, m.Found(work, 0, m.Cost(None, None)))
        found.add_done_callback(lambda found: on_found(found.result()))
        return work

    def read_ahead(self, lookup: int) -> None:
        """Begin to read the pages that a lookup found: they will be fetched."""
        self._send(m.ReadAhead(lookup))

    def forget_lookup(self, lookup: int) -> None:
        """Note that the pages that a lookup found will not be fetched."""
        self._send(m.Forget(lookup))

    def fetch(
        self,
        hashes: Sequence[bytes],
        deadline_s: float,
        destination: Destination,
        compute_s: float = math.inf,
    ) -> tuple[int, Future[m.FetchOver]]:
        """Begin to fetch pages into ``destination``. Return the number, for `cancel`, and what tells how many were
        restored; the data plane writes nothing after that. Other arguments as in `messages.FetchPages`."""
        work = next(self._numbers)
        command = m.FetchPages(work, b"".join(hashes), deadline_s, compute_s)
        return work, self._run.ask(command, m.FetchOver(work, 0), destination=destination)

    def cancel(self, fetch: int) -> None:
        """End a fetch soon."""
        self._send(m.Cancel(fetch))

    def stage(
        self,
        hashes: Sequence[bytes],
        on_staged: Callable[[StagedValues], None],
        *,
        saved_s: Sequence[tuple[int, float]] = (),
        request: timeline.Request = timeline.NOBODY,
        is_idle: bool = False,
    ) -> int:
        """Restore the longest stored run of these pages into shared memory. ``on_staged`` is called once, on the thread
        that steps unless the data plane ends. Return the number, for `unstage`. ``request``: for the timeline. Other
        arguments as in `messages.Stage`."""
        work, run = next(self._numbers), self._run
        command = m.Stage(work, b"".join(hashes), tuple(saved_s), request.id, request.traceparent, is_idle)
        staged = run.ask(command, m.Staged(work, 0, 0, 0, "failed"))
        staged.add_done_callback(lambda staged: on_staged(run.staged_values(staged.result())))
        return work

    def unstage(self, work: int, *, is_sound: bool = True) -> None:
        """End the staging of some pages soon, or free their memory. Nothing may read it afterwards. ``is_sound``: as in
        `messages.Unstage`."""
        self._send(m.Unstage(work, is_sound))

    def fetch_side(self, pool: str, hashes: Sequence[bytes], deadline_s: float, take: TakeSide) -> Future[m.SideOver]:
        """Begin to fetch pages from a side pool. ``take`` gets each page, uint8 ``(bytes,)``, which it must copy, with
        its index, on another thread; not after the future is done."""
        work = next(self._numbers)
        command = m.FetchSide(work, pool, b"".join(hashes), deadline_s)
        return self._run.ask(command, m.SideOver(work, ()), take)

    def flush(self) -> None:
        """Drop all bytes that were read, because the engine's caches are emptied."""
        self._send(m.Flush())

    # Writing

    def write(
        self,
        first_page: int,
        previous_hash: bytes | None,
        hashes: Sequence[bytes],
        pool_pages: Sequence[int],
        read: ReadPages,
        sides: Mapping[SideKey, ReadSide] | None = None,
        quantising: Quantising | None = None,
        may_wait: Callable[[], bool] = lambda: False,
    ) -> int:
        """Queue consecutive pages of a sequence for writing. Return how many, from the first on, were queued; the rest
        is counted as dropped. Waits a little for room, and longer while ``may_wait`` returns True, which is asked about
        once a second, but not for a store that takes nothing. Raises nothing: SGLang's thread goes on if the pool
        cannot be read.

        ``first_page``: position in the sequence. ``previous_hash``: hash of the page before, None at the sequence's
        start. ``pool_pages``: their page numbers in the pool. ``read`` returns a copy of pages of the pool, or None if
        they are no longer available. ``sides``: how to read the side pages of some of these pages, which are counted
        from the first. ``quantising`` goes before ``read``.
        """
        num_queued, result = 0, "dropped_full"
        try:
            parts = self._queued(first_page, previous_hash, hashes, pool_pages, read, sides or {}, quantising, may_wait)
            for part in parts:
                num_queued = part.stop
        except Exception:
            logger.exception("kvfetch: reading pages from the engine's pool failed")
            metrics.MISSES.labels("write", "internal").inc()
            result = "dropped_error"
        if dropped := len(hashes) - num_queued:
            metrics.WRITTEN_PAGES.labels(result).inc(dropped)
            if result == "dropped_full":
                why = "the write queue is full, or the engine has emptied its cache"
                _limited.warning("full", f"kvfetch: {dropped} pages not written: {why}")
        return num_queued

    def _queued(
        self,
        first_page: int,
        previous_hash: bytes | None,
        hashes: Sequence[bytes],
        pool_pages: Sequence[int],
        read: ReadPages,
        sides: Mapping[SideKey, ReadSide],
        quantising: Quantising | None,
        may_wait: Callable[[], bool],
    ) -> Iterator[range]:
        """Queue pages. Yield each part that is queued. Arguments as for `write`."""
        started_s = time.monotonic()
        most_bytes = PART_BYTES if quantising is None else _QUANTISED_BYTES
        for part in self._parts(len(hashes), sides, most_bytes):
            if part.start and time.monotonic() > started_s + _WRITES_S and not may_wait():
                return
            theirs = {(pool, page - part.start): x for (pool, page), x in sides.items() if page in part}
            run = slice(part.start, part.stop)
            command = m.Write(0, first_page + part.start, previous_hash, b"".join(hashes[run]), 0, tuple(theirs))
            while True:
                command = msgspec.structs.replace(command, work=next(self._numbers))
                left_s = max(0.0, started_s + _WRITE_S - time.monotonic())
                if self._run.write(command, pool_pages[run], read, quantising, part, list(theirs.values()), left_s):
                    self._refused_s = math.inf
                    break
                if not may_wait() or not self._takes_pages():
                    return
                time.sleep(_PAUSE_S)
            previous_hash = hashes[run][-1]
            yield part

    def _takes_pages(self) -> bool:
        """Return whether the store still seems to take pages, just after there was no room for some."""
        now_s = time.monotonic()
        self._refused_s = min(self._refused_s, now_s)
        return now_s <= self._refused_s + _NO_ROOM_S and not self._run.has_lost

    def _parts(self, num_pages: int, sides: Iterable[SideKey], most_bytes: int) -> Iterator[range]:
        """Cut pages into runs that take a quarter of the queue or ``most_bytes`` at most, or one page each."""
        sizes, most_bytes = [self._geometry.page_bytes] * num_pages, min(most_bytes, self._queue_bytes // 4)
        for pool, page in sides:
            sizes[page] += self._start.sides[pool]
        first = num_bytes = 0
        for page, size in enumerate(sizes):
            if page > first and num_bytes + size > most_bytes:
                yield range(first, page)
                first, num_bytes = page, 0
            num_bytes += size
        if num_pages:
            yield range(first, num_pages)

    def clear(self) -> None:
        """Delete all segments of this rank from the store, and wait for it. Raises StoreError."""
        work = next(self._numbers)
        cleared = self._run.ask(m.Clear(work), m.ClearOver(work, "the data plane ended"))
        try:
            fault = cleared.result(2 * ANSWER_S).fault
        except TimeoutError:
            fault = "the data plane did not answer"
        if fault:
            raise StoreError("io", fault)

    # Finding a profile

    @property
    def taken_profile(self) -> m.ProfileTaken | None:
        """The profile that was found for the engine's weights, as `messages.Start` has asked."""
        return self._run.profile

    def show_prompts(self, windows: Sequence[Sequence[bytes]]) -> None:
        """Let the data plane calibrate on these prompts: see `messages.ShowPrompts`."""
        self.tell(m.ShowPrompts(tuple(map(tuple, windows))))

    def pause_calibration(self, *, is_paused: bool) -> None:
        self.tell(m.PauseCalibration(is_paused))

    def take_profile(self, digest: str) -> None:
        """Let the data plane take this profile, which another rank has chosen."""
        self.tell(m.TakeProfile(digest))

    def step(self) -> None:
        """Complete the stagings whose results have come, a bounded number. Never waits."""
        self._run.step()

    def _send(self, command: m.Command) -> None:
        self._run.channel.send(command)
