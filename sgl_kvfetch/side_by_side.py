"""Works on many items, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def side_by_side(count: int, items: Iterable[T], work: Callable[[T], Awaitable[object]]) -> None:
    """Process ``count`` items at a time. Cancel the rest at the first error, and raise that error."""
    left = iter(items)

    async def take() -> None:
        for item in left:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(take())
    except ExceptionGroup as e:
        raise e.exceptions[0] from None
