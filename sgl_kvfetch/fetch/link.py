"""What comes over the link, how fast, and whether there is room for more."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from sgl_kvfetch.adapt.estimate import Transfer

# A link is full while more is asked of it than it brings in this time: what is asked for beyond that would only slow
# down what is on its way, all of which would arrive late and at once. With less, it would idle until the next is asked
# for; round trips come on top. So many reads are always under way.
_FULL_S = 0.05
_LEAST_READS = 4
_NUM_KEPT = 64
_NUM_SHOWN = 16
_STALE_S = 30.0  # links change


class Link:
    """Counts transfers. Belongs to one event loop."""

    def __init__(self) -> None:
        self._transfers: deque[Transfer] = deque()
        self._since_s = float("-inf")
        self._round_trips_s: deque[float] = deque(maxlen=_NUM_KEPT)
        self._outstanding_bytes = 0
        self._num_outstanding = 0
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def outstanding_bytes(self) -> int:
        """Asked for, and not here yet."""
        return self._outstanding_bytes

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """The last ones, the oldest first."""
        return tuple(self._transfers)[-_NUM_SHOWN:]

    @property
    def is_full(self) -> bool:
        """While it is not known, anything fills it."""
        full_s = _FULL_S + 2 * min(self._round_trips_s, default=0.0)
        return self._outstanding_bytes > (self.goodput_bps(time.monotonic()) or 0.0) / 8 * full_s

    def goodput_bps(self, now_s: float) -> float | None:
        """Of all transfers together, over the time in which any ran. None if nothing came lately.

        Bytes count when their transfer ends, and time from when the last one ended that is not kept: what that time
        brought of later ones is not counted either.
        """
        if not self._transfers or self._transfers[-1].end_s < now_s - _STALE_S:
            return None
        busy_s, until_s = 0.0, self._since_s
        for transfer in sorted(self._transfers, key=lambda t: t.start_s):
            busy_s += max(0.0, transfer.end_s - max(transfer.start_s, until_s))
            until_s = max(until_s, transfer.end_s)
        return sum(t.size_bytes for t in self._transfers) * 8 / busy_s if busy_s > 0 else None

    def answered(self, seconds: float) -> None:
        """A small request took so long."""
        self._round_trips_s.append(seconds)

    def started(self, size_bytes: int) -> None:
        self._outstanding_bytes += size_bytes
        self._num_outstanding += 1

    def ended(self, size_bytes: int, started_s: float, *, is_whole: bool) -> None:
        """``is_whole``: all bytes came; otherwise it failed, or was given up."""
        self._outstanding_bytes -= size_bytes
        self._num_outstanding -= 1
        now_s = time.monotonic()
        if is_whole and size_bytes and now_s > started_s:
            if len(self._transfers) == _NUM_KEPT:
                self._since_s = self._transfers.popleft().end_s
            self._transfers.append(Transfer(size_bytes, started_s, now_s))
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        self._waiting.clear()

    async def has_room(self) -> None:
        """Wait until the link is not full."""
        while self.is_full:
            await self._next_end()

    async def may_read(self) -> None:
        """Wait until it is time to ask for the next piece of a fetch."""
        while self.is_full and self._num_outstanding >= _LEAST_READS:
            await self._next_end()

    async def _next_end(self) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting


class DecodeRate:
    """How fast bitstreams become values, of late. Used on one thread."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._cells: deque[tuple[int, float]] = deque(maxlen=64)

    def add(self, size_bytes: int, seconds: float) -> None:
        self._cells.append((size_bytes, seconds))

    @property
    def bytes_per_s(self) -> float | None:
        """Compressed bytes, on all threads together. None before the first cell."""
        seconds = sum(s for _, s in self._cells)
        return self._num_threads * sum(size for size, _ in self._cells) / seconds if seconds > 0 else None
