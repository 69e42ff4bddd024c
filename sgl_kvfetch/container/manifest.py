"""A segment's manifest: what it holds, where, and how to check it.

Bytes: ``"KVFM"``, u16 major, u16 minor, u32 body length (little endian), the body (MessagePack), and the
xxh3-128 of all before it. See docs/format.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import msgspec
import xxhash
from msgspec import Meta

from sgl_kvfetch.errors import CorruptError, FormatError, FormatVersionError, UnsupportedError
from sgl_kvfetch.keys import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    PAGE_HASH_BYTES,
    Namespace,
    SegmentKey,
    is_power_of_two,
)
from sgl_kvfetch.layout.frames import PICTURE_MULTIPLE, PLANES, FrameLayout
from sgl_kvfetch.types import TENSORS, KVGeometry, TensorName

MAGIC = b"KVFM"
_HEADER = struct.Struct("<4sHHI")
CHECKSUM_BYTES = 16
MAX_MANIFEST_BYTES = 16 << 20
MAX_SEGMENT_PAGES = 1 << 20
MAX_DATA_BYTES = 1 << 40
MAX_VARIANTS = 16

LAYERS_PER_GROUP = PLANES

# What a reader allocates for one chunk is bounded by what the chunk holds.
_MAX_CHUNK_BYTES = 1 << 30
_MAX_EMPTINESS = 16
_SMALL_FRAMES_BYTES = 8 << 20

_Checksum = Annotated[bytes, Meta(min_length=CHECKSUM_BYTES, max_length=CHECKSUM_BYTES)]
_FrameSum = Annotated[int, Meta(ge=0)]  # 64 bits; MessagePack has no larger ones


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """One chunk's row. Which chunk it is follows from its place in the table (see ``Manifest.cells``)."""

    codec: str
    size_bytes: Annotated[int, Meta(ge=1, le=MAX_DATA_BYTES)]
    coded_checksum: _Checksum  # xxh3-128 of the compressed bytes
    decoded_checksum: _Checksum  # xxh3-128 of the integers, or of the scales


class Variant(msgspec.Struct, frozen=True, omit_defaults=True):
    """The segment coded in one way: a data object and the table of its chunks, in storage order."""

    data_digest: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    k_layout: FrameLayout
    v_layout: FrameLayout
    chunks: tuple[Chunk, ...]
    # What was asked for when it was coded, where the writer recorded it. Chunks may be in another codec (noise is), and
    # short spans have smaller pictures: neither can be told from the rest.
    codec: str = ""
    resolution: str = ""
    # Of each chunk, the sum of the frames that it decodes to (`layout.frame_sum`), or None; nothing if none has one.
    # They depend on the layout, so a chunk's row, which tells one content from another, does not hold them.
    frame_sums: tuple[_FrameSum | None, ...] = ()

    def layout(self, tensor: TensorName) -> FrameLayout:
        return self.k_layout if tensor == "k" else self.v_layout

    def frame_sum(self, chunk: int) -> int | None:
        return self.frame_sums[chunk] if self.frame_sums else None

    @property
    def codecs(self) -> frozenset[str]:
        """What a reader of this variant must be able to decode."""
        return frozenset(chunk.codec for chunk in self.chunks)


class _Body(msgspec.Struct, frozen=True):
    namespace: Namespace
    first_page: Annotated[int, Meta(ge=0, le=1 << 40)]
    previous_hash: bytes | None
    page_hashes: bytes
    span_pages: Annotated[int, Meta(ge=1, le=MAX_SEGMENT_PAGES)]
    planes: Annotated[int, Meta(ge=1, le=8)]
    has_scales: bool
    variants: Annotated[tuple[Variant, ...], Meta(min_length=1, max_length=MAX_VARIANTS)]


class Cell(NamedTuple):
    """One span of one layer group's K or V. Its chunks (scales, then byte planes) lie side by side."""

    span: int
    layer_group: int
    tensor: TensorName


class Manifest(msgspec.Struct, frozen=True):
    """A validated manifest.

    A segment is cut along its tokens into spans of ``span_pages`` pages (the last may be shorter), along its layers
    into groups of three, into K and V, and into byte planes; the scales of quantised integers are chunks of their
    own. A chunk is the unit of transmission, decoding and verification.
    """

    namespace: Namespace
    first_page: int  # position of the first page in the sequence
    previous_hash: bytes | None  # of the page before it; None at the sequence's start
    page_hashes: tuple[bytes, ...]
    span_pages: int
    planes: int
    has_scales: bool
    variants: tuple[Variant, ...]

    @property
    def num_pages(self) -> int:
        return len(self.page_hashes)

    @property
    def key(self) -> SegmentKey:
        return SegmentKey(self.namespace.digest(), self.num_pages, self.page_hashes[-1])

    @property
    def geometry(self) -> KVGeometry:
        return namespace_geometry(self.namespace)

    @property
    def num_spans(self) -> int:
        return -(-self.num_pages // self.span_pages)

    @property
    def num_layer_groups(self) -> int:
        return num_layer_groups(self.namespace.num_layers)

    def span_range(self, span: int) -> tuple[int, int]:
        """Pages ``[first, end)`` of a span, counted from the segment's start."""
        first = span * self.span_pages
        return first, min(first + self.span_pages, self.num_pages)

    def span_tokens(self, span: int) -> int:
        first, end = self.span_range(span)
        return (end - first) * self.namespace.page_size

    def cells(self) -> Iterator[Cell]:
        """The cells in storage order: by span, layer group, K before V."""
        for span in range(self.num_spans):
            yield from self.span_cells(span)

    def span_cells(self, span: int) -> Iterator[Cell]:
        for group in range(self.num_layer_groups):
            for tensor in TENSORS:
                yield Cell(span, group, tensor)

    @property
    def cells_per_span(self) -> int:
        return self.num_layer_groups * len(TENSORS)

    @property
    def chunks_per_cell(self) -> int:
        return self.planes + self.has_scales

    def group_layers(self, layer_group: int) -> tuple[int, int]:
        """Layers ``[first, end)`` of a group, counted from this rank's first layer."""
        first = layer_group * LAYERS_PER_GROUP
        return first, min(first + LAYERS_PER_GROUP, self.namespace.num_layers)

    def data_name(self, variant: Variant) -> str:
        return self.key.data_name(variant.data_digest)

    @property
    def data_names(self) -> frozenset[str]:
        """The data objects of all variants. Variants that come out alike share one."""
        return frozenset(map(self.data_name, self.variants))

    def data_bytes(self, variant: Variant) -> int:
        return sum(chunk.size_bytes for chunk in variant.chunks)

    @property
    def raw_bytes(self) -> int:
        """What the same pages take in the token-to-KV pool."""
        return self.num_pages * self.geometry.page_bytes

    def encode(self) -> bytes:
        body = _Body(
            self.namespace,
            self.first_page,
            self.previous_hash,
            b"".join(self.page_hashes),
            self.span_pages,
            self.planes,
            self.has_scales,
            self.variants,
        )
        packed = msgspec.msgpack.encode(body)
        # What an earlier version can say is written as it was then, byte for byte.
        minor = FORMAT_MINOR if any(variant.frame_sums for variant in self.variants) else 0
        head = _HEADER.pack(MAGIC, FORMAT_MAJOR, minor, len(packed)) + packed
        return head + xxhash.xxh3_128_digest(head)


def joined_frame_sums(*parts: Variant) -> tuple[int | None, ...]:
    """Of a variant that holds the chunks of all of these, one after another."""
    sums = tuple(part.frame_sum(chunk) for part in parts for chunk in range(len(part.chunks)))
    return sums if any(part.frame_sums for part in parts) else ()


def namespace_geometry(n: Namespace) -> KVGeometry:
    """Raises UnsupportedError for numbers out of bounds."""
    return KVGeometry(n.num_layers, n.num_heads, n.k_head_dim, n.v_head_dim, n.page_size, n.kv_dtype)


def num_layer_groups(num_layers: int) -> int:
    return -(-num_layers // LAYERS_PER_GROUP)


def decode_manifest(data: bytes) -> Manifest:
    """Parse and validate a manifest.

    Raises FormatVersionError for another major version, CorruptError where the checksum fails, and FormatError for
    everything else that is not as it should be. Nothing in the bytes is trusted before the checksum holds, and no
    number in them after it leads out of the bounds above.
    """
    if len(data) < _HEADER.size + CHECKSUM_BYTES:
        raise CorruptError(f"manifest has {len(data)} bytes, fewer than its header")
    if len(data) > MAX_MANIFEST_BYTES:
        raise FormatError(f"manifest has {len(data)} bytes, more than {MAX_MANIFEST_BYTES}")
    magic, major, _minor, body_bytes = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise CorruptError(f"manifest starts with {magic!r}, expected {MAGIC!r}")
    if xxhash.xxh3_128_digest(data[:-CHECKSUM_BYTES]) != data[-CHECKSUM_BYTES:]:
        raise CorruptError("manifest does not match its checksum")
    if major != FORMAT_MAJOR:
        raise FormatVersionError(f"manifest has format version {major}, this reader knows {FORMAT_MAJOR}")
    if body_bytes != len(data) - _HEADER.size - CHECKSUM_BYTES:
        raise FormatError(f"manifest's body is said to have {body_bytes} bytes, and has not")
    try:
        body = msgspec.msgpack.decode(memoryview(data)[_HEADER.size : -CHECKSUM_BYTES], type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise FormatError(f"manifest's body is malformed: {e}") from e
    return _validated(body)


def _validated(body: _Body) -> Manifest:
    num_pages, rest = divmod(len(body.page_hashes), PAGE_HASH_BYTES)
    if rest or not is_power_of_two(num_pages) or num_pages > MAX_SEGMENT_PAGES:
        raise FormatError(f"manifest has {len(body.page_hashes)} bytes of page hashes, not a power of two of them")
    if body.first_page % num_pages:
        raise FormatError(f"segment of {num_pages} pages starts at page {body.first_page}, which is not aligned")
    previous_bytes = PAGE_HASH_BYTES if body.first_page else 0
    if len(body.previous_hash or b"") != previous_bytes:
        raise FormatError(f"previous_hash has not {previous_bytes} bytes in a segment that starts at {body.first_page}")
    if body.namespace.format_major != FORMAT_MAJOR:
        raise FormatVersionError(f"namespace has format version {body.namespace.format_major}")
    manifest = Manifest(
        body.namespace,
        body.first_page,
        body.previous_hash,
        tuple(body.page_hashes[i : i + PAGE_HASH_BYTES] for i in range(0, len(body.page_hashes), PAGE_HASH_BYTES)),
        body.span_pages,
        body.planes,
        body.has_scales,
        body.variants,
    )
    try:
        geometry = manifest.geometry
    except UnsupportedError as e:
        raise FormatError(f"manifest's namespace is invalid: {e}") from e
    num_chunks = manifest.num_spans * manifest.cells_per_span * manifest.chunks_per_cell
    for variant in body.variants:
        if len(variant.chunks) != num_chunks:
            raise FormatError(f"manifest lists {len(variant.chunks)} chunks, its geometry has {num_chunks}")
        if len(variant.frame_sums) not in (0, num_chunks):
            raise FormatError(f"manifest lists {len(variant.frame_sums)} frame sums for {num_chunks} chunks")
        for tensor in TENSORS:
            layout = variant.layout(tensor)
            _check_layout(layout, manifest, geometry, tensor)
            if variant.frame_sums and (layout.width % PICTURE_MULTIPLE or layout.height % PICTURE_MULTIPLE):
                raise FormatError(f"frame sums of pictures of {layout.width}x{layout.height}, expected multiples of 8")
        for chunk in variant.chunks:
            if chunk.size_bytes > _MAX_CHUNK_BYTES:
                raise FormatError(f"chunk of {chunk.size_bytes} bytes exceeds {_MAX_CHUNK_BYTES}")
    return manifest


def _check_layout(layout: FrameLayout, manifest: Manifest, geometry: KVGeometry, tensor: TensorName) -> None:
    """Refuse layouts that do not hold the tensor, or whose frames are mostly empty: reading one would fill memory."""
    layout.require_fits(geometry.num_heads, geometry.head_dim(tensor))
    num_tokens = min(manifest.span_pages, manifest.num_pages) * geometry.page_size
    held = num_tokens * PLANES * geometry.num_heads * geometry.head_dim(tensor)
    frames = layout.num_frames(num_tokens) * PLANES * layout.width * layout.height
    if frames > _MAX_EMPTINESS * held + _SMALL_FRAMES_BYTES:
        raise FormatError(f"{tensor} frames of {frames} bytes for {held} values")
