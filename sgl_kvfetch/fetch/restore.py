"""From one cell's bytes to values in a pool's pages. Runs on the decode pool."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sgl_kvfetch import metrics, timeline
from sgl_kvfetch.codecs.base import Decoders
from sgl_kvfetch.container.manifest import Cell
from sgl_kvfetch.container.segment import SegmentReader
from sgl_kvfetch.fetch.sink import FramePool, GuardedSink
from sgl_kvfetch.quant import Quantised

# Values are dequantised so many at a time, for that takes several times their bytes.
_VALUES_AT_ONCE = 1 << 18
_BYTES_A_VALUE = 24  # while it is dequantised: a few copies in float32


def restore_cell(
    reader: SegmentReader,
    cell: Cell,
    data: memoryview,
    span_pages: Sequence[int],
    pool_pages: Sequence[int],
    sink: GuardedSink,
    decoders: Decoders,
    request_id: str = "",
) -> float:
    """Decode one cell and write the wanted pages of it: ``span_pages`` of its span into ``pool_pages``. Returns the
    seconds it took. ``decoders``: of the session that it runs on. ``request_id`` is for the timeline.

    Raises CorruptError, FormatError, UnsupportedError.
    """
    started_s = time.monotonic()
    if isinstance(sink.pool, FramePool):
        frames = reader.decode_frames(cell, data, decoders)
        decoded_s = time.monotonic()
        sink.pool.restore(frames, span_pages, pool_pages, sink.run)
    else:
        quantised = reader.decode_cell(cell, data, decoders)
        decoded_s = time.monotonic()
        _write_values(reader, cell, quantised, span_pages, pool_pages, sink)
    ended_s = time.monotonic()
    metrics.STAGE_SECONDS.labels("decode").observe(decoded_s - started_s)
    metrics.STAGE_SECONDS.labels("restore").observe(ended_s - decoded_s)
    timeline.add(request_id, "decode", started_s, decoded_s)
    timeline.add(request_id, "restore", decoded_s, ended_s)
    return ended_s - started_s


def working_bytes(reader: SegmentReader, cell: Cell) -> int:
    """Memory that `restore_cell` takes for a while: integers, the frames that they come from, some values."""
    layout = reader.variant.layout(cell.tensor)
    first, end = reader.manifest.group_layers(cell.layer_group)
    num_tokens = reader.manifest.span_tokens(cell.span)
    frame_bytes = layout.num_frames(num_tokens) * 3 * layout.height * layout.width
    token_values = (end - first) * reader.geometry.num_heads * reader.geometry.head_dim(cell.tensor)
    return (
        frame_bytes
        + (reader.manifest.planes + 1) * num_tokens * token_values
        + min(_VALUES_AT_ONCE, num_tokens * token_values) * _BYTES_A_VALUE
    )


def _write_values(
    reader: SegmentReader,
    cell: Cell,
    quantised: Quantised,
    span_pages: Sequence[int],
    pool_pages: Sequence[int],
    sink: GuardedSink,
) -> None:
    page_size = reader.geometry.page_size
    first_layer, _ = reader.manifest.group_layers(cell.layer_group)
    destinations = dict(zip(span_pages, pool_pages, strict=True))
    num_pages = reader.manifest.span_tokens(cell.span) // page_size
    step = max(1, _VALUES_AT_ONCE * num_pages // quantised.integers[0].numel())
    for first in range(0, num_pages, step):
        wanted = [page for page in range(first, min(first + step, num_pages)) if page in destinations]
        if not wanted:
            continue
        values = reader.dequantise_cell(cell, quantised, slice(wanted[0] * page_size, (wanted[-1] + 1) * page_size))
        values = values.view(-1, page_size, *values.shape[1:])  # (pages, page_size, layers, heads, dim)
        if len(wanted) < values.shape[0]:
            values = values[[page - wanted[0] for page in wanted]]
        if not sink.write(cell.tensor, first_layer, [destinations[page] for page in wanted], values):
            return
