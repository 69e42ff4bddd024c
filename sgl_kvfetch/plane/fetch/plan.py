"""Plans the reads for a request's pages, and which levels of coefficients they may lack. Pure: no clock, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import NamedTuple
from weakref import WeakKeyDictionary

from sgl_kvfetch.codec import Cell, SegmentReader

_LEAST_READ_BYTES = 128 << 10

CellsKey = tuple[str, Cell]  # a segment and the first cell of a run
CellChunks = Sequence[memoryview]  # the bytes of each of a cell's chunks
UnitKey = tuple[str, Cell, int]  # a data object, the first cell, and the number of levels


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
        return self.reader.span_bytes(self.span)


@dataclass(frozen=True)
class ReadUnit:
    """A run of neighbouring cells of one span, read with one ranged GET of each object: one a level."""

    reader: SegmentReader
    cells: tuple[Cell, ...]

    @cached_property
    def reads(self) -> list[tuple[str, int, int]]:
        """The objects to read from, and bytes ``[start, end)`` of each."""
        first, last = self.reader.cell_ranges(self.cells[0]), self.reader.cell_ranges(self.cells[-1])
        names = self.reader.object_names
        return [(name, start, end) for name, (start, _), (_, end) in zip(names, first, last, strict=True)]

    @property
    def key(self) -> UnitKey:
        return self.reader.data_name, self.cells[0], self.reader.num_levels

    @property
    def cells_key(self) -> CellsKey:
        """Return a key for the unit's cells that is the same in all variants."""
        return self.reader.stem, self.cells[0]

    @cached_property
    def size_bytes(self) -> int:
        return sum(end - start for _, start, end in self.reads)

    def split(self, data: bytes | memoryview) -> list[CellChunks]:
        """Return the chunks of each cell. ``data``: the bytes of all objects, one behind the other."""
        view, contents = memoryview(data), []
        end = 0
        for _, first, last in self.reads:
            begin, end = end, end + last - first
            contents.append(view[begin:end])
        assert end == len(view), (end, len(view))
        return self.split_objects(contents)

    def split_objects(self, contents: Sequence[bytes | memoryview]) -> list[CellChunks]:
        """Return the chunks of each cell. ``contents``: what `reads` reads of each object."""
        objects = [(memoryview(each), first) for each, (_, first, _) in zip(contents, self.reads, strict=True)]
        return [
            [
                view[start - first : stop - first]
                for (view, first), ranges in zip(objects, self.reader.chunk_ranges(cell), strict=True)
                for start, stop in ranges
            ]
            for cell in self.cells
        ]

    def by_object(self, chunks: Sequence[CellChunks]) -> list[list[memoryview]]:
        """Return the chunks of all cells by the objects in which they are stored, in their order there."""
        num_levels = len(self.reads) - 1  # each further object has one chunk of a cell
        first = [x for cell in chunks for x in cell[: len(cell) - num_levels]]
        return [first, *([cell[len(cell) - num_levels + level] for cell in chunks] for level in range(num_levels))]


def span_parts(sources: Sequence[PageSource]) -> list[SpanPart]:
    """Group a request's pages by the spans that hold them, in the order of their first pages."""
    pages: dict[tuple[SegmentReader, int], dict[int, int]] = {}  # of each span: indices into the request, into the span
    for i, source in enumerate(sources):
        for each in (source, *source.others):
            span, page = divmod(each.page, each.reader.manifest.span_pages)
            pages.setdefault((each.reader, span), {})[i] = page
    return [SpanPart(*place, tuple(held), tuple(held.values())) for place, held in pages.items()]


def total_bytes(
    sources: Sequence[PageSource], choose: Callable[[SegmentReader], SegmentReader] = lambda reader: reader
) -> int:
    """Return the number of bytes to read for these pages with the readers that ``choose`` returns. Spans are read
    whole."""
    return sum(replace(part, reader=choose(part.reader)).size_bytes for part in span_parts(sources))


class ReadSize(NamedTuple):
    """How large reads are: ``a_span`` for each span, but of at most about ``most_bytes``, and no very small ones. With
    several for a span, decoding starts when the first one has arrived."""

    most_bytes: int
    a_span: int = 3

    def of(self, span_bytes: int) -> int:
        """Return about how many bytes of a span one read takes."""
        return min(self.most_bytes, max(_LEAST_READ_BYTES, -(-span_bytes // self.a_span)))


def read_units(reader: SegmentReader, span: int, size: ReadSize) -> list[ReadUnit]:
    """Cut the bytes of a span's cells at cell boundaries into reads of about equal size. Equal arguments give equal
    units, so that a read started for one caller can serve another."""
    return [ReadUnit(reader, cells) for cells in read_runs(reader, span, size)]


_runs: WeakKeyDictionary[SegmentReader, dict[tuple[int, ReadSize], list[tuple[Cell, ...]]]] = WeakKeyDictionary()


def read_runs(reader: SegmentReader, span: int, size: ReadSize) -> Sequence[tuple[Cell, ...]]:
    """Return the cells of `read_units`. They are computed once."""
    made = _runs.setdefault(reader, {})
    if (span, size) not in made:
        most = size.of(reader.span_bytes(span))
        runs = neighbours(reader, list(reader.span_cells(span)))
        made[span, size] = [cells for run in runs for cells in _cut(reader, run, most)]
    return made[span, size]


def _cut(reader: SegmentReader, run: Sequence[Cell], most: int) -> list[tuple[Cell, ...]]:
    """Cut neighbours into runs of about equal size in bytes, about ``most``: a cell is in the run in which its middle
    is."""
    ends = list(accumulate(map(reader.coded_bytes, run)))
    count = -(-ends[-1] // most)
    middles = ((start + end) / 2 for start, end in pairwise((0, *ends)))
    where = [int(middle * count / ends[-1]) for middle in middles]
    return [tuple(cell for _, cell in cells) for _, cells in groupby(zip(where, run, strict=True), key=itemgetter(0))]


def neighbours(reader: SegmentReader, cells: Sequence[Cell]) -> Iterator[Sequence[Cell]]:
    """Split cells, which are in storage order, into runs without other cells in between."""
    first = 0
    for i in range(1, len(cells) + 1):
        if i == len(cells) or not reader.are_neighbours(cells[i - 1], cells[i]):
            yield cells[first:i]
            first = i


@dataclass(frozen=True, slots=True)
class LevelPolicy:
    """``most_left_out``: levels, of which each that is left out triples the step. ``within_s``: how long a fetch may
    take before it leaves some out. ``least_left_out``: levels that other servers need, and this one never reads."""

    most_left_out: int = 0
    within_s: float = 0.0
    least_left_out: int = 0

    def seconds(self, most_bytes: int, least_bytes: int, bytes_per_s: float) -> float:
        """Return how long a fetch takes at this rate. It leaves levels out only for what takes longer than
        ``within_s``."""
        return min(most_bytes / bytes_per_s, max(least_bytes / bytes_per_s, self.within_s))

    def finest(self, reader: SegmentReader) -> SegmentReader:
        """Return the reader of as many levels as are wanted."""
        return _leaving_out(reader, self.least_left_out)

    def coarsest(self, reader: SegmentReader) -> SegmentReader:
        """Return the reader of as few levels as may be read."""
        return _leaving_out(reader, self.most_left_out)


def _leaving_out(reader: SegmentReader, count: int) -> SegmentReader:
    """Return the reader that leaves out so many levels, counting those that are lost; level 0 is always read."""
    return reader.without_levels(max(0, min(reader.num_levels - 1, count - reader.levels_left_out)))
