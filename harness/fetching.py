"""Fetches pages into a pool, and makes a link of a known speed."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from sgl_kvfetch.plane.fetch.fetcher import Fetcher, FetchResult
from sgl_kvfetch.plane.fetch.link import Link
from sgl_kvfetch.plane.fetch.plan import PageSource
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
    return await fetcher.fetch(sources, Destination(pool_pages, sink), timeout_s, compute_s=compute_s)


def measured_link(size_bytes: int, bytes_per_s: float, num_transfers: int = 1) -> Link:
    """Return a link that has carried transfers of this size and speed one after another, until now."""
    seconds = size_bytes / bytes_per_s
    ahead_s = -num_transfers * seconds
    link = Link(lambda: time.monotonic() + ahead_s)
    for _ in range(num_transfers):
        started_s = time.monotonic() + ahead_s
        link.started(size_bytes)
        ahead_s += seconds
        link.ended(size_bytes, started_s, is_whole=True)
    return link
