"""Finds where pages are stored: makes lookups, remembers their results, and pauses if the store keeps failing."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from sgl_kvfetch import metrics
from sgl_kvfetch.container.manifest import decode_manifest
from sgl_kvfetch.container.segment import SegmentReader, first_readable
from sgl_kvfetch.errors import FormatError, KVFetchError, StoreError
from sgl_kvfetch.fetch.fetcher import FetchResult
from sgl_kvfetch.fetch.plan import PageSource
from sgl_kvfetch.keys import HeadSlice
from sgl_kvfetch.quant import Quantiser
from sgl_kvfetch.stores.base import Store
from sgl_kvfetch.stores.breaker import Breaker

_MAX_KNOWN_PAGES = 1 << 15  # remembered between a lookup and its fetch


class PageFinder:
    """Finds the pages of one rank. Belongs to one event loop.

    If lookups or fetches fail several times in a row, lookups pause for a while.
    """

    def __init__(
        self,
        store: Store,
        heads: HeadSlice,
        quantiser: Quantiser,
        on_fault: Callable[[KVFetchError], None],
        on_answer: Callable[[float], None] = lambda seconds: None,
        engine_codecs: Collection[str] = (),
    ) -> None:
        """``on_fault`` gets the error for each unusable segment that the store returned, ``on_answer`` the seconds of
        each lookup. ``engine_codecs``: the codecs that video engines decode; variants in these codecs are
        preferred."""
        self._on_answer = on_answer
        self._store = store
        self._heads = heads
        self._quantiser = quantiser
        self._on_fault = on_fault
        self._engine_codecs = engine_codecs
        self._lookups = Breaker()
        self._fetches = Breaker()
        self._known: OrderedDict[bytes, PageSource] = OrderedDict()

    async def find(self, hashes: Sequence[bytes], timeout_s: float) -> list[PageSource]:
        """Ask the store for the longest run of these pages. Raises StoreError, TimeoutError."""
        started_s = time.monotonic()
        if self._is_paused(started_s):
            raise StoreError("skipped", "lookups are paused because the store keeps failing")
        try:
            async with asyncio.timeout(timeout_s):
                lookup = await self._store.lookup(self._heads.folder, hashes)
        except (StoreError, TimeoutError):
            self._lookups.failed(time.monotonic())
            raise
        else:
            self._lookups.succeeded()
        finally:
            metrics.STORE_DOWN.set(self._is_paused(time.monotonic()))
        seconds = time.monotonic() - started_s
        metrics.STAGE_SECONDS.labels("lookup").observe(seconds)
        self._on_answer(seconds)
        sources: list[PageSource] = []
        for hit in lookup.hits:
            asked = hashes[len(sources) : len(sources) + hit.num_pages]
            try:
                sources += self._sources(hit.manifest, hit.first_page, asked)
            except KVFetchError as e:
                self._on_fault(e)
                break
        self._remember(hashes, sources)
        return sources

    async def recall(self, hashes: Sequence[bytes], timeout_s: float) -> list[PageSource]:
        """Return the sources that earlier lookups found, or call `find` if any of these pages is unknown."""
        known = [source for page_hash in hashes if (source := self._known.get(page_hash)) is not None]
        return known if len(known) == len(hashes) else await self.find(hashes, timeout_s)

    def fetched(self, hashes: Sequence[bytes], sources: Sequence[PageSource], result: FetchResult) -> None:
        """Update the memory and the breaker from the result of a fetch of ``sources``."""
        # The other pages may be merged, evicted or corrupt: ask the store again.
        for page_hash in hashes[result.num_pages :]:
            self._known.pop(page_hash, None)
        if result.timed_out or any(isinstance(f, StoreError) and f.reason != "missing" for f in result.failures):
            self._fetches.failed(time.monotonic())
        elif sources:
            self._fetches.succeeded()

    def forget(self) -> None:
        self._known.clear()

    @property
    def is_paused(self) -> bool:
        """Return whether lookups are paused now."""
        return self._is_paused(time.monotonic())

    def _is_paused(self, now_s: float) -> bool:
        return self._lookups.is_open(now_s) or self._fetches.is_open(now_s)

    def _sources(self, manifest_bytes: bytes, first_page: int, asked: Sequence[bytes]) -> list[PageSource]:
        manifest = decode_manifest(manifest_bytes)
        self._heads.require_same(manifest.heads)
        reader = SegmentReader(manifest, self._quantiser, first_readable(manifest, self._engine_codecs))
        if tuple(asked) != manifest.page_hashes[first_page : first_page + len(asked)]:
            raise FormatError("the store's answer holds other pages than the lookup requested")
        return [PageSource(reader, first_page + i) for i in range(len(asked))]

    def _remember(self, hashes: Sequence[bytes], sources: Sequence[PageSource]) -> None:
        for page_hash, source in zip(hashes, sources, strict=False):
            self._known[page_hash] = source
            self._known.move_to_end(page_hash)
        while len(self._known) > _MAX_KNOWN_PAGES:
            self._known.popitem(last=False)
