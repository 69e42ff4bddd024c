"""Prompts that are staged before they are restored, for an engine that restores them on its GPU.

A cell has one chunk of integers (`klt`), or several (`exact`: one for each byte of a value, of K and of V). Chunks that
the GPU decodes, and those that need no decoder, are staged as they are stored; of all others, the data plane decodes
the integers, a byte each. The chunks of a layer group lie together, so that the engine loads a group, or a part of it,
with one copy. Everything that the kernels need as tables is made here; only addresses on the device are left for the
engine to fill in. What a manifest says of its cells becomes rows of the tables once a segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from operator import attrgetter
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from sgl_kvfetch.codec import CLASS_LANES, TAG_BYTES, Cell, CellChunks, Decoders, SegmentReader, pack, read_tables
from sgl_kvfetch.codec.container.reader import cell_place
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plane.fetch.fetcher import Destination, Keep
from sgl_kvfetch.plane.fetch.plan import PageSource, ReadUnit, SpanPart
from sgl_kvfetch.plane.memory_cache import Held, Kept
from sgl_kvfetch.protocol import CODE_ALIGNMENT, Arena
from sgl_kvfetch.protocol.arena import CELL, CHUNK

CODEC, _FITTED = "ans", "ans-tables"  # that GPUs decode
_RAW = "raw"
_LEAST_INTEGERS = 241  # the checksum of fewer is not computed on GPUs


def gpu_restores(sources: Sequence[PageSource]) -> bool:
    """Return whether an engine's GPU is to restore all cells of these pages: it can, and gets fewer bytes than the
    values have."""
    readers = {each.reader for source in sources for each in (source, *source.others)}
    return all(reader.quantiser.gpu_restores for reader in readers) and (
        any(not reader.quantiser.is_lossless or _FITTED in reader.variant.codecs for reader in readers)
    )


class RegionPlan:
    """Where the cells of a prompt's spans lie: what stays coded of some spans in `memory_cache`, all else in a region,
    ordered by layers.

    ``rows``: of `CELL`, ordered by layers, and ``chunks``: of `CHUNK`, both with all that is known before a cell has
    arrived; ``start`` counts from the region's for chunks in it (``in_region``). ``stays``: which chunks stay coded, or
    are stored as they are. ``num_bytes``: the region's size."""

    def __init__(self, parts: Sequence[SpanPart], held: Held) -> None:
        """``held``: what memory has of these parts."""
        self.parts = parts
        self.data_names = {part.reader.data_name for part in parts}
        self.entries = [
            None if part.reader.manifest.is_encrypted else held.entry(part.reader, part.span) for part in parts
        ]
        of_parts = [_span_rows(part.reader, part.span) for part in parts]
        rows, counts = np.concatenate([each.cells for each in of_parts]), [len(each.cells) for each in of_parts]
        order = np.argsort(rows["first_layer"], kind="stable")
        self.rows, self.chunks = rows[order], np.concatenate([each.chunks for each in of_parts])[order]
        self.stays = np.concatenate([each.stays for each in of_parts])[order]
        part_of = np.repeat(np.arange(len(parts)), counts)[order]
        is_held = np.array([entry is not None for entry in self.entries])[part_of]
        self.in_region = ~(is_held[:, np.newaxis] & self.stays)
        rooms = -(-self.chunks["size"] // CODE_ALIGNMENT) * CODE_ALIGNMENT * self.in_region
        begins = [
            np.zeros(each.chunks.shape, dtype=np.int64) if entry is None else entry.integers.reshape(each.chunks.shape)
            for entry, each in zip(self.entries, of_parts, strict=True)
        ]
        in_turn = (np.cumsum(rooms) - rooms.flatten()).reshape(rooms.shape)
        self.chunks["start"] = np.where(self.in_region, in_turn, np.concatenate(begins)[order])
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


class _SpanRows(NamedTuple):
    """``cells``: of `CELL`, without ``table``, ``num_exact`` and ``packed``. ``chunks``: of `CHUNK`, without ``start``
    and their distributions: ``num_tables`` says whether there are any. ``stays``: as of `RegionPlan`."""

    cells: np.ndarray
    chunks: np.ndarray
    stays: np.ndarray


_made: WeakKeyDictionary[SegmentReader, dict[int, _SpanRows]] = WeakKeyDictionary()


def _span_rows(reader: SegmentReader, span: int) -> _SpanRows:
    """Return the rows of a span's cells. They are made once."""
    made = _made.setdefault(reader, {})
    if span not in made:
        cells, (first_page, end_page) = list(reader.span_cells(span)), reader.manifest.span_range(span)
        alike = next(
            (each.cells for each in made.values() if each.cells["num_pages"][0] == end_page - first_page), None
        )
        rows = np.array([_place(reader, cell) for cell in cells], dtype=CELL) if alike is None else alike.copy()
        rows["first_token"] = cell_place(reader.manifest, cells[0]).tokens.start
        laid_out = [each for cell in cells for each in reader.laid_out(cell)]
        chunks = np.zeros((len(cells), len(reader.laid_out_parts)), dtype=CHUNK)
        num_integers, size, is_in_order = (
            np.array([get(each) for each in laid_out]).reshape(chunks.shape)
            for get in map(attrgetter, ("num_integers", "row.size_bytes", "is_in_order"))
        )
        codecs = np.array([each.row.codec for each in laid_out]).reshape(chunks.shape)
        digests = np.frombuffer(b"".join(each.row.decoded_checksum for each in laid_out), dtype=np.uint8)
        chunks["num_rows"] = num_integers // rows["num_tokens"][:, np.newaxis]
        is_fitted = (codecs == _FITTED) & (chunks["num_rows"] % CLASS_LANES == 0)
        is_coded = is_in_order & ((codecs == CODEC) | is_fitted) & (num_integers >= _LEAST_INTEGERS)
        stays = is_coded | (is_in_order & (codecs == _RAW))
        chunks["is_coded"], chunks["num_tables"] = is_coded, is_coded & is_fitted
        chunks["size"] = np.where(stays, size - TAG_BYTES * reader.manifest.is_encrypted, num_integers)
        chunks["digest"] = digests.reshape(*chunks.shape, -1) * is_coded[..., np.newaxis]
        made[span] = _SpanRows(rows, chunks, stays)
    return made[span]


def _place(reader: SegmentReader, cell: Cell) -> tuple[int, ...]:
    """Return the part of a cell's row that all spans of as many tokens share."""
    manifest, place = reader.manifest, cell_place(reader.manifest, cell)
    layers, heads = reader.grid.layers(cell.layer_group), reader.heads_of(cell)
    first_page, end_page = manifest.span_range(cell.span)
    return (
        *(layers.start, len(layers), heads.start, len(heads)),
        *(place.layers.start, place.heads.start),
        *(0, manifest.span_tokens(cell.span), 0, end_page - first_page, 0),
        *(0, len(reader.laid_out_parts)),
    )


class CodedRegion(Destination):
    """Shared memory with the cells of one prompt, which are not restored yet: their integers, coded or not."""

    takes_units = True

    def __init__(self, arena: Arena, offset: int, plan: RegionPlan) -> None:
        """``offset``: of the plan's region. What `memory_cache` has verified before is kept from the start."""
        super().__init__()
        self._memory = arena.buffer(0, arena.num_bytes)
        self._plan = plan
        self._chunks = plan.chunks.copy()
        self._chunks["start"] += offset * plan.in_region
        self._starts, self._sizes = self._chunks["start"].tolist(), self._chunks["size"].tolist()
        self._stays, self._has_tables = plan.stays.tolist(), (plan.chunks["num_tables"] > 0).tolist()
        # Of each part's cells, in storage order. Those that stay coded as a whole are kept in their entry, too.
        self._kept: list[list[Kept | None]] = [
            [None] * part.reader.cells_per_span if entry is None else list(entry.kept)
            for part, entry in zip(plan.parts, plan.entries, strict=True)
        ]

    def is_kept(self, part: int) -> bool:
        return None not in self._kept[part]

    def takes(self, reader: SegmentReader) -> bool:
        return reader.data_name in self._plan.data_names

    def places(self, unit: ReadUnit) -> list[CellChunks] | None:
        rows = self._plan.rows_of(unit)
        if unit.reader.manifest.is_encrypted or not any(any(self._stays[row]) for row in rows):
            return None
        chunk_of = {number: chunk for chunk, number in enumerate(unit.reader.laid_out_parts)}
        places: list[CellChunks] = []
        for row, cell in zip(rows, unit.cells, strict=True):
            # What has no place is little, or is decoded, and does not go to the engine as it is stored.
            place, stays = list[memoryview](), self._stays[row]
            for number, each in enumerate(unit.reader.stored(cell)):
                chunk = chunk_of.get(number)
                if chunk is not None and stays[chunk]:
                    place.append(self._place(row, chunk, each.size_bytes))
                else:
                    place.append(memoryview(bytearray(each.size_bytes)))
            places.append(place)
        return places

    def _place(self, row: int, chunk: int, size: int) -> memoryview:
        start, expected = self._starts[row][chunk], self._sizes[row][chunk]
        if size != expected:
            raise UnsupportedError(f"integers of a cell have {size} bytes, expected {expected}")
        return self._memory[start : start + size]

    def decode(self, part: SpanPart, unit: ReadUnit, chunks: Sequence[CellChunks], decoders: Decoders) -> Keep:
        found: list[tuple[int, Kept, list[bytes | memoryview]]] = []
        for row, cell, each in zip(self._plan.rows_of(unit), unit.cells, chunks, strict=True):
            if self._kept_of(row) is None:
                plain, integers = unit.reader.verified_cell(cell, each, self._stays[row], decoders)
                found.append((row, self._unpacked(row, plain, integers), integers))
        return partial(self.write, partial(self._keep, found))

    def _unpacked(self, row: int, plain: Sequence[np.ndarray], integers: Sequence[bytes | memoryview]) -> Kept:
        content, num_exact = pack(*plain) if plain else (b"", 0)
        distributions = []
        for coded, has_own in zip(integers, self._has_tables[row], strict=True):
            if not has_own:
                distributions.append((0, 0, 0))
                continue
            slots, rest = read_tables(coded)
            distributions.append((len(content), len(slots), len(coded) - len(rest)))
            content += slots.tobytes()
        return Kept(content + bytes(-len(content) % 4), num_exact, tuple(distributions))

    def _kept_of(self, row: int) -> Kept | None:
        return self._kept[self._plan.part_of[row]][self._plan.number_of[row]]

    def working_bytes(self, unit: ReadUnit) -> int:
        cells = zip(self._plan.rows_of(unit), unit.cells, strict=True)
        return sum(2 * unit.reader.frames_bytes(cell) for row, cell in cells if not all(self._stays[row]))

    def _keep(self, cells: Sequence[tuple[int, Kept, list[bytes | memoryview]]]) -> None:
        for row, kept, integers in cells:
            for chunk, each in enumerate(integers):
                place = self._place(row, chunk, len(each))
                if not _is_at(each, place):
                    place[:] = each
            part, number = self._plan.part_of[row], self._plan.number_of[row]
            self._kept[part][number] = kept
            if (entry := self._plan.entries[part]) is not None and all(self._stays[row]):
                entry.kept[number] = kept

    def tables(self, num_pages: int) -> tuple[int, bytes]:
        """Return the number of cells that have some of the first ``num_pages`` pages, and as bytes their rows, those of
        their chunks, the page tables, and what the cells have beside their integers."""
        tables = [_page_table(part, num_pages) for part in self._plan.parts]
        ends = np.cumsum([len(table) for table in tables])
        wanted, begins, kept = [], [], []
        for row, part in enumerate(self._plan.part_of):
            if len(tables[part]) and (found := self._kept_of(row)) is not None:
                wanted.append(row)
                begins.append(ends[part] - len(tables[part]))
                kept.append(found)
        rows, chunks = self._plan.rows[wanted], self._chunks[wanted]
        sizes = np.fromiter((len(each.content) for each in kept), np.int64)
        rows["table"] = begins
        rows["packed"] = np.cumsum(sizes) - sizes
        rows["num_exact"] = [each.num_exact for each in kept]
        distributions = np.array([each.distributions for each in kept])
        chunks["tables"] = distributions[..., 0] + rows["packed"][:, np.newaxis]
        chunks["num_tables"], chunks["skipped"] = distributions[..., 1], distributions[..., 2]
        content = *(x.tobytes() for x in (rows, chunks, *tables)), *(each.content for each in kept)
        return len(rows), b"".join(content)


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
