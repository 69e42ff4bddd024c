"""Decides which fetch has the link and which is next. Pure and without a clock, so that all ranks decide alike."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # so that this can be tested without SGLang
    from sgl_kvfetch.plugin.device.fetch import Fetch

OrderName = Literal["shortest", "fifo", "priority"]

# Shortest first, with ageing: a later fetch overtakes only if it is shorter by more than so many pages per arrival
# since the earlier fetch. So none starves: after num_pages / AGEING_PAGES further arrivals, none can overtake it.
AGEING_PAGES = 8

# The rank of a fetch, the first one's the least. It must not change while the fetch waits.
ORDERS: dict[OrderName, Callable[[Fetch], tuple[int, int]]] = {
    "shortest": lambda fetch: (fetch.num_pages + AGEING_PAGES * fetch.arrival, fetch.arrival),
    "fifo": lambda fetch: (0, fetch.arrival),
    "priority": lambda fetch: (-fetch.urgency, fetch.arrival),
}


class LinkQueue:
    """Holds the fetches that wait for the link and those that occupy it.

    A large fetch gets the link alone, as in KVFetcher (section 3.3.1): even shares would only make both late. Small
    ones share the link, because it would be idle between them.
    """

    def __init__(self, order: OrderName, shared_pages: int) -> None:
        """``shared_pages``: how many pages the fetches that share the link may have in total."""
        self._rank = ORDERS[order]
        self._waiting: list[Fetch] = []  # by rank
        self._on_link: dict[Fetch, int] = {}  # requested pages of each fetch that occupies the link
        self._link_pages = 0  # their sum
        self._shared_pages = shared_pages
        self._num_changes = 0  # changes after which the first fetch is worth another look
        self._put_off: tuple[Fetch, int] | None = None  # the fetch, and `_num_changes` when it was put off
        self.expected_pages = 0  # of all fetches, waiting or not

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self, fetch: Fetch) -> None:
        bisect.insort(self._waiting, fetch, key=self._rank)

    def leave(self, fetch: Fetch) -> None:
        """Remove a fetch that no longer waits."""
        index = bisect.bisect_left(self._waiting, self._rank(fetch), key=self._rank)
        assert self._waiting[index] is fetch
        del self._waiting[index]

    def first(self) -> Fetch | None:
        """Return the fetch whose turn it is. None if it was put off, and neither room nor a change has come since."""
        first = self._waiting[0] if self._waiting else None
        if first is None or (self._put_off == (first, self._num_changes) and not self.has_room(first)):
            return None
        return first

    def has_room(self, fetch: Fetch) -> bool:
        """Return whether the link can serve ``fetch`` beside those that occupy it."""
        return not self._on_link or self._link_pages + fetch.num_pages <= self._shared_pages

    def put_off(self, fetch: Fetch) -> None:
        """Note that ``fetch`` was looked at and must go on waiting for the link."""
        self._put_off = fetch, self._num_changes

    def changed(self) -> None:
        """Note a change: a waiting fetch may find that nothing is left to fetch."""
        self._num_changes += 1

    def take(self, fetch: Fetch, num_pages: int) -> None:
        """Let ``fetch`` occupy the link: ``num_pages`` of its pages are now requested."""
        self._on_link[fetch] = num_pages
        self._link_pages += num_pages

    def give_back(self, fetch: Fetch) -> None:
        """Note that the link could serve another fetch beside ``fetch``."""
        self._link_pages -= self._on_link.pop(fetch, 0)

    def expect(self, fetch: Fetch, num_pages: int) -> None:
        """Set how many pages are still to be fetched for ``fetch``."""
        self.expected_pages += num_pages - fetch.expected_pages
        fetch.expected_pages = num_pages

    def clear(self) -> None:
        self._waiting.clear()
        self._on_link.clear()
        self._link_pages = self.expected_pages = 0
