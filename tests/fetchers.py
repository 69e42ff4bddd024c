"""Fetchers of small segments."""

from __future__ import annotations

import sys

from sgl_kvfetch.codec import Decoders
from sgl_kvfetch.plane.fetch.fetcher import Fetcher
from sgl_kvfetch.plane.fetch.link import Link
from sgl_kvfetch.plane.fetch.offers import Chooser, Tolerance
from sgl_kvfetch.plane.fetch.plan import ReadSize
from sgl_kvfetch.plane.fetch.pool import DecodePool
from sgl_kvfetch.plane.fetch.reads import UnitReader
from sgl_kvfetch.plane.memory_cache import MemoryCache
from sgl_kvfetch.stores import Store

_ALL = Tolerance()


def make_fetcher(
    store: Store,
    pool: DecodePool[Decoders],
    *,
    read_bytes: int = 600,
    inflight_bytes: int = 1 << 20,
    may_delete: bool = False,
    tolerance: Tolerance = _ALL,
    link: Link | None = None,
    memory: MemoryCache | None = None,
    decode_bytes: int = sys.maxsize,
) -> Fetcher:
    """Return a fetcher of a store, which reads little at a time."""
    chooser, size = Chooser(tolerance, pool, link or Link()), ReadSize(read_bytes)
    reads = UnitReader(
        store, chooser, read_size=size, inflight_bytes=inflight_bytes, may_delete=may_delete, memory=memory
    )
    return Fetcher(reads, pool, decode_bytes=decode_bytes)
