"""Merge buddies in the store into segments of twice the length, so that segments grow with their prefix."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

from sgl_kvfetch.codec import (
    CodedSegment,
    Manifest,
    SegmentSpec,
    decode_manifest,
    merge_segments,
    require_rewritable,
    split_signature,
)
from sgl_kvfetch.errors import KVFetchError
from sgl_kvfetch.keys import SegmentKey
from sgl_kvfetch.plane.write.commit import commit_segment, delete_segment
from sgl_kvfetch.stores import Store

Run = Callable[[Callable[[], CodedSegment]], asyncio.Future[CodedSegment]]


_MOST_SIDE_BYTES = 256 << 20  # of a merged segment: both halves are in memory, and states can be large


class Merger:
    """Merges a newly committed segment with its left buddy, and repeats this while there is one.

    The halves are deleted ``retire_s`` after the merged segment is committed, when no reader should still use them.
    """

    def __init__(
        self, store: Store, spec: SegmentSpec, *, max_segment_pages: int, retire_s: float, executor: Executor
    ) -> None:
        """``executor`` encodes cells again where needed. It must not be the executor behind ``grow``'s ``run``."""
        self._store = store
        self._spec = spec
        self._max_pages = max_segment_pages
        self._retire_s = retire_s
        self._executor = executor
        self._retiring: set[asyncio.Task[None]] = set()

    async def grow(self, manifest: Manifest, run: Run) -> int:
        """Merge a stored segment with its left buddy, the result with its own left buddy, and so on.

        ``run`` computes off the event loop. Return the number of merges. Raises KVFetchError; earlier merges stay.
        """
        num_merged = 0
        segment: CodedSegment | None = None
        while left := await self._left_buddy(manifest):
            segment = segment or await self._read(manifest)
            if segment is None:
                break
            whole = await run(partial(merge_segments, self._spec, left, segment, self._executor))
            await commit_segment(self._store, whole)
            self._retire(left.manifest)
            self._retire(segment.manifest)
            segment, manifest = whole, whole.manifest
            num_merged += 1
        return num_merged

    async def _left_buddy(self, manifest: Manifest) -> CodedSegment | None:
        is_right_half = manifest.first_page & manifest.num_pages
        if not is_right_half or 2 * manifest.num_pages > self._max_pages:
            return None
        assert manifest.previous_hash is not None
        key = SegmentKey(manifest.heads.folder, manifest.num_pages, manifest.previous_hash)
        stored = await self._store.get(key.manifest_name)
        if stored is None or (split_signature(stored)[1] and not self._store.signs):
            return None  # readers with a key could not use the merged segment
        left = decode_manifest(stored)
        require_rewritable(stored)
        if left.is_expired(time.time()):
            return None  # the merged segment would be, too
        side_bytes = sum(each.data_bytes(side) for each in (left, manifest) for side in each.sides)
        return await self._read(left) if side_bytes <= _MOST_SIDE_BYTES else None

    async def _read(self, manifest: Manifest) -> CodedSegment | None:
        contents = []
        for each in manifest.data:
            data = await self._store.get(manifest.data_name(each))
            if data is None:
                return None
            contents.append(data)
        num_variants = len(manifest.variants)
        return CodedSegment(
            manifest, contents[0], tuple(contents[1:num_variants]), side_data=tuple(contents[num_variants:])
        )

    def _retire(self, manifest: Manifest) -> None:
        task = asyncio.get_running_loop().create_task(self._delete_later(manifest))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _delete_later(self, manifest: Manifest) -> None:
        await asyncio.sleep(self._retire_s)
        # If deleting fails, the half stays until the store evicts it. That is harmless: lookups prefer longer segments.
        with contextlib.suppress(KVFetchError):
            await delete_segment(self._store, manifest)

    async def close(self) -> None:
        """Cancel pending deletions. Halves that stay do no harm."""
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
