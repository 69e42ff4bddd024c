"""Plans the reads for a request's pages: which bytes of which objects.

It reads no clock and does no I/O. A span's cells are cut into runs, and a run is read with one ranged GET of each
object. Which objects a span is read from was chosen before (`offers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import NamedTuple
from weakref import WeakKeyDictionary

from sgl_kvfetch.codec import Cell, CellChunks, SegmentReader

_LEAST_READ_BYTES = 512 << 10  # 4 ms at 1 Gbps; a request takes 0.7 ms of CPU time, store and client together

SpanKey = tuple[str, int]  # a segment and one of its spans, however it is read
UnitKey = tuple[str, int, Cell, int]  # the first object, how many are read, the first cell, and the number of cells


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

    @property
    def key(self) -> SpanKey:
        return self.reader.stem, self.span


@dataclass(frozen=True)
class ReadUnit:
    """A run of neighbouring cells of one span, read with one ranged GET of each object."""

    reader: SegmentReader
    cells: tuple[Cell, ...]

    @cached_property
    def reads(self) -> list[tuple[str, int, int]]:
        """The objects to read from, and bytes ``[start, end)`` of each."""
        starts = {each.place: each.start for each in reversed(self.reader.stored(self.cells[0]))}
        ends = {each.place: each.end for each in self.reader.stored(self.cells[-1])}
        return [(name, starts[place], ends[place]) for place, name in enumerate(self.reader.object_names)]

    @property
    def key(self) -> UnitKey:
        return self.reader.data_name, len(self.reader.object_names), self.cells[0], len(self.cells)

    @property
    def span_key(self) -> SpanKey:
        return self.reader.stem, self.cells[0].span

    @cached_property
    def num_integers(self) -> int:
        return sum(map(self.reader.num_integers, self.cells))

    @cached_property
    def size_bytes(self) -> int:
        return sum(end - start for _, start, end in self.reads)

    def split(self, data: bytes | memoryview) -> list[CellChunks]:
        """Return the chunks of each cell. ``data``: the bytes of all objects, one behind the other."""
        view, shifts, end = memoryview(data), [], 0
        for _, first, last in self.reads:
            shifts.append(end - first)
            end += last - first
        assert end == len(view), (end, len(view))
        return [
            [view[shifts[each.place] + each.start : shifts[each.place] + each.end] for each in self.reader.stored(cell)]
            for cell in self.cells
        ]

    def by_object(self, chunks: Sequence[CellChunks]) -> list[list[memoryview]]:
        """Return the chunks of all cells by the objects in which they are stored, in their order there."""
        further = len(self.reads) - 1  # objects, each with one chunk of a cell
        first = [x for cell in chunks for x in cell[: len(cell) - further]]
        return [first, *([cell[len(cell) - further + i] for cell in chunks] for i in range(further))]


def span_parts(sources: Sequence[PageSource]) -> list[SpanPart]:
    """Group a request's pages by the spans that hold them, in the order of their first pages."""
    pages: dict[tuple[SegmentReader, int], dict[int, int]] = {}  # of each span: indices into the request, into the span
    for i, source in enumerate(sources):
        for each in (source, *source.others):
            span, page = divmod(each.page, each.reader.manifest.span_pages)
            pages.setdefault((each.reader, span), {})[i] = page
    return [SpanPart(*place, tuple(held), tuple(held.values())) for place, held in pages.items()]


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
        made[span, size] = [cells for run in runs for cells in cut_run(reader, run, most)]
    return made[span, size]


def cut_run(reader: SegmentReader, run: Sequence[Cell], most: int) -> list[tuple[Cell, ...]]:
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
