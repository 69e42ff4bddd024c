"""Encode KV values into segments (a manifest and a data object), and decode them. No I/O: that is the caller's.

The data object is the concatenation of the chunks' bitstreams in the manifest's order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import xxhash

from sgl_kvfetch.codec.bitstream.ans import AnsCodec, AnsTablesCodec
from sgl_kvfetch.codec.bitstream.base import DecodedFrames, Decoders
from sgl_kvfetch.codec.bitstream.entropy import ZstdCodec
from sgl_kvfetch.codec.bitstream.ladder import decode_ladder, encode_ladder
from sgl_kvfetch.codec.bitstream.levels import DIGITS, LADDER, Wide
from sgl_kvfetch.codec.bitstream.registry import CODECS, READABLE, get_codec
from sgl_kvfetch.codec.container.manifest import (
    MAX_CHUNK_BYTES,
    MAX_MANIFEST_BYTES,
    Cell,
    Chunk,
    Level,
    Manifest,
    PartInfo,
    Side,
    Variant,
    checked_namespace,
    require_layouts,
)
from sgl_kvfetch.codec.container.sides import SideKey, SidePlace, side_places
from sgl_kvfetch.codec.container.signing import nth_digest
from sgl_kvfetch.codec.layout.frame_sum import sum_of_frames
from sgl_kvfetch.codec.layout.frames import Layout
from sgl_kvfetch.codec.quant.base import CellPlace, CellValues, Quantised, Quantiser
from sgl_kvfetch.errors import ConfigError, CorruptError, FormatError, UnsupportedError
from sgl_kvfetch.keys import PAGE_HASH_BYTES, HeadSlice
from sgl_kvfetch.types import TENSORS, KVGeometry, TensorName

_BYTES = ZstdCodec()  # for parts that are plain bytes
# A part of plain bytes holds at most every value of its cell, and this many bytes a token.
_MOST_BYTES_A_TOKEN = 4096
# Of a signed manifest: what is neither rows nor hashes; and a chunk's row: 72 bytes with a frame sum, 69 without.
_HEAD_BYTES, _ROW_BYTES = 4096, 71
_TABLE_BYTES = 38  # that encryption adds to a chunk
FALLBACK_CODEC = "zstd"
# A plane with more order-0 entropy is noise, such as the low mantissa bytes of exact values. `ans` would gain nothing;
# video coding would be slow, and expand it by a third. Below this, the user's choice of video is kept even if another
# codec would be smaller: with NVDEC, decoding video is free.
NOISE_BITS = 7.9


@dataclass(frozen=True, slots=True)
class SegmentSpec:
    """How a writer encodes the segments of one rank. ``cell_heads``: heads of a cell, a divisor of the
    rank's; None for all. A quantiser's own choice goes before it. ``encrypts``: whether the store encrypts.
    ``num_levels``: of coefficients; 1 for all at once. ``num_dropped``: last levels that are not stored."""

    heads: HeadSlice
    quantiser: Quantiser
    codec: str
    resolution: str
    span_pages: int
    cell_heads: int | None = None
    encrypts: bool = False
    num_levels: int = 1
    num_dropped: int = 0

    def __post_init__(self) -> None:
        get_codec(self.codec)
        assert 0 <= self.num_dropped < self.num_levels
        assert self.heads.namespace.quantiser == self.quantiser.identity
        assert self.num_levels == 1 or (self.codec == AnsCodec.name and not self.encrypts)

    def manifest(self, first_page: int, previous_hash: bytes | None, page_hashes: Sequence[bytes]) -> Manifest:
        """Return the manifest of a segment of these pages, still without variants."""
        namespace, quantiser, geometry = self.heads.namespace, self.quantiser, self.heads.geometry
        manifest = Manifest(
            namespace=namespace,
            first_head=self.heads.heads.start,
            num_heads=len(self.heads.heads),
            first_page=first_page,
            previous_hash=previous_hash,
            page_hashes=tuple(page_hashes),
            span_pages=min(self.span_pages, len(page_hashes)),
            cell_layers=quantiser.cell_layers,
            cell_heads=self._heads_of_a_cell(),
            parts=_part_infos(quantiser, geometry),
            coefficients=(),
            variants=(),
            labels=self.heads.labels,
        )
        return msgspec.structs.replace(manifest, coefficients=_coefficients(manifest, quantiser))

    def _heads_of_a_cell(self) -> int:
        if self.quantiser.cell_heads is not None:
            return self.quantiser.cell_heads
        all_heads = len(self.heads.heads)
        return self.cell_heads or all_heads if self.quantiser.splits_heads else all_heads

    def require_readable(self) -> None:
        """Raise FormatError if readers would refuse the namespace, chunks of a full span, or its manifest, as too
        large."""
        checked_namespace(asdict(self.heads.namespace))
        manifest = self.manifest(0, None, [bytes(PAGE_HASH_BYTES)] * self.span_pages)
        require_layouts(manifest, self.layouts(manifest))
        if (num_bytes := self._manifest_bytes(self.span_pages, 1)) > MAX_MANIFEST_BYTES:
            raise FormatError(
                f"manifests of one span would have {num_bytes} bytes, more than {MAX_MANIFEST_BYTES}: of "
                f"{manifest.namespace.num_layers} layers and {manifest.num_heads} heads, cells have "
                f"{manifest.cell_layers} and {manifest.cell_heads}; a smaller max_tp_size gives them more heads"
            )

    def longest_segment(self, most_pages: int) -> int:
        """Return ``most_pages``, halved while they are several spans whose manifest has no room for two variants, one
        of them video."""
        while most_pages > self.span_pages and self._manifest_bytes(most_pages, 2) > MAX_MANIFEST_BYTES:
            most_pages //= 2
        return most_pages

    def _manifest_bytes(self, num_pages: int, num_variants: int) -> int:
        """Return about how large a signed manifest is."""
        manifest = self.manifest(0, None, [bytes(PAGE_HASH_BYTES)] * num_pages)
        rows_a_cell = manifest.chunks_per_cell + self.num_levels - 1
        num_chunks = manifest.num_spans * manifest.cells_per_span * rows_a_cell
        row_bytes = _ROW_BYTES + (_TABLE_BYTES if self.encrypts else 0)
        return _HEAD_BYTES + num_pages * PAGE_HASH_BYTES + num_variants * num_chunks * row_bytes

    def layouts(self, manifest: Manifest) -> dict[str, Layout]:
        return layouts_of(manifest, self.quantiser, self.resolution)


def _part_infos(quantiser: Quantiser, geometry: KVGeometry) -> tuple[PartInfo, ...]:
    return tuple(PartInfo(part.name, part.layout or "") for part in quantiser.parts(geometry.torch_dtype))


def _coefficients(manifest: Manifest, quantiser: Quantiser) -> tuple[int, ...]:
    places = (cell_place(manifest, cell) for cell in manifest.span_cells(0))
    return tuple(n for n in map(quantiser.num_coefficients, places) if n is not None)


def layouts_of(manifest: Manifest, quantiser: Quantiser, resolution: str) -> dict[str, Layout]:
    """Return the best layouts of a segment's integers at this resolution."""
    most = max(manifest.coefficients, default=None)
    return quantiser.layouts(manifest.geometry, manifest.cell_heads, most, manifest.span_tokens(0), resolution)


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


@dataclass(frozen=True, slots=True)
class CodedSegment:
    """A segment as it is stored. ``data`` belongs to the first variant, ``more_data`` to the others in order,
    ``level_data`` to the levels of all of them, ``side_data`` to the manifest's sides."""

    manifest: Manifest
    data: bytes
    more_data: tuple[bytes, ...] = ()
    side_data: tuple[bytes, ...] = ()
    level_data: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.manifest.variants) == 1 + len(self.more_data)
        assert len(self.manifest.levels) == len(self.level_data)
        assert len(self.manifest.sides) == len(self.side_data)

    @property
    def data_name(self) -> str:
        return self.manifest.data_name(self.manifest.variants[0])

    def variant_data(self, variant: int) -> bytes:
        return (self.data, *self.more_data)[variant]

    def levels_of(self, variant: int) -> tuple[bytes, ...]:
        """Return the contents of a variant's levels."""
        first = sum(len(each.levels) for each in self.manifest.variants[:variant])
        return self.level_data[first : first + len(self.manifest.variants[variant].levels)]

    def data_objects(self) -> Iterator[tuple[str, bytes]]:
        """Yield names and contents. Variants with identical data share an object."""
        contents = (self.data, *self.more_data, *self.level_data, *self.side_data)
        objects = zip(self.manifest.data, contents, strict=True)
        yield from {self.manifest.data_name(each): data for each, data in objects}.items()

    def with_side(self, side: Side, data: bytes) -> CodedSegment:
        """Return the segment with one more object of side pages."""
        manifest = msgspec.structs.replace(self.manifest, sides=(*self.manifest.sides, side))
        return replace(self, manifest=manifest, side_data=(*self.side_data, data))


class CodedChunk(NamedTuple):
    """A chunk's row and bitstream. ``frame_sum``: as in `Variant`. ``levels``: those that refine it."""

    row: Chunk
    bitstream: bytes | memoryview
    frame_sum: int | None
    levels: tuple[CodedChunk, ...] = ()

    @property
    def finest(self) -> Chunk:
        """The row with the checksum of what all its levels decode to."""
        return self.levels[-1].row if self.levels else self.row


def encode_segment(
    spec: SegmentSpec,
    values: Mapping[TensorName, torch.Tensor],
    first_page: int,
    previous_hash: bytes | None,
    page_hashes: Sequence[bytes],
    executor: Executor | None = None,
) -> CodedSegment:
    """Encode one segment. ``values`` holds K and V, each ``(tokens, layers, heads, dim)`` of the namespace's dtype.
    ``previous_hash`` is that of the page before the first, None at the sequence's start.

    Cells are encoded in parallel on ``executor``, if given. Raises QuantiseError.
    """
    geometry = spec.heads.geometry
    expected = (len(page_hashes) * geometry.page_size, geometry.num_layers, geometry.num_heads)
    for x in values.values():
        assert x.shape[:3] == expected, (x.shape, expected)
    manifest = spec.manifest(first_page, previous_hash, page_hashes)

    def quantise(cell: Cell) -> Quantised:
        tokens = slice(*(page * geometry.page_size for page in manifest.span_range(cell.span)))
        layers, heads = manifest.grid.layers(cell.layer_group), manifest.grid.heads(cell.head_block)
        part = CellValues(values["k"], values["v"]).tokens(tokens).cell(layers, heads)
        return spec.quantiser.quantise(part, cell_place(manifest, cell))

    return encode_cells(spec, manifest, quantise, executor)


def encode_cells(
    spec: SegmentSpec,
    manifest: Manifest,
    quantised: Callable[[Cell], Quantised],
    executor: Executor | None = None,
) -> CodedSegment:
    """Encode the cells of ``manifest``, which has no variants yet. ``quantised`` returns the parts of a cell."""
    layouts = spec.layouts(manifest)

    def encode(cell: Cell) -> list[CodedChunk]:
        parts = quantised(cell)
        if spec.num_levels == 1:
            return encode_cell(manifest, cell, parts, layouts, spec.codec)
        wide = spec.quantiser.wide_coefficients(cell_place(manifest, cell))
        return encode_cell(manifest, cell, parts, layouts, spec.codec, spec.num_levels, wide)

    run: Callable[..., Iterable[list[CodedChunk]]] = executor.map if executor else map
    coded = [chunk for cell in run(encode, manifest.cells()) for chunk in cell]
    variant, data = make_variant(coded, layouts, spec.codec, spec.resolution)
    rows: list[Level] = []
    contents = []
    for level in zip(*(chunk.levels for chunk in coded if chunk.levels), strict=True):
        contents.append(b"".join(chunk.bitstream for chunk in level))
        rows.append(Level(xxhash.xxh3_128_hexdigest(contents[-1]), tuple(chunk.row for chunk in level)))
    kept = spec.num_levels - 1 - spec.num_dropped
    variant = msgspec.structs.replace(variant, levels=tuple(rows)).with_levels(kept)
    return CodedSegment(msgspec.structs.replace(manifest, variants=(variant,)), data, level_data=tuple(contents[:kept]))


def make_variant(
    coded: Iterable[CodedChunk], layouts: Mapping[str, Layout], codec: str, resolution: str
) -> tuple[Variant, bytes]:
    """Return a variant and its data object from chunks in storage order."""
    chunks, bitstreams, sums, _ = zip(*coded, strict=True)
    data = b"".join(bitstreams)
    digest = xxhash.xxh3_128_hexdigest(data)
    frame_sums = () if all(each is None for each in sums) else sums
    return Variant(digest, dict(layouts), chunks, codec, resolution, frame_sums), data  # type: ignore[arg-type]


def encode_cell(
    manifest: Manifest,
    cell: Cell,
    quantised: Quantised,
    layouts: Mapping[str, Layout],
    codec: str,
    num_levels: int = 1,
    wide: Sequence[Wide] = (),
) -> list[CodedChunk]:
    """Return a cell's chunks, one a part. ``num_levels``: of coefficients, of which ``wide`` have two
    integers."""
    chunks = []
    for part, x in zip(manifest.parts, quantised, strict=True):
        raw = x.contiguous().cpu().numpy().tobytes()
        if not part.layout:
            bitstream = _BYTES.compress(raw)
            chunks.append(CodedChunk(Chunk.of(_BYTES.name, bitstream, raw), bitstream, None))
            continue
        frames = layouts[part.layout].to_frames(x)
        if num_levels > 1:
            bitstreams = encode_ladder(frames, wide, len(x), num_levels)
            chunks.append(_with_levels(bitstreams, frames, layouts[part.layout], tuple(x.shape)))
            continue
        tried = {name: get_codec(name).encode(frames) for name in _codecs_for(cell, part, codec, raw)}
        name, bitstream = min(tried.items(), key=lambda item: len(item[1]))
        frame_sum = sum_of_frames(frames) if get_codec(name).is_video else None
        chunks.append(CodedChunk(Chunk.of(name, bitstream, raw), bitstream, frame_sum))
    return chunks


def _with_levels(
    bitstreams: Sequence[bytes], frames: torch.Tensor, layout: Layout, shape: tuple[int, ...]
) -> CodedChunk:
    """Return the chunk of level 0 with all further levels."""
    chunks = []
    for count, bitstream in enumerate(bitstreams, 1):
        shape_of_frames = len(frames), *frames.shape[2:]
        decoded = frames if count == len(bitstreams) else decode_ladder(bitstreams[:count], shape_of_frames)
        content = layout.from_frames(decoded, shape).numpy().tobytes()
        chunks.append(CodedChunk(Chunk.of(LADDER if count == 1 else DIGITS, bitstream, content), bitstream, None))
    return chunks[0]._replace(levels=tuple(chunks[1:]))


def _codecs_for(cell: Cell, part: PartInfo, codec: str, raw: bytes) -> tuple[str, ...]:
    """Return the codecs among which a part's smallest bitstream is chosen, if the user wants ``codec``."""
    is_values = codec == AnsCodec.name and part.layout in TENSORS
    if not is_values and not get_codec(codec).is_video:
        return (codec,)
    if _entropy_bits(raw) > NOISE_BITS:
        return (FALLBACK_CODEC,)
    if not is_values:
        return (codec,)
    # Values of the first layer repeat with their tokens, which only zstd finds.
    return (AnsTablesCodec.name, FALLBACK_CODEC) if cell.layer_group == 0 else (AnsTablesCodec.name,)


def _entropy_bits(data: bytes) -> float:
    """Return the order-0 entropy of the bytes, in bits a byte."""
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    p = counts[counts > 0] / len(data)
    return float(-(p * np.log2(p)).sum())


@dataclass(frozen=True, slots=True)
class CellFrames:
    """A decoded and verified cell, its integers still in frames, with everything that restoring needs.

    ``parts``: for each part, uint8 frames ``(frames, 3, height, width)``, or bytes ``(n,)``. ``layouts``: for each
    part, None for bytes. ``is_on_device``: for each part, whether its frames are on the device and not on the host.
    """

    place: CellPlace
    layers: range  # counted from the rank's first layer
    heads: range  # counted from the reading rank's first head
    parts: tuple[torch.Tensor, ...]
    layouts: tuple[Layout | None, ...]
    is_on_device: tuple[bool, ...]
    quantiser: Quantiser


class SegmentReader:
    """Decodes the cells of one variant of a segment."""

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
        if a codec of the variant is unknown, EncryptedError if it must be opened first, UnsupportedError if the
        segment's cells have both heads of the rank and others."""
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
        self._offsets = [0, *accumulate(chunk.size_bytes for chunk in self.variant.chunks)]
        self._level_offsets = [[0, *accumulate(chunk.size_bytes for chunk in level.chunks)] for level in self.levels]
        self._head_blocks = self._blocks_of_rank()
        self._coarser: dict[int, SegmentReader] = {}

    def _blocks_of_rank(self) -> range:
        """Return the head blocks that have heads of the rank. Raises UnsupportedError if one has others, too."""
        m, mine = self.manifest, self.rank_heads
        first = max(mine.start, m.first_head) - m.first_head
        end = min(mine.stop, m.first_head + m.num_heads) - m.first_head
        assert first < end, (mine, m.heads.heads)
        if first % m.cell_heads or end % m.cell_heads:
            raise UnsupportedError(
                f"segment has cells of {m.cell_heads} heads: heads {mine.start} to {mine.stop} are not whole cells of "
                f"heads {m.first_head} to {m.first_head + m.num_heads}"
            )
        return range(first // m.cell_heads, end // m.cell_heads)

    def _require_quantiser(self) -> None:
        """Raise FormatError unless the manifest describes cells as the quantiser makes them."""
        m, quantiser = self.manifest, self.quantiser
        found = m.namespace.quantiser, m.parts
        expected = quantiser.identity, _part_infos(quantiser, self.geometry)
        if found != expected:
            raise FormatError(f"segment is quantised as {found}, expected {expected}")
        if not quantiser.knows_cells:
            return
        cells = m.cell_layers, m.cell_heads, m.coefficients
        try:
            made = quantiser.cell_layers, quantiser.cell_heads or m.cell_heads, _coefficients(m, quantiser)
        except ConfigError as e:
            raise FormatError(f"segment does not fit its quantiser: {e}") from e
        if cells != made:
            raise FormatError(f"segment has cells of {cells} layers, heads and coefficients, expected {made}")

    @cached_property
    def data_name(self) -> str:
        return self.manifest.data_name(self.variant)

    @cached_property
    def object_names(self) -> list[str]:
        """The data objects that have a cell's bytes: the variant's, and those of its levels."""
        return [self.data_name, *map(self.manifest.data_name, self.levels)]

    def cell_ranges(self, cell: Cell) -> list[tuple[int, int]]:
        """Return bytes ``[start, end)`` of a cell in each of ``object_names``. Together they are the cell's bytes."""
        index = self.manifest.cell_index(cell)
        return [self.cell_range(cell), *((offsets[index], offsets[index + 1]) for offsets in self._level_offsets)]

    def coded_bytes(self, cell: Cell) -> int:
        """Return the size of a cell's bytes."""
        return sum(end - start for start, end in self.cell_ranges(cell))

    @property
    def num_levels(self) -> int:
        """How many levels of coefficients are read."""
        return 1 + len(self.levels)

    @property
    def levels_left_out(self) -> int:
        """How many levels are not read, or not stored any more: each is a step three times as large."""
        return self.variant.num_dropped + len(self.variant.levels) - len(self.levels)

    def without_levels(self, count: int) -> SegmentReader:
        """Return the reader that leaves out the last ``count`` levels of this one."""
        if not count:
            return self
        if count not in self._coarser:
            index = self.manifest.variants.index(self.variant)
            kept = self.num_levels - count
            self._coarser[count] = SegmentReader(self.manifest, self.quantiser, index, self.rank_heads, kept)
        return self._coarser[count]

    def cell_data(self, cell: Cell, objects: Sequence[bytes | memoryview]) -> bytes | memoryview:
        """Return a cell's bytes. ``objects``: the contents of ``object_names``."""
        pieces = [memoryview(x)[slice(*each)] for x, each in zip(objects, self.cell_ranges(cell), strict=True)]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def cell_range(self, cell: Cell) -> tuple[int, int]:
        """Return bytes ``[start, end)`` of a cell in the variant's data object, without further levels."""
        per_cell = self.manifest.chunks_per_cell
        first = self.manifest.cell_index(cell) * per_cell
        return self._offsets[first], self._offsets[first + per_cell]

    def span_cells(self, span: int) -> Iterator[Cell]:
        """Yield the span's cells that the rank reads, in storage order."""
        return (cell for cell in self.manifest.span_cells(span) if cell.head_block in self._head_blocks)

    @property
    def cells_per_span(self) -> int:
        """How many cells of a span the rank reads."""
        return self.manifest.grid.num_layer_groups * len(self._head_blocks)

    def has_cells_of(self, other: SegmentReader) -> bool:
        """Return whether equal cells hold equal values in both segments, which have the same pages."""
        a, b = self.manifest, other.manifest
        return (a.span_pages, a.cell_heads) == (b.span_pages, b.cell_heads)

    def heads_of(self, cell: Cell) -> range:
        """Return a cell's heads, counted from the rank's first head."""
        heads, shift = self.manifest.grid.heads(cell.head_block), self.manifest.first_head - self.rank_heads.start
        return range(heads.start + shift, heads.stop + shift)

    def num_integers(self, cell: Cell) -> int:
        """Return the number of integers in a cell, over all parts."""
        return sum(prod(shape) for _, shape in self._laid_out(cell))

    def frames_bytes(self, cell: Cell) -> int:
        """Return the size of a cell's frames in bytes, over all parts."""
        return sum(prod(layout.frames_shape(shape)) for layout, shape in self._laid_out(cell))

    def _laid_out(self, cell: Cell) -> Iterator[tuple[Layout, tuple[int, ...]]]:
        """Yield the layout and the shape of the integers of each part that has frames."""
        for part in self.manifest.parts:
            if part.layout:
                yield self.variant.layouts[part.layout], self.manifest.integers_shape(cell, part.layout)

    @cached_property
    def side_places(self) -> Mapping[SideKey, SidePlace]:
        return side_places(self.manifest)

    @cached_property
    def variants(self) -> tuple[SegmentReader, ...]:
        """A reader for each variant whose codecs are available, including this one."""
        return tuple(
            self if variant is self.variant else SegmentReader(self.manifest, self.quantiser, index, self.rank_heads)
            for index, variant in enumerate(self.manifest.variants)
            if variant.codecs <= READABLE
        )

    def decode_cell(self, cell: Cell, data: bytes | memoryview, decoders: Decoders | None = None) -> Quantised:
        """Verify a cell's bytes and decode them into its parts, on the host. ``decoders``: for codecs that are not
        decoded on the CPU. Raises CorruptError, FormatError."""
        pieces = self._verified_pieces(cell, data)
        parts = tuple(
            self._decode_integers(cell, part, piece, decoders or {})
            if part.layout
            else self._decode_bytes(cell, part, piece)
            for part, piece in zip(self.manifest.parts, pieces, strict=True)
        )
        self._require_sound(cell, parts)
        return parts

    def _require_sound(self, cell: Cell, parts: Quantised) -> None:
        token_bytes = self._cell_bytes(cell) // self.manifest.span_tokens(cell.span)
        self.quantiser.require_sound(parts, cell_place(self.manifest, cell), token_bytes)

    def _cell_bytes(self, cell: Cell) -> int:
        """Return the size of a cell's values."""
        return self.manifest.cell_values(cell) * self.geometry.torch_dtype.itemsize

    def decode_frames(self, cell: Cell, data: bytes | memoryview, decoders: Decoders | None = None) -> CellFrames:
        """Verify and decode a cell, leaving its integers in frames, on the device if ``decoders`` decode to it. Raises
        CorruptError, FormatError."""
        pieces = self._verified_pieces(cell, data)
        decoded = [
            self._decode_frames(cell, part, piece, decoders or {})
            for part, piece in zip(self.manifest.parts, pieces, strict=True)
        ]
        parts = tuple(each.frames for each in decoded)
        self._require_sound(cell, parts)
        return CellFrames(
            place=cell_place(self.manifest, cell),
            layers=self.manifest.grid.layers(cell.layer_group),
            heads=self.heads_of(cell),
            parts=parts,
            layouts=tuple(self.variant.layouts[p.layout] if p.layout else None for p in self.manifest.parts),
            is_on_device=tuple(each.is_on_device for each in decoded),
            quantiser=self.quantiser,
        )

    def verify_cell(self, cell: Cell, data: bytes | memoryview) -> None:
        """Verify a cell's bytes as they are stored. Raises CorruptError."""
        for _ in self._stored_pieces(cell, data):
            pass
        self._stored_levels(cell, data)

    def _verified_pieces(self, cell: Cell, data: bytes | memoryview) -> list[CodedChunk]:
        """Return a cell's chunks, verified and decrypted."""
        cipher = self.manifest.ciphers.get(self.variant.data_digest)
        stored = list(self._stored_pieces(cell, data))
        levels = self._stored_levels(cell, data)
        return [
            CodedChunk(
                self.variant.chunks[index],
                cipher.decrypt(index, piece, str(cell)) if cipher else piece,
                self.variant.frame_sum(index),
                levels if self.variant.chunks[index].codec == LADDER else (),
            )
            for index, piece in stored
        ]

    def _stored_levels(self, cell: Cell, data: bytes | memoryview) -> tuple[CodedChunk, ...]:
        """Return the verified chunks of a cell's levels, without the first."""
        index, end = self.manifest.cell_index(cell), len(data)
        found = []
        for level in reversed(self.levels):
            chunk = level.chunks[index]
            piece = memoryview(data)[max(0, end - chunk.size_bytes) : end]
            chunk.require_coded(piece, nth_digest(level.chunk_digests, index), f"{cell}, digits")
            found.append(CodedChunk(chunk, piece, None))
            end -= chunk.size_bytes
        return tuple(reversed(found))

    def _stored_pieces(self, cell: Cell, data: bytes | memoryview) -> Iterator[tuple[int, memoryview]]:
        """Yield the number and the verified bytes of each of a cell's chunks."""
        start, _ = self.cell_range(cell)
        expected = self.coded_bytes(cell)
        if len(data) != expected:
            raise CorruptError(f"{cell} has {len(data)} bytes, expected {expected}")
        view = memoryview(data)
        first = self.manifest.cell_index(cell) * self.manifest.chunks_per_cell
        for index in range(first, first + self.manifest.chunks_per_cell):
            chunk = self.variant.chunks[index]
            piece = view[self._offsets[index] - start :][: chunk.size_bytes]
            chunk.require_coded(piece, nth_digest(self.variant.chunk_digests, index), str(cell))
            yield index, piece

    def dequantise_cell(self, cell: Cell, quantised: Quantised, tokens: slice = slice(None)) -> CellValues:
        """Return the values of a cell, ``(tokens, layers, heads, dim)`` of the KV dtype, for ``tokens`` of the span."""
        return self.quantiser.dequantise(quantised, self.geometry.torch_dtype, cell_place(self.manifest, cell), tokens)

    def _decode_integers(self, cell: Cell, part: PartInfo, coded: CodedChunk, decoders: Decoders) -> torch.Tensor:
        frames = self._decode_video(cell, part, coded, decoders, to_host=True).frames
        integers = self._verified_integers(cell, part, coded, frames)
        # A copy, as the frames may be in the decoder's own memory, which the next part overwrites.
        return integers.clone() if coded.row.codec in decoders else integers

    def _decode_frames(self, cell: Cell, part: PartInfo, coded: CodedChunk, decoders: Decoders) -> DecodedFrames:
        """Return a part's frames, or its bytes."""
        if not part.layout:
            raw = self._decode_bytes(cell, part, coded)
            return DecodedFrames(raw, raw)
        decoded = self._decode_video(cell, part, coded, decoders, with_sum=coded.frame_sum is not None)
        if decoded.host is not None:
            self._verified_integers(cell, part, coded, decoded.host)
        elif decoded.digest is not None:
            coded.row.require_digest(decoded.digest, f"{cell}, decoded {part.name}")
        elif decoded.frame_sum != coded.frame_sum:
            raise CorruptError(f"{cell}, decoded frames: frame sum does not match")
        return decoded

    def _decode_video(
        self, cell: Cell, part: PartInfo, coded: CodedChunk, decoders: Decoders, **how: bool
    ) -> DecodedFrames:
        """Return a part's frames, not yet verified. ``how``: as in `FrameDecoder.decode`."""
        layout = self.variant.layouts[part.layout]
        integers = self.manifest.integers_shape(cell, part.layout)
        shape = layout.num_frames(integers), layout.height, layout.width
        if coded.row.codec == LADDER:
            frames = decode_ladder([each.bitstream for each in (coded, *coded.levels)], shape)
            return DecodedFrames(frames, frames)
        if decoder := decoders.get(coded.row.codec):
            num_integers = prod(integers) if layout.begins_with(integers) else None
            return decoder.decode(coded.bitstream, shape, num_integers=num_integers, **how)
        frames = get_codec(coded.row.codec).decode(coded.bitstream, shape)
        return DecodedFrames(frames, frames)

    def _verified_integers(self, cell: Cell, part: PartInfo, coded: CodedChunk, frames: torch.Tensor) -> torch.Tensor:
        """Return the integers in ``frames`` (on the host) after verifying them. Also verify the frame sum: readers on a
        GPU would treat sound frames with a wrong sum as a miss for ever."""
        shape = self.manifest.integers_shape(cell, part.layout)
        integers = self.variant.layouts[part.layout].from_frames(frames, shape)
        coded.finest.require_decoded(integers.numpy().data, f"{cell}, decoded {part.name}")
        if coded.frame_sum is not None and sum_of_frames(frames) != coded.frame_sum:
            raise CorruptError(f"{cell}, decoded frames: frame sum does not match")
        return integers

    def _decode_bytes(self, cell: Cell, part: PartInfo, coded: CodedChunk) -> torch.Tensor:
        if coded.row.codec != _BYTES.name:
            raise FormatError(f"{cell} has {part.name} in codec {coded.row.codec!r}, expected {_BYTES.name!r}")
        most = self._cell_bytes(cell) + self.manifest.span_tokens(cell.span) * _MOST_BYTES_A_TOKEN
        raw = _BYTES.decompress(coded.bitstream, min(most, MAX_CHUNK_BYTES))
        coded.row.require_decoded(raw, f"{cell}, {part.name}")
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


def first_readable(manifest: Manifest, engine_codecs: Collection[str] = ()) -> int:
    """Return the index of the first variant whose codecs are all available. Without one, return 0, so that the reader
    reports the unknown codec. ``engine_codecs`` are decoded by video engines: variants that leave no video codec to the
    CPU are preferred."""
    codecs = [variant.codecs for variant in manifest.variants]
    readable = [i for i, names in enumerate(codecs) if names <= READABLE]
    if engine_codecs:
        on_cpu = {name for name, codec in CODECS.items() if codec.is_video and name not in engine_codecs}
        readable = [i for i in readable if not codecs[i] & on_cpu] or readable
    return next(iter(readable), 0)
