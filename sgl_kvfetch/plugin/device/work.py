"""What runs on the event loop for the scheduler's thread."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from sgl_kvfetch.loop import LoopThread


@dataclass(slots=True, eq=False)
class Work:
    """Something under way. What it came to is reported by the tickets that it was begun with, once, whatever happens to
    it."""

    loop: LoopThread
    cancelled: bool = False
    task: asyncio.Task[None] | None = None  # set on the event loop

    def cancel(self) -> None:
        """Have it end soon. All its tickets are still reported."""
        self.cancelled = True
        self.loop.submit(self._cancel())

    async def _cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()
