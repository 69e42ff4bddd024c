"""Plans the reads for a request's pages. Pure: no clock, no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sgl_kvfetch.container.manifest import Cell
from sgl_kvfetch.container.segment import SegmentReader

# Read a span in this many pieces, unless they get too small: decoding starts when the first piece has arrived.
_READS_A_SPAN = 8
_LEAST_READ_BYTES = 128 << 10

CellsKey = tuple[str, Cell]  # a segment and the first cell of a run


@dataclass(frozen=True, slots=True)
class PageSource:
    """Where one page is stored."""

    reader: SegmentReader
    page: int  # counted from the segment's start


@dataclass(frozen=True, slots=True)
class SpanPart:
    """The pages of one span that a request wants."""

    reader: SegmentReader
    span: int
    request_pages: tuple[int, ...]  # indices into the request
    span_pages: tuple[int, ...]  # indices into the span

    @property
    def is_begun(self) -> bool:
        """Return whether the span has more pages after this part."""
        first, end = self.reader.manifest.span_range(self.span)
        return self.span_pages[-1] + 1 < end - first


@dataclass(frozen=True, slots=True)
class ReadUnit:
    """A run of neighbouring cells of one span, read with one ranged GET."""

    reader: SegmentReader
    cells: tuple[Cell, ...]
    start: int  # bytes [start, end) of the data object
    end: int

    @property
    def key(self) -> tuple[str, int]:
        return self.reader.data_name, self.start

    @property
    def cells_key(self) -> CellsKey:
        """Return a key for the unit's cells that is the same in all variants."""
        return self.reader.manifest.key.stem, self.cells[0]

    @property
    def size_bytes(self) -> int:
        return self.end - self.start

    def piece(self, cell: Cell, data: bytes) -> memoryview:
        """Return a cell's part of the unit's bytes."""
        start, end = self.reader.cell_range(cell)
        return memoryview(data)[start - self.start : end - self.start]


def span_parts(sources: Sequence[PageSource]) -> list[SpanPart]:
    """Group a request's pages by the span that holds them, in the request's order."""
    parts: list[SpanPart] = []
    request_page = 0
    while request_page < len(sources):
        reader, page = sources[request_page].reader, sources[request_page].page
        span, first = divmod(page, reader.manifest.span_pages)
        places = [first]
        for source in sources[request_page + 1 :]:
            if source.reader is not reader or source.page // reader.manifest.span_pages != span:
                break
            places.append(source.page % reader.manifest.span_pages)
        parts.append(SpanPart(reader, span, tuple(range(request_page, request_page + len(places))), tuple(places)))
        request_page += len(places)
    return parts


def total_bytes(sources: Sequence[PageSource]) -> int:
    """Return the number of bytes to read for these pages. Spans are read whole."""
    return sum(end - start for part in span_parts(sources) for start, end in [part.reader.span_range_bytes(part.span)])


def read_units(reader: SegmentReader, span: int, read_bytes: int) -> Iterator[ReadUnit]:
    """Cut a span's bytes at cell boundaries into reads of at most about ``read_bytes``. Equal arguments give equal
    units, so that a read started for one caller can serve another."""
    first, last = reader.span_range_bytes(span)
    read_bytes = min(read_bytes, max(_LEAST_READ_BYTES, -(-(last - first) // _READS_A_SPAN)))
    cells: list[Cell] = []
    start = end = 0
    for cell in reader.manifest.span_cells(span):
        cell_start, cell_end = reader.cell_range(cell)
        if cells and cell_end - start > read_bytes:
            yield ReadUnit(reader, tuple(cells), start, end)
            cells = []
        if not cells:
            start = cell_start
        cells.append(cell)
        end = cell_end
    yield ReadUnit(reader, tuple(cells), start, end)
