"""Measures the link's goodput, and decides when to request more bytes."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from sgl_kvfetch.plane.adapt.estimate import Transfer

# A link is full while more bytes are outstanding than it carries in this time plus two round trips. More requests would
# only slow down the reads under way, which would all arrive late and at once. With fewer, the link would be idle
# between requests. _LEAST_READS reads may always be under way.
_FULL_S = 0.05
_LEAST_READS = 4
_NUM_KEPT = 64
_NUM_SHOWN = 16
_STALE_S = 30.0  # older measurements are ignored, since links change


class Link:
    """Records transfers over the link. Belongs to one event loop."""

    def __init__(self) -> None:
        self._transfers: deque[Transfer] = deque()
        self._since_s = float("-inf")
        self._round_trips_s: deque[float] = deque(maxlen=_NUM_KEPT)
        self.outstanding_bytes = 0  # of unfinished transfers
        self._num_outstanding = 0
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """Return the last transfers, oldest first."""
        return tuple(self._transfers)[-_NUM_SHOWN:]

    @property
    def is_full(self) -> bool:
        """Return whether enough bytes are outstanding. While the goodput is unknown, any transfer fills the link."""
        full_s = _FULL_S + 2 * min(self._round_trips_s, default=0.0)
        return self.outstanding_bytes > (self.goodput_bps(time.monotonic()) or 0.0) / 8 * full_s

    def goodput_bps(self, now_s: float) -> float | None:
        """Return the goodput of all transfers together while any ran, or None if none ended lately.

        A transfer's bytes count when it ends. Time counts from the end of the last transfer that is no longer kept.
        Bytes of transfers that still run are not counted.
        """
        if not self._transfers or self._transfers[-1].end_s < now_s - _STALE_S:
            return None
        busy_s, until_s = 0.0, self._since_s
        for transfer in sorted(self._transfers, key=lambda t: t.start_s):
            busy_s += max(0.0, transfer.end_s - max(transfer.start_s, until_s))
            until_s = max(until_s, transfer.end_s)
        return sum(t.size_bytes for t in self._transfers) * 8 / busy_s if busy_s > 0 else None

    def answered(self, seconds: float) -> None:
        """Record how long a small request took."""
        self._round_trips_s.append(seconds)

    def started(self, size_bytes: int) -> None:
        self.outstanding_bytes += size_bytes
        self._num_outstanding += 1

    def ended(self, size_bytes: int, started_s: float, *, is_whole: bool) -> None:
        """Record a transfer's end. ``is_whole``: all bytes arrived; otherwise it failed or was cancelled."""
        self.outstanding_bytes -= size_bytes
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
        """Wait until a fetch may request its next unit."""
        while self.is_full and self._num_outstanding >= _LEAST_READS:
            await self._next_end()

    async def _next_end(self) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting


class DecodeRate:
    """Measures how fast recent bitstreams became values. Used on one thread."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._cells: deque[tuple[int, float]] = deque(maxlen=64)

    def add(self, size_bytes: int, seconds: float) -> None:
        self._cells.append((size_bytes, seconds))

    @property
    def bytes_per_s(self) -> float | None:
        """Return the compressed bytes per second of all threads together, or None before the first cell."""
        seconds = sum(s for _, s in self._cells)
        return self._num_threads * sum(size for size, _ in self._cells) / seconds if seconds > 0 else None
