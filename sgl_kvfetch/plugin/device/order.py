"""The order in which items get their turn. Pure and without a clock, so that all ranks order alike."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, Literal, Protocol, TypeVar

OrderName = Literal["shortest", "fifo", "priority"]

# Shortest first, with ageing: a later item overtakes only if it is shorter by more than so many pages per arrival
# since the earlier item. So no item starves: after num_pages / AGEING_PAGES further arrivals, none can overtake it.
AGEING_PAGES = 8


class Queued(Protocol):
    """An item that waits."""

    @property
    def arrival(self) -> int:
        """The item's serial number, in order of arrival."""

    @property
    def num_pages(self) -> int:
        """The number of pages to be fetched."""

    @property
    def urgency(self) -> int:
        """If the order is by priority, higher urgency goes first."""


T = TypeVar("T", bound=Queued)
Rank = tuple[int, int]

ORDERS: dict[OrderName, Callable[[Queued], Rank]] = {
    "shortest": lambda item: (item.num_pages + AGEING_PAGES * item.arrival, item.arrival),
    "fifo": lambda item: (0, item.arrival),
    "priority": lambda item: (-item.urgency, item.arrival),
}


class Turns(Generic[T]):
    """A priority queue of items that are hashed by identity. An item's rank must not change while it is queued."""

    def __init__(self, order: OrderName) -> None:
        self._rank = ORDERS[order]
        self._heap: list[tuple[Rank, T]] = []
        self._present: set[T] = set()

    def __len__(self) -> int:
        return len(self._present)

    def __contains__(self, item: T) -> bool:
        return item in self._present

    def add(self, item: T) -> None:
        assert item not in self._present
        self._present.add(item)
        heapq.heappush(self._heap, (self._rank(item), item))

    def discard(self, item: T) -> None:
        self._present.discard(item)

    def first(self) -> T | None:
        while self._heap:
            item = self._heap[0][1]
            if item in self._present:
                return item
            heapq.heappop(self._heap)
        return None

    def clear(self) -> None:
        self._heap.clear()
        self._present.clear()
