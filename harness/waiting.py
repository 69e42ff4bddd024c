"""Waits for conditions, however slow the machine is."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

WAIT_S = 240.0  # far more than anything takes on a busy machine
_MIN_POLLS = 50


def polls(timeout_s: float = WAIT_S, poll_s: float = 0.01) -> Iterator[None]:
    """Yield for ``timeout_s``, and at least 50 times, ``poll_s`` apart: the machine may stand still for a minute."""
    deadline_s = time.monotonic() + timeout_s
    num_left = _MIN_POLLS
    while num_left > 0 or time.monotonic() < deadline_s:
        yield
        num_left -= 1
        time.sleep(poll_s)


def wait_until(
    condition: Callable[[], bool],
    *,
    timeout_s: float = WAIT_S,
    poll_s: float = 0.01,
    found: Callable[[], object] = lambda: "the condition is still false",
) -> None:
    """Poll ``condition`` until it is true. Raises TimeoutError, with what ``found`` returns, after ``timeout_s``."""
    for _ in polls(timeout_s, poll_s):
        if condition():
            return
    raise TimeoutError(found())


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    """Do the same on an event loop. ``condition`` may be a coroutine function. Raises TimeoutError after ``WAIT_S``."""
    deadline_s = time.monotonic() + WAIT_S  # not the loop's clock, which a test may set forward
    while True:
        result = condition()
        if await result if inspect.isawaitable(result) else result:
            return
        if time.monotonic() > deadline_s:
            raise TimeoutError("the condition is still false")
        await asyncio.sleep(0.001)


async def until_idle() -> None:
    """Wait until no other task of this event loop is left."""
    await until(lambda: len(asyncio.all_tasks()) == 1)


class LoopClock:
    """The clock of the running event loop, which can be set forward. Threads and ``time`` do not see that."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._time = loop.time
        self._ahead_s = 0.0
        loop.time = self  # type: ignore[method-assign]

    def __call__(self) -> float:
        return self._time() + self._ahead_s

    async def advance(self, seconds: float) -> None:
        """Set the clock forward, and let the timers run that are due by then."""
        self._ahead_s += seconds
        for _ in range(2):
            await asyncio.sleep(0)

    async def until_done(self, work: Awaitable[T], seconds: float) -> T:
        """Set the clock forward by so much again and again, until ``work`` is done, and return what it returns. For
        timers of which nobody can see whether they run yet, such as those of a server."""
        task = asyncio.ensure_future(work)

        async def is_done() -> bool:
            await self.advance(seconds)
            return task.done()

        await until(is_done)
        return await task


class TimerClock:
    """The clock of the running event loop, which stands still while anything is to be done, and goes on to the next
    timer when nothing is. So timers are exact, however slow the machine is. Threads and sockets are not waited for."""

    def __init__(self) -> None:
        loop: Any = asyncio.get_running_loop()
        self._now_s: float = loop.time()
        self._select = loop._selector.select
        loop.time = lambda: self._now_s
        loop._selector.select = self._go_on

    def _go_on(self, timeout_s: float | None = None) -> Any:
        if timeout_s is None:
            return self._select(None)
        self._now_s += timeout_s
        return self._select(0)
