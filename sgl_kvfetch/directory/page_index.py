"""The page index of a directory's catalog: find the stored segment that continues a run of pages furthest.

Blocking; it runs within a transaction of the catalog. `coverage` explains the search.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import inf

import xxhash

from sgl_kvfetch.keys import PAGE_HASH_BYTES, split_hashes
from sgl_kvfetch.stores import furthest

_EARLIEST = """
SELECT first_page, segment FROM pages CROSS JOIN segments ON id = segment
WHERE key = ? AND (expires IS NULL OR expires > ?) ORDER BY first_page, segment LIMIT 1"""
_SEGMENT = """
SELECT name, digest, hashes, (SELECT bytes FROM files WHERE files.name = segments.name AND files.state = 1)
FROM segments JOIN chains ON segment = id WHERE id = ?"""
_HIT_BYTES = 512  # at least what one hit takes beside its manifest


@dataclass(frozen=True, slots=True)
class IndexHit:
    """A segment that covers some of the looked-up pages. See ``SegmentHit`` for the last two fields."""

    manifest_name: str
    digest: str  # object_digest of the manifest
    num_bytes: int  # the manifest's
    first_page: int
    num_pages: int


def page_rows(namespace: str, segment: int, first_page: int, hashes: bytes) -> list[tuple[bytes, int, int]]:
    """Return the rows of a segment's pages, in the table's order. Pages whose keys collide share a row."""
    keys = {page_key(namespace, page_hash) for page_hash in split_hashes(hashes)}
    return [(key, first_page, segment) for key in sorted(keys)]


def page_key(namespace: str, page_hash: bytes) -> bytes:
    return xxhash.xxh3_128_digest(namespace.encode() + page_hash)


def find_pages(
    db: sqlite3.Connection, namespace: str, page_hashes: Sequence[bytes], most_bytes: float = inf
) -> list[IndexHit]:
    """Find the longest run of stored pages that starts with ``page_hashes[0]``. See ``Store.lookup``.

    The run ends early where an answer with its manifests would take more than ``most_bytes``.
    """
    now = time.time()

    @cache
    def earliest(page: int) -> tuple[int, int] | None:
        """Return position and identifier of the segment that starts earliest of those with this page."""
        row: tuple[int, int] | None = db.execute(_EARLIEST, (page_key(namespace, page_hashes[page]), now)).fetchone()
        return row

    if not page_hashes or (first := earliest(0)) is None:
        return []
    (_, _, hashes, _) = db.execute(_SEGMENT, (first[1],)).fetchone()
    held = split_hashes(hashes)
    if page_hashes[0] not in held:
        return []  # another page has the same key
    origin = first[0] + held.index(page_hashes[0])  # position in the sequence of the first page
    hits = []
    page = 0
    while reached := furthest(earliest, page, len(page_hashes), origin + page):
        end, first_page, segment = reached
        name, digest, hashes, num_bytes = db.execute(_SEGMENT, (segment,)).fetchone()
        most_bytes -= num_bytes + _HIT_BYTES
        skipped = origin + page - first_page
        # Manifests are not trusted: one with false page hashes may hide pages, but never adds wrong ones.
        count = _matching(hashes, skipped, page_hashes[page:end])
        if count == 0 or most_bytes < 0:
            break
        hits.append(IndexHit(name, digest, num_bytes, skipped, count))
        page += count
    return hits


def _matching(hashes: bytes, first: int, page_hashes: Sequence[bytes]) -> int:
    """Count how many of ``page_hashes`` a segment with these ``hashes`` holds in a row, from its page ``first`` on."""
    start = first * PAGE_HASH_BYTES
    if hashes.startswith(b"".join(page_hashes), start):
        return len(page_hashes)
    count = 0
    while hashes.startswith(page_hashes[count], start + count * PAGE_HASH_BYTES):
        count += 1
    return count
