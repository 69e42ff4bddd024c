"""Prompts that are staged before they are restored, for an engine that restores them on its GPU.

What the GPU decodes, too, is staged as it is coded; of all else, the data plane decodes the integers, a byte each. The
cells of a layer group lie together, so that the engine loads a group, or a part of it, with one copy. Everything that
the kernels need as tables is made here; only addresses on the device are left for the engine to fill in. What a
manifest says of its cells becomes rows of the table once a segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from weakref import WeakKeyDictionary

import numpy as np
import torch

from sgl_kvfetch.codec import TAG_BYTES, Cell, CellChunks, Decoders, SegmentReader, pack
from sgl_kvfetch.codec.container.reader import cell_place
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plane.fetch.fetcher import Destination, Keep
from sgl_kvfetch.plane.fetch.plan import PageSource, ReadUnit, SpanPart
from sgl_kvfetch.plane.memory_cache import Held, Kept
from sgl_kvfetch.protocol import CODE_ALIGNMENT, Arena
from sgl_kvfetch.protocol.arena import CELL

CODEC = "ans"  # that GPUs decode
_LEAST_INTEGERS = 241  # the checksum of fewer is not computed on GPUs


def gpu_restores(sources: Sequence[PageSource]) -> bool:
    """Return whether an engine's GPU can restore all cells of these pages."""
    return all(each.reader.quantiser.gpu_restores for source in sources for each in (source, *source.others))


def stays_coded(reader: SegmentReader, cell: Cell) -> bool:
    """Return whether an engine's GPU decodes a cell that it restores."""
    return reader.is_in_one_bitstream(cell, CODEC) and reader.num_integers(cell) >= _LEAST_INTEGERS


def lies_as_taken(reader: SegmentReader, span: int) -> bool:
    """Return whether an engine's GPU takes all cells of a span as they are stored."""
    return not reader.manifest.is_encrypted and bool(_span_rows(reader, span)["is_coded"].all())


class RegionPlan:
    """Where the cells of a prompt's spans lie: some spans in `memory_cache`, the others in a region, ordered by layers.

    ``rows``: of `CELL`, ordered by layers, with all that is known before a cell has arrived; ``start`` counts from the
    region's for cells in it (``in_region``). ``num_bytes``: the region's size."""

    def __init__(self, parts: Sequence[SpanPart], held: Held | None = None) -> None:
        """``held``: what memory has of these parts; by default nothing, so that all cells lie in the region."""
        self.parts = parts
        self.data_names = {part.reader.data_name for part in parts}
        self.entries = [
            None if held is None or not lies_as_taken(part.reader, part.span) else held.entry(part.reader, part.span)
            for part in parts
        ]
        of_parts = [_span_rows(part.reader, part.span) for part in parts]
        rows, counts = np.concatenate(of_parts), [len(each) for each in of_parts]
        order = np.argsort(rows["first_layer"], kind="stable")
        self.rows = rows[order]
        part_of = np.repeat(np.arange(len(parts)), counts)[order]
        self.in_region = np.array([entry is None for entry in self.entries])[part_of]
        rooms = -(-self.rows["size"] // CODE_ALIGNMENT) * CODE_ALIGNMENT * self.in_region
        nowhere = np.zeros(max(counts), dtype=np.int64)
        begins = [
            nowhere[:count] if entry is None else entry.integers
            for entry, count in zip(self.entries, counts, strict=True)
        ]
        self.rows["start"] = np.where(self.in_region, np.cumsum(rooms) - rooms, np.concatenate(begins)[order])
        self.num_bytes = int(rooms.sum())
        # Of each row: its part, and which of the part's cells it is, in storage order.
        self.part_of: list[int] = part_of.tolist()
        self.number_of: list[int] = np.concatenate([np.arange(count) for count in counts])[order].tolist()

    def rows_of(self, unit: ReadUnit) -> list[int]:
        """Return the numbers of a unit's rows. Raises UnsupportedError if one of its cells was not planned for."""
        name = unit.reader.data_name
        try:
            return [self._places[name, cell] for cell in unit.cells]
        except KeyError as e:
            raise UnsupportedError(f"{unit.cells[0]} of {name} has no place in its prompt's region") from e

    @cached_property
    def _places(self) -> dict[tuple[str, Cell], int]:
        """The row of each data object's cells. A prompt that is all in memory needs none."""
        cells = [list(part.reader.span_cells(part.span)) for part in self.parts]
        names = [part.reader.data_name for part in self.parts]
        places = enumerate(zip(self.part_of, self.number_of, strict=True))
        return {(names[part], cells[part][number]): row for row, (part, number) in places}


_made: WeakKeyDictionary[SegmentReader, dict[int, np.ndarray]] = WeakKeyDictionary()


def _span_rows(reader: SegmentReader, span: int) -> np.ndarray:
    """Return the rows of a span's cells, without ``table``, ``num_exact``, ``start`` and ``packed``. They are made
    once."""
    made = _made.setdefault(reader, {})
    if span not in made:
        cells, (first_page, end_page) = list(reader.span_cells(span)), reader.manifest.span_range(span)
        alike = next((rows for rows in made.values() if rows["num_pages"][0] == end_page - first_page), None)
        rows = np.array([_place(reader, cell) for cell in cells], dtype=CELL) if alike is None else alike.copy()
        rows["first_token"] = cell_place(reader.manifest, cells[0]).tokens.start
        chunks = list(map(reader.last_chunk, cells))
        digests = np.frombuffer(b"".join(chunk.decoded_checksum for chunk in chunks), dtype=np.uint8)
        is_coded = np.array([stays_coded(reader, cell) for cell in cells])
        rows["is_coded"] = is_coded
        coded_bytes = np.array([chunk.size_bytes for chunk in chunks]) - TAG_BYTES * reader.manifest.is_encrypted
        rows["size"] = np.where(is_coded, coded_bytes, rows["coefficients"] * rows["num_tokens"])
        rows["digest"] = digests.reshape(len(cells), -1) * is_coded[:, np.newaxis]
        made[span] = rows
    return made[span]


def _place(reader: SegmentReader, cell: Cell) -> tuple[int, ...]:
    """Return the part of a cell's row that all spans of as many tokens share."""
    manifest, place = reader.manifest, cell_place(reader.manifest, cell)
    coefficients, num_tokens = manifest.integers_shape(cell, manifest.parts[-1].layout)
    layers, heads = reader.grid.layers(cell.layer_group), reader.heads_of(cell)
    first_page, end_page = manifest.span_range(cell.span)
    return (
        *(layers.start, len(layers), heads.start, len(heads)),
        *(place.layers.start, place.heads.start),
        *(0, num_tokens, 0, end_page - first_page, 0),
        *(0, 0, 0, coefficients),
        *(0, 0),
    )


class CodedRegion(Destination):
    """Shared memory with the cells of one prompt, which are not restored yet: their integers, coded or not."""

    takes_units = True

    def __init__(self, arena: Arena, offset: int, plan: RegionPlan) -> None:
        """``offset``: of the plan's region. What `memory_cache` has verified before is kept from the start."""
        super().__init__()
        self._memory = arena.buffer(0, arena.num_bytes)
        self._plan = plan
        self._rows = plan.rows.copy()
        self._rows["start"] += offset * plan.in_region
        self._starts, self._sizes, self._is_coded = (self._rows[x].tolist() for x in ("start", "size", "is_coded"))
        # Of each part's cells, in storage order. What an entry keeps is shared with those who read it meanwhile.
        self._kept: list[list[Kept | None]] = [
            [None] * part.reader.cells_per_span if entry is None else entry.kept
            for part, entry in zip(plan.parts, plan.entries, strict=True)
        ]

    def is_kept(self, part: int) -> bool:
        return None not in self._kept[part]

    def takes(self, reader: SegmentReader) -> bool:
        return reader.data_name in self._plan.data_names

    def places(self, unit: ReadUnit) -> list[CellChunks] | None:
        rows = self._plan.rows_of(unit)
        if unit.reader.manifest.is_encrypted or not all(self._is_coded[row] for row in rows):
            return None
        sizes = [[each.size_bytes for each in unit.reader.stored(cell)] for cell in unit.cells]
        # What a cell has beside its integers is little, and does not go to the engine as it is stored.
        rest = memoryview(bytearray(sum(map(sum, sizes)) - sum(self._sizes[row] for row in rows)))
        places: list[CellChunks] = []
        for row, (*others, size) in zip(rows, sizes, strict=True):
            place = []
            for each in others:
                place.append(rest[:each])
                rest = rest[each:]
            places.append([*place, self._place(row, size)])
        return places

    def _place(self, row: int, size: int) -> memoryview:
        if size != self._sizes[row]:
            raise UnsupportedError(f"integers of a cell have {size} bytes, expected {self._sizes[row]}")
        start = self._starts[row]
        return self._memory[start : start + size]

    def decode(self, part: SpanPart, unit: ReadUnit, chunks: Sequence[CellChunks], decoders: Decoders) -> Keep:
        found: list[tuple[int, Kept, bytes | memoryview]] = []
        for row, cell, each in zip(self._plan.rows_of(unit), unit.cells, chunks, strict=True):
            if self._is_coded[row]:
                parts, integers = unit.reader.verified_cell(cell, each)
            else:
                *tensors, decoded = unit.reader.decode_cell(cell, each, decoders)
                parts = [x.numpy() for x in tensors]
                integers = decoded.contiguous().view(torch.uint8).flatten().numpy().data
            found.append((row, pack(*parts), integers))
        return partial(self.write, partial(self._keep, found))

    def working_bytes(self, unit: ReadUnit) -> int:
        cells = zip(self._plan.rows_of(unit), unit.cells, strict=True)
        return sum(2 * unit.reader.frames_bytes(cell) for row, cell in cells if not self._is_coded[row])

    def _keep(self, cells: Sequence[tuple[int, Kept, bytes | memoryview]]) -> None:
        for row, kept, integers in cells:
            place = self._place(row, len(integers))
            if not _is_at(integers, place):
                place[:] = integers
            self._kept[self._plan.part_of[row]][self._plan.number_of[row]] = kept

    def tables(self, num_pages: int) -> tuple[int, bytes]:
        """Return the number of cells that have some of the first ``num_pages`` pages, and as bytes their rows, the page
        tables, and what the cells have beside their integers."""
        tables = [_page_table(part, num_pages) for part in self._plan.parts]
        ends = np.cumsum([len(table) for table in tables])
        wanted, begins, kept = [], [], []
        for row, (part, number) in enumerate(zip(self._plan.part_of, self._plan.number_of, strict=True)):
            if len(tables[part]) and (found := self._kept[part][number]) is not None:
                wanted.append(row)
                begins.append(ends[part] - len(tables[part]))
                kept.append(found)
        rows = self._rows[wanted]
        sizes = np.fromiter((len(content) for content, _ in kept), np.int64)
        rows["table"] = begins
        rows["packed"] = np.cumsum(sizes) - sizes
        rows["num_exact"] = [num_exact for _, num_exact in kept]
        return len(rows), b"".join((rows.tobytes(), *(x.tobytes() for x in tables), *(x for x, _ in kept)))


def _is_at(integers: bytes | memoryview, place: memoryview) -> bool:
    if not isinstance(integers, memoryview) or integers.obj is not place.obj:
        return False
    ours, theirs = (np.frombuffer(x, np.uint8).__array_interface__["data"][0] for x in (place, integers))
    return bool(ours == theirs)


def _page_table(part: SpanPart, num_pages: int) -> np.ndarray:
    """Return which page of the prompt each page of a span is, int32; -1 for pages that are not wanted, or not among the
    first ``num_pages``. The table is empty if none is."""
    first, end = part.reader.manifest.span_range(part.span)
    table = np.full(end - first, -1, dtype=np.int32)
    pages = np.array(part.request_pages)
    table[list(part.span_pages)] = np.where(pages < num_pages, pages, -1)
    return table if pages.min() < num_pages else table[:0]
