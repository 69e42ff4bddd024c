"""Restores cells on the decode pool: decodes them, dequantises their values, and writes those to a destination."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial

from sgl_kvfetch import metrics, timeline
from sgl_kvfetch.codec import Cell, CellValues, Decoders, Quantised, SegmentReader
from sgl_kvfetch.plane.adapt.pool import DecodePool
from sgl_kvfetch.plane.fetch.link import BytesBudget
from sgl_kvfetch.plane.fetch.offers import Chooser
from sgl_kvfetch.plane.fetch.plan import CellChunks, ReadUnit, SpanPart
from sgl_kvfetch.plane.fetch.sink import CodedPool, Destination, PagePool, Sink

# Values dequantised at a time: dequantising needs several times their memory.
_VALUES_AT_ONCE = 1 << 19
_BYTES_A_VALUE = 24  # during dequantisation: a few copies in float32


class Restorer:
    """Restores cells within a budget of memory. Belongs to one event loop."""

    def __init__(self, pool: DecodePool[Decoders], chooser: Chooser, decode_bytes: int) -> None:
        """``chooser`` knows what a cell costs the pool. ``decode_bytes``: the budget."""
        self._pool = pool
        self._chooser = chooser
        self._budget = BytesBudget(decode_bytes)

    async def restore(
        self,
        unit: ReadUnit,
        chunks: Sequence[CellChunks],
        part: SpanPart,
        destination: Destination,
        request: timeline.Request,
    ) -> None:
        """Restore the cells of a unit, which have these chunks. ``part``: the pages that are wanted of its span.
        Raises what `restore_cells` raises, when no cell is under way any more."""
        job = partial(
            restore_cells,
            span_pages=part.span_pages,
            pool_pages=[destination.pool_pages[i] for i in part.request_pages],
            sink=destination.sink,
            request=request,
        )
        cells = list(zip(unit.cells, chunks, strict=True))
        # To verify a cell takes less than to hand it to a thread. To decode its values takes long.
        runs = [cells] if isinstance(destination.sink.pool, CodedPool) else [[each] for each in cells]
        jobs = [
            self._run(
                unit.reader,
                [cell for cell, _ in run],
                partial(job, unit.reader, run),
                working_bytes(unit.reader, [cell for cell, _ in run], destination.sink.pool),
            )
            for run in runs
        ]
        # Wait for all cells even if one fails: they hold memory until they are done.
        for error in await asyncio.gather(*jobs, return_exceptions=True):
            if error is not None:
                raise error

    async def _run(
        self, reader: SegmentReader, cells: Sequence[Cell], job: Callable[[Decoders], None], num_bytes: int
    ) -> None:
        """Run the job of some cells on the pool, within ``num_bytes`` of memory."""
        await self._budget.acquire(num_bytes)
        try:
            variant = self._chooser.profile_variant(reader)
            work = sum(self._chooser.work(reader, cell) for cell in cells)
            future = self._pool.submit(job, variant, work=work, size_bytes=sum(map(reader.coded_bytes, cells)))
        except BaseException:
            self._budget.release(num_bytes)
            raise
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def end() -> None:
            self._budget.release(num_bytes)
            ended.set()

        # The memory is used until the job is over, even if this coroutine has been cancelled.
        future.add_done_callback(lambda _: _call_soon(loop, end))
        try:
            await ended.wait()
        except asyncio.CancelledError:
            future.cancel()
            raise
        future.result()


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Call ``function`` on the loop, from any thread. Do nothing if the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function)


def restore_cells(
    reader: SegmentReader,
    cells: Sequence[tuple[Cell, CellChunks]],
    decoders: Decoders,
    *,
    span_pages: Sequence[int],
    pool_pages: Sequence[int],
    sink: Sink,
    request: timeline.Request = timeline.NOBODY,
) -> None:
    """Decode some cells of one span, each with its chunks, and write pages ``span_pages`` of the span into
    ``pool_pages``. ``decoders`` are those of the session that runs this. ``request`` is for the timeline.

    Raises CorruptError, FormatError, UnsupportedError.
    """
    started_s = time.monotonic()
    if isinstance(sink.pool, CodedPool):
        keep = sink.pool.decoded(reader, cells, decoders)
        decoded_s = time.monotonic()
        sink.run(keep)
    else:
        decoded = [(cell, reader.decode_chunks(cell, chunks, decoders)) for cell, chunks in cells]
        decoded_s = time.monotonic()
        for cell, quantised in decoded:
            _write_values(reader, cell, quantised, span_pages, pool_pages, sink)
    ended_s = time.monotonic()
    metrics.STAGE_SECONDS.labels("decode").observe(decoded_s - started_s)
    metrics.STAGE_SECONDS.labels("restore").observe(ended_s - decoded_s)
    about: dict[str, int | str] = {
        "bytes": sum(len(x) for _, chunks in cells for x in chunks),
        "codec": reader.variant.codec,
    }
    timeline.add(request, "decode", started_s, decoded_s, **about, levels_left_out=reader.levels_left_out)
    timeline.add(request, "restore", decoded_s, ended_s)


def working_bytes(reader: SegmentReader, cells: Sequence[Cell], pool: PagePool) -> int:
    """Return the bytes of memory that `restore_cells` needs until it is finished: frames, their integers, and some
    values."""
    if isinstance(pool, CodedPool):
        return pool.working_bytes(reader, cells)
    most_values = max(min(_VALUES_AT_ONCE, reader.manifest.cell_values(cell)) for cell in cells)
    return sum(2 * reader.frames_bytes(cell) for cell in cells) + most_values * _BYTES_A_VALUE


def _write_values(
    reader: SegmentReader,
    cell: Cell,
    quantised: Quantised,
    span_pages: Sequence[int],
    pool_pages: Sequence[int],
    sink: Sink,
) -> None:
    page_size, grid = reader.geometry.page_size, reader.manifest.grid
    layers, heads = grid.layers(cell.layer_group), reader.heads_of(cell)
    destinations = dict(zip(span_pages, pool_pages, strict=True))
    num_pages = reader.manifest.span_tokens(cell.span) // page_size
    step = max(1, _VALUES_AT_ONCE * num_pages // reader.manifest.cell_values(cell))
    for first in range(0, num_pages, step):
        wanted = [page for page in range(first, min(first + step, num_pages)) if page in destinations]
        if not wanted:
            continue
        values = reader.dequantise_cell(cell, quantised, slice(wanted[0] * page_size, (wanted[-1] + 1) * page_size))
        if len(wanted) <= wanted[-1] - wanted[0]:
            values = _pages_of(values, page_size, [page - wanted[0] for page in wanted])
        if not sink.write(layers, heads, [destinations[page] for page in wanted], values):
            return


def _pages_of(values: CellValues, page_size: int, pages: Sequence[int]) -> CellValues:
    """Select some pages of the values."""
    return CellValues(*(x.reshape(-1, page_size, *x.shape[1:])[list(pages)].flatten(0, 1) for x in values))
