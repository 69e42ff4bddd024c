"""Decode the cells of segments. No I/O: that is the caller's. `segment` encodes them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from sgl_kvfetch.codec.bitstream.ans import AnsCodec, AnsTablesCodec
from sgl_kvfetch.codec.bitstream.base import LADDER, Decoders
from sgl_kvfetch.codec.bitstream.entropy import RawCodec, ZstdCodec
from sgl_kvfetch.codec.bitstream.ladder import decode_ladder
from sgl_kvfetch.codec.bitstream.registry import CODECS, can_decode, get_codec
from sgl_kvfetch.codec.container.manifest import Cell, Manifest, PartInfo
from sgl_kvfetch.codec.container.objects import MAX_CHUNK_BYTES, Chunk, DataObject
from sgl_kvfetch.codec.container.sides import SidePlace, side_places
from sgl_kvfetch.codec.layout.frames import Layout
from sgl_kvfetch.codec.quant.base import CellPlace, CellValues, Quantised, Quantiser
from sgl_kvfetch.errors import ConfigError, CorruptError, FormatError
from sgl_kvfetch.types import KVGeometry, SideKey

BYTES_CODEC = ZstdCodec()  # for parts that are plain bytes
# A part of plain bytes holds at most every value of its cell, and this many bytes a token.
_MOST_BYTES_A_TOKEN = 4096


class StoredChunk(NamedTuple):
    """Where a chunk of a cell is stored: bytes ``[start, end)`` of an object, in which it is the chunk ``number``.
    ``place``: the object's, among `SegmentReader.object_names`."""

    place: int
    number: int
    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.start


CellChunks = Sequence[memoryview]  # a cell's chunks, in the order of `SegmentReader.stored`


class CodedChunk(NamedTuple):
    """A chunk's row and bitstream. ``levels``: those that refine it."""

    row: Chunk
    bitstream: bytes | memoryview
    levels: tuple[CodedChunk, ...] = ()

    @property
    def all(self) -> tuple[CodedChunk, ...]:
        """The chunk, and those that refine it."""
        return self, *self.levels

    @property
    def finest(self) -> Chunk:
        """The row with the checksum of what all its levels decode to."""
        return self.levels[-1].row if self.levels else self.row


class CellSize(NamedTuple):
    """What cells of the same layers, heads and number of tokens have in common. ``in_order``: for each part that has
    frames, the number of its integers, and the codecs in which its frames have them in their order."""

    num_tokens: int
    value_bytes: int
    num_integers: int
    frames_bytes: int
    in_order: list[tuple[int, frozenset[str]]]


class LaidOut(NamedTuple):
    """A part of a cell that has frames: its row, the number of its integers, and whether its bitstream decodes to
    them in their order: to frames that begin with them, or, in `ans-tables`, of which each begins with a token's. One
    in `raw` is the integers themselves: both of its checksums are one, unless it is encrypted."""

    row: Chunk
    num_integers: int
    is_in_order: bool


class SegmentReader:
    """Decodes the cells of one variant of a segment.

    Whoever only reads sees bytes in `object_names`, and need not know of variants and levels: `ways` are the readers of
    the same cells in other bytes.
    """

    def __init__(
        self,
        manifest: Manifest,
        quantiser: Quantiser,
        variant: int | None = None,
        rank_heads: range | None = None,
        num_levels: int | None = None,
    ) -> None:
        """``variant``: its index; None selects the first whose codecs are available. ``rank_heads``: the heads that the
        reading rank has, counted in the model; None for those of the segment. ``num_levels``: how many levels of
        coefficients to read; None for all. Raises FormatError if the manifest was not written with this quantiser, or
        if a codec of the variant is unknown, EncryptedError if it must be opened first, UnsupportedError if a cell has
        both heads of the rank and others."""
        manifest.require_open()
        self.manifest = manifest
        self.rank_heads = manifest.heads.heads if rank_heads is None else rank_heads
        self.quantiser = quantiser
        self.variant = manifest.variants[first_readable(manifest) if variant is None else variant]
        self.geometry: KVGeometry = manifest.geometry
        self._require_quantiser()
        for codec in self.variant.codecs - {LADDER}:
            get_codec(codec)
        self.levels = self.variant.levels[: None if num_levels is None else num_levels - 1]
        self._objects: tuple[DataObject, ...] = self.variant, *self.levels
        self._offsets = [rows.offsets for rows in self._objects]
        self._head_blocks = manifest.head_blocks(self.rank_heads)
        self.grid = manifest.grid
        self._num_blocks, self._cells_per_span = self.grid.num_head_blocks, manifest.cells_per_span
        self._num_parts = manifest.chunks_per_cell
        self._sizes: dict[tuple[int, int, int], CellSize] = {}
        self._span_bytes: dict[int, int] = {}

    def _require_quantiser(self) -> None:
        """Raise FormatError unless the manifest describes cells as the quantiser makes them."""
        m, quantiser = self.manifest, self.quantiser
        found = m.namespace.quantiser, m.parts
        expected = quantiser.identity, part_infos(quantiser, self.geometry)
        if found != expected:
            raise FormatError(f"segment is quantised as {found}, expected {expected}")
        if not quantiser.knows_cells:
            return
        cells = m.cell_layers, m.cell_heads, m.coefficients
        try:
            made = quantiser.cell_layers, quantiser.cell_heads or m.cell_heads, coefficients_of(m, quantiser)
        except ConfigError as e:
            raise FormatError(f"segment does not fit its quantiser: {e}") from e
        if cells != made:
            raise FormatError(f"segment has cells of {cells} layers, heads and coefficients, expected {made}")

    @cached_property
    def stem(self) -> str:
        """The segment's name without a suffix, as in `SegmentKey.stem`."""
        return self.manifest.key.stem

    @cached_property
    def data_name(self) -> str:
        return self.manifest.data_name(self.variant)

    @cached_property
    def object_names(self) -> list[str]:
        """The data objects that have a cell's bytes: the variant's, and those of its levels."""
        return list(map(self.manifest.data_name, self._objects))

    def _index(self, cell: Cell) -> int:
        """Return what `Manifest.cell_index` does, for each of thousands of cells."""
        return cell.span * self._cells_per_span + cell.layer_group * self._num_blocks + cell.head_block

    def are_neighbours(self, cell: Cell, following: Cell) -> bool:
        """Return whether no other cell's bytes are between those of two."""
        return self._index(following) == self._index(cell) + 1

    def _size(self, cell: Cell) -> CellSize:
        """Return the sizes of a cell, which those of other spans of as many tokens share."""
        num_tokens = self.manifest.span_tokens(cell.span)
        key = cell.layer_group, cell.head_block, num_tokens
        if (found := self._sizes.get(key)) is None:
            laid_out = list(self._laid_out(cell))
            in_order = [(prod(shape), _codecs_in_order(layout, shape)) for layout, shape in laid_out]
            found = self._sizes[key] = CellSize(
                num_tokens,
                self.manifest.cell_values(cell) * self.geometry.torch_dtype.itemsize,
                sum(num_integers for num_integers, _ in in_order),
                sum(prod(layout.frames_shape(shape)) for layout, shape in laid_out),
                in_order,
            )
        return found

    def stored(self, cell: Cell) -> list[StoredChunk]:
        """Return where a cell's chunks are stored: one a part in the variant's object, then one in that of each
        level."""
        index, each = self._index(cell), self._num_parts
        first, *further = self._offsets
        parts = [StoredChunk(0, i, first[i], first[i + 1]) for i in range(index * each, (index + 1) * each)]
        return parts + [StoredChunk(i, index, ends[index], ends[index + 1]) for i, ends in enumerate(further, 1)]

    def chunks_in(self, cell: Cell, objects: Sequence[bytes | memoryview]) -> list[memoryview]:
        """Return a cell's chunks. ``objects``: the contents of ``object_names``."""
        return [memoryview(objects[each.place])[each.start : each.end] for each in self.stored(cell)]

    def coded_bytes(self, cell: Cell) -> int:
        """Return the size of a cell's chunks."""
        index, each = self._index(cell), self._num_parts
        first, *further = self._offsets
        return first[(index + 1) * each] - first[index * each] + sum(x[index + 1] - x[index] for x in further)

    def span_bytes(self, span: int) -> int:
        """Return the size of a span's bytes that the rank reads."""
        if span not in self._span_bytes:
            self._span_bytes[span] = sum(map(self.coded_bytes, self.span_cells(span)))
        return self._span_bytes[span]

    @property
    def coarseness(self) -> int:
        """How many levels are not read, or not stored any more. Each of them triples the step."""
        return self.variant.num_dropped + len(self.variant.levels) - len(self.levels)

    @cached_property
    def coarser(self) -> SegmentReader | None:
        """The reader of the same variant without this one's last level; None if it is the only one."""
        if not self.levels:
            return None
        index = self.manifest.variants.index(self.variant)
        return SegmentReader(self.manifest, self.quantiser, index, self.rank_heads, len(self.levels))

    @property
    def is_finest(self) -> bool:
        """Whether all levels that are stored are read."""
        return self.levels == self.variant.levels

    @property
    def codec(self) -> str:
        return self.variant.codec

    @property
    def layouts(self) -> Mapping[str, Layout]:
        return self.variant.layouts

    @cached_property
    def coding(self) -> str:
        """What decides how long its cells take to decode, for each integer."""
        return f"{self.variant.codec} {self.variant.resolution} {len(self.levels)}"

    def ways(self, most: int) -> Iterator[SegmentReader]:
        """Yield the readers of this segment's cells that are at most of coarseness ``most``, this one first: each
        variant whose codecs are available, in all its levels and in fewer."""
        each: SegmentReader | None
        for each in (self, *self._others):
            yield each
            while each.coarseness < most and (each := each.coarser) is not None:
                yield each

    def span_cells(self, span: int) -> Iterator[Cell]:
        """Yield the span's cells that the rank reads, in storage order."""
        groups = range(self.grid.num_layer_groups)
        return (Cell(span, group, block) for group in groups for block in self._head_blocks)

    @property
    def cells_per_span(self) -> int:
        """How many cells of a span the rank reads."""
        return self.grid.num_layer_groups * len(self._head_blocks)

    def has_cells_of(self, other: SegmentReader) -> bool:
        """Return whether equal cells hold equal values in both segments, which have the same pages."""
        a, b = self.manifest, other.manifest
        return (a.span_pages, a.cell_heads) == (b.span_pages, b.cell_heads)

    def heads_of(self, cell: Cell) -> range:
        """Return a cell's heads, counted from the rank's first head."""
        heads, shift = self.grid.heads(cell.head_block), self.manifest.first_head - self.rank_heads.start
        return range(heads.start + shift, heads.stop + shift)

    def num_integers(self, cell: Cell) -> int:
        """Return the number of integers in a cell, over all parts."""
        return self._size(cell).num_integers

    def frames_bytes(self, cell: Cell) -> int:
        """Return the size of a cell's frames in bytes, over all parts."""
        return self._size(cell).frames_bytes

    def _laid_out(self, cell: Cell) -> Iterator[tuple[Layout, tuple[int, ...]]]:
        """Yield the layout and the shape of the integers of each part that has frames."""
        for part in self.manifest.parts:
            if part.layout:
                yield self.variant.layouts[part.layout], self.manifest.integers_shape(cell, part.layout)

    @cached_property
    def side_places(self) -> Mapping[SideKey, SidePlace]:
        return side_places(self.manifest)

    @cached_property
    def _others(self) -> tuple[SegmentReader, ...]:
        """A reader for each other variant whose codecs are available."""
        return tuple(
            SegmentReader(self.manifest, self.quantiser, index, self.rank_heads)
            for index, variant in enumerate(self.manifest.variants)
            if variant is not self.variant and can_decode(variant.codecs)
        )

    def decode_cell(self, cell: Cell, chunks: CellChunks, decoders: Decoders | None = None) -> Quantised:
        """Verify a cell's chunks and decode them into its parts, on the host. ``decoders``: for codecs that are not
        decoded on the CPU. Raises CorruptError, FormatError."""
        pieces = self._verified_pieces(cell, chunks)
        parts = tuple(
            self._decode_integers(cell, part, piece, decoders or {})
            if part.layout
            else _tensor_of(self._decode_bytes(cell, part, piece))
            for part, piece in zip(self.manifest.parts, pieces, strict=True)
        )
        plain = [x.numpy() for x, part in zip(parts, self.manifest.parts, strict=True) if not part.layout]
        self._require_sound(cell, plain)
        return parts

    def _require_sound(self, cell: Cell, plain: Sequence[np.ndarray]) -> None:
        num_tokens, num_bytes, *_ = self._size(cell)
        shape = num_tokens, len(self.grid.layers(cell.layer_group)), self.grid.cell_heads
        self.quantiser.require_sound(plain, shape, num_bytes // num_tokens)

    def laid_out(self, cell: Cell) -> list[LaidOut]:
        """Return the parts of a cell that have frames. What has levels is in several bitstreams, or in fewer than it
        was written in, and so is not in order."""
        is_whole = not self.variant.levels and not self.variant.num_dropped
        first = self._index(cell) * self._num_parts
        rows = [self.variant.chunks[first + number] for number in self.laid_out_parts]
        sizes = self._size(cell).in_order
        found = []
        for row, (size, codecs) in zip(rows, sizes, strict=True):
            is_itself = (row.size_bytes, row.coded_checksum) == (size, row.decoded_checksum)
            is_in_order = is_itself if row.codec == RawCodec.name else row.codec in codecs
            found.append(LaidOut(row, size, is_whole and is_in_order))
        return found

    @cached_property
    def laid_out_parts(self) -> list[int]:
        """Which of a cell's parts have frames."""
        return [number for number, part in enumerate(self.manifest.parts) if part.layout]

    def verified_cell(
        self, cell: Cell, chunks: CellChunks, stay: Sequence[bool], decoders: Decoders | None = None
    ) -> tuple[list[np.ndarray], list[bytes | memoryview]]:
        """Verify the chunks of a cell. Return its parts of plain bytes; and of each part that has frames the bitstream,
        if it is to ``stay`` coded, or else the integers. ``decoders``: as for `decode_cell`. Raises CorruptError,
        FormatError."""
        plain, laid_out, stays = list[np.ndarray](), list[bytes | memoryview](), iter(stay)
        for part, coded in zip(self.manifest.parts, self._verified_pieces(cell, chunks), strict=True):
            if not part.layout:
                plain.append(np.frombuffer(self._decode_bytes(cell, part, coded), dtype=np.uint8))
            elif next(stays):
                laid_out.append(coded.bitstream)
            else:
                laid_out.append(self._decode_integers(cell, part, coded, decoders or {}).flatten().numpy().data)
        self._require_sound(cell, plain)
        return plain, laid_out

    def _verified_pieces(self, cell: Cell, chunks: CellChunks) -> list[CodedChunk]:
        """Return a cell's parts, each with its levels, verified and decrypted."""
        found = []
        for (place, number, *_), piece in zip(self.stored(cell), chunks, strict=True):
            rows = self._objects[place]
            row = rows.chunks[number]
            row.require_coded(piece, f"{cell}, digits" if place else cell)
            cipher = self.manifest.ciphers.get(rows.data_digest)
            bitstream = cipher.decrypt(number, piece, str(cell)) if cipher else piece
            found.append(CodedChunk(row, bitstream))
        parts, levels = found[: self._num_parts], tuple(found[self._num_parts :])
        return [part._replace(levels=levels) if part.row.codec == LADDER else part for part in parts]

    def dequantise_cell(self, cell: Cell, quantised: Quantised, tokens: slice = slice(None)) -> CellValues:
        """Return the values of a cell, ``(tokens, layers, heads, dim)`` of the KV dtype, for ``tokens`` of the span."""
        return self.quantiser.dequantise(quantised, self.geometry.torch_dtype, cell_place(self.manifest, cell), tokens)

    def _decode_integers(self, cell: Cell, part: PartInfo, coded: CodedChunk, decoders: Decoders) -> torch.Tensor:
        """Return a part's integers. Those in `raw` may be in the memory of the chunk."""
        if coded.row.codec == RawCodec.name:
            size = prod(shape := self.manifest.integers_shape(cell, part.layout))
            if len(coded.bitstream) != size:
                raise CorruptError(f"{cell}: raw bitstream has {len(coded.bitstream)} bytes, expected {size}")
            coded.row.require_decoded(coded.bitstream, cell, f"decoded {part.name}")
            return _tensor_of(coded.bitstream).view(shape)
        frames = self._decode_frames(cell, part, coded, decoders)
        integers = self._verified_integers(cell, part, coded, frames)
        # A copy, as the frames may be in the decoder's own memory, which the next part overwrites.
        return integers.clone() if coded.row.codec in decoders else integers

    def _decode_frames(self, cell: Cell, part: PartInfo, coded: CodedChunk, decoders: Decoders) -> torch.Tensor:
        """Return a part's frames, not yet verified."""
        layout = self.variant.layouts[part.layout]
        integers = self.manifest.integers_shape(cell, part.layout)
        shape = layout.num_frames(integers), layout.height, layout.width
        if coded.row.codec == LADDER:
            bitstreams = [each.bitstream for each in (coded, *coded.levels)]
            return decode_ladder(bitstreams, 1 + len(self.levels) + self.coarseness, shape)
        if decoder := decoders.get(coded.row.codec):
            return decoder.decode(coded.bitstream, shape).frames
        return get_codec(coded.row.codec).decode(coded.bitstream, shape)

    def _verified_integers(self, cell: Cell, part: PartInfo, coded: CodedChunk, frames: torch.Tensor) -> torch.Tensor:
        """Return the integers in ``frames`` after verifying them."""
        shape = self.manifest.integers_shape(cell, part.layout)
        integers = self.variant.layouts[part.layout].from_frames(frames, shape)
        coded.finest.require_decoded(integers.numpy().data, cell, f"decoded {part.name}")
        return integers

    def _decode_bytes(self, cell: Cell, part: PartInfo, coded: CodedChunk) -> bytes:
        if coded.row.codec != BYTES_CODEC.name:
            raise FormatError(f"{cell} has {part.name} in codec {coded.row.codec!r}, expected {BYTES_CODEC.name!r}")
        size = self._size(cell)
        most = size.value_bytes + size.num_tokens * _MOST_BYTES_A_TOKEN
        raw = BYTES_CODEC.decompress(coded.bitstream, min(most, MAX_CHUNK_BYTES))
        coded.row.require_decoded(raw, cell, part.name)
        return raw


def _codecs_in_order(layout: Layout, shape: tuple[int, ...]) -> frozenset[str]:
    if layout.each_begins_with(shape):
        return frozenset({AnsTablesCodec.name})
    return frozenset({AnsCodec.name}) if layout.begins_with(shape) else frozenset()


def _tensor_of(raw: bytes | memoryview) -> torch.Tensor:
    """Return bytes as a tensor: the same memory, or a copy of memory that must not be written to."""
    own = raw if isinstance(raw, memoryview) and not raw.readonly else bytearray(raw)
    return torch.frombuffer(own, dtype=torch.uint8) if own else torch.empty(0, dtype=torch.uint8)


def part_infos(quantiser: Quantiser, geometry: KVGeometry) -> tuple[PartInfo, ...]:
    """Return the parts of every cell, as a manifest lists them."""
    return tuple(PartInfo(part.name, part.layout or "") for part in quantiser.parts(geometry.torch_dtype))


def coefficients_of(manifest: Manifest, quantiser: Quantiser) -> tuple[int, ...]:
    """Return `Manifest.coefficients` for this quantiser."""
    places = (cell_place(manifest, cell) for cell in manifest.span_cells(0))
    return tuple(n for n in map(quantiser.num_coefficients, places) if n is not None)


def cell_place(manifest: Manifest, cell: Cell) -> CellPlace:
    """Return a cell's layers, heads and tokens in the model and in the sequence."""
    grid, first_layer = manifest.grid, manifest.namespace.first_layer
    layers, heads = grid.layers(cell.layer_group), grid.heads(cell.head_block)
    first_page, _ = manifest.span_range(cell.span)
    first_token = (manifest.first_page + first_page) * manifest.namespace.page_size
    return CellPlace(
        range(first_layer + layers.start, first_layer + layers.stop),
        range(manifest.first_head + heads.start, manifest.first_head + heads.stop),
        range(first_token, first_token + manifest.span_tokens(cell.span)),
    )


def preferred_reader(
    manifest: Manifest, quantiser: Quantiser, rank_heads: range, engine_codecs: Collection[str] = ()
) -> SegmentReader:
    """Return the reader of `first_readable`. Raises as `SegmentReader` does."""
    return SegmentReader(manifest, quantiser, first_readable(manifest, engine_codecs), rank_heads)


def all_readers(manifest: Manifest, quantiser: Quantiser) -> list[SegmentReader]:
    """Return a reader of each variant's first level. Raises as `SegmentReader` does."""
    return [SegmentReader(manifest, quantiser, index, num_levels=1) for index in range(len(manifest.variants))]


def first_readable(manifest: Manifest, engine_codecs: Collection[str] = ()) -> int:
    """Return the index of the first variant whose codecs are all available. Without one, return 0, so that the reader
    reports the unknown codec. ``engine_codecs`` are decoded by video engines: variants that leave no video codec to the
    CPU are preferred."""
    codecs = [variant.codecs for variant in manifest.variants]
    readable = [i for i, names in enumerate(codecs) if can_decode(names)]
    if engine_codecs:
        on_cpu = {name for name, codec in CODECS.items() if codec.is_video and name not in engine_codecs}
        readable = [i for i in readable if not codecs[i] & on_cpu] or readable
    return next(iter(readable), 0)
