"""The engine's end of the data plane: all that the engine asks of it, whichever process serves.

`DataPlane` keeps one serving: it starts, watches and restarts processes. They follow one another: one of them gets all
new work, and the thread that watches it replaces it when it ends. It may die, or be told to end because the next one is
to serve by another config. Either way, its work under way counts as misses (`process`), and so does what is asked for
until the next one serves. What must hold is said at the fields.

Only methods whose docstrings say so wait.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch

from sgl_kvfetch import metrics, timeline
from sgl_kvfetch.engine.process import CLOSE_S, Awaited, Peer, Quantising, ReadPages, ReadSide
from sgl_kvfetch.errors import KVFetchError, StoreError
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.protocol import StagedValues, messages as m
from sgl_kvfetch.status import Audits
from sgl_kvfetch.types import SideKey

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)

# A data plane that cannot start fails again at once: there is no memory, or a file that it needs is gone.
_LEAST_BACKOFF_S, _MOST_BACKOFF_S = 0.1, 30.0
_STEADY_S = 5.0  # after a data plane has served this long, the backoff starts anew

_END_S = 4.0  # how long a fetch may take to end: SGLang waits 10 s for the thread that waits for it
_CLEAR_S = 10.0  # how long to wait until the store is cleared, which the data plane gives up after half of it
_WRITE_S = 1.0  # how long to wait for room for pages
_WRITES_S = 4.0  # after which no further part of the pages is begun: SGLang waits 10 s for this thread when it stops it
# Pages that may wait longer do so until there was no room for _NO_ROOM_S, for them and for those before them. There is
# a pause between attempts: one fails at once while a data plane is restarted.
_NO_ROOM_S, _PAUSE_S = 30.0, 0.1

PART_BYTES = 32 << 20  # of the values of pages that are copied, or quantised, at once


@dataclass(frozen=True)
class Fetch:
    """A fetch under way, in the pool's pages. ``over`` tells how many were restored; nothing is written after that."""

    over: Awaited[m.Fetched]

    def end(self) -> None:
        """End it soon. Wait until the data plane writes nothing more, which takes milliseconds; one that does not
        answer is killed."""
        if self.over.done():
            return
        self.over.unstage()
        try:
            self.over.result(_END_S)
        except TimeoutError:
            logger.warning("kvfetch: the data plane does not stop a fetch, so it is killed")
            self.over.peer.running.kill()
            self.over.result()


class SideFetch:
    """A fetch of side pages. They come in parts, since all of them may not fit into the shared memory."""

    def __init__(self, ask: Callable[[int], Awaited[m.Fetched]], firsts: Sequence[int]) -> None:
        """``ask`` begins the part from some page on. ``firsts``: the parts' first pages."""
        self._ask = ask
        self._firsts = firsts
        self._asked = ask(firsts[0])

    def parts(self, wait: Callable[[Awaited[m.Fetched]], m.Fetched | None]) -> Iterator[dict[int, torch.Tensor]]:
        """Yield the pages of each part that have come, uint8 ``(bytes,)``, by their index. They are readable until the
        next part. ``wait`` waits for an answer, and returns None if no more is wanted."""
        for number, first in enumerate(self._firsts):
            if number:
                self.end()
                self._asked = self._ask(first)
            if (fetched := wait(self._asked)) is None:
                return
            sides = self._asked.peer.side_pages(fetched)
            yield {first + page: content for (_, page), content in sides.items()}

    def end(self) -> None:
        """End it soon, and free its pages."""
        self._asked.unstage()


class DataPlane:
    """One rank's data plane: one process at a time serves. Call ``close`` at the end."""

    def __init__(self, start: m.Start, launched: Peer) -> None:
        """Start the first data plane, which was launched, and wait until it serves. Raises KVFetchError if that refuses
        the config or fails."""
        self._setup = launched.setup
        self._refused_s = math.inf  # since when no pages were queued that might have waited
        # What the next data plane is started with: that of the first one, until a switch.
        self._start = start
        # Returns what it is started with instead, after a switch and until that has succeeded.
        self._make: Callable[[Peer], m.Start] | None = None
        # What the present data plane was told last of each kind, and those that follow it are told, too.
        self._told: dict[type, m.ShowPrompts | m.PauseCalibration] = {}
        self._closing = threading.Event()
        self._backoff_s = _LEAST_BACKOFF_S
        # How often pages that a data plane had taken were lost: it ended, or the store had failed to take them, or they
        # were stored by another quantiser.
        self.num_losses = 0
        self.on_switch: Callable[[], None] = lambda: None  # what is known of the store's pages holds no longer
        # The data plane that gets all new work. It may have ended, while the next one is being started. The watching
        # thread replaces it, with the lock held, so that no switch passes it by.
        self._replacing = threading.Lock()
        self._peer = self._begin(launched)
        self._thread = threading.Thread(target=self._watch, name="kvfetch-data", daemon=True)
        self._thread.start()

    @property
    def memory(self) -> torch.Tensor:
        """The shared memory in which prompts are staged, uint8, and behind it that of `memory_cache`."""
        return self._peer.values.whole

    @property
    def audits(self) -> Audits | None:
        """What audits have found; None before the first one, and after the data plane was started again."""
        return self._peer.audits

    def close(self) -> None:
        """Write what is queued, within a few seconds, and end the data plane. Waits for it. Idempotent."""
        if self._closing.is_set():
            return
        with self._replacing:  # from here on, none follows
            self._closing.set()
            peer = self._peer
        peer.channel.send(m.Close())
        if not peer.running.join(CLOSE_S):
            logger.warning("kvfetch: the data plane did not exit within %g s", CLOSE_S)
            peer.running.kill()
        self._thread.join(CLOSE_S)

    @property
    def is_closing(self) -> bool:
        return self._closing.is_set()

    # One that serves, always

    def _begin(self, peer: Peer) -> Peer:
        """Start a data plane that was launched, and wait until it serves. Return it. Raises KVFetchError."""
        make, peer.on_loss = self._make, self._lose
        try:
            start = self._start if make is None else make(peer)
            peer.start(start, self._closing)
        except BaseException:
            peer.end()
            raise
        if make is not None:
            self._start, self._make = start, None
            if start.rank == 0:
                logger.info("kvfetch: this server stores with %r from now on", start.config["quantiser"])
        for command in [*self._told.values()]:
            peer.channel.send(command)
        return peer

    def _watch(self) -> None:
        """Serve with each data plane until its end, then start the next one. Runs on the thread that receives."""
        is_over = False
        while not is_over:
            began_s = time.monotonic()
            self._peer.serve(self._closing)
            if self._peer.end():
                self._lose()
            if time.monotonic() - began_s > _STEADY_S:
                self._backoff_s = _LEAST_BACKOFF_S
            is_over = not self._follow()

    def _follow(self) -> bool:
        """Start the data plane that follows one that has ended. Return False at the close."""
        if self._closing.is_set():
            return False
        if self._make is None:
            logger.warning("kvfetch: the data plane ended; its work under way counts as misses; it is restarted")
            metrics.DATA_PLANE_STARTS.inc()
        while not self._closing.wait(self._backoff_s):
            self._backoff_s = min(_MOST_BACKOFF_S, 2 * self._backoff_s)
            try:
                following = self._begin(Peer(self._setup))
            except (KVFetchError, OSError) as e:
                if not self._closing.is_set():
                    logger.warning("kvfetch: the data plane did not start: %s", e)
                continue
            with self._replacing:
                if not self._closing.is_set():
                    self._peer = following
                    if self._make is not None:  # a switch has come meanwhile
                        following.leave()
                    return True
            following.end()
        return False

    def _lose(self) -> None:
        self.num_losses += 1

    def switch(self, make: Callable[[Peer], m.Start]) -> None:
        """Serve by another config, and never again by the present one: the data plane writes what is queued, and ends,
        and the next one is started with what ``make`` returns. That is called with the launched one, on another thread,
        where it may take its time, until one serves: it may raise KVFetchError. Never waits."""
        self.num_losses += 1  # what is queued is of no use to the next one
        self.on_switch()
        with self._replacing:
            self._make, self._told = make, {}
            self._peer.leave()

    # Reading

    def look_up(self, command: m.LookUp) -> Awaited[m.Found]:
        """Find the longest stored run of some pages, and read it ahead, as host mode does."""
        return self._peer.ask(command, m.Found(0))

    def fetch(self, command: m.FetchPages) -> Fetch:
        """Begin to fetch pages to places in the pool."""
        return Fetch(self._peer.ask(command, m.Fetched(0)))

    def stage(
        self,
        hashes: Sequence[bytes],
        on_staged: Callable[[StagedValues], None],
        *,
        saved_s: Sequence[tuple[int, float]] = (),
        request: timeline.Request = timeline.NOBODY,
        is_idle: bool = False,
        trailing: Mapping[str, int] | None = None,
    ) -> int:
        """Restore the longest stored run of these pages into shared memory. ``on_staged`` is called once, on the thread
        that steps unless the data plane ends. Return the number, for `unstage`. ``request``: for the timeline. Other
        arguments as in `messages.Stage`."""
        peer, sides = self._peer, dict(trailing or {})
        command = m.Stage(0, b"".join(hashes), tuple(saved_s), request.id, request.traceparent, is_idle, trailing=sides)
        asked = peer.ask(command, m.Staged(0))
        asked.add_done_callback(lambda staged: on_staged(peer.staged_values(staged.result())))
        return asked.work

    def unstage(self, work: int, *, is_sound: bool = True, takes_code: bool = True) -> None:
        """End the staging of some pages soon, or free their memory. Nothing may read it afterwards. Other arguments as
        in `messages.Unstage`."""
        if not takes_code:  # nor of a data plane that follows this one
            self._start = msgspec.structs.replace(self._start, takes_code=False)
        self._peer.channel.send(m.Unstage(work, is_sound, takes_code))

    def fetch_side(self, pool: str, hashes: Sequence[bytes], deadline_s: float) -> SideFetch:
        """Begin to bring pages of a side pool, one or more, into shared memory. Call ``end`` of what is returned."""
        num_pages = max(1, self._setup.side_part_bytes // self._setup.sides[pool])

        def ask(first: int) -> Awaited[m.Fetched]:
            command = m.FetchSide(0, pool, b"".join(hashes[first : first + num_pages]), deadline_s)
            return self._peer.ask(command, m.Fetched(0))

        return SideFetch(ask, range(0, len(hashes), num_pages))

    def flush(self) -> None:
        """Drop all bytes that were read, because the engine's caches are emptied."""
        self._peer.channel.send(m.Flush())

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
        start. ``pool_pages``: their page numbers in the pool, which ``read`` copies. ``sides``: how to read the side
        pages of some of these pages, which are counted from the first. ``quantising`` goes before ``read``.
        """
        sides, num_queued, result, started_s = sides or {}, 0, "dropped_full", time.monotonic()
        try:
            for part in self._parts(len(hashes), sides):
                if part.start and time.monotonic() > started_s + _WRITES_S and not may_wait():
                    break
                theirs = {(pool, page - part.start): x for (pool, page), x in sides.items() if page in part}
                run = slice(part.start, part.stop)
                command = m.Write(0, first_page + part.start, previous_hash, b"".join(hashes[run]), 0, tuple(theirs))
                what = pool_pages[run], read, quantising, part, list(theirs.values())
                if not self._put(command, what, started_s, may_wait):
                    break
                previous_hash, num_queued = hashes[run][-1], part.stop
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

    def _put(
        self,
        command: m.Write,
        what: tuple[Sequence[int], ReadPages, Quantising | None, range, list[ReadSide]],
        started_s: float,
        may_wait: Callable[[], bool],
    ) -> bool:
        """Queue a part. Return whether there was room for it, in the time that `write` waits."""
        while True:
            if self._peer.write(command, *what, max(0.0, started_s + _WRITE_S - time.monotonic())):
                self._refused_s = math.inf
                return True
            if not may_wait() or not self._takes_pages():
                return False
            time.sleep(_PAUSE_S)

    def _takes_pages(self) -> bool:
        """Return whether the store still seems to take pages, just after there was no room for some."""
        now_s = time.monotonic()
        self._refused_s = min(self._refused_s, now_s)
        return now_s <= self._refused_s + _NO_ROOM_S and not self._peer.has_lost

    def _parts(self, num_pages: int, sides: Iterable[SideKey]) -> Iterator[range]:
        """Cut pages into runs that take a quarter of the queue or `PART_BYTES` at most, or one page each."""
        sizes, most_bytes = [self._setup.geometry.page_bytes] * num_pages, min(PART_BYTES, self._setup.page_bytes // 4)
        for pool, page in sides:
            sizes[page] += self._setup.sides[pool]
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
        cleared = self._peer.ask(m.Clear(0), m.ClearOver(0, "the data plane ended"))
        try:
            fault = cleared.result(_CLEAR_S).fault
        except TimeoutError:
            fault = "the data plane did not answer"
        if fault:
            raise StoreError("io", fault)

    # Finding a profile

    def tell(self, command: m.ShowPrompts | m.PauseCalibration) -> None:
        """Tell the data plane, and those that follow it until a switch."""
        self._told[type(command)] = command
        self._peer.channel.send(command)

    @property
    def found_profile(self) -> str:
        """The digest of the profile that was found for the engine's weights, as `Start` has asked; "" before."""
        return self._peer.found_profile

    def show_prompts(self, windows: Sequence[Sequence[bytes]]) -> None:
        """Let the data plane calibrate on these prompts: see `messages.ShowPrompts`."""
        self.tell(m.ShowPrompts(tuple(map(tuple, windows))))

    def pause_calibration(self, *, is_paused: bool) -> None:
        self.tell(m.PauseCalibration(is_paused))

    def step(self, wait_s: float = 0.0) -> None:
        """Complete the stagings whose results have come, as `Peer.step` does."""
        self._peer.step(wait_s)
