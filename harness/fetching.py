"""Fetches in one round, whose destination is known from the start."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sgl_kvfetch.plane.fetch.fetcher import Fetcher, FetchResult
from sgl_kvfetch.plane.fetch.plan import PageSource
from sgl_kvfetch.plane.fetch.rounds import Round
from sgl_kvfetch.plane.fetch.sink import Destination, GuardedSink


async def fetch_pages(
    fetcher: Fetcher,
    sources: Sequence[PageSource],
    pool_pages: Sequence[int],
    sink: GuardedSink,
    timeout_s: float,
    compute_s: float = math.inf,
) -> FetchResult:
    """Restore pages into ``pool_pages`` through ``sink``."""
    assert len(sources) == len(pool_pages)
    only = Round(0, len(sources))
    only.give(Destination(pool_pages, sink))
    return await fetcher.fetch_rounds(sources, [only], timeout_s, compute_s=compute_s)
