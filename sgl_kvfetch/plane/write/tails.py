"""Short segments that have just been written, until their span is whole.

The turns of a conversation come one by one, and the next one may be asked for anywhere, at once. So each is written in
segments of its own, which may be shorter than a span. Cells of few tokens take longer to read for their bytes: a
session of 30 turns of 330 tokens took three times as long to its first token as in whole spans. So once segments make
up a span, they are written again as one, and then deleted. That is all that is sent twice. They are joined from memory:
nothing is read back for it. What another server wrote, or has no room here, stays as it is.
"""

from __future__ import annotations

from collections import OrderedDict

from sgl_kvfetch.codec import CodedSegment
from sgl_kvfetch.keys import SegmentKey


class Tails:
    """Holds short segments by their pages. The oldest ones go first."""

    def __init__(self, span_pages: int, most_bytes: int) -> None:
        self._span_pages = span_pages
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._by_end: OrderedDict[bytes, CodedSegment] = OrderedDict()  # by the hash of the last page
        self._by_start: dict[bytes | None, CodedSegment] = {}  # by that of the page before the first one

    def add(self, segment: CodedSegment) -> list[CodedSegment]:
        """Hold a segment that is shorter than a span. Return the segments of its span, once all of them are here; they
        are not held any longer."""
        manifest = segment.manifest
        last_hash = manifest.page_hashes[-1]
        if last_hash in self._by_end:
            self._drop(self._by_end[last_hash])
        self._by_end[last_hash] = self._by_start[manifest.previous_hash] = segment
        self._num_bytes += _size(segment)
        found = self._span_of(segment)
        for each in found:
            self._drop(each)
        while self._num_bytes > self._most_bytes:
            self._drop(next(iter(self._by_end.values())))
        return found

    def forget(self, key: SegmentKey) -> None:
        """Record that a segment is not as it was written any more."""
        if (held := self._by_end.get(key.last_page_hash)) is not None and held.manifest.key == key:
            self._drop(held)

    def _span_of(self, segment: CodedSegment) -> list[CodedSegment]:
        found = [segment]
        while (first := found[0].manifest).first_page % self._span_pages:
            before = self._by_end.get(first.previous_hash or b"")
            if before is None:
                return []
            found.insert(0, before)
        while ((last := found[-1].manifest).first_page + last.num_pages) % self._span_pages:
            after = self._by_start.get(last.page_hashes[-1])
            if after is None:
                return []
            found.append(after)
        return found

    def _drop(self, segment: CodedSegment) -> None:
        manifest = segment.manifest
        del self._by_end[manifest.page_hashes[-1]]
        if self._by_start.get(manifest.previous_hash) is segment:
            del self._by_start[manifest.previous_hash]
        self._num_bytes -= _size(segment)


def _size(segment: CodedSegment) -> int:
    return sum(map(len, segment.contents))
