"""Transmit, decode and restore: three stages that overlap, each bounded. Decisions without I/O are in ``plan``, and
``reads`` brings the bytes.

A fetch restores a run of pages to one destination. They are read in units, runs of cells of one span: a unit is
requested and arrives, and its cells are decoded and restored one by one, in any order. The event loop transmits;
decoding and restoring run on a decode pool.

What may happen to a unit, and what then: it is late, missing, damaged, or of a key that we lack. Then it fails, and the
fetch ends in front of its pages: a page counts only if all pages before it are whole. A unit that may be coarser is
read without what is damaged or gone. Nothing else is tried twice here; the store's client reads on where a read stalls.

What must hold:

* **A budget's bytes are given back once, whatever happens**: when their job is over, not when a coroutine ends. A
  cancelled fetch still has jobs on the pool.
* **Nothing is written after a fetch is over**: the destination is closed first. SGLang gives the pages to others.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

from sgl_kvfetch import metrics, timeline
from sgl_kvfetch.codec import CellChunks, CellValues, Decoders, Quantised, SegmentReader
from sgl_kvfetch.errors import FormatError, KVFetchError
from sgl_kvfetch.plane.choice import Cost
from sgl_kvfetch.plane.fetch.link import BytesBudget
from sgl_kvfetch.plane.fetch.offers import Tolerance
from sgl_kvfetch.plane.fetch.plan import PageSource, ReadUnit, SpanPart, cut_run, span_parts
from sgl_kvfetch.plane.fetch.pool import DecodePool
from sgl_kvfetch.plane.fetch.reads import UnitReader
from sgl_kvfetch.plane.memory_cache import Held
from sgl_kvfetch.protocol import StridedPages
from sgl_kvfetch.reasons import Reason, reason_of
from sgl_kvfetch.side_by_side import call_soon

logger = logging.getLogger(__name__)

# Values dequantised at a time: dequantising needs several times their memory.
_VALUES_AT_ONCE = 1 << 19
_BYTES_A_VALUE = 24  # during dequantisation: a few copies in float32
_JOB_BYTES = 128 << 10  # of cells that are decoded together: for fewer, a hand-over takes longer

Keep = Callable[[], object]  # keeps cells that were decoded


class Destination(ABC):
    """What one fetch restores cells to, until it is closed. Closing waits for the write under way, and nothing is
    written afterwards: the memory may then belong to another request. Threads may restore cells at once."""

    takes_units = False  # whether all cells of a unit are decoded in one job, and not each as a unit of its own

    def __init__(self) -> None:
        self._is_closed = False
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True

    def write(self, write: Callable[[], None]) -> bool:
        """Call ``write``. Return False, without calling it, if the destination is closed."""
        with self._lock:
            if not self._is_closed:
                write()
            return not self._is_closed

    def is_kept(self, part: int) -> bool:
        """Return whether the cells of a fetch's part were verified by another fetch, and need not be read."""
        return False

    def takes(self, reader: SegmentReader) -> bool:
        """Return whether cells may come as this reader reads them, and not only as the fetch's sources do."""
        return True

    def places(self, unit: ReadUnit) -> list[CellChunks] | None:
        """Return where the chunks of a unit's cells may be received, if they stay as they are coded. Else return
        None."""
        return None

    @abstractmethod
    def decode(self, part: SpanPart, unit: ReadUnit, chunks: Sequence[CellChunks], decoders: Decoders) -> Keep:
        """Verify and decode the chunks of a unit's cells, of which ``part`` is wanted; they may lie in `places`. What
        is returned writes them. Both raise CorruptError, FormatError, UnsupportedError."""

    @abstractmethod
    def working_bytes(self, unit: ReadUnit) -> int:
        """Return the bytes of memory that a unit's cells need until they are written."""


class PoolPages(Destination):
    """Pages of a pool. Cells are restored: joined right into the pages, or dequantised and copied."""

    def __init__(self, pool: StridedPages, pages: Sequence[int]) -> None:
        """``pages``: one for each page of the fetch."""
        super().__init__()
        self._pool = pool
        self._pages = pages

    def decode(self, part: SpanPart, unit: ReadUnit, chunks: Sequence[CellChunks], decoders: Decoders) -> Keep:
        decoded = [unit.reader.decode_cell(cell, each, decoders) for cell, each in zip(unit.cells, chunks, strict=True)]
        return partial(self._restore, part, unit, decoded)

    def working_bytes(self, unit: ReadUnit) -> int:
        """Count frames, their integers, and some values if these are dequantised."""
        most_values = max(min(_VALUES_AT_ONCE, unit.reader.manifest.cell_values(cell)) for cell in unit.cells)
        of_values = 0 if unit.reader.quantiser.is_lossless else most_values * _BYTES_A_VALUE
        return sum(2 * unit.reader.frames_bytes(cell) for cell in unit.cells) + of_values

    def _restore(self, part: SpanPart, unit: ReadUnit, decoded: Sequence[Quantised]) -> None:
        """Join cells in the pages that are wanted, or dequantise them a few pages at a time, and write those."""
        reader = unit.reader
        page_size, grid = reader.geometry.page_size, reader.manifest.grid
        places = {page: self._pages[i] for page, i in zip(part.span_pages, part.request_pages, strict=True)}
        num_pages = reader.manifest.span_tokens(part.span) // page_size
        for cell, quantised in zip(unit.cells, decoded, strict=True):
            layers, heads = grid.layers(cell.layer_group), reader.heads_of(cell)
            if reader.quantiser.is_lossless:
                pages, into = self._pool.of_cell(layers, heads), [places.get(page, -1) for page in range(num_pages)]
                if not self.write(partial(reader.quantiser.restore_pages, quantised, pages, into)):
                    return
                continue
            step = max(1, _VALUES_AT_ONCE * num_pages // reader.manifest.cell_values(cell))
            for first in range(0, num_pages, step):
                wanted = [page for page in range(first, min(first + step, num_pages)) if page in places]
                if not wanted:
                    continue
                tokens = slice(wanted[0] * page_size, (wanted[-1] + 1) * page_size)
                values = reader.dequantise_cell(cell, quantised, tokens)
                if len(wanted) <= wanted[-1] - wanted[0]:
                    values = _pages_of(values, page_size, [page - wanted[0] for page in wanted])
                into = [places[page] for page in wanted]
                if not self.write(partial(self._pool.write, layers, heads, into, values)):
                    return


def _pages_of(values: CellValues, page_size: int, pages: Sequence[int]) -> CellValues:
    """Select some pages of the values."""
    return CellValues(*(x.reshape(-1, page_size, *x.shape[1:])[list(pages)].flatten(0, 1) for x in values))


def restore_cells(
    destination: Destination,
    part: SpanPart,
    unit: ReadUnit,
    chunks: Sequence[CellChunks],
    decoders: Decoders,
    *,
    request: timeline.Request = timeline.NOBODY,
) -> None:
    """Restore a unit's cells, which have these chunks, of one part. ``decoders`` are those of the session that runs
    this. ``request`` is for the timeline. Raises CorruptError, FormatError, UnsupportedError."""
    started_s = time.monotonic()
    keep = destination.decode(part, unit, chunks, decoders)
    decoded_s = time.monotonic()
    keep()
    ended_s = time.monotonic()
    metrics.STAGE_SECONDS.labels("decode").observe(decoded_s - started_s)
    metrics.STAGE_SECONDS.labels("restore").observe(ended_s - decoded_s)
    about: dict[str, int | str] = {"bytes": unit.size_bytes, "codec": unit.reader.codec}
    timeline.add(request, "decode", started_s, decoded_s, **about, coarseness=unit.reader.coarseness)
    timeline.add(request, "restore", decoded_s, ended_s)


_COMPARE_S = 0.05  # how often a fetch is compared with computing
_SLOWER = 1.1  # it ends if it would take so many times as long: estimates have noise, and what has come is lost in part


@dataclass(frozen=True, slots=True)
class FetchResult:
    num_pages: int = 0  # length of the restored run, from the first requested page
    failures: tuple[KVFetchError | TimeoutError, ...] = ()  # TimeoutError: bytes did not arrive in time
    late: bool = False  # the rest was not requested in time, or would have arrived too late
    is_read: bool = field(default=False, compare=False)  # whether it took more than `memory_cache` has

    def count(self, num_asked: int, page_bytes: int) -> None:
        """Count the pages, and misses by reason. ``num_asked``: the pages that the engine wanted, of ``page_bytes`` raw
        bytes each."""
        for failure in self.failures:
            metrics.count_miss("fetch", failure)
        if self.late:
            metrics.miss("fetch", "late")
        metrics.FETCHED_PAGES.labels("hit").inc(self.num_pages)
        metrics.FETCHED_PAGES.labels("miss").inc(num_asked - self.num_pages)
        metrics.RAW_BYTES.labels("read").inc(self.num_pages * page_bytes)


class _SettledError(Exception):
    """Ends a fetch as soon as no further page can be restored."""


class _RunningFetch:
    """Tracks which parts of a fetch are restored. A page counts only if it and all pages before it are whole."""

    def __init__(
        self, sources: Sequence[PageSource], destination: Destination, held: Held, request: timeline.Request
    ) -> None:
        """``held``: the spans whose bytes are in memory. ``request``: for the timeline."""
        self.parts = span_parts(sources)  # in the order of their first pages; several may hold a page, each some heads
        self.destination = destination
        self.held = held
        self.request = request
        self.failures: list[KVFetchError | TimeoutError] = []
        self.num_asked = len(sources)
        self.num_transmitting = 0  # units
        self.is_late = False  # the rest would arrive after the deadline
        self.is_read = False
        self._cells_left = [part.reader.cells_per_span for part in self.parts]
        self.num_unasked = sum(self._cells_left)  # cells whose bytes are not requested yet
        # Before the first page of a part, all earlier pages are in the parts before it.
        self._pages_before = [*(part.request_pages[0] for part in self.parts), self.num_asked]
        self._end = len(self.parts)  # the first part that failed or is not wanted
        self._num_whole = 0

    def has(self, part: SpanPart) -> bool:
        """Return whether all bytes of a span are in memory."""
        return self.held.has(part.reader, part.span)

    def is_wanted(self, part: int) -> bool:
        return part < self._end

    def restored(self, part: int, num_cells: int) -> None:
        self._cells_left[part] -= num_cells

    def take_kept(self, part: int) -> None:
        """Record that a part is in memory, as its pool takes it."""
        taken = self.parts[part]
        self.num_unasked -= taken.reader.cells_per_span
        self.restored(part, taken.reader.cells_per_span)
        metrics.MEMORY_CACHE_READ_BYTES.inc(taken.size_bytes)
        metrics.READ_CELLS.labels(str(taken.reader.coarseness)).inc(taken.reader.cells_per_span)

    def fail(self, part: int, error: KVFetchError | None) -> None:
        """End the fetch before this part. ``error`` is None if the part is not wanted."""
        if error is not None:
            self.failures.append(error)
        self._end = min(self._end, part)

    def advance(self) -> bool:
        """Count the parts that are whole. Return whether every part before the first failure is."""
        while self._num_whole < self._end and not self._cells_left[self._num_whole]:
            self._num_whole += 1
        return self._num_whole == self._end

    def left_bytes(self, sizes: Sequence[int]) -> float:
        """Return how many bytes are not restored yet. ``sizes``: each part's bytes."""
        return sum(
            size * left / part.reader.cells_per_span
            for size, left, part in zip(sizes, self._cells_left, self.parts, strict=True)
        )

    @property
    def share_left(self) -> float:
        """Return the share of the pages that is not part of the restored run yet."""
        return 1 - self.num_pages / self.num_asked

    @property
    def num_pages(self) -> int:
        """Return the length of the restored run, from the first page."""
        return self._pages_before[self._num_whole]


class Fetcher:
    """Fetches pages: orders what is read, decodes it, and restores it. Belongs to one event loop."""

    def __init__(self, reads: UnitReader, pool: DecodePool[Decoders], *, decode_bytes: int = sys.maxsize) -> None:
        """``decode_bytes`` bounds the memory for frames and values between bitstreams and pages; by default, only the
        number of sessions bounds it."""
        self.reads, self.pool, self.link = reads, pool, reads.link
        self._decode_budget = BytesBudget(decode_bytes)
        self._running: set[_RunningFetch] = set()

    @property
    def tolerance(self) -> Tolerance:
        """How coarse what is read may be."""
        return self.reads.chooser.tolerance

    @property
    def is_busy(self) -> bool:
        """Whether a fetch is under way."""
        return bool(self._running)

    def hold(self, sources: Sequence[PageSource]) -> Held:
        """Keep what is in memory of these pages until it is let go."""
        return Held(self.reads.memory, span_parts(sources))

    def open(self, held: Held, parts: Sequence[SpanPart]) -> None:
        """Open entries in memory for what is not there of these parts, if it is known how they will be read."""
        held.open(part for part in parts if not self.reads.chooser.is_free(part.reader))

    def cost(self, sources: Sequence[PageSource]) -> Cost:
        """Estimate how long it takes to fetch these pages, if nothing else is fetched."""
        parts = span_parts(sources)
        missing = [part for part in parts if not self.reads.memory.has(part.reader, part.span)]
        goodput_bps = self.link.goodput_bps  # an old one, too: a fetch or a probe corrects it
        seconds = self.tolerance.seconds
        transmit_s = None if goodput_bps is None else seconds(missing, goodput_bps / 8)
        rate = self.pool.bytes_per_s
        return Cost(transmit_s if missing else 0.0, None if rate is None else seconds(parts, rate))

    async def fetch(
        self,
        sources: Sequence[PageSource],
        destination: Destination,
        timeout_s: float,
        *,
        request: timeline.Request = timeline.NOBODY,
        on_requested: Callable[[], None] | None = None,
        compute_s: float = math.inf,
        held: Held | None = None,
    ) -> FetchResult:
        """Restore pages to ``destination``. When this returns or raises, it is closed.

        Returns within about ``timeout_s``, and does not request bytes that the link, at its measured speed, would bring
        only after that. ``num_pages`` excludes pages that failed or came too late; pages beyond it may have been
        written in part. ``on_requested`` is called when the link could serve another fetch as well, unless this one
        ends first. Never raises a domain error. ``request`` is for the timeline. ``compute_s``: how long the engine
        would take to compute all pages; ends, as if the rest came too late, when the engine would compute the rest
        sooner. ``held``: what the caller holds of these pages, and has opened for them.
        """
        own = None
        if held is None:
            held = own = self.hold(sources)
            self.open(own, span_parts(sources))
        fetch = _RunningFetch(sources, destination, held, request)
        self._running.add(fetch)
        timed_out = False
        try:
            async with asyncio.timeout(timeout_s):
                await self._run(fetch, time.monotonic() + timeout_s, on_requested, compute_s)
        except TimeoutError:
            if timed_out := fetch.num_transmitting > 0:
                fetch.failures.append(TimeoutError(f"not all pages arrived within {timeout_s:g} s"))
            fetch.is_late |= not timed_out
        finally:
            destination.close()
            self._running.remove(fetch)
            if own is not None:
                own.let_go()
            if fetch.is_late or timed_out:  # the rest is computed: leave the link to others
                for name in {part.reader.data_name for part in fetch.parts}:
                    self.reads.ahead.drop_units(name)
        return FetchResult(fetch.num_pages, tuple(fetch.failures), fetch.is_late, fetch.is_read)

    async def _run(
        self, fetch: _RunningFetch, deadline_s: float, on_requested: Callable[[], None] | None, compute_s: float
    ) -> None:
        """Run all units."""
        due_s = time.monotonic() + self.tolerance.within_s
        try:
            async with asyncio.TaskGroup() as group:
                if math.isfinite(compute_s):
                    group.create_task(self._end_when_slow(fetch, compute_s))
                for index, part in enumerate(fetch.parts):
                    if fetch.destination.is_kept(index):
                        fetch.take_kept(index)
                        continue
                    if not fetch.has(part) and self._comes_after(part, deadline_s):
                        fetch.is_late = True
                        fetch.fail(index, None)
                    for unit in self.reads.units(part, due_s, self._num_unasked, fetch.destination.takes):
                        if not fetch.is_wanted(index):
                            break
                        self.reads.ahead.leave_out(unit)
                        fetch.held.hold(unit.reader, part.span)  # which may be another reader than the part's
                        is_here = fetch.held.has_unit(unit)
                        if not is_here:
                            fetch.is_read = True
                            await self.reads.budget.acquire(unit.size_bytes)
                        fetch.num_unasked -= len(unit.cells)
                        fetch.num_transmitting += 1
                        task = group.create_task(self._run_unit(unit, index, fetch))
                        # Not released in the task itself, since a task cancelled before its first step never runs.
                        if not is_here:
                            task.add_done_callback(lambda _, size=unit.size_bytes: self.reads.budget.release(size))  # type: ignore[misc]
                        await asyncio.sleep(0)  # let the task send its request
                        if not is_here:
                            await self.link.may_read()  # so what is next is chosen as late as possible
                    if not fetch.is_wanted(index):
                        break
                fetch.num_unasked = 0
                if fetch.advance():
                    raise _SettledError
                if on_requested is not None:
                    await self.link.has_room()
                    on_requested()
        except* _SettledError:
            pass

    async def _end_when_slow(self, fetch: _RunningFetch, compute_s: float) -> None:
        """End the fetch when the engine, which takes ``compute_s`` for all pages, would compute the rest sooner."""
        sizes = [0 if fetch.has(part) else part.size_bytes for part in fetch.parts]
        while True:
            await asyncio.sleep(_COMPARE_S)
            link_bps = self.link.present_bps(time.monotonic())
            if link_bps is None:
                continue  # the deadline counts
            bytes_per_s = min(link_bps / 8, self.pool.bytes_per_s or math.inf)
            if fetch.left_bytes(sizes) / bytes_per_s > _SLOWER * compute_s * fetch.share_left:
                fetch.is_late = True
                raise _SettledError

    def _comes_after(self, part: SpanPart, deadline_s: float) -> bool:
        now_s = time.monotonic()
        goodput_bps = self.link.recent_bps(now_s)
        if goodput_bps is None:
            return False
        least_bytes = self.tolerance.coarsest(part.reader).span_bytes(part.span)
        return now_s + (self.link.outstanding_bytes + least_bytes) * 8 / goodput_bps > deadline_s

    async def _run_unit(self, unit: ReadUnit, index: int, fetch: _RunningFetch) -> None:
        """Take one unit through all three stages; if something is damaged or gone, once more without it, if it may be
        left out."""
        while True:
            try:
                await self._take_through(unit, index, fetch)
                break
            except KVFetchError as e:
                is_damage = isinstance(e, FormatError) or reason_of(e) == Reason.MISSING
                if isinstance(e, FormatError):
                    metrics.CORRUPT_CHUNKS.inc()
                    self.reads.drop_kept(unit.reader.data_name)
                if is_damage:
                    self.reads.report_damage(unit.reader)
                coarser = self.tolerance.coarser(unit.reader) if is_damage else None
                if coarser is None:
                    fetch.fail(index, e)
                    break
                unit = replace(unit, reader=coarser)
                fetch.num_transmitting += 1
        if fetch.advance():
            raise _SettledError

    async def _take_through(self, unit: ReadUnit, index: int, fetch: _RunningFetch) -> None:
        part, places_of = fetch.parts[index], fetch.destination.places
        is_used_again = part.is_begun and part.request_pages[-1] == fetch.num_asked - 1
        try:
            chunks = await self.reads.chunks_of(unit, fetch.held, places_of, fetch.request, is_used_again=is_used_again)
        except KVFetchError:
            fetch.num_transmitting -= 1
            raise
        fetch.num_transmitting -= 1
        await self._restore(unit, chunks, part, fetch)
        metrics.READ_CELLS.labels(str(unit.reader.coarseness)).inc(len(unit.cells))
        fetch.restored(index, len(unit.cells))

    async def _restore(
        self, unit: ReadUnit, chunks: Sequence[CellChunks], part: SpanPart, fetch: _RunningFetch
    ) -> None:
        """Restore the cells of a unit, which have these chunks. Raises what `restore_cells` raises, when no cell is
        under way any more."""
        units = [(unit, chunks)]
        if not fetch.destination.takes_units:  # to verify cells takes less than a hand-over, however many there are
            runs, rest = cut_run(unit.reader, unit.cells, _JOB_BYTES), iter(chunks)
            units = [(replace(unit, cells=cells), list(islice(rest, len(cells)))) for cells in runs]
        restore = partial(restore_cells, fetch.destination, part, request=fetch.request)
        jobs = [self._decode(each, partial(restore, each, theirs), fetch.destination) for each, theirs in units]
        # Wait for all cells even if one fails: they hold memory until they are done.
        for error in await asyncio.gather(*jobs, return_exceptions=True):
            if error is not None:
                raise error

    async def _decode(self, unit: ReadUnit, job: Callable[[Decoders], None], destination: Destination) -> None:
        """Run the job of a unit on the pool, within the budget of memory."""
        num_bytes = destination.working_bytes(unit)
        await self._decode_budget.acquire(num_bytes)
        try:
            what = {"num_integers": unit.num_integers, "size_bytes": unit.size_bytes}
            future = self.pool.submit(job, unit.reader.coding, **what)
        except BaseException:
            self._decode_budget.release(num_bytes)
            raise
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def end() -> None:
            self._decode_budget.release(num_bytes)
            ended.set()

        # The memory is used until the job is over, even if this coroutine has been cancelled.
        future.add_done_callback(lambda _: call_soon(loop, end))
        try:
            await ended.wait()
        except asyncio.CancelledError:
            future.cancel()
            raise
        future.result()

    @property
    def _num_unasked(self) -> int:
        """Count the cells that running fetches have not requested yet; all fetches share link and decoders."""
        return sum(fetch.num_unasked for fetch in self._running)
