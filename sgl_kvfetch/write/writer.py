"""Encode and commit segments in the background, bounded; what does not fit is dropped and counted."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

from sgl_kvfetch import metrics
from sgl_kvfetch.container.segment import CodedSegment, SegmentSpec, encode_segment
from sgl_kvfetch.errors import KVFetchError, QuantiseError
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.stores.base import Store
from sgl_kvfetch.write.gather import Gatherer, PageBatch

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)

# Segments in work at once. Each spreads its cells over the encode pool; a second one fills the pool while the first
# talks to the store.
_CONCURRENT_SEGMENTS = 2
_TIMER_SLACK_S = 0.01  # a timer may fire a little early


class Writer:
    """Takes pages from any thread; gathers, encodes and commits them on its event loop and pools."""

    def __init__(
        self,
        store: Store,
        spec: SegmentSpec,
        encode_pool: Executor,
        *,
        max_segment_pages: int,
        queue_bytes: int,
        linger_s: float,
    ) -> None:
        """Call on the event loop that is to do the work."""
        self._store = store
        self._spec = spec
        self._encode_pool = encode_pool
        # encode_segment waits for the cells it hands to the encode pool, so it must not sit in that pool itself.
        self._segment_pool = ThreadPoolExecutor(_CONCURRENT_SEGMENTS, "kvfetch-segment")
        self._gatherer = Gatherer(max_segment_pages, linger_s)
        self._linger_s = linger_s
        self._queue_bytes = queue_bytes
        self._lock = threading.Lock()
        self._used_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._in_work = asyncio.Semaphore(_CONCURRENT_SEGMENTS)
        self._tasks: set[asyncio.Task[None]] = set()

    def reserve(self, num_bytes: int) -> bool:
        """Take room in the queue, before the pages are copied. False, and counted by the caller, if there is none."""
        with self._lock:
            if self._used_bytes + num_bytes > self._queue_bytes:
                return False
            self._used_bytes += num_bytes
            metrics.QUEUED_BYTES.labels("write").set(self._used_bytes)
            return True

    def submit(self, batch: PageBatch, previous_hash: bytes | None) -> None:
        """Hand over pages whose room is reserved. From any thread; never waits."""
        self._loop.call_soon_threadsafe(self._add, batch, previous_hash)

    def _add(self, batch: PageBatch, previous_hash: bytes | None) -> None:
        self._start(self._gatherer.add(batch, previous_hash, time.monotonic()))
        self._loop.call_later(self._linger_s + _TIMER_SLACK_S, self._cut_due)

    def _cut_due(self) -> None:
        self._start(self._gatherer.due(time.monotonic()))

    def _start(self, segments: Sequence[PageBatch]) -> None:
        for segment in segments:
            task = self._loop.create_task(self._write(segment))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _write(self, segment: PageBatch) -> None:
        num_pages = len(segment.page_hashes)
        result = "dropped_error"
        try:
            async with self._in_work:
                result = await self._encode_and_commit(segment)
        except QuantiseError as e:
            result = "dropped_invalid"
            _limited.warning("quantise", f"segment of {num_pages} pages not written: {e}")
        except KVFetchError as e:
            _limited.warning(f"write {type(e).__name__}", f"segment of {num_pages} pages not written: {e}")
        except Exception:
            logger.exception("segment of %d pages not written", num_pages)
        finally:
            metrics.WRITTEN_PAGES.labels(result).inc(num_pages)
            self._release(segment.size_bytes)

    async def _encode_and_commit(self, segment: PageBatch) -> str:
        namespace = self._spec.namespace.digest()
        if (await self._store.lookup(namespace, segment.page_hashes)).num_pages == len(segment.page_hashes):
            return "known"
        started_s = time.monotonic()
        coded = await self._loop.run_in_executor(self._segment_pool, self._encode, segment)
        encoded_s = time.monotonic()
        manifest = coded.manifest.encode()
        await self._store.put(coded.data_name, coded.data)
        await self._store.put(coded.manifest.key.manifest_name, manifest)
        metrics.STAGE_SECONDS.labels("encode").observe(encoded_s - started_s)
        metrics.STAGE_SECONDS.labels("commit").observe(time.monotonic() - encoded_s)
        metrics.WIRE_BYTES.labels("write").inc(len(coded.data) + len(manifest))
        metrics.RAW_BYTES.labels("write").inc(segment.size_bytes)
        return "stored"

    def _encode(self, segment: PageBatch) -> CodedSegment:
        return encode_segment(
            self._spec,
            {tensor: values.flatten(0, 1) for tensor, values in segment.values.items()},
            segment.first_page,
            segment.page_hashes,
            self._encode_pool,
        )

    def _release(self, num_bytes: int) -> None:
        with self._lock:
            self._used_bytes -= num_bytes
            metrics.QUEUED_BYTES.labels("write").set(self._used_bytes)

    async def drain(self) -> None:
        """Write all that waits."""
        self._start(self._gatherer.flush())
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Drop what is still in work. Call ``drain`` first to keep it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._segment_pool.shutdown(wait=False, cancel_futures=True)
