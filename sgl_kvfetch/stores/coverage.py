"""Find the stored segment that continues a run of pages furthest.

Page hashes are chained: a hash determines the whole prefix before it, and with it the page's position in the sequence.
So a segment that holds page j and starts at page i or before holds all pages from i to j. For each page, only the
segment that starts earliest matters. If no segment holds pages i to j, none holds i to j + 1. A bisection therefore
finds the furthest page, however many segments share a popular prefix.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def furthest(
    earliest: Callable[[int], tuple[int, T] | None], page: int, num_pages: int, position: int
) -> tuple[int, int, T] | None:
    """Find the segment that holds ``page`` and reaches furthest, of ``num_pages`` that are looked up.

    ``earliest`` returns, for a page, position and identifier of the segment that starts earliest of those that hold it.
    ``position`` is that of ``page`` in the sequence. Return the page behind the segment's last one that is looked up,
    and position and identifier of the segment; None if no segment holds ``page``.
    """

    def out_of_reach(last: int) -> bool:
        holder = earliest(last)
        return holder is None or holder[0] > position

    end = bisect_left(range(num_pages), True, lo=page, key=out_of_reach)
    holder = earliest(end - 1) if end > page else None
    return None if holder is None else (end, *holder)
