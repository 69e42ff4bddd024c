"""Prompts that are staged before they are restored, for an engine that restores them on its GPU.

What the GPU decodes, too, is staged as it is coded; of all else, the data plane decodes the integers, a byte each. The
cells of a layer group lie together, so that the engine loads a group, or a part of it, with one copy. Everything that
the kernels need as tables is made here, when bytes arrive; only addresses on the device are left for the engine to fill
in.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from sgl_kvfetch.codec import Cell, CellPlace, Decoders, SegmentReader
from sgl_kvfetch.codec.container import cell_place
from sgl_kvfetch.codec.layout import RegionLayout
from sgl_kvfetch.codec.quant import pack
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plane.arena import Arena
from sgl_kvfetch.plane.fetch.plan import PageSource, SpanPart, span_parts
from sgl_kvfetch.plane.fetch.sink import CodedPool, Keep

ALIGNMENT = 16  # of bitstreams, in bytes
CODEC = "ans"  # that GPUs decode
_LEAST_INTEGERS = 241  # the checksum of fewer is not computed on GPUs

# A cell of a staged prompt, with its integers at ``start`` of the arena, and what `pack` returns at ``packed`` of the
# tables. Layers count from the rank's first one, heads from its first one, and tokens in the sequence.
CELL = np.dtype(
    [
        *((name, "<i8") for name in ("first_layer", "num_layers", "first_head", "num_heads")),
        *((name, "<i8") for name in ("model_layer", "model_head")),  # the same firsts, counted in the model
        *((name, "<i8") for name in ("first_token", "num_tokens", "num_pages", "num_exact")),
        *((name, "<i8") for name in ("start", "size", "packed", "coefficients")),
        *((name, "<i8") for name in ("width", "height", "token_rows", "token_cols")),
        ("is_coded", "<i8"),  # or 0: these are the integers themselves, which need no checksum
        ("digest", "u1", (16,)),  # of the integers
    ]
)

_Key = tuple[str, Cell]  # a data object and a cell of it


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


class _Kept(NamedTuple):
    """A cell in a region: what its row in the tables is made of, but for the pages that are wanted, which are known
    later."""

    place: CellPlace
    layers: range
    heads: range
    parts: tuple[torch.Tensor, ...]
    layout: RegionLayout
    coefficients: int
    size: int
    digest: bytes | None  # of integers that are coded


class CodedRegion(CodedPool):
    """A region of shared memory with the cells of one prompt. Thread-safe."""

    def __init__(self, arena: Arena, offset: int, parts: Sequence[SpanPart]) -> None:
        self._arena = arena
        self._places: dict[_Key, tuple[int, int]] = {}  # offset and room of each cell's integers
        for key, room_bytes in _rooms(parts):
            self._places[key] = offset, room_bytes
            offset += room_bytes
        self._kept: dict[_Key, tuple[_Kept, Sequence[int], Sequence[int]]] = {}
        self._lock = threading.Lock()

    def decoded(self, reader: SegmentReader, cell: Cell, data: bytes | memoryview, decoders: Decoders) -> Keep:
        key = reader.data_name, cell
        if stays_coded(reader, cell):
            coded = reader.verified_cell(cell, data)
            bitstream, digest = coded.coded.bitstream, coded.coded.row.decoded_checksum
            assert isinstance(coded.layout, RegionLayout)
            of_cell = coded.place, coded.layers, coded.heads, coded.parts, coded.layout, coded.coefficients
            return partial(self._keep, key, bitstream, _Kept(*of_cell, len(bitstream), digest))
        *parts, integers = reader.decode_cell(cell, data, decoders)
        coefficients, num_tokens = integers.shape
        layout = RegionLayout(width=num_tokens, height=1, token_rows=1, token_cols=num_tokens)
        layers, heads = reader.manifest.grid.layers(cell.layer_group), reader.heads_of(cell)
        of_cell = cell_place(reader.manifest, cell), layers, heads, tuple(parts), layout, coefficients
        content = integers.contiguous().numpy().data.cast("B")
        return partial(self._keep, key, content, _Kept(*of_cell, len(content), None))

    def working_bytes(self, reader: SegmentReader, cell: Cell) -> int:
        return reader.coded_bytes(cell) if stays_coded(reader, cell) else 2 * reader.frames_bytes(cell)

    def _keep(
        self,
        key: _Key,
        content: bytes | memoryview,
        cell: _Kept,
        span_pages: Sequence[int],
        pages: Sequence[int],
    ) -> None:
        offset, room_bytes = self._places.get(key, (0, 0))
        if len(content) > room_bytes:
            raise UnsupportedError(f"{key[1]} of {key[0]} has {len(content)} bytes, expected at most {room_bytes}")
        self._arena.buffer(offset, len(content))[:] = content
        with self._lock:
            self._kept[key] = cell, span_pages, pages

    def tables(self, num_pages: int, page_size: int) -> tuple[int, bytes]:
        """Return the number of cells that have some of the first ``num_pages`` pages, and their rows with what they
        have beside their integers."""
        rows, packed, end = [], [], 0
        for key, (offset, _) in self._places.items():
            cell, span_pages, pages = self._kept.get(key, (None, (), ()))
            if cell is None or min(pages) >= num_pages:
                continue
            table = array("i", (-1,)) * (len(cell.place.tokens) // page_size)
            for span_page, page in zip(span_pages, pages, strict=True):
                table[span_page] = page if page < num_pages else -1
            content, num_exact = pack(table.tobytes(), *cell.parts)
            layout = cell.layout
            rows.append(
                (
                    *(cell.layers.start, len(cell.layers), cell.heads.start, len(cell.heads)),
                    *(cell.place.layers.start, cell.place.heads.start),
                    *(cell.place.tokens.start, len(cell.place.tokens), len(table), num_exact),
                    *(offset, cell.size, end, cell.coefficients),
                    *(layout.width, layout.height, layout.token_rows, layout.token_cols),
                    cell.digest is not None,
                    np.frombuffer(cell.digest or bytes(16), dtype=np.uint8),
                )
            )
            packed.append(content)
            end += len(content)
        return len(rows), np.array(rows, dtype=CELL).tobytes() + b"".join(packed)


def code_bytes(sources: Sequence[PageSource]) -> int:
    """Return the size of a `CodedRegion` of these pages."""
    return sum(room_bytes for _, room_bytes in _rooms(span_parts(sources)))


def _rooms(parts: Sequence[SpanPart]) -> list[tuple[_Key, int]]:
    """Return the cells of some spans, ordered by layers, and the room for the integers of each."""
    found = []
    for part in parts:
        reader = part.reader
        for cell in reader.span_cells(part.span):
            is_coded = stays_coded(reader, cell)
            num_bytes = reader.last_chunk(cell).size_bytes if is_coded else reader.num_integers(cell)
            found.append(((reader.data_name, cell), -(-num_bytes // ALIGNMENT) * ALIGNMENT))
    return sorted(found, key=lambda each: each[0][1].layer_group)  # a stable order otherwise
