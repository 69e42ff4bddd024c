"""Fetches side pages (see codec/container/sides.py), and tells which runs of pages have those that they need."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sgl_kvfetch import metrics
from sgl_kvfetch.codec import SegmentReader, SidePlace
from sgl_kvfetch.errors import FormatError, KVFetchError, StoreError
from sgl_kvfetch.plane.fetch.plan import PageSource
from sgl_kvfetch.side_by_side import side_by_side
from sgl_kvfetch.stores import Store

KV_POOL = "kv"
_READS = 8  # at a time
_READ_BYTES = 8 << 20  # neighbouring pages are read together up to this size


@dataclass(frozen=True, slots=True)
class Usable:
    """``lengths``: the runs that have all their side pages. ``stored``: the longest run for each pool alone."""

    lengths: tuple[int, ...]
    stored: dict[str, int]


def usable_runs(sources: Sequence[PageSource], trailing: Mapping[str, int]) -> Usable:
    """Return which runs of pages, from the first on, can be used. ``trailing``: see `messages.LookUp`.

    The rules are SGLang's (``HiCacheFile.batch_exists_v2``).
    """
    lengths, stored = set(range(1, len(sources) + 1)), {}
    for pool, num_trailing in trailing.items():
        found = set()
        num_there = 0  # pages in front of here, without a gap
        for end, source in enumerate(sources, 1):
            num_there = num_there + 1 if (pool, source.page) in source.reader.side_places else 0
            if num_there >= min(num_trailing or end, end):
                found.add(end)
        stored[pool] = max(found, default=0)
        lengths &= found
    return Usable(tuple(sorted(lengths)), stored)


@dataclass(frozen=True, slots=True)
class _Read:
    """Neighbouring side pages of an object. ``pages``: indices into the request, in the order of their bytes."""

    source: PageSource
    pages: tuple[int, ...]
    places: tuple[SidePlace, ...]

    @property
    def size_bytes(self) -> int:
        return sum(place.size_bytes for place in self.places)


class SideFetcher:
    """Fetches the side pages of one store. Belongs to one event loop."""

    def __init__(self, store: Store, report_damage: Callable[[SegmentReader], None]) -> None:
        """``report_damage`` is called for segments whose side pages are missing or broken."""
        self._store = store
        self._report_damage = report_damage

    async def fetch(
        self, sources: Sequence[PageSource], pool: str, num_bytes: int, take: Callable[[int, bytearray], None]
    ) -> list[KVFetchError]:
        """Fetch pages of one side pool, ``num_bytes`` each. ``take`` gets each page that is there and verified, with
        its index, on some thread, and may wait. Return why others are not there; those that nobody stored are not
        errors."""
        failures: list[KVFetchError] = []

        async def read(each: _Read) -> None:
            try:
                _require_size(each, num_bytes)
                await self._read(each, take)
            except KVFetchError as e:
                failures.append(e)
                if isinstance(e, FormatError):
                    metrics.CORRUPT_CHUNKS.inc()
                if isinstance(e, FormatError) or (isinstance(e, StoreError) and e.reason == "missing"):
                    self._report_damage(each.source.reader)

        await side_by_side(_READS, _reads(sources, pool), read)
        return failures

    async def _read(self, each: _Read, take: Callable[[int, bytearray], None]) -> None:
        first = each.places[0]
        started_s = time.monotonic()
        data = memoryview(bytearray(each.size_bytes))
        if not await self._store.read(first.data_name, first.start, [data]):
            raise StoreError("missing", f"{first.data_name} is not in the store")
        metrics.STAGE_SECONDS.labels("transmit").observe(time.monotonic() - started_s)
        metrics.WIRE_BYTES.labels("read").inc(len(data))

        def decode() -> None:
            for page, place in zip(each.pages, each.places, strict=True):
                start = place.start - first.start
                take(page, place.decode(data[start : start + place.size_bytes]))

        await asyncio.to_thread(decode)


def _require_size(each: _Read, num_bytes: int) -> None:
    """Raise FormatError for pages of another size, before anything is allocated for them."""
    for place in each.places:
        if place.page.num_bytes != num_bytes:
            raise FormatError(
                f"a side page of {place.page.pool} has {place.page.num_bytes} bytes, expected {num_bytes}"
            )


def _reads(sources: Sequence[PageSource], pool: str) -> list[_Read]:
    reads: list[_Read] = []
    for page, source in enumerate(sources):
        place = source.reader.side_places.get((pool, source.page))
        if place is None:
            continue
        last = reads[-1] if reads else None
        if (
            last is not None
            and last.places[-1].data_name == place.data_name
            and last.places[-1].start + last.places[-1].size_bytes == place.start
            and last.size_bytes + place.size_bytes <= _READ_BYTES
        ):
            reads[-1] = _Read(last.source, (*last.pages, page), (*last.places, place))
        else:
            reads.append(_Read(source, (page,), (place,)))
    return reads
