"""Encodes and commits segments in the background. Failed segments are dropped and counted.

The queue is the shared memory into which the engine copies pages; where there is no room in it for a second, the engine
decides whether they wait in SGLang's pool or are dropped. Here they belong to the event loop: joined with the batches
before and after (`gather`), cut into segments, encoded, and put. Nothing copies them: they are encoded from where they
lie, which gives their memory back, and the chunks are sent from where the encoder has put them.

What bounds memory: chunks take half of what the queue may, in addition to it. Pages are encoded before it is known
which segment they belong to while there is room for their chunks; others stay in the queue until it is the turn of
their segment. So a slow store fills the queue, and pages wait in the pool.

* A segment is encoded only if the store lacks it; and the store is asked right before, as another server may write the
  same prompt. Two that do so at once put equal values, which is harmless.
* Data is put before the manifest. A manifest without its data would be found, and be a miss each time.
* Segments that are shorter than a span are written again once, when they make up a whole one (`tails`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import msgspec

from sgl_kvfetch import blocks, metrics
from sgl_kvfetch.codec import (
    CodedSegment,
    EncodedSegment,
    Manifest,
    Quantiser,
    SegmentSpec,
    decode_manifest,
    require_rewritable,
    secure_segment,
)
from sgl_kvfetch.codec.container.join import join_segments
from sgl_kvfetch.codec.container.manifest import MAX_SIDES
from sgl_kvfetch.codec.container.protect import secure_side
from sgl_kvfetch.codec.container.segment import encode_pages, encode_span
from sgl_kvfetch.codec.container.sides import encode_side, side_places
from sgl_kvfetch.errors import FormatError, KVFetchError, QuantiseError, StoreError
from sgl_kvfetch.keys import SegmentKey
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.metrics import miss
from sgl_kvfetch.plane.write.gather import Gatherer, PageBatch, SpanPages
from sgl_kvfetch.plane.write.tails import Tails
from sgl_kvfetch.reasons import Reason, reason_of
from sgl_kvfetch.side_by_side import Tasks
from sgl_kvfetch.stores import SegmentHit, Store, object_digest

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)

T = TypeVar("T")
Segment = CodedSegment | EncodedSegment

# Segments processed at once. Each spreads its cells over the encode pool; others fill the pool while the first waits
# for the store, and are sent side by side.
_CONCURRENT_SEGMENTS = 4
_ADD_ATTEMPTS = 4  # to add side pages to a segment that other writers change
_REFUSALS = ("invalid", "too_large")  # the store would not take the same segment another time either
_TAILS_SHARE = 0.25  # of as many bytes as the queue has, for short segments
_REST_S = 30.0  # after which memory for the next segments is not kept
_TIMER_SLACK_S = 0.01  # a timer may fire a little early


class Writer:
    """Accepts pages from any thread; gathers, encodes and commits them on its event loop and pools."""

    def __init__(
        self,
        store: Store,
        spec: SegmentSpec,
        encode_pool: Executor,
        *,
        max_segment_pages: int,
        queue_bytes: int,
        linger_s: float,
        retire_s: float,
        ttl_s: float | None = None,
        refines: bool = False,
    ) -> None:
        """Call on the event loop that the writer should use. ``ttl_s``: how long segments live from their commit on; by
        default for ever. ``refines``: write segments again that have become coarser. Not for a server that reads coarse
        values: it would write those as if it had computed them. Segments that were written again are deleted after
        ``retire_s``, when no reader should still use them."""
        self._store = store
        self._spec = spec
        self._encode_pool = encode_pool
        # encode_pages waits for cells in the encode pool, so it must not occupy a thread of that pool itself.
        self._segment_pool = ThreadPoolExecutor(_CONCURRENT_SEGMENTS, "kvfetch-segment")
        self._gatherer = Gatherer(max_segment_pages, linger_s, spec.span_pages, self._begin_spans)
        self._coding: dict[SpanPages, asyncio.Task[None]] = {}  # spans that are coded before their segment is cut
        self._linger_s = linger_s
        self._queue_bytes = queue_bytes
        self._ttl_s = ttl_s
        self._refines = refines
        self._used_bytes = 0  # of pages and chunks on their way
        self._coded_bytes = 0  # of them, those of chunks
        # Called when so many pages leave the queue, and with whether the store has failed to take them.
        self.on_settled: Callable[[int, bool], None] = lambda num_pages, is_lost: None
        self.on_known: Callable[[PageBatch], None] = lambda segment: None  # called with what the store has already
        self.on_committed: Callable[[Segment], None] = lambda segment: None  # called with what the store has now
        self.is_off = False  # whether audits have found that it would write what is wrong
        self._loop = asyncio.get_running_loop()
        self._written_s = 0.0
        self._num_in_work = 0
        self._turns = asyncio.Condition()
        self._tasks = Tasks()
        self._retire_s = retire_s
        self._retiring = Tasks()
        self._tails = Tails(spec.span_pages, int(_TAILS_SHARE * queue_bytes))

    @property
    def quantiser(self) -> Quantiser:
        return self._spec.quantiser

    def _count(self, num_bytes: int, coded_bytes: int = 0) -> None:
        """Count bytes on their way, of which ``coded_bytes`` are of chunks."""
        self._used_bytes += num_bytes
        self._coded_bytes += coded_bytes
        metrics.QUEUED_BYTES.labels("write").set(self._used_bytes)

    def _count_out(self, segment: PageBatch) -> None:
        self._count(-segment.size_bytes, -segment.coded_bytes)

    def add(self, batch: PageBatch) -> None:
        """Queue pages. Call on the event loop; never waits."""
        if self.is_off:
            metrics.WRITTEN_PAGES.labels("dropped_audited").inc(len(batch.page_hashes))
            self.on_settled(len(batch.page_hashes), False)
            return
        self._count(batch.size_bytes)
        self._start(self._gatherer.add_batch(batch, time.monotonic()))
        self._loop.call_later(self._linger_s + _TIMER_SLACK_S, self._cut_due)

    def _cut_due(self) -> None:
        self._start(self._gatherer.due(time.monotonic()))

    def _start(self, segments: Sequence[PageBatch]) -> None:
        for segment in segments:
            self._tasks.begin(self._write(segment))

    def _begin_spans(self, spans: Sequence[SpanPages]) -> None:
        for span in spans:
            if self._coded_bytes + sum(each.num_bytes for each in self._coding) > self._queue_bytes // 2:
                return  # its segment will encode it
            task = self._coding[span] = self._tasks.begin(self._encode_ahead(span))
            task.add_done_callback(lambda _, span=span: self._coding.pop(span))  # type: ignore[misc]

    async def _encode_ahead(self, span: SpanPages) -> None:
        """Encode a span that the store lacks, which gives back the memory of its pages. If anything fails, the segment
        will meet it again, and report it."""
        try:
            found = await self._store.lookup(self._spec.heads.folder, span.page_hashes)
            if found.num_pages == len(span.page_hashes):
                return
            raw_bytes = span.num_bytes
            where = span.first_page, span.previous_hash, span.page_hashes
            chunks = await self._run(partial(encode_span, self._spec, span.pieces, *where, self._encode_pool))
            span.chunks, span.pieces = chunks, []
            self._count(span.num_bytes - raw_bytes, span.num_bytes)
        except KVFetchError:
            pass
        except Exception:
            logger.exception("span of %d pages not encoded ahead", len(span.page_hashes))

    def _rest(self) -> None:
        """Free memory that only writing needs, when nothing has been written for a while."""
        if not self._used_bytes and self._loop.time() >= self._written_s + _REST_S:
            blocks.drop_kept()

    async def _write(self, segment: PageBatch) -> None:
        """Write one segment, unless the store has it."""
        num_pages = len(segment.page_hashes)
        result, coded, is_lost = "dropped_error", None, False
        try:
            async with self._turn(segment):
                await asyncio.gather(*(self._coding[span] for span in segment.spans if span in self._coding))
                coded = await self._encode_and_commit(segment)
            result = "stored" if coded else "known"
            if coded:
                metrics.record_success("write")
        except QuantiseError as e:
            result = "dropped_invalid"
            _limited.warning("quantise", f"segment of {num_pages} pages not written: {e}")
        except KVFetchError as e:
            reason = reason_of(e)
            is_lost = isinstance(e, StoreError) and reason not in _REFUSALS
            metrics.count_miss("write", e)
        except Exception:
            logger.exception("segment of %d pages not written", num_pages)
            miss("write", Reason.INTERNAL)
        finally:
            metrics.WRITTEN_PAGES.labels(result).inc(num_pages)
            self._count_out(segment)
            self._written_s = self._loop.time()
            self._loop.call_later(_REST_S + _TIMER_SLACK_S, self._rest)
            self.on_settled(num_pages, is_lost)
        if coded is not None and num_pages < self._spec.span_pages:
            tail = await self._run(coded.joined)  # a copy, of up to 90 MB: not on the event loop
            await self._join(self._tails.add(tail))

    @asynccontextmanager
    async def _turn(self, segment: PageBatch) -> AsyncIterator[None]:
        """Wait until few segments are in work, and their chunks take little memory."""

        def may_begin() -> bool:
            new_bytes = segment.size_bytes - segment.coded_bytes
            fits = not new_bytes or self._coded_bytes + new_bytes <= self._queue_bytes // 2
            return not self._num_in_work or (self._num_in_work < _CONCURRENT_SEGMENTS and fits)

        async with self._turns:
            await self._turns.wait_for(may_begin)
            self._num_in_work += 1
        try:
            yield
        finally:
            self._num_in_work -= 1
            async with self._turns:
                self._turns.notify_all()

    def _run(self, compute: Callable[[], T]) -> asyncio.Future[T]:
        return self._loop.run_in_executor(self._segment_pool, compute)

    async def _encode_and_commit(self, segment: PageBatch) -> EncodedSegment | None:
        """Return what was stored, before encryption; None if the store has these pages already."""
        coarse: list[Manifest] = []
        for _ in range(_ADD_ATTEMPTS):
            found = await self._store.lookup(self._spec.heads.folder, segment.page_hashes)
            if found.num_pages < len(segment.page_hashes):
                break
            coarse = await asyncio.to_thread(_coarse_segments, found.hits) if self._refines else []
            if coarse:
                break
            if await self._add_sides(found.hits, segment):
                self.on_known(segment)
                return None
        else:
            _limited.warning("sides", f"side pages not stored: others changed the segment {_ADD_ATTEMPTS} times")
            return None
        started_s = time.monotonic()
        coded = self._expiring(await self._run(partial(self._encode, segment)))
        encoded_s = time.monotonic()
        coded_bytes = sum(map(len, coded.contents))
        self._count(coded_bytes, coded_bytes)
        self._count_out(segment)
        segment.pieces.clear()  # the engine has their memory back while the chunks are sent
        segment.sides.clear()
        try:
            await self._commit(coded, coarse, encoded_s - started_s)
        finally:
            self._count(-coded_bytes, -coded_bytes)
        return coded

    def _expiring(self, coded: EncodedSegment) -> EncodedSegment:
        if self._ttl_s is None:
            return coded
        expires = math.ceil(time.time() + self._ttl_s)
        return replace(coded, manifest=msgspec.structs.replace(coded.manifest, expires=expires))

    async def _join(self, pieces: Sequence[CodedSegment]) -> None:
        """Write the segments of a span again as one, if there are any, and none has expired. If that fails, they are as
        good as before."""
        if not pieces or self.is_off or any(each.manifest.is_expired(time.time()) for each in pieces):
            return
        started_s = time.monotonic()
        try:
            whole = await self._run(partial(join_segments, self._spec, pieces, self._encode_pool))
            await self._commit(whole, [each.manifest for each in pieces], time.monotonic() - started_s)
        except KVFetchError as e:
            metrics.log_failure("write", e, "the segments of a span are not joined")

    async def _commit(self, coded: EncodedSegment, replaced: Iterable[Manifest], encode_s: float) -> None:
        started_s = time.monotonic()
        stored, num_bytes = await commit_segment(self._store, coded)
        self.on_committed(stored)
        manifest = stored.manifest
        for each in replaced:
            if each.key != manifest.key:
                self._retiring.begin(self._delete_later(each, manifest.key))
        metrics.STAGE_SECONDS.labels("encode").observe(encode_s)
        metrics.STAGE_SECONDS.labels("commit").observe(time.monotonic() - started_s)
        metrics.WIRE_BYTES.labels("write").inc(num_bytes)
        side_bytes = sum(page.num_bytes for side in manifest.sides for page in side.pages)
        metrics.RAW_BYTES.labels("write").inc(manifest.num_pages * self._spec.heads.geometry.page_bytes + side_bytes)

    async def _delete_later(self, replaced: Manifest, whole: SegmentKey) -> None:
        """Delete a segment that ``whole`` replaces. If that fails, it stays until the store evicts it, which is
        harmless."""
        await asyncio.sleep(self._retire_s)
        with contextlib.suppress(KVFetchError):
            if await self._store.get(whole.manifest_name) is not None:  # it may have been damaged, or evicted
                await delete_segment(self._store, replaced)

    async def _add_sides(self, hits: Sequence[SegmentHit], segment: PageBatch) -> bool:
        """Add side pages to the stored segments that lack them. Return False if another writer was faster.

        Raises KVFetchError.
        """
        first_page = 0
        for hit in hits if segment.sides else ():
            manifest = await asyncio.to_thread(decode_manifest, hit.manifest)
            held = range(first_page, first_page + hit.num_pages)
            first_page += hit.num_pages
            keys = {(pool, page): (pool, page - held.start + hit.first_page) for pool, page in segment.sides}
            stored = await asyncio.to_thread(side_places, manifest)
            new = {keys[k]: x for k, x in segment.sides.items() if k[1] in held and keys[k] not in stored}
            if not new:
                continue
            if len(manifest.sides) == MAX_SIDES:
                _limited.warning("sides", f"side pages not stored: {manifest.key.stem} has {MAX_SIDES} additions")
                continue
            await self._store.require_replace()
            require_rewritable(hit.manifest)
            if not _may_change(self._store, manifest):
                continue
            side, data = await self._run(partial(encode_side, new, self._encode_pool))
            side, data = await self._run(partial(secure_side, manifest, side, data, self._store.keys))
            whole = msgspec.structs.replace(manifest, sides=(*manifest.sides, side))
            content = whole.encode()
            await self._store.put(whole.data_name(side), data)
            if not await self._store.replace(manifest.key.manifest_name, content, object_digest(hit.manifest)):
                return False
            self._tails.forget(manifest.key)
        return True

    def _encode(self, segment: PageBatch) -> EncodedSegment:
        ahead = {span.first_page - segment.first_page: span.chunks for span in segment.spans if span.chunks}
        coded = encode_pages(
            self._spec,
            [x for piece in segment.pieces for x in (piece.pieces if isinstance(piece, SpanPages) else (piece,))],
            segment.first_page,
            segment.previous_hash,
            segment.page_hashes,
            self._encode_pool,
            ahead,
        )
        return coded.with_side(*encode_side(segment.sides, self._encode_pool)) if segment.sides else coded

    async def drain(self) -> None:
        """Write all queued pages, and wait for that."""
        self._start(self._gatherer.flush())
        await self._tasks.join()

    async def close(self) -> None:
        """Drop unfinished segments. Call ``drain`` first to write them."""
        await self._tasks.cancel()
        await self._retiring.cancel()
        self._segment_pool.shutdown(wait=False, cancel_futures=True)


def _coarse_segments(hits: Sequence[SegmentHit]) -> list[Manifest]:
    """Return the manifests among ``hits`` that have become coarser. Return none if a hit uses only part of its segment:
    replacing it would lose the rest."""
    coarse = []
    for hit in hits:
        manifest = decode_manifest(hit.manifest)
        if hit.num_pages < manifest.num_pages:
            return []
        if manifest.num_dropped:
            coarse.append(manifest)
    return coarse


def _may_change(store: Store, manifest: Manifest) -> bool:
    """Return whether readers with keys could still use a segment if it was written again through ``store``."""
    return bool(store.keys) or not manifest.is_encrypted


async def commit_segment(store: Store, segment: Segment) -> tuple[Segment, int]:
    """Put the data, then the manifest, which is the commit: readers see a whole segment or none. Return the segment as
    the store has it, which may be encrypted, and the number of bytes put.

    Raises StoreError; objects put before are then garbage that no reader sees.
    """
    if store.keys:
        segment = await asyncio.to_thread(_secured, segment, store)
    manifest = segment.manifest.encode()
    num_bytes = len(manifest)
    for name, data in segment.data_objects():
        await store.put(name, data)
        num_bytes += len(data)
    await store.put(segment.manifest.key.manifest_name, manifest)
    return segment, num_bytes


def _secured(segment: Segment, store: Store) -> CodedSegment:
    whole = segment.joined() if isinstance(segment, EncodedSegment) else segment
    return secure_segment(whole, store.keys)


async def delete_segment(store: Store, known: Manifest) -> None:
    """Delete a segment with all data of its stored manifest and in ``known``, the manifest first.

    Raises StoreError; some of its objects may be deleted then. Data that is left is garbage that no reader sees.
    """
    names = set(known.data_names)
    stored = await store.get(known.key.manifest_name)
    if stored is not None:
        with contextlib.suppress(FormatError):
            names |= decode_manifest(stored).data_names
    await store.delete(known.key.manifest_name)
    for name in names:
        await store.delete(name)
