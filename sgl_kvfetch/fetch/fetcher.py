"""Transmit, decode and restore: three stages that overlap, each bounded.

The event loop transmits; decoding and restoring run on a thread pool. What is decided without I/O lies in
``plan``; this module does it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial

from sgl_kvfetch import metrics
from sgl_kvfetch.container.manifest import Cell, decode_manifest
from sgl_kvfetch.container.segment import SegmentReader
from sgl_kvfetch.errors import CorruptError, FormatError, KVFetchError, StoreError
from sgl_kvfetch.fetch.budget import BytesBudget
from sgl_kvfetch.fetch.plan import PageSource, ReadUnit, SpanPart, read_units, span_parts
from sgl_kvfetch.fetch.sink import GuardedSink
from sgl_kvfetch.stores.base import Store

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Progress:
    """Which spans of one fetch are whole. ``failed_from`` is the first span (in the request's order) that cannot be."""

    cells_left: list[int]
    failed_from: int
    failures: list[KVFetchError] = field(default_factory=list)
    begun: dict[tuple[str, int], bytes] = field(default_factory=dict)

    def fail(self, part: int, error: KVFetchError) -> None:
        self.failures.append(error)
        self.failed_from = min(self.failed_from, part)

    @property
    def num_whole(self) -> int:
        """How many spans from the first on are whole."""
        whole = (i for i, left in enumerate(self.cells_left[: self.failed_from]) if left)
        return next(whole, min(self.failed_from, len(self.cells_left)))


@dataclass(frozen=True, slots=True)
class FetchResult:
    num_pages: int  # from the first page asked for, restored without a gap
    failures: tuple[KVFetchError, ...]
    timed_out: bool


class Fetcher:
    """Fetches pages from one store. Belongs to one event loop."""

    def __init__(
        self, store: Store, decode_pool: Executor, *, read_bytes: int, inflight_bytes: int, may_delete: bool
    ) -> None:
        """``may_delete``: whether segments that prove corrupt are deleted, so that they can be written again."""
        self._store = store
        self._decode_pool = decode_pool
        self._read_bytes = read_bytes
        # Half each, so that reads ahead, which nobody may come for, never keep a fetch from its bytes.
        self._ahead_budget = BytesBudget(max(1, inflight_bytes // 2))
        self._fetch_budget = BytesBudget(max(1, inflight_bytes - inflight_bytes // 2))
        self._may_delete = may_delete
        self._condemning: dict[str, asyncio.Task[None]] = {}
        self._ahead: dict[tuple[str, int], tuple[ReadUnit, asyncio.Task[bytes], asyncio.TimerHandle]] = {}
        # Bytes of spans that fetches used in part: SGLang fetches in batches of 128 pages, and the next batch, or the
        # next turn of a conversation, begins with the rest.
        self._begun: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._begun_bytes = inflight_bytes // 8

    def read_ahead(self, sources: Sequence[PageSource], expire_s: float) -> None:
        """Begin to transmit what these pages need, as far as there is room, and keep it for ``expire_s``."""
        loop = asyncio.get_running_loop()
        for part in span_parts(sources):
            for unit in read_units(part.reader, part.span, self._read_bytes):
                if unit.key in self._ahead or unit.key in self._begun:
                    continue
                if not self._ahead_budget.try_acquire(unit.size_bytes):
                    return
                task = loop.create_task(self._transmit(unit))
                task.add_done_callback(_retrieve_exception)
                self._ahead[unit.key] = unit, task, loop.call_later(expire_s, self._expire, unit.key)

    async def fetch(
        self, sources: Sequence[PageSource], pool_pages: Sequence[int], sink: GuardedSink, timeout_s: float
    ) -> FetchResult:
        """Restore pages into ``pool_pages`` through ``sink``.

        Returns within about ``timeout_s``; what failed or came too late is left out of ``num_pages``. The pool pages
        beyond it may have been written in part. Never raises a domain error.
        """
        assert len(sources) == len(pool_pages)
        parts = span_parts(sources)
        progress = _Progress([part.reader.manifest.cells_per_span for part in parts], len(parts))
        timed_out = False
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                for index, part in enumerate(parts):
                    destination = [pool_pages[i] for i in part.request_pages]
                    for unit in read_units(part.reader, part.span, self._read_bytes):
                        if index >= progress.failed_from:
                            break
                        await self._fetch_budget.acquire(unit.size_bytes)
                        task = group.create_task(self._run_unit(unit, index, part, destination, sink, progress))
                        # Not in the task itself: one that is cancelled before its first step runs no line of it.
                        task.add_done_callback(partial(self._release, unit))
        except TimeoutError:
            timed_out = True
        finally:
            sink.close()
        self._keep_begun(progress.begun)
        num_pages = sum(len(part.request_pages) for part in parts[: progress.num_whole])
        return FetchResult(num_pages, tuple(progress.failures), timed_out)

    async def _run_unit(
        self,
        unit: ReadUnit,
        index: int,
        part: SpanPart,
        pool_pages: list[int],
        sink: GuardedSink,
        progress: _Progress,
    ) -> None:
        """One unit through all three stages."""
        loop = asyncio.get_running_loop()
        try:
            if index >= progress.failed_from:
                return
            data = await self._bytes_of(unit)
            await asyncio.gather(
                *(
                    loop.run_in_executor(
                        self._decode_pool, _restore, unit, cell, data, part.span_pages, pool_pages, sink
                    )
                    for cell in unit.cells
                )
            )
            progress.cells_left[index] -= len(unit.cells)
            if index == len(progress.cells_left) - 1 and part.is_begun:
                progress.begun[unit.key] = data
        except KVFetchError as e:
            if isinstance(e, FormatError):
                metrics.CORRUPT_CHUNKS.inc()
                self._condemn(unit)
            progress.fail(index, e)

    def _release(self, unit: ReadUnit, _: asyncio.Task[None]) -> None:
        self._fetch_budget.release(unit.size_bytes)
        self._report_queue()

    async def _bytes_of(self, unit: ReadUnit) -> bytes:
        if unit.key in self._begun:
            return self._begun[unit.key]
        if unit.key not in self._ahead:
            return await self._transmit(unit)
        _, task, timer = self._ahead.pop(unit.key)
        timer.cancel()  # it holds the task, and so the bytes
        try:
            return await task
        finally:
            self._ahead_budget.release(unit.size_bytes)

    def _keep_begun(self, begun: dict[tuple[str, int], bytes]) -> None:
        """Keep these, and as many older ones as there is room for."""
        for key, data in begun.items():
            self._begun[key] = data
            self._begun.move_to_end(key)
        while len(self._begun) > len(begun) and sum(map(len, self._begun.values())) > self._begun_bytes:
            self._begun.popitem(last=False)

    def _expire(self, key: tuple[str, int]) -> None:
        """Nobody is to use a read ahead any more."""
        unit, task, timer = self._ahead.pop(key)
        timer.cancel()
        task.cancel()
        self._ahead_budget.release(unit.size_bytes)
        self._report_queue()

    def _condemn(self, unit: ReadUnit) -> None:
        """Look at a corrupt segment once more in the background; delete it if it is corrupt indeed, not garbled on the
        way: lookups would go on to find it, and writers would think its pages stored."""
        name = unit.reader.data_name
        if self._may_delete and name not in self._condemning:
            task = asyncio.get_running_loop().create_task(self._delete_if_corrupt(unit))
            self._condemning[name] = task
            task.add_done_callback(lambda _: self._condemning.pop(name))

    async def _delete_if_corrupt(self, unit: ReadUnit) -> None:
        loop = asyncio.get_running_loop()
        try:
            data = await self._transmit(unit)
            for cell in unit.cells:
                await loop.run_in_executor(self._decode_pool, unit.reader.decode_cell, cell, unit.piece(cell, data))
        except StoreError as e:
            logger.debug("corrupt segment not looked at again: %s", e)
        except FormatError:
            with contextlib.suppress(StoreError):
                await self._delete_if_named(unit.reader)
            for key in [key for key in self._ahead if key[0] == unit.reader.data_name]:
                self._expire(key)

    async def _delete_if_named(self, reader: SegmentReader) -> None:
        """Delete a segment, unless its manifest was replaced by one that does without the corrupt data."""
        name = reader.manifest.key.manifest_name
        stored = await self._store.get(name)
        if stored is None:
            return
        with contextlib.suppress(FormatError):
            if reader.data_name not in decode_manifest(stored).data_names:
                return
        logger.warning("deleting the corrupt segment %s", reader.manifest.key.stem)
        metrics.DELETED_SEGMENTS.inc()
        # Not its data: they are garbage now, and may be under way anew from a writer, under the same name.
        await self._store.delete(name)

    async def _transmit(self, unit: ReadUnit) -> bytes:
        started_s = time.monotonic()
        data = await self._store.get(unit.reader.data_name, unit.start, unit.size_bytes)
        if data is None:
            raise StoreError("missing", f"{unit.reader.data_name} is gone")
        metrics.STAGE_SECONDS.labels("transmit").observe(time.monotonic() - started_s)
        metrics.WIRE_BYTES.labels("read").inc(len(data))
        self._report_queue()
        return data

    def _report_queue(self) -> None:
        used = self._ahead_budget.used_bytes + self._fetch_budget.used_bytes
        metrics.QUEUED_BYTES.labels("read").set(used)


def _restore(
    unit: ReadUnit, cell: Cell, data: bytes, span_pages: Sequence[int], pool_pages: list[int], sink: GuardedSink
) -> None:
    """Decode one cell and write the wanted pages of it. Runs on the decode pool."""
    reader = unit.reader
    started_s = time.monotonic()
    quantised = reader.decode_cell(cell, unit.piece(cell, data))
    decoded_s = time.monotonic()
    values = reader.dequantise_cell(cell, quantised)
    values = values.view(-1, reader.geometry.page_size, *values.shape[1:])  # (pages, page_size, layers, heads, dim)
    if len(span_pages) < values.shape[0]:
        values = values[list(span_pages)]
    sink.write(cell.tensor, reader.manifest.group_layers(cell.layer_group)[0], pool_pages, values)
    metrics.STAGE_SECONDS.labels("decode").observe(decoded_s - started_s)
    metrics.STAGE_SECONDS.labels("restore").observe(time.monotonic() - decoded_s)


def failure_reason(error: KVFetchError) -> str:
    """A fixed word for a metric's label."""
    match error:
        case StoreError():
            return error.reason
        case CorruptError():
            return "corrupt"
        case FormatError():
            return "format"
    return type(error).__name__.removesuffix("Error").lower()


def _retrieve_exception(task: asyncio.Task[bytes]) -> None:
    """A read ahead that failed and that nobody came for is no one's concern."""
    if not task.cancelled():
        task.exception()
