"""Restores cells: decodes them, dequantises their values and writes those to a pool. Runs on the decode pool."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from sgl_kvfetch import metrics, timeline
from sgl_kvfetch.codec import Cell, CellValues, Decoders, Quantised, SegmentReader
from sgl_kvfetch.plane.fetch.sink import CodedPool, FramePool, IsFinished, Pool, Sink

# Values dequantised at a time: dequantising needs several times their memory.
_VALUES_AT_ONCE = 1 << 19
_BYTES_A_VALUE = 24  # during dequantisation: a few copies in float32


_WRITTEN: Future[IsFinished] = Future()
_WRITTEN.set_result(lambda: True)  # no device has anything to do


def restore_cell(
    reader: SegmentReader,
    cell: Cell,
    data: memoryview,
    decoders: Decoders,
    *,
    span_pages: Sequence[int],
    pool_pages: Sequence[int],
    sink: Sink,
    request: timeline.Request = timeline.NOBODY,
) -> Future[IsFinished]:
    """Decode one cell and write pages ``span_pages`` of its span into ``pool_pages``. The returned future is done when
    they are written, or when the device is told to. ``decoders`` are those of the session that runs this. ``request``
    is for the timeline.

    Raises CorruptError, FormatError, UnsupportedError.
    """
    started_s = time.monotonic()
    launched = _WRITTEN
    if isinstance(sink.pool, CodedPool):
        keep = sink.pool.decoded(reader, cell, data, decoders)
        decoded_s = time.monotonic()
        sink.run(partial(keep, span_pages, pool_pages))
    elif isinstance(sink.pool, FramePool):
        frames = reader.decode_frames(cell, data, decoders)
        decoded_s = time.monotonic()
        launched = sink.pool.restore(frames, span_pages, pool_pages, sink.run)
    else:
        quantised = reader.decode_cell(cell, data, decoders)
        decoded_s = time.monotonic()
        _write_values(reader, cell, quantised, span_pages, pool_pages, sink)
    ended_s = time.monotonic()
    metrics.STAGE_SECONDS.labels("decode").observe(decoded_s - started_s)
    metrics.STAGE_SECONDS.labels("restore").observe(ended_s - decoded_s)
    about: dict[str, int | str] = {"bytes": len(data), "codec": reader.variant.codec}
    timeline.add(request, "decode", started_s, decoded_s, **about, levels_left_out=reader.levels_left_out)
    timeline.add(request, "restore", decoded_s, ended_s)
    return launched


def working_bytes(reader: SegmentReader, cell: Cell, pool: Pool) -> int:
    """Return the bytes of memory that `restore_cell` needs until it is finished: frames, their integers, and some
    values unless a device dequantises them."""
    if isinstance(pool, CodedPool):
        return pool.working_bytes(reader, cell)
    num_values = 0 if isinstance(pool, FramePool) else reader.manifest.cell_values(cell)
    return 2 * reader.frames_bytes(cell) + min(_VALUES_AT_ONCE, num_values) * _BYTES_A_VALUE


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
