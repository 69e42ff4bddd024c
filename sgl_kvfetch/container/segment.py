"""Segments: KV values <-> a manifest and a data object. Pure computation; the caller does the I/O.

The data object is the chunks' bitstreams, one after another, in the manifest's order, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import xxhash

from sgl_kvfetch.codecs import CODECS, get_codec
from sgl_kvfetch.codecs.base import DecodedFrames, Decoders, FrameDecoder, FrameEncoder
from sgl_kvfetch.codecs.entropy import ZstdCodec
from sgl_kvfetch.container.manifest import Cell, Chunk, Manifest, Variant, namespace_geometry
from sgl_kvfetch.errors import CorruptError, FormatError
from sgl_kvfetch.keys import Namespace
from sgl_kvfetch.layout.frame_sum import sum_of_frames
from sgl_kvfetch.layout.frames import FrameLayout
from sgl_kvfetch.quant import Quantised, Quantiser
from sgl_kvfetch.types import TENSORS, KVGeometry, TensorName

_SCALES = ZstdCodec()
FALLBACK_CODEC = "zstd"
# Above this order-0 entropy a plane is noise (the low mantissa bytes of exact values are): video coding would expand it
# by a third, and slowly. Below it the codec is the user's choice even where another is smaller: video is decoded for
# free where there is NVDEC.
NOISE_BITS = 7.9


@dataclass(frozen=True, slots=True)
class SegmentSpec:
    """How a writer codes the segments of one namespace. ``encoders``: of codecs that are encoded elsewhere than on the
    CPU."""

    namespace: Namespace
    quantiser: Quantiser
    codec: str
    resolution: str
    span_pages: int
    encoders: Mapping[str, FrameEncoder] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        get_codec(self.codec)
        assert self.namespace.quantiser == self.quantiser.identity


@dataclass(frozen=True, slots=True)
class CodedSegment:
    """A segment as it is stored: ``data`` is the first variant's, ``more_data`` the others', in their order."""

    manifest: Manifest
    data: bytes
    more_data: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.manifest.variants) == 1 + len(self.more_data)

    @property
    def data_name(self) -> str:
        return self.manifest.data_name(self.manifest.variants[0])

    def variant_data(self, variant: int) -> bytes:
        return (self.data, *self.more_data)[variant]

    def data_objects(self) -> Iterator[tuple[str, bytes]]:
        """Names and contents. Variants that came out alike share an object."""
        objects = zip(self.manifest.variants, (self.data, *self.more_data), strict=True)
        yield from {self.manifest.data_name(variant): data for variant, data in objects}.items()


class CodedChunk(NamedTuple):
    """A chunk with all that is stored of it. ``frame_sum``: as in `Variant`."""

    row: Chunk
    bitstream: bytes | memoryview
    frame_sum: int | None


def encode_segment(
    spec: SegmentSpec,
    values: Mapping[TensorName, torch.Tensor],
    first_page: int,
    previous_hash: bytes | None,
    page_hashes: Sequence[bytes],
    executor: Executor | None = None,
) -> CodedSegment:
    """Code one segment. ``values`` holds K and V, each ``(tokens, layers, heads, dim)`` of the namespace's dtype.
    ``previous_hash`` is that of the page before the first, None at the sequence's start.

    Cells are coded side by side on ``executor``, if there is one. Raises QuantiseError.
    """
    namespace = spec.namespace
    for tensor in TENSORS:
        expected = (len(page_hashes) * namespace.page_size, namespace.num_layers, namespace.num_heads)
        assert values[tensor].shape[:3] == expected, (values[tensor].shape, expected)

    def quantise(manifest: Manifest, cell: Cell) -> Quantised:
        first_token, end_token = (page * namespace.page_size for page in manifest.span_range(cell.span))
        first_layer, end_layer = manifest.group_layers(cell.layer_group)
        return spec.quantiser.quantise(
            values[cell.tensor][first_token:end_token, first_layer:end_layer],
            cell.tensor,
            namespace.first_layer + first_layer,
            first_page * namespace.page_size + first_token,
        )

    return encode_cells(spec, first_page, previous_hash, page_hashes, quantise, executor)


def encode_cells(
    spec: SegmentSpec,
    first_page: int,
    previous_hash: bytes | None,
    page_hashes: Sequence[bytes],
    quantised: Callable[[Manifest, Cell], Quantised],
    executor: Executor | None = None,
) -> CodedSegment:
    """Code a segment whose cells' integers and scales ``quantised`` gives, given the manifest without its variants."""
    namespace = spec.namespace
    geometry = namespace_geometry(namespace)
    span_pages = min(spec.span_pages, len(page_hashes))
    layouts = {
        tensor: spec.quantiser.layout(
            tensor, geometry.num_heads, geometry.head_dim(tensor), span_pages * geometry.page_size, spec.resolution
        )
        for tensor in TENSORS
    }
    manifest = Manifest(
        namespace,
        first_page,
        previous_hash,
        tuple(page_hashes),
        span_pages,
        spec.quantiser.planes(geometry.torch_dtype),
        spec.quantiser.scales_per_layer(geometry.num_heads) > 0,
        (),
    )

    def encode(cell: Cell) -> list[CodedChunk]:
        return encode_cell(quantised(manifest, cell), layouts[cell.tensor], spec.codec, spec.encoders)

    run: Callable[..., Iterable[list[CodedChunk]]] = executor.map if executor else map
    coded = [chunk for cell in run(encode, manifest.cells()) for chunk in cell]
    variant, data = make_variant(coded, layouts, spec.codec, spec.resolution)
    return CodedSegment(msgspec.structs.replace(manifest, variants=(variant,)), data)


def make_variant(
    coded: Iterable[CodedChunk], layouts: Mapping[TensorName, FrameLayout], codec: str, resolution: str
) -> tuple[Variant, bytes]:
    """A variant and its data object from chunks in storage order."""
    chunks, bitstreams, sums = zip(*coded, strict=True)
    data = b"".join(bitstreams)
    digest = xxhash.xxh3_128_hexdigest(data)
    frame_sums = () if all(each is None for each in sums) else sums
    return Variant(digest, layouts["k"], layouts["v"], chunks, codec, resolution, frame_sums), data


def encode_cell(
    quantised: Quantised, layout: FrameLayout, codec: str, encoders: Mapping[str, FrameEncoder] | None = None
) -> list[CodedChunk]:
    """A cell's chunks: the scales, if there are any, then the planes. ``encoders``: as in `SegmentSpec`."""
    chunks = []
    if quantised.scales is not None:
        raw = scales_to_bytes(quantised.scales)
        chunks.append(_chunk(_SCALES.name, _SCALES.compress(raw), raw))
    for integers in quantised.integers:
        raw = integers.cpu().numpy().tobytes()
        plane_codec = get_codec(FALLBACK_CODEC if _entropy_bits(raw) > NOISE_BITS else codec)
        frames = layout.to_frames(integers)
        encoder = (encoders or {}).get(plane_codec.name) or plane_codec
        frame_sum = sum_of_frames(frames) if plane_codec.is_video else None
        chunks.append(_chunk(plane_codec.name, encoder.encode(frames), raw, frame_sum))
    return chunks


def _chunk(codec: str, bitstream: bytes, raw: bytes, frame_sum: int | None = None) -> CodedChunk:
    digest = xxhash.xxh3_128_digest
    return CodedChunk(Chunk(codec, len(bitstream), digest(bitstream), digest(raw)), bitstream, frame_sum)


def _entropy_bits(data: bytes) -> float:
    """Order-0 entropy of the bytes, in bits a byte."""
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    p = counts[counts > 0] / len(data)
    return float(-(p * np.log2(p)).sum())


def scales_to_bytes(scales: torch.Tensor) -> bytes:
    """bfloat16 ``(tokens, layers, scales_per_layer)`` as little-endian 16-bit words."""
    return scales.contiguous().cpu().view(torch.uint8).numpy().tobytes()


@dataclass(frozen=True, slots=True)
class CellFrames:
    """A cell decoded and verified, as frames, with all that restoring them takes.

    ``frames``: of each byte plane, uint8 ``(frames, 3, height, width)``. ``is_on_device``: of each, whether it was
    decoded to where it is restored, and not on the host. ``scales``: as in `Quantised`.
    """

    tensor: TensorName
    layers: range  # counted from the namespace's first
    model_layer: int  # the first of them, counted from the model's first
    tokens: range  # of the sequence
    layout: FrameLayout
    frames: tuple[torch.Tensor, ...]
    is_on_device: tuple[bool, ...]
    scales: torch.Tensor | None
    quantiser: Quantiser


class SegmentReader:
    """Decodes the cells of one variant of a segment."""

    def __init__(self, manifest: Manifest, quantiser: Quantiser, variant: int | None = None) -> None:
        """``variant``: its index; if None, the first whose codecs are here. Raises FormatError if the manifest was not
        written with this quantiser, or if no codec is here for the variant."""
        self.manifest = manifest
        self.quantiser = quantiser
        self.variant = manifest.variants[first_readable(manifest) if variant is None else variant]
        self.geometry: KVGeometry = manifest.geometry
        self._check_quantiser()
        for codec in {chunk.codec for chunk in self.variant.chunks}:
            get_codec(codec)
        sizes = (chunk.size_bytes for chunk in self.variant.chunks)
        self._offsets = [0, *accumulate(sizes)]

    def _check_quantiser(self) -> None:
        m, q = self.manifest, self.quantiser
        expected = (
            q.identity,
            q.planes(self.geometry.torch_dtype),
            q.scales_per_layer(self.geometry.num_heads) > 0,
        )
        found = (m.namespace.quantiser, m.planes, m.has_scales)
        if found != expected:
            raise FormatError(f"segment is quantised as {found}, expected {expected}")

    @property
    def data_name(self) -> str:
        return self.manifest.data_name(self.variant)

    def cell_index(self, cell: Cell) -> int:
        m = self.manifest
        return cell.span * m.cells_per_span + cell.layer_group * len(TENSORS) + TENSORS.index(cell.tensor)

    def cell_range(self, cell: Cell) -> tuple[int, int]:
        """Bytes ``[start, end)`` of a cell in the data object."""
        per_cell = self.manifest.chunks_per_cell
        first = self.cell_index(cell) * per_cell
        return self._offsets[first], self._offsets[first + per_cell]

    def span_range_bytes(self, span: int) -> tuple[int, int]:
        """Bytes ``[start, end)`` of a span in the data object."""
        per_span = self.manifest.cells_per_span * self.manifest.chunks_per_cell
        return self._offsets[span * per_span], self._offsets[(span + 1) * per_span]

    def num_integers(self, cell: Cell) -> int:
        """Of all planes."""
        m, g = self.manifest, self.geometry
        per_plane = m.span_tokens(cell.span) * self._num_layers(cell) * g.num_heads * g.head_dim(cell.tensor)
        return m.planes * per_plane

    @cached_property
    def variants(self) -> tuple[SegmentReader, ...]:
        """A reader for each variant that can be decoded here, this one among them."""
        return tuple(
            self if variant is self.variant else SegmentReader(self.manifest, self.quantiser, index)
            for index, variant in enumerate(self.manifest.variants)
            if variant.codecs <= CODECS.keys()
        )

    def decode_cell(self, cell: Cell, data: bytes | memoryview, decoders: Decoders | None = None) -> Quantised:
        """Verify and decode a cell's bytes to integers and scales, on the host. ``decoders``: of codecs that are
        decoded elsewhere than on the CPU. Raises CorruptError, FormatError."""
        pieces = self._verified_pieces(cell, data)
        scales = self._decode_scales(cell, pieces.pop(0)) if self.manifest.has_scales else None
        geometry = self.geometry
        integers = torch.empty(
            len(pieces),
            self.manifest.span_tokens(cell.span),
            self._num_layers(cell),
            geometry.num_heads,
            geometry.head_dim(cell.tensor),
            dtype=torch.uint8,
        )
        for plane, piece in zip(integers, pieces, strict=True):
            # At once: a decoder's memory is written again by the next plane.
            plane.copy_(self._decode_plane((decoders or {}).get(piece.row.codec), cell, piece))
        return Quantised(integers, scales)

    def decode_frames(self, cell: Cell, data: bytes | memoryview, decoders: Decoders | None = None) -> CellFrames:
        """The same, left as frames, where ``decoders`` decode to. Raises CorruptError, FormatError."""
        pieces = self._verified_pieces(cell, data)
        scales = self._decode_scales(cell, pieces.pop(0)) if self.manifest.has_scales else None
        layers = range(*self.manifest.group_layers(cell.layer_group))
        first_page, _ = self.manifest.span_range(cell.span)
        first_token = (self.manifest.first_page + first_page) * self.geometry.page_size
        planes = [self._decode_plane_with((decoders or {}).get(piece.row.codec), cell, piece) for piece in pieces]
        return CellFrames(
            tensor=cell.tensor,
            layers=layers,
            model_layer=self.manifest.namespace.first_layer + layers.start,
            tokens=range(first_token, first_token + self.manifest.span_tokens(cell.span)),
            layout=self.variant.layout(cell.tensor),
            frames=tuple(plane.frames for plane in planes),
            is_on_device=tuple(plane.is_on_device for plane in planes),
            scales=scales,
            quantiser=self.quantiser,
        )

    def _verified_pieces(self, cell: Cell, data: bytes | memoryview) -> list[CodedChunk]:
        """A cell's chunks, their bitstreams verified."""
        start, end = self.cell_range(cell)
        if len(data) != end - start:
            raise CorruptError(f"{cell} has {len(data)} bytes, expected {end - start}")
        view = memoryview(data)
        first = self.cell_index(cell) * self.manifest.chunks_per_cell
        pieces = []
        for index in range(first, first + self.manifest.chunks_per_cell):
            chunk = self.variant.chunks[index]
            piece = view[self._offsets[index] - start :][: chunk.size_bytes]
            _require_checksum(piece, chunk.coded_checksum, f"{cell}, compressed bytes")
            pieces.append(CodedChunk(chunk, piece, self.variant.frame_sum(index)))
        return pieces

    def dequantise_cell(self, cell: Cell, quantised: Quantised, tokens: slice = slice(None)) -> torch.Tensor:
        """``(tokens, layers, heads, dim)`` of the KV dtype: of all tokens of the span, or of a run of them."""
        first_layer, _ = self.manifest.group_layers(cell.layer_group)
        first_page, _ = self.manifest.span_range(cell.span)
        first_token, _, _ = tokens.indices(quantised.integers.shape[1])
        scales = quantised.scales
        return self.quantiser.dequantise(
            Quantised(quantised.integers[:, tokens], None if scales is None else scales[tokens]),
            self.geometry.torch_dtype,
            cell.tensor,
            self.manifest.namespace.first_layer + first_layer,
            (self.manifest.first_page + first_page) * self.manifest.namespace.page_size + first_token,
        )

    def _num_layers(self, cell: Cell) -> int:
        first, end = self.manifest.group_layers(cell.layer_group)
        return end - first

    def _decode_plane(self, decoder: FrameDecoder | None, cell: Cell, coded: CodedChunk) -> torch.Tensor:
        """Integers, maybe in the decoder's memory."""
        shape = self._frames_shape(cell)
        if decoder is not None:
            frames = decoder.decode(coded.bitstream, *shape, to_host=True).frames
        else:
            frames = get_codec(coded.row.codec).decode(coded.bitstream, *shape)
        return self._verified_integers(cell, coded, frames)

    def _decode_plane_with(self, decoder: FrameDecoder | None, cell: Cell, coded: CodedChunk) -> DecodedFrames:
        """Frames, verified."""
        if decoder is not None:
            with_sum = coded.frame_sum is not None
            decoded = decoder.decode(coded.bitstream, *self._frames_shape(cell), with_sum=with_sum)
        else:
            frames = get_codec(coded.row.codec).decode(coded.bitstream, *self._frames_shape(cell))
            decoded = DecodedFrames(frames, frames, is_on_device=False)
        if decoded.host is not None:
            self._verified_integers(cell, coded, decoded.host)
        elif decoded.frame_sum != coded.frame_sum:
            raise CorruptError(f"{cell}, decoded frames: frame sum does not match")
        return decoded

    def _frames_shape(self, cell: Cell) -> tuple[int, int, int]:
        """Number of frames, height, width."""
        layout = self.variant.layout(cell.tensor)
        return layout.num_frames(self.manifest.span_tokens(cell.span)), layout.height, layout.width

    def _verified_integers(self, cell: Cell, coded: CodedChunk, frames: torch.Tensor) -> torch.Tensor:
        """``frames``: on the host. Their sum is looked at as well: one that is wrong would have readers on a GPU miss
        what is sound, for ever."""
        geometry = self.geometry
        integers = self.variant.layout(cell.tensor).from_frames(
            frames,
            self.manifest.span_tokens(cell.span),
            self._num_layers(cell),
            geometry.num_heads,
            geometry.head_dim(cell.tensor),
        )
        _require_checksum(integers.numpy().data, coded.row.decoded_checksum, f"{cell}, decoded integers")
        if coded.frame_sum is not None and sum_of_frames(frames) != coded.frame_sum:
            raise CorruptError(f"{cell}, decoded frames: frame sum does not match")
        return integers

    def _decode_scales(self, cell: Cell, coded: CodedChunk) -> torch.Tensor:
        chunk = coded.row
        if chunk.codec != _SCALES.name:
            raise FormatError(f"{cell} has scales in codec {chunk.codec!r}, expected {_SCALES.name!r}")
        shape = (
            self.manifest.span_tokens(cell.span),
            self._num_layers(cell),
            self.quantiser.scales_per_layer(self.geometry.num_heads),
        )
        expected = shape[0] * shape[1] * shape[2] * torch.bfloat16.itemsize
        raw = _SCALES.decompress(coded.bitstream, expected)
        if len(raw) != expected:
            raise CorruptError(f"{cell} has {len(raw)} bytes of scales, expected {expected}")
        _require_checksum(raw, chunk.decoded_checksum, f"{cell}, scales")
        return torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).view(shape)


def first_readable(manifest: Manifest, engine_codecs: Collection[str] = ()) -> int:
    """The index of the first variant all of whose codecs are here; 0 if there is none, so that its lack is reported.
    Where there are video engines, for ``engine_codecs``, variants that leave no video to the CPU come before others."""
    codecs = [variant.codecs for variant in manifest.variants]
    readable = [i for i, names in enumerate(codecs) if names <= CODECS.keys()]
    if engine_codecs:
        on_cpu = {name for name, codec in CODECS.items() if codec.is_video and name not in engine_codecs}
        readable = [i for i in readable if not codecs[i] & on_cpu] or readable
    return next(iter(readable), 0)


def _require_checksum(data: bytes | memoryview, expected: bytes, what: str) -> None:
    if xxhash.xxh3_128_digest(data) != expected:
        raise CorruptError(f"{what}: checksum does not match")
