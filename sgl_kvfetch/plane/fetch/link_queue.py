"""Decides which fetch has the link and which is next. Pure, without a clock, so that all ranks take the same order."""

from __future__ import annotations

import bisect
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

F = TypeVar("F", bound=Hashable)

# Shortest first, with ageing: a later fetch overtakes only if it is shorter by more than so many pages per arrival
# since the earlier fetch. So none starves: after num_pages / AGEING_PAGES further arrivals, none can overtake it.
AGEING_PAGES = 8


@dataclass(frozen=True, slots=True)
class Claim:
    """What decides when a fetch gets the link."""

    num_pages: int
    arrival: int  # serial number, in order of arrival

    @property
    def rank(self) -> tuple[int, int]:
        """The first one's is the least."""
        return self.num_pages + AGEING_PAGES * self.arrival, self.arrival


class LinkQueue(Generic[F]):
    """Holds the fetches that wait for the link and those that occupy it.

    A large fetch gets the link alone, as in KVFetcher (section 3.3.1): even shares would only make both late. Small
    ones share the link, because it would be idle between them.
    """

    def __init__(self, shared_pages: int) -> None:
        """``shared_pages``: how many pages the fetches that share the link may have in total."""
        self._claims: dict[F, Claim] = {}  # of the fetches that wait
        self._waiting: list[F] = []  # by rank
        self._on_link: dict[F, int] = {}  # requested pages of each fetch that occupies the link
        self._shared_pages = shared_pages
        self._expected: dict[F, int] = {}  # pages still to be fetched for each fetch, waiting or not
        self.expected_pages = 0  # their sum

    def wait(self, fetch: F, claim: Claim) -> None:
        self._claims[fetch] = claim
        bisect.insort(self._waiting, fetch, key=self._rank)

    def leave(self, fetch: F) -> None:
        """Remove a fetch that no longer waits."""
        index = bisect.bisect_left(self._waiting, self._rank(fetch), key=self._rank)
        assert self._waiting[index] is fetch
        del self._waiting[index], self._claims[fetch]

    def _rank(self, fetch: F) -> tuple[int, int]:
        return self._claims[fetch].rank

    def first(self) -> F | None:
        """Return the fetch whose turn it is."""
        return self._waiting[0] if self._waiting else None

    def has_room(self, fetch: F) -> bool:
        """Return whether the link can serve ``fetch``, which waits, beside those that occupy it."""
        return not self._on_link or sum(self._on_link.values()) + self._claims[fetch].num_pages <= self._shared_pages

    def occupy(self, fetch: F, num_pages: int) -> None:
        """Note that ``fetch`` occupies the link: ``num_pages`` of its pages are now requested."""
        self._on_link[fetch] = num_pages

    def give_back(self, fetch: F) -> None:
        """Note that the link could serve another fetch beside ``fetch``."""
        self._on_link.pop(fetch, None)

    def expect(self, fetch: F, num_pages: int) -> None:
        """Set how many pages are still to be fetched for ``fetch``."""
        self.expected_pages += num_pages - self._expected.pop(fetch, 0)
        if num_pages:
            self._expected[fetch] = num_pages
