"""The page index: find the stored segment that continues a run of pages furthest. Pure, no I/O, not thread-safe.

Page hashes are chained: a hash determines the whole prefix before it, and with it the page's position in the sequence.
So a segment that holds page j and starts at page i or before holds all pages from i to j. For each page, only the
segment that starts earliest matters. If no segment holds pages i to j, none holds i to j + 1. A bisection therefore
finds the furthest page, however many segments share a popular prefix.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from sgl_kvfetch.container.manifest import Manifest
from sgl_kvfetch.keys import PAGE_HASH_BYTES
from sgl_kvfetch.stores.base import Lookup, SegmentHit


class _Segment:
    __slots__ = ("first_page", "hashes", "manifest", "name")

    def __init__(self, name: str, manifest_bytes: bytes, manifest: Manifest) -> None:
        self.name = name
        self.manifest = manifest_bytes
        self.first_page = manifest.first_page
        self.hashes = b"".join(manifest.page_hashes)

    @property
    def namespace(self) -> str:
        return self.name.partition("/")[0]

    def page_hashes(self) -> list[bytes]:
        step = PAGE_HASH_BYTES
        return [self.hashes[i : i + step] for i in range(0, len(self.hashes), step)]

    def position(self, page_hash: bytes) -> int:
        """Return the position in the sequence of a page of this segment."""
        at = self.hashes.find(page_hash)
        while at % PAGE_HASH_BYTES and at >= 0:  # a match that spans two hashes
            at = self.hashes.find(page_hash, at + 1)
        assert at >= 0
        return self.first_page + at // PAGE_HASH_BYTES

    def matching(self, first: int, page_hashes: Sequence[bytes]) -> int:
        """Count how many of ``page_hashes`` this segment holds in a row, starting at its page ``first``."""
        if first < 0:
            return 0
        start = first * PAGE_HASH_BYTES
        if self.hashes.startswith(b"".join(page_hashes), start):
            return len(page_hashes)
        count = 0
        while self.hashes.startswith(page_hashes[count], start + count * PAGE_HASH_BYTES):
            count += 1
        return count


# The segments that hold one page: usually one; otherwise grouped by first page, each group ordered by age.
_Holders = _Segment | dict[int, dict[_Segment, None]]


def _earliest(holders: _Holders) -> _Segment:
    if isinstance(holders, _Segment):
        return holders
    # Take the newest of a group. Eviction removes the oldest ones first, and a dict is slow to iterate from that end.
    return next(reversed(holders[min(holders)]))


class _Space:
    """The pages of one namespace."""

    def __init__(self) -> None:
        self.pages: dict[bytes, _Holders] = {}

    def add(self, segment: _Segment) -> None:
        for page_hash in segment.page_hashes():
            holders = self.pages.get(page_hash)
            if holders is None:
                self.pages[page_hash] = segment
                continue
            if isinstance(holders, _Segment):
                holders = self.pages[page_hash] = {holders.first_page: {holders: None}}
            holders.setdefault(segment.first_page, {})[segment] = None

    def remove(self, segment: _Segment) -> None:
        for page_hash in segment.page_hashes():
            holders = self.pages.get(page_hash)
            if holders is segment:
                del self.pages[page_hash]
            elif isinstance(holders, dict):
                self._remove_from(holders, segment, page_hash)

    def _remove_from(self, holders: dict[int, dict[_Segment, None]], segment: _Segment, page_hash: bytes) -> None:
        same_start = holders.get(segment.first_page, {})
        same_start.pop(segment, None)
        if not same_start:
            holders.pop(segment.first_page, None)
        if not holders:
            del self.pages[page_hash]
        elif len(holders) == 1:
            (others,) = holders.values()
            if len(others) == 1:
                (self.pages[page_hash],) = others

    def find(self, page_hashes: Sequence[bytes]) -> list[tuple[str, SegmentHit]]:
        first = self.pages.get(page_hashes[0])
        if first is None:
            return []
        origin = _earliest(first).position(page_hashes[0])
        hits = []
        page = 0
        while page < len(page_hashes):
            end = self._reach(page_hashes, page, origin)
            if end == page:
                break
            segment = _earliest(self.pages[page_hashes[end - 1]])
            skipped = origin + page - segment.first_page
            # Manifests are not trusted: one with false page hashes may hide pages, but never adds wrong ones.
            count = segment.matching(skipped, page_hashes[page:end])
            if count == 0:
                break
            hits.append((segment.name, SegmentHit(segment.manifest, skipped, count)))
            page += count
        return hits

    def _reach(self, page_hashes: Sequence[bytes], page: int, origin: int) -> int:
        """Return the end of the longest run from ``page`` that one segment holds; ``page`` if there is none."""

        def out_of_reach(last: int) -> bool:
            holders = self.pages.get(page_hashes[last])
            return holders is None or _earliest(holders).first_page > origin + page

        return bisect_left(range(len(page_hashes)), True, lo=page, key=out_of_reach)


class PageIndex:
    """Segments by page hash. Uses about 200 bytes of memory per page, plus the manifests themselves."""

    def __init__(self) -> None:
        self._spaces: dict[str, _Space] = {}
        self._segments: dict[str, _Segment] = {}

    def __len__(self) -> int:
        return len(self._segments)

    def __contains__(self, manifest_name: str) -> bool:
        return manifest_name in self._segments

    def add(self, manifest_name: str, manifest_bytes: bytes, manifest: Manifest) -> None:
        """Add a segment, so that lookups find it. A manifest of the same name is replaced."""
        self.remove(manifest_name)
        segment = _Segment(manifest_name, manifest_bytes, manifest)
        self._segments[manifest_name] = segment
        self._spaces.setdefault(segment.namespace, _Space()).add(segment)

    def remove(self, manifest_name: str) -> bool:
        """Remove a segment. Return True if it was there."""
        segment = self._segments.pop(manifest_name, None)
        if segment is None:
            return False
        space = self._spaces[segment.namespace]
        space.remove(segment)
        if not space.pages:
            del self._spaces[segment.namespace]
        return True

    def find(self, namespace: str, page_hashes: Sequence[bytes]) -> list[tuple[str, SegmentHit]]:
        """Return the hits of ``lookup``, each with its manifest's name."""
        space = self._spaces.get(namespace)
        if space is None or not page_hashes:
            return []
        return space.find(page_hashes)

    def lookup(self, namespace: str, page_hashes: Sequence[bytes]) -> Lookup:
        """Find the longest run of stored pages that starts with ``page_hashes[0]``. See ``Store.lookup``."""
        return Lookup(tuple(hit for _, hit in self.find(namespace, page_hashes)))
