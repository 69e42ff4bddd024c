"""Transmit, decode and restore: three stages that overlap, each bounded.

The event loop transmits; decoding and restoring run on a decode pool. What is decided without I/O lies in
``plan``; this module does it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from sgl_kvfetch import metrics, timeline
from sgl_kvfetch.adapt.policy import Policy
from sgl_kvfetch.adapt.pool import DecodePool
from sgl_kvfetch.codecs.base import Decoders
from sgl_kvfetch.container.manifest import Cell, decode_manifest
from sgl_kvfetch.container.segment import SegmentReader
from sgl_kvfetch.errors import CorruptError, FormatError, KVFetchError, StoreError
from sgl_kvfetch.fetch.ahead import ReadAhead
from sgl_kvfetch.fetch.budget import BytesBudget
from sgl_kvfetch.fetch.link import DecodeRate, Link
from sgl_kvfetch.fetch.plan import CellsKey, PageSource, ReadUnit, SpanPart, read_units, span_parts
from sgl_kvfetch.fetch.progress import FetchProgress
from sgl_kvfetch.fetch.restore import restore_cell, working_bytes
from sgl_kvfetch.fetch.rounds import Destination, Round
from sgl_kvfetch.fetch.sink import GuardedSink
from sgl_kvfetch.fetch.variants import VariantChooser
from sgl_kvfetch.stores.base import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FetchResult:
    num_pages: int  # from the first page asked for, restored without a gap
    failures: tuple[KVFetchError, ...]
    timed_out: bool  # bytes did not come
    starved: bool = False  # bytes came, and nobody gave them a destination in time
    late: bool = False  # the rest was not asked for in time, or would have come too late


class _SettledError(Exception):
    """Ends a fetch of which no more can be had."""


class Fetcher:
    """Fetches pages from one store. Belongs to one event loop."""

    def __init__(
        self,
        store: Store,
        pool: DecodePool[Decoders],
        *,
        read_bytes: int,
        inflight_bytes: int,
        may_delete: bool,
        decode_bytes: int | None = None,
        policy: Policy | None = None,
    ) -> None:
        """``may_delete``: whether segments that prove corrupt are deleted, so that they can be written again.
        ``decode_bytes`` bounds the frames and values that are on their way from bitstreams to pages; None: the sessions
        of the pool do. ``policy`` chooses among a segment's variants, and needs a pool with a profile; None: the first
        variant that can be decoded is read."""
        self._store = store
        self._pool = pool
        self._read_bytes = read_bytes
        # Half each, so that bytes that wait for pages never keep those from coming that have theirs.
        self._ahead_budget = BytesBudget(max(1, inflight_bytes // 2))
        self._fetch_budget = BytesBudget(max(1, inflight_bytes - inflight_bytes // 2))
        self._decode_budget = None if decode_bytes is None else BytesBudget(decode_bytes)
        self.link = Link()
        self.decode_rate = DecodeRate(pool.num_sessions)
        self._chooser = None if policy is None else VariantChooser(policy, pool, self.link)
        self._may_delete = may_delete
        self._condemning: dict[str, asyncio.Task[None]] = {}
        self._running: set[FetchProgress] = set()
        self._ahead = ReadAhead(
            self.link, self._ahead_budget, partial(self._transmit, request_id=""), self._report_queue
        )
        # Bytes of spans that fetches used in part: SGLang fetches in batches of 128 pages, and the next batch, or the
        # next turn of a conversation, begins with the rest.
        self._begun: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._begun_bytes = inflight_bytes // 8

    def close(self, *, wait: bool = True) -> None:
        """Close the pool. Fetches must be over. ``wait``: for what is decoded at the moment."""
        self._pool.close(wait=wait)

    def forget(self) -> None:
        """Keep no bytes beyond the fetches that run."""
        self._begun.clear()
        self._ahead.clear()

    def read_ahead(self, sources: Sequence[PageSource], expire_s: float) -> None:
        """Begin to transmit what these pages need, as the link brings it and as far as there is room, and keep it for
        ``expire_s``."""
        self._ahead.begin(partial(self._units_ahead, span_parts(sources)), expire_s)

    def _units_ahead(self, parts: Sequence[SpanPart], is_taken: Callable[[CellsKey], bool]) -> Iterator[ReadUnit]:
        unasked = sum(part.reader.manifest.cells_per_span for part in parts)
        for part in parts:
            left = unasked
            for unit in self._units(part, lambda: left, is_taken):  # noqa: B023, it is to see how it changes
                left -= len(unit.cells)
                if unit.key not in self._begun:
                    yield unit
            unasked -= part.reader.manifest.cells_per_span

    async def fetch(
        self, sources: Sequence[PageSource], pool_pages: Sequence[int], sink: GuardedSink, timeout_s: float
    ) -> FetchResult:
        """Restore pages into ``pool_pages`` through ``sink``: `fetch_rounds` in one whose destination is known."""
        assert len(sources) == len(pool_pages)
        only = Round(0, len(sources))
        only.give(Destination(pool_pages, sink))
        return await self.fetch_rounds(sources, [only], timeout_s)

    async def fetch_rounds(
        self,
        sources: Sequence[PageSource],
        rounds: Sequence[Round],
        timeout_s: float,
        *,
        request_id: str = "",
        on_requested: Callable[[], None] | None = None,
    ) -> FetchResult:
        """Restore pages to where ``rounds``, which follow one another and cover all of them, say.

        Bytes come before there is a destination for them, as far as there is room. A round ends, in its turn, as soon
        as all its pages are restored; when this returns or raises, all have ended. Returns within about ``timeout_s``,
        and does not ask for what the link, as measured, would bring only after that; what failed or came too late is
        left out of ``num_pages``, and the pages beyond may have been written in part.
        ``on_requested`` is called when the link could serve another fetch beside this one, unless this one ends first.
        Never raises a domain error. ``request_id`` is for the timeline.
        """
        progress = FetchProgress(sources, rounds)
        self._running.add(progress)
        requested = asyncio.Event()
        announcing = asyncio.create_task(self._announce(requested, on_requested))
        timed_out = starved = False
        try:
            async with asyncio.timeout(timeout_s):
                deadline_s = time.monotonic() + timeout_s
                await self._run(progress, requested, deadline_s, request_id)
        except TimeoutError:
            timed_out = progress.num_transmitting > 0
            starved = not timed_out and progress.num_waiting > 0
            progress.is_late |= not timed_out and not starved
        finally:
            announcing.cancel()
            self._running.remove(progress)
            progress.end()
        return FetchResult(progress.num_pages, tuple(progress.failures), timed_out, starved, progress.is_late)

    async def _run(self, progress: FetchProgress, requested: asyncio.Event, deadline_s: float, request_id: str) -> None:
        """``requested`` is set when nothing more can be asked for, for the moment or at all."""
        try:
            async with asyncio.TaskGroup() as group:
                for index, (each, part) in enumerate(progress.parts):
                    if self._comes_after(part, deadline_s):
                        progress.is_late = True
                        progress.fail(index, None)
                    for unit in self._units(part, self._num_unasked):
                        if not progress.is_wanted(index):
                            break
                        progress.num_unasked -= len(unit.cells)
                        self._ahead.leave_out(unit)
                        budget = await self._acquire(unit, each, requested)
                        task = group.create_task(self._run_unit(unit, index, progress, request_id))
                        # Not in the task itself: one that is cancelled before its first step runs no line of it.
                        task.add_done_callback(partial(self._release, unit, budget))
                        await asyncio.sleep(0)  # its turn to ask for its bytes
                        await self.link.may_read()  # and so the next one is chosen as late as can be
                    if not progress.is_wanted(index):
                        break
                progress.num_unasked = 0
                requested.set()
                if progress.advance():
                    raise _SettledError
        except* _SettledError:
            pass

    async def _announce(self, requested: asyncio.Event, on_requested: Callable[[], None] | None) -> None:
        if on_requested is not None:
            await requested.wait()
            await self.link.has_room()
            on_requested()

    def _comes_after(self, part: SpanPart, deadline_s: float) -> bool:
        now_s = time.monotonic()
        goodput_bps = self.link.goodput_bps(now_s)
        if goodput_bps is None:
            return False
        start, end = part.reader.span_range_bytes(part.span)
        return now_s + (self.link.outstanding_bytes + end - start) * 8 / goodput_bps > deadline_s

    async def _acquire(self, unit: ReadUnit, each: Round, requested: asyncio.Event) -> BytesBudget:
        """Room for the unit's bytes."""
        if not each.destination.done():
            if self._ahead_budget.try_acquire(unit.size_bytes):
                return self._ahead_budget
            requested.set()
            if await self._ahead_budget.acquire(unit.size_bytes, unless=each.destination):
                return self._ahead_budget
        await self._fetch_budget.acquire(unit.size_bytes)
        return self._fetch_budget

    async def _run_unit(self, unit: ReadUnit, index: int, progress: FetchProgress, request_id: str) -> None:
        """One unit through all three stages."""
        each, part = progress.parts[index]
        try:
            progress.num_transmitting += 1
            try:
                data = await self._bytes_of(unit, request_id)
            except KVFetchError:
                progress.num_transmitting -= 1
                raise
            progress.num_transmitting -= 1
            each.want()
            progress.num_waiting += 1
            destination = await asyncio.shield(each.destination)
            progress.num_waiting -= 1
            if destination is None:
                progress.fail(index, None)
            else:
                pool_pages = [destination.pool_pages[i] for i in part.request_pages]
                cells = [
                    self._restore(unit, cell, data, part.span_pages, pool_pages, destination.sink, request_id)
                    for cell in unit.cells
                ]
                # All of them, whatever becomes of one: their memory counts until they are done.
                for error in await asyncio.gather(*cells, return_exceptions=True):
                    if error is not None:
                        raise error
                progress.restored(index, len(unit.cells))
                if part.is_begun and part.request_pages[-1] == each.end_page - each.first_page - 1:
                    self._keep_begun(unit, data)
        except KVFetchError as e:
            if isinstance(e, FormatError):
                metrics.CORRUPT_CHUNKS.inc()
                self._condemn(unit)
            progress.fail(index, e)
        if progress.advance():
            raise _SettledError

    async def _restore(
        self,
        unit: ReadUnit,
        cell: Cell,
        data: bytes,
        span_pages: Sequence[int],
        pool_pages: list[int],
        sink: GuardedSink,
        request_id: str,
    ) -> None:
        """One cell, on the decode pool."""
        piece, size_bytes = unit.piece(cell, data), working_bytes(unit.reader, cell)
        if self._decode_budget is not None:
            await self._decode_budget.acquire(size_bytes)
        try:
            future = self._submit(
                unit.reader,
                cell,
                partial(restore_cell, unit.reader, cell, piece, span_pages, pool_pages, sink, request_id=request_id),
            )
        except BaseException:
            self._restored(size_bytes)
            raise
        loop = asyncio.get_running_loop()
        # The memory is in use until the thread is done with it, whether or not somebody still waits for that.
        future.add_done_callback(lambda _: _call_soon(loop, partial(self._restored, size_bytes)))
        seconds = await asyncio.wrap_future(future)
        self.decode_rate.add(len(piece), seconds)

    def _submit(self, reader: SegmentReader, cell: Cell, job: Callable[[Decoders], float]) -> Future[float]:
        if self._chooser is None:
            return self._pool.submit(job)
        return self._pool.submit(job, self._chooser.profile_variant(reader), work=self._chooser.work(reader, cell))

    def _num_unasked(self) -> int:
        """Cells that the running fetches have yet to ask for. They share link and decoders."""
        return sum(progress.num_unasked for progress in self._running)

    def _units(
        self,
        part: SpanPart,
        num_unasked: Callable[[], int],
        is_taken: Callable[[CellsKey], bool] = lambda _: False,
    ) -> Iterator[ReadUnit]:
        """What to read of a span: in the variant that is best at the moment when the unit is asked for, unless it is on
        its way already. Those whose cells somebody else has taken are left out. ``num_unasked``: cells that are yet to
        be asked for, this one's among them."""
        if self._chooser is None:
            yield from (u for u in read_units(part.reader, part.span, self._read_bytes) if not is_taken(u.cells_key))
            return
        for run in self._chooser.runs(part.reader, part.span):
            key = part.reader.manifest.key.stem, run[0]
            if not is_taken(key):
                unit = self._ahead.find(key)
                # A segment that was written anew in the meantime may be cut into other spans.
                if unit is None or unit.reader.manifest.span_pages != part.reader.manifest.span_pages:
                    reader = self._chooser.choose(part.reader, run, num_unasked())
                    unit = ReadUnit(reader, run, reader.cell_range(run[0])[0], reader.cell_range(run[-1])[1])
                yield unit

    def _restored(self, size_bytes: int) -> None:
        if self._decode_budget is not None:
            self._decode_budget.release(size_bytes)

    def _release(self, unit: ReadUnit, budget: BytesBudget, _: asyncio.Task[None]) -> None:
        budget.release(unit.size_bytes)
        self._report_queue()

    async def _bytes_of(self, unit: ReadUnit, request_id: str) -> bytes:
        if unit.key in self._begun:
            return self._begun[unit.key]
        task = self._ahead.take(unit)
        if task is None:
            return await self._transmit(unit, request_id)
        try:
            return await task
        finally:
            self._ahead_budget.release(unit.size_bytes)

    def _keep_begun(self, unit: ReadUnit, data: bytes) -> None:
        """Keep these bytes, and as many older ones as there is room for, but all of one span."""
        self._begun[unit.key] = data
        self._begun.move_to_end(unit.key)
        name, span = unit.reader.data_name, unit.cells[0].span
        first, end = unit.reader.span_range_bytes(span)
        while sum(map(len, self._begun.values())) > self._begun_bytes:
            oldest_name, oldest_start = oldest = next(iter(self._begun))
            if oldest_name == name and first <= oldest_start < end:
                return
            del self._begun[oldest]

    def _condemn(self, unit: ReadUnit) -> None:
        """Look at a corrupt segment once more in the background; delete it if it is corrupt indeed, not garbled on the
        way: lookups would go on to find it, and writers would think its pages stored."""
        name = unit.reader.data_name
        if self._may_delete and name not in self._condemning:
            task = asyncio.get_running_loop().create_task(self._delete_if_corrupt(unit))
            self._condemning[name] = task
            task.add_done_callback(lambda _: self._condemning.pop(name))

    async def _delete_if_corrupt(self, unit: ReadUnit) -> None:
        try:
            data = await self._transmit(unit, "")
            for cell in unit.cells:
                decode = partial(_decode_on_cpu, unit.reader, cell, unit.piece(cell, data))
                await asyncio.wrap_future(self._pool.submit(decode))
        except StoreError as e:
            logger.debug("corrupt segment not looked at again: %s", e)
        except FormatError:
            with contextlib.suppress(StoreError):
                await self._delete_if_named(unit.reader)
            self._ahead.forget(unit.reader.data_name)

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

    async def _transmit(self, unit: ReadUnit, request_id: str) -> bytes:
        started_s = time.monotonic()
        data = None
        self.link.started(unit.size_bytes)
        try:
            data = await self._store.get(unit.reader.data_name, unit.start, unit.size_bytes)
        finally:
            self.link.ended(unit.size_bytes, started_s, is_whole=data is not None)
        if data is None:
            raise StoreError("missing", f"{unit.reader.data_name} is gone")
        ended_s = time.monotonic()
        metrics.STAGE_SECONDS.labels("transmit").observe(ended_s - started_s)
        metrics.WIRE_BYTES.labels("read").inc(len(data))
        timeline.add(request_id, "transmit", started_s, ended_s)
        self._report_queue()
        return data

    def _report_queue(self) -> None:
        used = self._ahead_budget.used_bytes + self._fetch_budget.used_bytes
        metrics.QUEUED_BYTES.labels("read").set(used)


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


def _decode_on_cpu(reader: SegmentReader, cell: Cell, data: memoryview, _: Decoders) -> None:
    """Whatever the session has: what NVDEC gets wrong is to cost misses, never what is stored."""
    reader.decode_cell(cell, data)


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """From any thread. Nothing, if the loop is no more."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function)
