"""An S3 store with an index of its pages: a hit takes one round trip to the index and one to the store."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any

from sgl_kvfetch.codec import Content, bytes_of, decode_manifest
from sgl_kvfetch.errors import FormatError, StoreError
from sgl_kvfetch.keys import MANIFEST_SUFFIX, SegmentKey
from sgl_kvfetch.log import Troubles
from sgl_kvfetch.side_by_side import Tasks, together
from sgl_kvfetch.stores.base import (
    MAX_LOOKUP_ANSWER_BYTES,
    Lookup,
    SegmentHit,
    decode_expected,
    furthest,
    require_namespace,
)
from sgl_kvfetch.stores.redis_index import Entry, IndexOptions, PageIndex, entries_of
from sgl_kvfetch.stores.s3 import S3Store

logger = logging.getLogger(__name__)

SAVE_USES_EVERY_S = 10.0
_READS_AT_ONCE = 16  # of manifests, of one lookup


class IndexedS3Store(S3Store):
    """Enters the pages of each manifest that is put. Reads check what the index says.

    If the index fails or knows nothing of the first page, lookups go by names, and enter what they find. The index also
    records when segments were last found, to within 10 s.
    """

    def __init__(self, url: str, index: IndexOptions, **options: Any) -> None:
        """``options`` are those of `S3Store`. Raises ConfigError."""
        super().__init__(url, **options)
        self._index = PageIndex(index, self.url)
        self._mending = Tasks()
        self._troubles = Troubles(logger, f"the index {index.label}")
        self._uses: dict[SegmentKey, float] = {}  # since they were last saved
        self._saving: asyncio.Task[None] | None = None

    async def put(self, name: str, data: Content) -> None:
        await super().put(name, data)
        if name.endswith(MANIFEST_SUFFIX):
            await self._quietly(self._enter(bytes_of(data)))

    async def delete(self, name: str) -> bool:
        """Delete an object, and a manifest's pages from the index, too."""
        if not name.endswith(MANIFEST_SUFFIX):
            return await super().delete(name)
        content = await self.get(name)
        if content is None:
            return False
        await self._delete(name)
        await self._quietly(self._remove(content))
        return True

    async def last_uses(self, segments: Sequence[SegmentKey]) -> Sequence[float | None]:
        return await self._index.last_uses(segments)

    def sweeping(self) -> AbstractAsyncContextManager[None]:
        return self._index.sweeping()

    async def lookup(self, namespace: str, page_hashes: Sequence[bytes]) -> Lookup:
        require_namespace(namespace)
        if not page_hashes:
            return Lookup(())
        hits: tuple[SegmentHit, ...] = ()
        stale: dict[bytes, Entry] = {}
        try:
            entries = await self._index.find(namespace, page_hashes)
        except StoreError as e:
            self._warn(e)
        else:
            if self._troubles.lasting:
                self._troubles.worked("index")
            hits, stale = await self._read(namespace, page_hashes, entries)
        found = Lookup(hits) if hits else await super().lookup(namespace, page_hashes)
        unknown = () if hits else found.hits
        if stale or unknown:
            self._mending.begin(self._quietly(self._mend(namespace, stale, unknown)))
        return found

    async def _read(
        self, namespace: str, page_hashes: Sequence[bytes], entries: Sequence[Entry | None]
    ) -> tuple[tuple[SegmentHit, ...], dict[bytes, Entry]]:
        """Read the manifests of the run that the index promises, up to `MAX_LOOKUP_ANSWER_BYTES`. Return what is really
        there, and the entries that lead to nothing. Raises StoreError."""
        hits: list[SegmentHit] = []
        room = MAX_LOOKUP_ANSWER_BYTES
        async for (page, end, entry), content in self._contents(namespace, _parts(entries)):
            manifest = (
                None if content is None else await asyncio.to_thread(decode_expected, content, entry.key(namespace))
            )
            first = page + _origin(entries) - entry.first_page
            asked = tuple(page_hashes[page:end])
            if content is None or manifest is None or manifest.page_hashes[first : first + len(asked)] != asked:
                known = zip(page_hashes, entries, strict=True)
                return tuple(hits), {h: e for h, e in known if e and e.key(namespace) == entry.key(namespace)}
            room -= len(content)
            if room < 0:
                break
            hits.append(SegmentHit(content, first, len(asked)))
            self._record_use(manifest.key)
        return tuple(hits), {}

    async def _contents(
        self, namespace: str, parts: Sequence[tuple[int, int, Entry]]
    ) -> AsyncIterator[tuple[tuple[int, int, Entry], bytes | None]]:
        """Read the parts' manifests, a few at a time. Raises StoreError."""
        for i in range(0, len(parts), _READS_AT_ONCE):
            some = parts[i : i + _READS_AT_ONCE]
            contents = await together(self.get(entry.key(namespace).manifest_name) for _, _, entry in some)
            for each in zip(some, contents, strict=True):
                yield each

    async def _mend(self, namespace: str, stale: dict[bytes, Entry], unknown: Sequence[SegmentHit]) -> None:
        if stale:
            await self._index.remove(namespace, stale)
        for hit in unknown:
            await self._enter(hit.manifest)

    async def _enter(self, content: bytes) -> None:
        with suppress(FormatError):  # no reader will use it
            manifest = decode_manifest(content)
            self._record_use(manifest.key)
            await self._index.add(manifest)

    async def _remove(self, content: bytes) -> None:
        with suppress(FormatError):
            manifest = decode_manifest(content)
            await self._index.remove(manifest.heads.folder, entries_of(manifest))

    def _record_use(self, segment: SegmentKey) -> None:
        self._uses[segment] = time.time()
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._save_uses_later())

    async def _save_uses_later(self) -> None:
        while self._uses:  # also those that are noted while others are being saved
            await asyncio.sleep(SAVE_USES_EVERY_S)
            await self._save_uses()

    async def _save_uses(self) -> None:
        uses, self._uses = self._uses, {}
        if uses:
            await self._quietly(self._index.record_uses(uses))

    async def _quietly(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except StoreError as e:
            self._warn(e)

    def _warn(self, error: StoreError) -> None:
        if error.reason != "skipped":
            self._troubles.failed(error.reason, "index", f"kvfetch: {error}; {self.url} is used without it")

    async def close(self) -> None:
        await self._mending.join()
        if self._saving is not None:
            self._saving.cancel()
        await self._save_uses()
        await self._index.close()
        await super().close()


def _origin(entries: Sequence[Entry | None]) -> int:
    """Return the position of the first page in the sequence, as the first entry has it."""
    return next((entry.position - page for page, entry in enumerate(entries) if entry), 0)


def _parts(entries: Sequence[Entry | None]) -> list[tuple[int, int, Entry]]:
    """Return segments that cover the longest run from the first page on, each with the pages ``[page, end)`` to use."""
    origin = _origin(entries)

    def earliest(page: int) -> tuple[int, Entry] | None:
        entry = entries[page]
        return None if entry is None or entry.position != origin + page else (entry.first_page, entry)

    parts = []
    page = 0
    while reached := furthest(earliest, page, len(entries), origin + page):
        end, _, entry = reached
        parts.append((page, end, entry))
        page = end
    return parts
