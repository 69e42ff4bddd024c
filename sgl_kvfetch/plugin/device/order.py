"""Whose turn it is: shortest first, with ageing. Pure; no clock, so that all ranks order alike."""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar

# A later arrival overtakes if it is shorter by so many pages for each arrival in between. So nothing starves: what has
# waited for n pages' worth of arrivals is overtaken by nobody.
AGEING_PAGES = 8


class Queued(Protocol):
    """What waits. ``arrival`` counts arrivals; ``num_pages`` is how much is to be fetched."""

    @property
    def arrival(self) -> int: ...

    @property
    def num_pages(self) -> int: ...


T = TypeVar("T", bound=Queued)


class Turns(Generic[T]):
    """A queue of things that are hashed by identity."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._ranks: dict[T, float] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, item: T) -> bool:
        return item in self._ranks

    def add(self, item: T, *, is_next: bool = False) -> None:
        """``is_next``: before all others."""
        assert item not in self._ranks
        rank = float("-inf") if is_next else float(item.num_pages + AGEING_PAGES * item.arrival)
        self._ranks[item] = rank
        heapq.heappush(self._heap, (rank, item.arrival, item))

    def discard(self, item: T) -> None:
        self._ranks.pop(item, None)

    def first(self) -> T | None:
        while self._heap:
            rank, _, item = self._heap[0]
            if self._ranks.get(item) == rank:
                return item
            heapq.heappop(self._heap)
        return None

    def clear(self) -> None:
        self._heap.clear()
        self._ranks.clear()
