"""A budget that bounds the bytes in flight."""

from __future__ import annotations

import asyncio
from asyncio import FIRST_COMPLETED
from collections import deque
from collections.abc import Callable
from typing import Any


class BytesBudget:
    """Hands out bytes, first come first served. Belongs to one event loop."""

    def __init__(self, capacity_bytes: int, on_change: Callable[[], None] = lambda: None) -> None:
        """``on_change`` is called whenever ``used_bytes`` has changed."""
        assert capacity_bytes > 0
        self._capacity = capacity_bytes
        self._on_change = on_change
        self._free = capacity_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None], Any, int]] = deque()

    @property
    def used_bytes(self) -> int:
        return self._capacity - self._free

    def try_acquire(self, num_bytes: int) -> bool:
        """Take the bytes if they are free now. Return whether they were taken."""
        num_bytes = self._clip(num_bytes)
        if self._waiting or num_bytes > self._free:
            return False
        self._take(num_bytes)
        return True

    async def acquire(
        self, num_bytes: int, unless: asyncio.Future[Any] | None = None, owner: Any = None, turn: int = 0
    ) -> bool:
        """Wait for the bytes, or until ``unless`` is done. Return whether they were taken.

        A request for more than the capacity takes the whole capacity, so that it does not wait forever. ``owner`` and
        ``turn`` are for `sort`.
        """
        if self.try_acquire(num_bytes):
            return True
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((self._clip(num_bytes), granted, owner, turn))
        is_taken = False
        try:
            await asyncio.wait([granted] if unless is None else [granted, unless], return_when=FIRST_COMPLETED)
            is_taken = granted.done()
        finally:
            if not is_taken:  # ``unless`` was done, or we were cancelled, perhaps after the bytes were granted
                if granted.done():
                    self.release(num_bytes)
                granted.cancel()
                self._grant()
        return is_taken

    def sort(self, owner: Any) -> None:
        """Let the requests of ``owner`` take their places in the queue by turn."""
        places = [i for i, (_, _, each, _) in enumerate(self._waiting) if each is owner]
        for i, waiting in zip(places, sorted((self._waiting[i] for i in places), key=lambda w: w[3]), strict=True):
            self._waiting[i] = waiting

    def release(self, num_bytes: int) -> None:
        self._take(-self._clip(num_bytes))
        assert self._free <= self._capacity
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            num_bytes, granted, *_ = self._waiting[0]
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
