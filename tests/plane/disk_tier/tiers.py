"""A store and a disk tier in front of it, which tests watch and disturb."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import prometheus_client

from harness.reading import read_bytes
from harness.waiting import until
from sgl_kvfetch import metrics
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.plane.disk_tier import DiskTier
from sgl_kvfetch.stores.base import Lookup, Store
from sgl_kvfetch.testing import FOLDER, make_segment, page_hashes, parts

CAPACITY = 100 << 20
CHAIN = page_hashes(64)
SEGMENT = make_segment(CHAIN, 0, 64)
MANIFEST_NAME = SEGMENT.manifest.key.manifest_name
PIECE = 512  # bytes of a read

MakeTier = Callable[..., DiskTier]


class Events:
    """What tiers have counted, since `forget` if that was called. ``outages``: why stores did not answer lookups."""

    def __init__(self) -> None:
        self.outages: list[str] = []
        self.forget()

    def forget(self) -> None:
        self._before = {counter: _counts(counter) for counter in _COUNTERS}

    @property
    def bytes(self) -> Counter[str]:
        """By tier."""
        return self._since(metrics.LOCAL_CACHE_READ_BYTES)

    @property
    def fills(self) -> Counter[str]:
        """By result."""
        return self._since(metrics.LOCAL_CACHE_FILLS)

    @property
    def failures(self) -> Counter[str]:
        """By operation and reason, in one string."""
        return self._since(metrics.LOCAL_CACHE_FAILURES)

    def _since(self, counter: prometheus_client.Counter) -> Counter[str]:
        return _counts(counter) - self._before[counter]


_COUNTERS = metrics.LOCAL_CACHE_READ_BYTES, metrics.LOCAL_CACHE_FILLS, metrics.LOCAL_CACHE_FAILURES


def _counts(counter: prometheus_client.Counter) -> Counter[str]:
    samples = [each for family in counter.collect() for each in family.samples if each.name.endswith("_total")]
    return Counter({" ".join(each.labels.values()): int(each.value) for each in samples})


class RemoteStore(LocalStore):
    """A store that fails, hangs and counts reads as a test tells it to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.error: StoreError | None = None
        self.hangs = False
        self.num_reads = self.num_lookups = 0

    async def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        self.num_reads += 1
        if self.error is not None:
            raise self.error
        return await super().get(name, start, length)

    async def lookup(self, namespace: str, page_hashes: Sequence[bytes]) -> Lookup:
        self.num_lookups += 1
        if self.error is not None:
            raise self.error
        if self.hangs:
            await asyncio.Event().wait()
        return await super().lookup(namespace, page_hashes)


async def read(store: Store, segment: CodedSegment = SEGMENT, variant: int = 0, end: int | None = None) -> bytes:
    """Read data in pieces, all at once, up to byte ``end``."""
    name, size = segment.manifest.data_name(segment.manifest.variants[variant]), len(segment.variant_data(variant))
    starts = range(0, size if end is None else end, PIECE)
    pieces = await asyncio.gather(*(read_bytes(store, name, start, min(PIECE, size - start)) for start in starts))
    return b"".join(piece for piece in pieces if piece is not None)


async def fetch(store: Store, segment: CodedSegment = SEGMENT, variant: int = 0) -> bytes:
    """Look a segment up and read its data, as a fetch does."""
    found = await store.lookup(FOLDER, segment.manifest.page_hashes)
    assert parts(found) == [(0, segment.manifest.num_pages)]
    assert found.hits[0].manifest == segment.manifest.encode()
    return await read(store, segment, variant)


async def fill(tier: DiskTier, events: Events, segment: CodedSegment = SEGMENT) -> None:
    before = events.fills.total()
    assert await fetch(tier, segment) == segment.data
    await until(lambda: events.fills.total() > before)
    assert events.fills["stored"] == events.fills.total()


def content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None
