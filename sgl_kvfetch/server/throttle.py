"""A link of a given speed, shared by all responses."""

from __future__ import annotations

import asyncio

# Shorter waits than this are not worth a trip through the event loop, and are made up for by the next one.
_SHORTEST_WAIT_S = 0.001
_CATCH_UP_S = 0.05


class Link:
    """Paces bytes as a serial link does: each piece leaves once those before it have, in the order they came."""

    def __init__(self, *gbps: float) -> None:
        """``gbps``: 1e9 bits a second. Of several, one a second from the first byte on, over and over; not all 0."""
        assert any(gbps), gbps
        self._bytes_per_s = [value * 1e9 / 8 for value in gbps]
        self._began_at: float | None = None  # loop time in seconds
        self._free_at = 0.0  # when the link has sent all that it took

    @property
    def piece_bytes(self) -> int:
        """Pieces of about two milliseconds: small enough to share the link fairly, at least one packet."""
        return max(1500, min(1 << 20, int(max(self._bytes_per_s) * 0.002)))

    async def take(self, num_bytes: int, *, continuing: bool = False) -> None:
        """Wait until these bytes would have left. ``continuing``: they follow others of the same response.

        An idle link saves nothing up. A response that was held up, by the event loop say, may catch up a little:
        its bytes were ready, and a real link would have sent them.
        """
        loop = asyncio.get_running_loop()
        start = max(self._free_at, loop.time() - (_CATCH_UP_S if continuing else 0.0))
        self._free_at = self._sent_at(start, num_bytes)
        wait_s = self._free_at - loop.time()
        if wait_s > _SHORTEST_WAIT_S:
            await asyncio.sleep(wait_s)

    def _sent_at(self, start: float, num_bytes: float) -> float:
        """When these bytes have left, if they begin to at ``start``."""
        if len(self._bytes_per_s) == 1:
            return start + num_bytes / self._bytes_per_s[0]
        if self._began_at is None:
            self._began_at = start
        second = max(0, int(start - self._began_at))
        while True:
            rate = self._bytes_per_s[second % len(self._bytes_per_s)]
            second += 1
            left_s = self._began_at + second - start
            if num_bytes <= rate * left_s:
                return start + num_bytes / rate if rate else start
            num_bytes -= rate * left_s
            start += left_s
