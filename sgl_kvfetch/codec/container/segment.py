"""Encode KV values into segments: a manifest and a data object. No I/O: that is the caller's.

The data object is the concatenation of the chunks' bitstreams in the manifest's order. `reader` decodes segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from itertools import accumulate
from types import MappingProxyType

import msgspec
import torch

from sgl_kvfetch.codec.bitstream import _ans
from sgl_kvfetch.codec.bitstream.ans import AnsCodec, AnsTablesCodec
from sgl_kvfetch.codec.bitstream.base import DIGITS, LADDER, Wide
from sgl_kvfetch.codec.bitstream.entropy import RawCodec, ZstdCodec
from sgl_kvfetch.codec.bitstream.ladder import decode_ladder, encode_ladder
from sgl_kvfetch.codec.bitstream.registry import get_codec
from sgl_kvfetch.codec.container.manifest import (
    MAX_MANIFEST_BYTES,
    Cell,
    Manifest,
    PartInfo,
    checked_namespace,
    require_layouts,
)
from sgl_kvfetch.codec.container.objects import Chunk, Content, Level, Pieces, Side, Variant, bytes_of
from sgl_kvfetch.codec.container.pages import Pages, RawPages, quantised_cells
from sgl_kvfetch.codec.container.reader import BYTES_CODEC, CodedChunk, cell_place, coefficients_of, part_infos
from sgl_kvfetch.codec.layout.frames import Layout
from sgl_kvfetch.codec.quant.base import Quantised, Quantiser
from sgl_kvfetch.errors import FormatError
from sgl_kvfetch.keys import PAGE_HASH_BYTES, HeadSlice
from sgl_kvfetch.types import TENSORS, TensorName

# Estimates for a manifest: all but rows and hashes; and a chunk's row.
_HEAD_BYTES, _ROW_BYTES = 4096, 69
_TABLE_BYTES = 38  # what encryption adds to a chunk's row
# A plane with more order-0 entropy is noise, such as the low mantissa bytes of exact values, and stored as it is. `ans`
# would gain nothing; video coding would be slow, and expand it by a third. Below this, the user's choice of video is
# kept even if another codec would be smaller: with NVDEC, decoding video is free.
NOISE_BITS = 7.9
# zstd is tried only where tokens repeat. `ans` takes a quarter less for what does not, so few repetitions do not pay.
_MUCH_REPEATED, _START_BYTES = 0.25, 64
# How much of a large plane is looked at for that: a block of so many bytes, once in so many blocks.
_SAMPLED, _SAMPLED_EVERY, _LEAST_BLOCKS = 1024, 32, 16


@dataclass(frozen=True, slots=True)
class SegmentSpec:
    """How a writer encodes the segments of one rank. ``cell_heads``: heads of a cell, a divisor of the rank's; None for
    all. A quantiser's own choice overrides it. ``encrypts``: whether the store encrypts. ``num_levels``: of
    coefficients; 1 for all at once."""

    heads: HeadSlice
    quantiser: Quantiser
    codec: str
    resolution: str
    span_pages: int
    cell_heads: int | None = None
    encrypts: bool = False
    num_levels: int = 1

    def __post_init__(self) -> None:
        get_codec(self.codec)
        assert self.heads.namespace.quantiser == self.quantiser.identity
        assert self.num_levels == 1 or self.codec == AnsCodec.name

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
            cell_heads=quantiser.heads_of_a_cell(len(self.heads.heads), self.cell_heads),
            parts=part_infos(quantiser, geometry),
            coefficients=(),
            variants=(),
            labels=self.heads.labels,
        )
        return msgspec.structs.replace(manifest, coefficients=coefficients_of(manifest, quantiser))

    def require_readable(self) -> None:
        """Raise FormatError if readers would refuse the namespace, or would find a full span's chunks or manifest too
        large."""
        checked_namespace(asdict(self.heads.namespace))
        manifest = self.manifest(0, None, [bytes(PAGE_HASH_BYTES)] * self.span_pages)
        require_layouts(manifest, self.layouts(manifest))
        if (num_bytes := self._manifest_bytes(self.span_pages, 1)) > MAX_MANIFEST_BYTES:
            raise FormatError(
                f"manifests of one span would have {num_bytes} bytes, more than {MAX_MANIFEST_BYTES}: cells have "
                f"{manifest.cell_layers} of {manifest.namespace.num_layers} layers and {manifest.cell_heads} of "
                f"{manifest.num_heads} heads; a smaller max_tp_size gives them more heads"
            )

    def longest_segment(self, most_pages: int) -> int:
        """Return the length of the longest segments, in pages: ``most_pages``, halved while that is several spans and
        the manifest has no room for two variants."""
        while most_pages > self.span_pages and self._manifest_bytes(most_pages, 2) > MAX_MANIFEST_BYTES:
            most_pages //= 2
        return most_pages

    def _manifest_bytes(self, num_pages: int, num_variants: int) -> int:
        """Return about how large a manifest is."""
        manifest = self.manifest(0, None, [bytes(PAGE_HASH_BYTES)] * num_pages)
        rows_a_cell = manifest.chunks_per_cell + self.num_levels - 1
        num_chunks = manifest.num_spans * manifest.cells_per_span * rows_a_cell
        row_bytes = _ROW_BYTES + (_TABLE_BYTES if self.encrypts else 0)
        return _HEAD_BYTES + num_pages * PAGE_HASH_BYTES + num_variants * num_chunks * row_bytes

    def layouts(self, manifest: Manifest) -> dict[str, Layout]:
        return layouts_of(manifest, self.quantiser, self.resolution)


def layouts_of(manifest: Manifest, quantiser: Quantiser, resolution: str) -> dict[str, Layout]:
    """Return the best layouts of a segment's integers at this resolution."""
    most = max(manifest.coefficients, default=None)
    return quantiser.layouts(manifest.geometry, manifest.cell_heads, most, manifest.span_tokens(0), resolution)


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

    @classmethod
    def of(cls, manifest: Manifest, contents: Sequence[bytes]) -> CodedSegment:
        """Return the segment whose data objects have ``contents``, in the order of `Manifest.data`."""
        sizes = len(manifest.variants), len(manifest.levels), len(manifest.sides)
        ends = list(accumulate(sizes))
        (first, *more), levels, sides = (
            tuple(contents[end - size : end]) for size, end in zip(sizes, ends, strict=True)
        )
        return cls(manifest, first, tuple(more), sides, levels)

    @property
    def contents(self) -> tuple[bytes, ...]:
        """The contents of the data objects, in the order of `Manifest.data`."""
        return (self.data, *self.more_data, *self.level_data, *self.side_data)

    @property
    def data_name(self) -> str:
        return self.manifest.data_name(self.manifest.variants[0])

    def data_objects(self) -> Iterator[tuple[str, bytes]]:
        """Yield names and contents. Variants with identical data share an object."""
        objects = zip(self.manifest.data, self.contents, strict=True)
        yield from {self.manifest.data_name(each): data for each, data in objects}.items()


@dataclass(frozen=True, slots=True)
class EncodedSegment:
    """A segment as its encoder leaves it: the chunks of its data objects lie where they were encoded. ``contents``: in
    the order of `Manifest.data`."""

    manifest: Manifest
    contents: tuple[Content, ...]

    def data_objects(self) -> Iterator[tuple[str, Content]]:
        """Yield names and contents."""
        yield from dict(zip(map(self.manifest.data_name, self.manifest.data), self.contents, strict=True)).items()

    def with_side(self, side: Side, data: bytes) -> EncodedSegment:
        """Return the segment with an object of side pages."""
        manifest = msgspec.structs.replace(self.manifest, sides=(*self.manifest.sides, side))
        return EncodedSegment(manifest, (*self.contents, data))

    def joined(self) -> CodedSegment:
        """Return the segment with each of its data objects in one place."""
        return CodedSegment.of(self.manifest, list(map(bytes_of, self.contents)))


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
    pages = RawPages(*(values[t].view(-1, geometry.page_size, *values[t].shape[1:]) for t in TENSORS))
    return encode_pages(spec, [pages], first_page, previous_hash, page_hashes, executor).joined()


def encode_pages(
    spec: SegmentSpec,
    pieces: Sequence[Pages],
    first_page: int,
    previous_hash: bytes | None,
    page_hashes: Sequence[bytes],
    executor: Executor | None = None,
    ahead: Mapping[int, Sequence[CodedChunk]] | None = None,
) -> EncodedSegment:
    """Encode one segment, as `encode_segment` does, of consecutive pieces. ``ahead``: the chunks of spans that were
    coded before (`encode_span`), by the first page of the span, counted from the segment's; ``pieces`` has none of
    these spans."""
    manifest = spec.manifest(first_page, previous_hash, page_hashes)
    ahead = ahead or {}
    left = iter(pieces)
    held: list[Pages | int] = []  # pages, or the number of pages that are coded
    page = 0
    while page < len(page_hashes):
        held.append(manifest.span_pages if page in ahead else next(left))
        last = held[-1]
        page += last if isinstance(last, int) else last.num_tokens // manifest.namespace.page_size
    coded = {first // manifest.span_pages: chunks for first, chunks in ahead.items()}
    return encode_cells(spec, manifest, quantised_cells(spec.quantiser, manifest, held), executor, coded)


def encode_span(
    spec: SegmentSpec,
    pieces: Sequence[Pages],
    first_page: int,
    previous_hash: bytes | None,
    page_hashes: Sequence[bytes],
    executor: Executor | None = None,
) -> list[CodedChunk]:
    """Encode a span for a segment that is not known yet. Return its chunks, in storage order. Raises QuantiseError."""
    assert len(page_hashes) == spec.span_pages
    manifest = spec.manifest(first_page, previous_hash, page_hashes)
    return _coded_cells(spec, manifest, quantised_cells(spec.quantiser, manifest, pieces), executor)


def encode_cells(
    spec: SegmentSpec,
    manifest: Manifest,
    quantised: Callable[[Cell], Quantised],
    executor: Executor | None = None,
    ahead: Mapping[int, Sequence[CodedChunk]] | None = None,
) -> EncodedSegment:
    """Encode the cells of ``manifest``, which has no variants yet. ``quantised`` returns the parts of a cell. ``ahead``
    has the chunks of some spans."""
    coded = _coded_cells(spec, manifest, quantised, executor, ahead or {})
    variant, data = _variant(coded, spec.layouts(manifest), spec.codec, spec.resolution)
    rows: list[Level] = []
    contents = []
    for level in zip(*(chunk.levels for chunk in coded if chunk.levels), strict=True):
        contents.append(Pieces(chunk.bitstream for chunk in level))
        rows.append(Level(contents[-1].hexdigest(), tuple(chunk.row for chunk in level)))
    variant = msgspec.structs.replace(variant, levels=tuple(rows))
    return EncodedSegment(msgspec.structs.replace(manifest, variants=(variant,)), (data, *contents))


def _coded_cells(
    spec: SegmentSpec,
    manifest: Manifest,
    quantised: Callable[[Cell], Quantised],
    executor: Executor | None,
    ahead: Mapping[int, Sequence[CodedChunk]] = MappingProxyType({}),
) -> list[CodedChunk]:
    """Return the chunks of all cells, in storage order. ``ahead`` has those of some spans."""
    layouts = spec.layouts(manifest)

    def encode(cell: Cell) -> list[CodedChunk]:
        parts = quantised(cell)
        if spec.num_levels == 1:
            return encode_cell(manifest, cell, parts, layouts, spec.codec)
        wide = spec.quantiser.wide_coefficients(cell_place(manifest, cell))
        return encode_cell(manifest, cell, parts, layouts, spec.codec, spec.num_levels, wide)

    run: Callable[..., Iterable[list[CodedChunk]]] = executor.map if executor else map
    cells = run(encode, [cell for cell in manifest.cells() if cell.span not in ahead])
    spans = {span: list(chunks) for span, chunks in ahead.items()}
    for cell, chunks in zip((cell for cell in manifest.cells() if cell.span not in ahead), cells, strict=True):
        spans.setdefault(cell.span, []).extend(chunks)
    return [chunk for span in range(manifest.num_spans) for chunk in spans[span]]


def make_variant(
    coded: Iterable[CodedChunk], layouts: Mapping[str, Layout], codec: str, resolution: str
) -> tuple[Variant, bytes]:
    """Return a variant and its data object from chunks in storage order."""
    variant, data = _variant(coded, layouts, codec, resolution)
    return variant, data.joined()


def _variant(
    coded: Iterable[CodedChunk], layouts: Mapping[str, Layout], codec: str, resolution: str
) -> tuple[Variant, Pieces]:
    chunks, bitstreams, _ = zip(*coded, strict=True)
    data = Pieces(bitstreams)
    return Variant(data.hexdigest(), dict(layouts), chunks, codec, resolution), data  # type: ignore[arg-type]


def encode_cell(
    manifest: Manifest,
    cell: Cell,
    quantised: Quantised,
    layouts: Mapping[str, Layout],
    codec: str,
    num_levels: int = 1,
    wide: Sequence[Wide] = (),
) -> list[CodedChunk]:
    """Return a cell's chunks, one a part. ``num_levels``: of coefficients, of which ``wide`` have two integers."""
    chunks: list[CodedChunk] = []
    bitstream: bytes | memoryview
    for part, x in zip(manifest.parts, quantised, strict=True):
        raw = x.contiguous().cpu().numpy().reshape(-1).data
        if not part.layout:
            bitstream = BYTES_CODEC.compress(raw)
            chunks.append(CodedChunk(Chunk.of(BYTES_CODEC.name, bitstream, raw), bitstream))
            continue
        layout = layouts[part.layout]
        if num_levels > 1:
            frames = layout.to_frames(x)
            bitstreams = encode_ladder(frames, wide, len(x), num_levels)
            chunks.append(_with_levels(bitstreams, frames, layout, tuple(x.shape)))
            continue
        tried = {
            name: raw if name == RawCodec.name else get_codec(name).encode(layout.to_frames(x))
            for name in _codecs_for(cell, part, codec, x, raw)
        }
        name, bitstream = min(tried.items(), key=lambda item: len(item[1]))
        chunks.append(CodedChunk(Chunk.of(name, bitstream, raw), bitstream))
    return chunks


def _with_levels(
    bitstreams: Sequence[bytes], frames: torch.Tensor, layout: Layout, shape: tuple[int, ...]
) -> CodedChunk:
    """Return the chunk of level 0 with all further levels."""
    chunks = []
    for count, bitstream in enumerate(bitstreams, 1):
        shape_of_frames = len(frames), *frames.shape[2:]
        is_whole = count == len(bitstreams)
        decoded = frames if is_whole else decode_ladder(bitstreams[:count], len(bitstreams), shape_of_frames)
        content = layout.from_frames(decoded, shape).numpy().tobytes()
        chunks.append(CodedChunk(Chunk.of(LADDER if count == 1 else DIGITS, bitstream, content), bitstream))
    return chunks[0]._replace(levels=tuple(chunks[1:]))


def _codecs_for(cell: Cell, part: PartInfo, codec: str, x: torch.Tensor, raw: memoryview) -> tuple[str, ...]:
    """Return the codecs among which the smallest bitstream of a part ``x`` is chosen, if the user wants ``codec``."""
    is_values = codec == AnsCodec.name and part.layout in TENSORS
    if not is_values and not get_codec(codec).is_video:
        return (codec,)
    is_noise = _ans.entropy_bits(_sample(raw)) > NOISE_BITS
    if not is_values and not is_noise:
        return (codec,)
    usual = RawCodec.name if is_noise else AnsTablesCodec.name
    # In the first layer, V usually depends on the token alone, so it repeats. Only zstd finds repetitions.
    may_repeat = cell.layer_group == 0 and part.layout == "v" and _share_of_repeated(x) >= _MUCH_REPEATED
    return (usual, ZstdCodec.name) if may_repeat else (usual,)


def _share_of_repeated(x: torch.Tensor) -> float:
    """Return the share of tokens whose first values, in the first layer, are those of a token before."""
    starts = x.flatten(1)[:, :_START_BYTES].contiguous().numpy()
    return 1 - len({start.tobytes() for start in starts}) / len(starts)


def _sample(data: memoryview) -> memoryview | bytes:
    """Return few of many bytes: blocks from everywhere."""
    blocks = len(data) // (_SAMPLED * _SAMPLED_EVERY)
    if blocks < _LEAST_BLOCKS:
        return data
    block_bytes = _SAMPLED * _SAMPLED_EVERY
    return b"".join(data[i * block_bytes : i * block_bytes + _SAMPLED] for i in range(blocks))
