"""Plans the reads for a request's pages. Pure: no clock, no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sgl_kvfetch.codec import Cell, SegmentReader

# Read a span in this many pieces, unless they get too small: decoding starts when the first piece has arrived.
_READS_A_SPAN = 8
_LEAST_READ_BYTES = 128 << 10

CellsKey = tuple[str, Cell]  # a segment and the first cell of a run


@dataclass(frozen=True, slots=True)
class PageSource:
    """Where one page is stored. ``others``: segments with the rest of the rank's heads, if ``reader``'s has not all."""

    reader: SegmentReader
    page: int  # counted from the segment's start
    others: tuple[PageSource, ...] = ()

    @property
    def position(self) -> int:
        """The page's place in the sequence, as the segment's writer has it."""
        return self.reader.manifest.first_page + self.page


@dataclass(frozen=True, slots=True)
class SpanPart:
    """The pages of one span that a request wants, in the rank's heads that the segment has."""

    reader: SegmentReader
    span: int
    request_pages: tuple[int, ...]  # indices into the request
    span_pages: tuple[int, ...]  # indices into the span

    @property
    def is_begun(self) -> bool:
        """Return whether the span has more pages after this part."""
        first, end = self.reader.manifest.span_range(self.span)
        return self.span_pages[-1] + 1 < end - first

    @property
    def size_bytes(self) -> int:
        return sum(end - start for start, end in map(self.reader.cell_range, self.reader.span_cells(self.span)))


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

    def verify(self, data: bytes) -> None:
        """Verify the compressed bytes. Raises CorruptError."""
        for cell in self.cells:
            self.reader.verify_cell(cell, self.piece(cell, data))

    def piece(self, cell: Cell, data: bytes) -> memoryview:
        """Return a cell's part of the unit's bytes."""
        start, end = self.reader.cell_range(cell)
        return memoryview(data)[start - self.start : end - self.start]


def span_parts(sources: Sequence[PageSource]) -> list[SpanPart]:
    """Group a request's pages by the spans that hold them, in the order of their first pages."""
    pages: dict[tuple[SegmentReader, int], dict[int, int]] = {}  # of each span: indices into the request, into the span
    for i, source in enumerate(sources):
        for each in (source, *source.others):
            span, page = divmod(each.page, each.reader.manifest.span_pages)
            pages.setdefault((each.reader, span), {})[i] = page
    return [SpanPart(*place, tuple(held), tuple(held.values())) for place, held in pages.items()]


def total_bytes(sources: Sequence[PageSource]) -> int:
    """Return the number of bytes to read for these pages. Spans are read whole."""
    return sum(part.size_bytes for part in span_parts(sources))


def read_size(span_bytes: int, read_bytes: int) -> int:
    """Return about how many bytes of a span one read takes, if the configuration allows ``read_bytes``."""
    return min(read_bytes, max(_LEAST_READ_BYTES, -(-span_bytes // _READS_A_SPAN)))


def read_units(reader: SegmentReader, span: int, read_bytes: int) -> Iterator[ReadUnit]:
    """Cut the bytes of a span's cells at cell boundaries into reads of at most about ``read_bytes``. Equal arguments
    give equal units, so that a read started for one caller can serve another."""
    cells = list(reader.span_cells(span))
    read_bytes = read_size(sum(end - start for start, end in map(reader.cell_range, cells)), read_bytes)
    for run in neighbours(reader, cells):
        taken: list[Cell] = []
        for cell in run:
            if taken and reader.cell_range(cell)[1] - reader.cell_range(taken[0])[0] > read_bytes:
                yield read_unit(reader, taken)
                taken = []
            taken.append(cell)
        yield read_unit(reader, taken)


def read_unit(reader: SegmentReader, cells: Sequence[Cell]) -> ReadUnit:
    """Return the read of a run of neighbouring cells."""
    return ReadUnit(reader, tuple(cells), reader.cell_range(cells[0])[0], reader.cell_range(cells[-1])[1])


def neighbours(reader: SegmentReader, cells: Sequence[Cell]) -> Iterator[Sequence[Cell]]:
    """Split cells, which are in storage order, into runs without other cells in between."""
    first = 0
    for i in range(1, len(cells) + 1):
        if i == len(cells) or reader.cell_range(cells[i])[0] != reader.cell_range(cells[i - 1])[1]:
            yield cells[first:i]
            first = i
