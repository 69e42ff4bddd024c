"""Prompts that are staged before they are restored, for an engine that restores them on its GPU.

What the GPU decodes, too, is staged as it is coded; of all else, the data plane decodes the integers, a byte each. The
cells of a layer group lie together, so that the engine loads a group, or a part of it, with one copy. Everything that
the kernels need as tables is made here; only addresses on the device are left for the engine to fill in. What a
manifest says of its cells becomes rows of the table once a segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import torch

from sgl_kvfetch.codec import Cell, Decoders, SegmentReader
from sgl_kvfetch.codec.container import cell_place
from sgl_kvfetch.codec.quant import pack
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plane.arena import Arena
from sgl_kvfetch.plane.fetch.plan import PageSource, SpanPart
from sgl_kvfetch.plane.fetch.sink import CodedPool, Keep

ALIGNMENT = 16  # of bitstreams, in bytes
CODEC = "ans"  # that GPUs decode
_LEAST_INTEGERS = 241  # the checksum of fewer is not computed on GPUs

# A cell of a staged prompt. Its integers, ``(coefficients, num_tokens)``, are at ``start`` of the arena, and what
# `pack` returns at ``packed`` of the tables. Layers count from the rank's first one, heads from its first one, and
# tokens in the sequence.
CELL = np.dtype(
    [
        *((name, "<i8") for name in ("first_layer", "num_layers", "first_head", "num_heads")),
        *((name, "<i8") for name in ("model_layer", "model_head")),  # the same firsts, counted in the model
        *((name, "<i8") for name in ("first_token", "num_tokens", "num_pages", "num_exact")),
        *((name, "<i8") for name in ("start", "size", "packed", "coefficients")),
        ("is_coded", "<i8"),  # or 0: these are the integers themselves, which need no checksum
        ("digest", "u1", (16,)),  # of the integers
    ]
)


@dataclass(frozen=True, slots=True)
class StagedCode:
    """The engine's view of a prompt that it restores. ``cells``: of `CELL`, ordered by layers, with their integers in
    the same order. ``packed``: uint8, what the cells have beside their integers."""

    cells: np.ndarray
    packed: torch.Tensor


def gpu_restores(sources: Sequence[PageSource]) -> bool:
    """Return whether an engine's GPU can restore all cells of these pages."""
    return all(each.reader.quantiser.gpu_restores for source in sources for each in (source, *source.others))


def stays_coded(reader: SegmentReader, cell: Cell) -> bool:
    """Return whether an engine's GPU decodes a cell that it restores."""
    return (
        not reader.variant.levels
        and not reader.variant.num_dropped
        and reader.is_in_one_bitstream(cell, CODEC)
        and reader.num_integers(cell) >= _LEAST_INTEGERS
    )


class RegionPlan:
    """Where the cells of a prompt's spans lie in a region, ordered by layers. ``rows``: of `CELL`, with all that is
    known before a cell has arrived; ``start`` counts from the region's. ``num_bytes``: the region's size."""

    def __init__(self, parts: Sequence[SpanPart]) -> None:
        self.parts = parts
        of_parts = [_span_rows(part.reader, part.span) for part in parts]
        rows = np.concatenate(of_parts)
        order = np.argsort(rows["first_layer"], kind="stable")
        self.rows = rows[order]
        rooms = -(-self.rows["size"] // ALIGNMENT) * ALIGNMENT
        self.rows["start"] = np.cumsum(rooms) - rooms
        self.num_bytes = int(rooms.sum())
        self.part_of = np.repeat(np.arange(len(parts)), [len(each) for each in of_parts])[order].tolist()  # each row's
        self._places: dict[tuple[str, Cell], int] = {}  # the row of each data object's cells
        places = np.argsort(order).tolist()
        for part in parts:
            for cell in part.reader.span_cells(part.span):
                self._places[part.reader.data_name, cell] = places[len(self._places)]

    def row(self, reader: SegmentReader, cell: Cell) -> int:
        """Return the number of a cell's row. Raises UnsupportedError if the cell was not planned for."""
        row = self._places.get((reader.data_name, cell))
        if row is None:
            raise UnsupportedError(f"{cell} of {reader.data_name} has no place in its prompt's region")
        return row


_made: WeakKeyDictionary[SegmentReader, dict[int, np.ndarray]] = WeakKeyDictionary()


def _span_rows(reader: SegmentReader, span: int) -> np.ndarray:
    """Return the rows of a span's cells, without ``num_exact``, ``start`` and ``packed``. They are made once."""
    made = _made.setdefault(reader, {})
    if span not in made:
        made[span] = np.array([_row(reader, cell) for cell in reader.span_cells(span)], dtype=CELL)
    return made[span]


def _row(reader: SegmentReader, cell: Cell) -> tuple[object, ...]:
    manifest, place = reader.manifest, cell_place(reader.manifest, cell)
    name = manifest.parts[-1].layout
    coefficients, num_tokens = manifest.integers_shape(cell, name)
    layers, heads, chunk = reader.grid.layers(cell.layer_group), reader.heads_of(cell), reader.last_chunk(cell)
    first_page, end_page = manifest.span_range(cell.span)
    is_coded = stays_coded(reader, cell)
    return (
        *(layers.start, len(layers), heads.start, len(heads)),
        *(place.layers.start, place.heads.start),
        *(place.tokens.start, num_tokens, end_page - first_page, 0),
        *(0, chunk.size_bytes if is_coded else coefficients * num_tokens, 0, coefficients),
        is_coded,
        np.frombuffer(chunk.decoded_checksum, dtype=np.uint8) if is_coded else 0,
    )


class CodedRegion(CodedPool):
    """A region of shared memory with the cells of one prompt. Threads may keep cells at once."""

    def __init__(self, arena: Arena, offset: int, plan: RegionPlan) -> None:
        self._memory = arena.buffer(offset, plan.num_bytes)
        self._offset = offset
        self._plan = plan
        self._starts, self._sizes, self._is_coded = (plan.rows[x].tolist() for x in ("start", "size", "is_coded"))
        self._kept: dict[int, Sequence[np.ndarray]] = {}  # by row: what a cell has beside its integers

    def places(self, reader: SegmentReader, cells: Sequence[Cell]) -> list[list[memoryview]] | None:
        rows = [self._plan.row(reader, cell) for cell in cells]
        if reader.manifest.is_encrypted or not all(self._is_coded[row] for row in rows):
            return None
        sizes = [reader.chunk_sizes(cell) for cell in cells]
        # What a cell has beside its integers is little, and does not go to the engine as it is stored.
        rest = memoryview(bytearray(sum(map(sum, sizes)) - sum(self._sizes[row] for row in rows)))
        places = []
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

    def decoded(
        self, reader: SegmentReader, cells: Sequence[tuple[Cell, Sequence[memoryview]]], decoders: Decoders
    ) -> Keep:
        found = []
        for cell, chunks in cells:
            row = self._plan.row(reader, cell)
            if self._is_coded[row]:
                parts, integers = reader.verified_cell(cell, chunks)
            else:
                *tensors, decoded = reader.decode_chunks(cell, chunks, decoders)
                parts = [x.numpy() for x in tensors]
                integers = decoded.contiguous().view(torch.uint8).flatten().numpy().data
            found.append((row, parts, integers))
        return partial(self._keep, found)

    def working_bytes(self, reader: SegmentReader, cells: Sequence[Cell]) -> int:
        decoded = (cell for cell in cells if not self._is_coded[self._plan.row(reader, cell)])
        return sum(2 * reader.frames_bytes(cell) for cell in decoded)

    def _keep(self, cells: Sequence[tuple[int, Sequence[np.ndarray], bytes | memoryview]]) -> None:
        for row, parts, integers in cells:
            if not isinstance(integers, memoryview) or integers.obj is not self._memory.obj:
                self._place(row, len(integers))[:] = integers
            self._kept[row] = parts

    def tables(self, num_pages: int) -> tuple[int, bytes]:
        """Return the number of cells that have some of the first ``num_pages`` pages, and their rows with what they
        have beside their integers."""
        pages = [_page_table(part, num_pages) for part in self._plan.parts]
        wanted = [row for row in sorted(self._kept) if pages[self._plan.part_of[row]]]
        packed = [pack(pages[self._plan.part_of[row]], *self._kept[row]) for row in wanted]
        rows = self._plan.rows[wanted]
        rows["start"] += self._offset
        sizes = np.array([len(content) for content, _ in packed], dtype=np.int64)
        rows["packed"] = np.cumsum(sizes) - sizes
        rows["num_exact"] = [num_exact for _, num_exact in packed]
        return len(rows), rows.tobytes() + b"".join(content for content, _ in packed)


def _page_table(part: SpanPart, num_pages: int) -> bytes:
    """Return which page of the prompt each page of a span is, int32; -1 for pages that are not wanted, or not among the
    first ``num_pages``. Return b"" if none is."""
    first, end = part.reader.manifest.span_range(part.span)
    table = np.full(end - first, -1, dtype=np.int32)
    pages = np.array(part.request_pages)
    table[list(part.span_pages)] = np.where(pages < num_pages, pages, -1)
    return table.tobytes() if pages.min() < num_pages else b""
