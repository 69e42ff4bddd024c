"""Runs coroutines side by side: all at once, a few at a time, or in the background; and other threads' calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines at once, and return their results. Cancel the rest at the first error, and raise that error."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except ExceptionGroup as e:
        raise e.exceptions[0] from None
    return [task.result() for task in tasks]


def call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: Any) -> None:
    """Call a function on a loop, from any thread. Do nothing if the loop is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)


async def side_by_side(count: int, items: Iterable[T], work: Callable[[T], Awaitable[object]]) -> None:
    """Process ``count`` items at a time. Cancel the rest at the first error, and raise that error."""
    left = iter(items)

    async def take() -> None:
        for item in left:
            await work(item)

    await together(take() for _ in range(count))


class Tasks:
    """Tasks that run in the background of one event loop."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task, and refer to it until its end, because the event loop does not."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def join(self) -> None:
        """Wait for all tasks, also for those that begin meanwhile."""
        while self._running:
            await asyncio.gather(*self._running, return_exceptions=True)

    async def cancel(self) -> None:
        """Cancel all tasks, and wait for their ends."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
