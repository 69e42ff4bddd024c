"""Measures the link, decides when to request more bytes, and estimates what the link will bring.

We know a link by what has arrived over it, and when. Several reads share it, so each is slower than the link, and the
goodput of a single read says little. So all reads count as one connection. A `Transfer` is what all reads have brought
between the ends of two reads. If two reads end almost together, the time between the ends says nothing. Then the
transfer is joined with the one before, until it lasts as long as a read.

There is one measurement, and three questions:

* **How fast is the link?** `goodput_bps` is the mean of the last 16 transfers. It is taken over time, so that slow
  transfers count in full. Such a mean would hide for long that the link has become faster. So when the last two
  transfers are far faster than all before, those before are forgotten. This answer is for plans: the cost of a fetch,
  and what to read (`offers`).
* **Was that measured lately?** Links change. `recent_bps` is the same number, but None once it is 30 s old. It decides
  how much to request, and whether a deadline can be met: there, no number is better than an old one.
* **Does the link bring anything now?** A link that has stopped ends no transfer, so its mean would stay high for ever.
  `present_bps` is at most what has come since the last end of a read. It ends a fetch that computing would overtake. A
  read that is given up leaves such a bound for the other two answers.

Where computing is sooner, nobody uses the link, and nobody would see that it has become faster. So now and then a probe
reads a little of what was found.

The pace: enough reads are under way that the link is never idle, and no more. A read that is requested too early
arrives late, together with others, and cannot be taken back.

Nothing here does I/O, or has a clock but the one that is passed in.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes that a link carried, over any number of connections. Both times are from one clock, which may be any."""

    size_bytes: int
    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        assert self.size_bytes > 0, self.size_bytes
        assert self.end_s > self.start_s, (self.start_s, self.end_s)

    @property
    def goodput_bps(self) -> float:
        return self.size_bytes * 8 / (self.end_s - self.start_s)


# A link is full while more bytes are outstanding than it carries in this time plus two round trips. More requests would
# only slow down the reads under way, which would all arrive late and at once. With fewer, the link would be idle
# between requests. _LEAST_READS reads may always be under way.
_FULL_S = 0.05
_LEAST_READS = 4
_NUM_KEPT = 16
_STALE_S = 30.0  # links change, so older measurements decide neither pace nor deadline
_FASTER = 1.5  # two transfers that are so many times as fast as all before mean that the link has become faster
_SILENT_S = 0.25  # a store may take so long to answer before its first bytes come
# A probe is two transfers: one that is fast says little, two say that the link has become faster.
_PROBE_EVERY_S = 5.0
_PROBE_S = 0.1  # how long each transfer may take


class Link:
    """Records transfers over the link. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._transfers: deque[Transfer] = deque(maxlen=_NUM_KEPT)
        self._round_trips_s: deque[float] = deque(maxlen=_NUM_KEPT)
        self.outstanding_bytes = 0  # of unfinished transfers
        self._num_outstanding = 0
        # When a transfer last ended, or the link was last idle, and how many bytes have come since. `_hears`: whether
        # pieces are reported as they come. If not, all outstanding bytes may have come.
        self._changed_s, self._received_bytes, self._hears = 0.0, 0, False
        self._bound_bps: float | None = None  # the most that the link had when a transfer was given up, and when
        self._bounded_s = -math.inf
        self._probed_s = -math.inf
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def is_full(self) -> bool:
        """Return whether enough bytes are outstanding. While the goodput is unknown, any transfer fills the link."""
        full_s = _FULL_S + 2 * min(self._round_trips_s, default=0.0)
        return self.outstanding_bytes > (self.recent_bps(self._clock()) or 0.0) / 8 * full_s

    @property
    def goodput_bps(self) -> float | None:
        """Return the mean goodput of the kept transfers, however old. Before the first one, return the bound that a
        transfer left which was given up; None if there is no such bound."""
        if not self._transfers:
            return self._bound_bps
        return sum(t.size_bytes for t in self._transfers) * 8 / sum(t.end_s - t.start_s for t in self._transfers)

    def recent_bps(self, now_s: float) -> float | None:
        """Return `goodput_bps` if a transfer ended in the last 30 s. Otherwise return the bound that a transfer left
        which was given up in that time; None if there is no such bound."""
        if self._transfers and self._transfers[-1].end_s >= now_s - _STALE_S:
            return self.goodput_bps
        return self._bound_bps if self._bounded_s >= now_s - _STALE_S else None

    def present_bps(self, now_s: float) -> float | None:
        """Return `recent_bps`, or the goodput since a transfer last ended if that is less. None if neither is
        known."""
        recent_bps = self.recent_bps(now_s)
        least_bps = min(math.inf if recent_bps is None else recent_bps, self._bps_since_change(now_s))
        return least_bps if least_bps < math.inf else None

    def _bps_since_change(self, now_s: float) -> float:
        """Return an upper bound of the goodput since a transfer last ended. It is infinite while nothing is
        outstanding, and for as long as a store may take to answer."""
        silent_s = now_s - self._changed_s - _SILENT_S
        if not self._num_outstanding or silent_s <= 0:
            return math.inf
        return max(1, self._received_bytes if self._hears else self.outstanding_bytes) * 8 / silent_s

    def received(self, num_bytes: int) -> None:
        """Record that a piece of a transfer has come."""
        self._received_bytes += num_bytes
        self._hears = True

    def begin_probe(self) -> int:
        """Return how many bytes to read, at least, in each of two transfers to measure the link: 0 if it is in use, or
        was measured a moment ago."""
        now_s = self._clock()
        measured_s = max(self._probed_s, self._bounded_s, self._transfers[-1].end_s if self._transfers else -math.inf)
        if self._num_outstanding or now_s < measured_s + _PROBE_EVERY_S:
            return 0
        self._probed_s = now_s
        return max(1, int((self.goodput_bps or 0.0) / 8 * _PROBE_S))

    def answered(self, seconds: float) -> None:
        """Record how long a small request took."""
        self._round_trips_s.append(seconds)

    def started(self, size_bytes: int) -> None:
        if not self._num_outstanding:
            self._changed_s, self._received_bytes = self._clock(), 0
        self.outstanding_bytes += size_bytes
        self._num_outstanding += 1

    def give_up(self) -> None:
        """Record that a transfer is given up, before it ends."""
        now_s = self._clock()
        if (bound_bps := self._bps_since_change(now_s)) < math.inf:
            self._bound_bps, self._bounded_s = bound_bps, now_s

    def ended(self, size_bytes: int, started_s: float, *, is_whole: bool) -> None:
        """Record the end of a transfer that `started` announced at ``started_s``. ``is_whole``: all bytes arrived;
        otherwise it failed or was cancelled."""
        self.outstanding_bytes -= size_bytes
        self._num_outstanding -= 1
        now_s = self._clock()
        if is_whole and size_bytes and now_s > started_s:
            self._add(size_bytes, self._changed_s, now_s, now_s - started_s)
        self._changed_s = now_s
        self._received_bytes = 0
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        self._waiting.clear()

    def _add(self, size_bytes: int, start_s: float, end_s: float, duration_s: float) -> None:
        """Keep what has come from ``start_s``, when the last transfer ended, to ``end_s``.

        Where pieces are reported, all of them count: those of transfers under way share the link with the one that has
        ended. Otherwise its own bytes count.

        Transfers that share a link may end almost together, and the time between two such ends says nothing about the
        link. So what is kept is joined with what follows until it lasts as long as the transfers do.
        """
        kept = self._transfers
        num_bytes = self._received_bytes if self._hears else size_bytes
        if kept and kept[-1].end_s == start_s:
            is_short = kept[-1].end_s - kept[-1].start_s < duration_s
            is_nothing = not num_bytes or end_s == start_s  # its bytes came before another one ended
            is_last = self._num_outstanding == 0 and end_s - start_s < duration_s
            if is_short or is_nothing or is_last:
                last = kept.pop()
                num_bytes, start_s = num_bytes + last.size_bytes, last.start_s
        if not num_bytes or end_s == start_s:
            return
        kept.append(Transfer(num_bytes, start_s, end_s))
        # The mean is over time: slow transfers count at once, and would hide fast ones until they are gone.
        goodputs = [t.goodput_bps for t in kept]
        if len(kept) > 2 and min(goodputs[-2:]) > _FASTER * max(goodputs[:-2]):
            for _ in goodputs[:-2]:
                kept.popleft()

    async def has_room(self) -> None:
        """Wait until the link is not full."""
        while self.is_full:
            await self._next_end()

    async def may_read(self) -> None:
        """Wait until a fetch may request its next unit."""
        while self.is_full and self._num_outstanding >= _LEAST_READS:
            await self._next_end()

    async def _next_end(self) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting


class BytesBudget:
    """Hands out bytes, first come first served. Belongs to one event loop."""

    def __init__(self, capacity_bytes: int, on_change: Callable[[], None] = lambda: None) -> None:
        """``on_change`` is called whenever ``used_bytes`` has changed."""
        assert capacity_bytes > 0
        self._capacity = capacity_bytes
        self._on_change = on_change
        self._free = capacity_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def used_bytes(self) -> int:
        return self._capacity - self._free

    async def acquire(self, num_bytes: int) -> None:
        """Wait for the bytes. A request for more than the capacity takes the whole capacity, so that it does not wait
        forever."""
        num_bytes = self._clip(num_bytes)
        if not self._waiting and num_bytes <= self._free:
            self._take(num_bytes)
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._grant()
            else:  # the bytes were granted just before
                self.release(num_bytes)
            raise

    def release(self, num_bytes: int) -> None:
        self._take(-self._clip(num_bytes))
        assert self._free <= self._capacity
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            num_bytes, granted = self._waiting[0]
            if not granted.done():
                if num_bytes > self._free:
                    return
                self._take(num_bytes)
                granted.set_result(None)
            self._waiting.popleft()

    def _take(self, num_bytes: int) -> None:
        self._free -= num_bytes
        self._on_change()

    def _clip(self, num_bytes: int) -> int:
        return min(num_bytes, self._capacity)
