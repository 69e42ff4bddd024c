"""A segment's manifest: the contents of the segment, their location, and their checksums.

Bytes: ``"KVFM"``, u16 major, u16 minor, u32 body length (little endian), the body (MessagePack), and the xxh3-128 of
all before it. See docs/format.md.

Manifests come from a store, and anybody who may write to it may have made them. What they say decides how much memory
is allocated, which bytes are read, and where values go. So nothing is used before it is checked: the checksum first,
then the major version, then every number against a bound, then numbers against each other. A `Manifest` that exists is
sound in itself. Its reader checks whether it is the one that was asked for, by namespace, heads and page hashes.

A manifest is replaced only if the stored one has the digest of the bytes that were read. So what is decoded and encoded
again must give the same bytes, and never loses fields of a newer version (`require_rewritable`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from functools import lru_cache
from typing import Annotated, NamedTuple, TypeVar

import msgspec
import xxhash
from msgspec import Meta

from sgl_kvfetch.codec.bitstream.base import DIGITS, LADDER, MOST_LEVELS
from sgl_kvfetch.codec.container.encryption import ENCRYPTED, DataCipher, Encryption
from sgl_kvfetch.codec.container.objects import (
    CHECKSUM_BYTES,
    MAX_CHUNK_BYTES,
    MAX_SEGMENT_PAGES,
    SIDE_CHUNK_BYTES,
    DataObject,
    Level,
    Name,
    Side,
    Variant,
)
from sgl_kvfetch.codec.layout.frames import MIN_PICTURE, PICTURE_MULTIPLE, PLANES, Layout, TileLayout
from sgl_kvfetch.errors import (
    DECODE_ERRORS,
    CorruptError,
    EncryptedError,
    FormatError,
    FormatVersionError,
    UnsupportedError,
)
from sgl_kvfetch.keys import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    MAX_NAMESPACE_CHARS,
    PAGE_HASH_BYTES,
    HeadSlice,
    Labels,
    Namespace,
    SegmentKey,
    is_power_of_two,
    split_hashes,
)
from sgl_kvfetch.types import MAX_HEADS, MAX_LAYERS, TENSORS, CellGrid, KVGeometry, first_to_last

MAGIC = b"KVFM"
_HEADER = struct.Struct("<4sHHI")
# 8,192 tokens of 80 layers and 8 heads take 111 KiB with `exact`. A reader takes six times as much memory for each
# manifest.
MAX_MANIFEST_BYTES = 1 << 20
MAX_VARIANTS = 16
MAX_PARTS = 32
MAX_COEFFICIENTS = 1 << 16
MAX_MODEL_HEADS = 999  # of all ranks; folder names have room for three digits
MAX_SIDES = 64
COEFFICIENTS = "coefficients"  # the layout of what levels code
MAX_EXPIRES_S = 1 << 36  # the year 4147

# Frames may take this many bytes for each value that they hold, and this many more: the rest of them is fill.
_MAX_EMPTINESS = 16
_SMALL_FRAMES_BYTES = 8 << 20

Rows = TypeVar("Rows", bound=DataObject)
_Expires = Annotated[int, Meta(ge=0, le=MAX_EXPIRES_S)] | None


class PartInfo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One part of every cell. ``layout``: the name of its integers' layout; empty if the part is plain bytes."""

    name: Name
    layout: Name = ""


class _Body(msgspec.Struct, frozen=True, omit_defaults=True):
    namespace: dict[str, str | int]  # a dataclass would let unknown fields pass
    first_head: Annotated[int, Meta(ge=0)]
    num_heads: Annotated[int, Meta(ge=1, le=MAX_HEADS)]
    first_page: Annotated[int, Meta(ge=0, le=1 << 40)]
    previous_hash: bytes | None
    page_hashes: bytes
    span_pages: Annotated[int, Meta(ge=1, le=MAX_SEGMENT_PAGES)]
    cell_layers: Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
    cell_heads: Annotated[int, Meta(ge=1, le=MAX_HEADS)]
    parts: Annotated[tuple[PartInfo, ...], Meta(min_length=1, max_length=MAX_PARTS)]
    coefficients: tuple[Annotated[int, Meta(ge=1, le=MAX_COEFFICIENTS)], ...]
    variants: Annotated[tuple[Variant, ...], Meta(min_length=1, max_length=MAX_VARIANTS)]
    sides: Annotated[tuple[Side, ...], Meta(max_length=MAX_SIDES)] = ()
    expires: _Expires = None
    labels: Labels | None = None


class _Encrypted(msgspec.Struct):
    encryption: Encryption | None = None
    levels: tuple[_Encrypted, ...] = ()


class _Encryptions(msgspec.Struct):
    """The fields of a body that say how its objects are encrypted."""

    variants: tuple[_Encrypted, ...]
    sides: tuple[_Encrypted, ...] = ()


# msgspec looks at a type's annotations when it first decodes one, and crashes the process (in version 0.22) if another
# thread decodes one meanwhile. So it is made to look here, before there are threads.
_bodies = msgspec.msgpack.Decoder(_Body)
_encryptions = msgspec.msgpack.Decoder(_Encryptions)
msgspec.msgpack.Decoder(Namespace)


class Cell(NamedTuple):
    """K and V of one span, layer group and head block, by their indices. Its chunks, one a part, are contiguous."""

    span: int
    layer_group: int
    head_block: int


class StoredAs(NamedTuple):
    """One way in which a segment is stored. ``size_bytes``: of its first data object."""

    codecs: list[str]
    resolution: str
    size_bytes: int


_grid = lru_cache(CellGrid)  # readers ask for each cell


class Manifest(msgspec.Struct, frozen=True):
    """A validated manifest.

    A segment is divided into cells: along its tokens into spans of ``span_pages`` pages (the last may be shorter),
    along its layers into groups of ``cell_layers`` (the last may be smaller), along its heads into blocks of
    ``cell_heads``. All cells have the same parts. A part of a cell is a chunk: the unit of decoding and verification.

    ``coefficients``: how many a token has, for each layer group and head block; empty if there is one integer a value.
    """

    namespace: Namespace
    first_head: int  # index among the model's heads
    num_heads: int
    first_page: int  # position of the first page in the sequence
    previous_hash: bytes | None  # of the page before it; None at the sequence's start
    page_hashes: tuple[bytes, ...]
    span_pages: int
    cell_layers: int
    cell_heads: int
    parts: tuple[PartInfo, ...]
    coefficients: tuple[int, ...]
    variants: tuple[Variant, ...]
    sides: tuple[Side, ...] = ()
    expires: int | None = None  # when readers and stores forget the segment, in seconds since the epoch; None for never
    labels: Labels = Labels()  # for people
    ciphers: Mapping[str, DataCipher] = {}  # by data digest, once `protect.open_manifest` has opened it

    def is_expired(self, now_s: float) -> bool:
        return self.expires is not None and self.expires <= now_s

    @property
    def num_pages(self) -> int:
        return len(self.page_hashes)

    @property
    def heads(self) -> HeadSlice:
        return HeadSlice(self.namespace, range(self.first_head, self.first_head + self.num_heads), self.labels)

    @property
    def key(self) -> SegmentKey:
        return SegmentKey(self.heads.folder, self.num_pages, self.page_hashes[-1])

    @property
    def geometry(self) -> KVGeometry:
        return self.heads.geometry

    @property
    def grid(self) -> CellGrid:
        return _grid(self.namespace.num_layers, self.num_heads, self.cell_layers, self.cell_heads)

    @property
    def num_spans(self) -> int:
        return -(-self.num_pages // self.span_pages)

    def span_range(self, span: int) -> tuple[int, int]:
        """Return pages ``[first, end)`` of a span, counted from the segment's start."""
        first = span * self.span_pages
        return first, min(first + self.span_pages, self.num_pages)

    def span_tokens(self, span: int) -> int:
        first, end = self.span_range(span)
        return (end - first) * self.namespace.page_size

    def cells(self) -> Iterator[Cell]:
        """Yield the cells in storage order: by span, layer group, head block."""
        for span in range(self.num_spans):
            yield from self.span_cells(span)

    def span_cells(self, span: int) -> Iterator[Cell]:
        for group, block in self.grid.cells():
            yield Cell(span, group, block)

    def head_blocks(self, rank_heads: range) -> range:
        """Return the head blocks that have heads of a rank, which has some of the segment's. Raises UnsupportedError if
        one has others, too."""
        first = max(rank_heads.start, self.first_head) - self.first_head
        end = min(rank_heads.stop, self.first_head + self.num_heads) - self.first_head
        assert first < end, (rank_heads, self.heads.heads)
        if first % self.cell_heads or end % self.cell_heads:
            raise UnsupportedError(
                f"segment has cells of {self.cell_heads} heads: heads "
                f"{first_to_last(rank_heads.start, rank_heads.stop)} are not whole cells of heads "
                f"{first_to_last(self.first_head, self.first_head + self.num_heads)}"
            )
        return range(first // self.cell_heads, end // self.cell_heads)

    @property
    def cells_per_span(self) -> int:
        grid = self.grid
        return grid.num_layer_groups * grid.num_head_blocks

    @property
    def chunks_per_cell(self) -> int:
        return len(self.parts)

    def cell_index(self, cell: Cell) -> int:
        """Return a cell's index in storage order."""
        grid = self.grid
        within = cell.layer_group * grid.num_head_blocks + cell.head_block
        return cell.span * self.cells_per_span + within

    def cell_values(self, cell: Cell) -> int:
        """Return the number of values in a cell, K and V together."""
        head_dims = self.namespace.k_head_dim + self.namespace.v_head_dim
        channels = len(self.grid.layers(cell.layer_group)) * self.cell_heads * head_dims
        return self.span_tokens(cell.span) * channels

    def integers_shape(self, cell: Cell, layout: str) -> tuple[int, ...]:
        """Return the shape of a cell's integers in this layout: ``(tokens, layers, heads, dim)`` for K or V,
        ``(coefficients, tokens)`` for others."""
        num_tokens = self.span_tokens(cell.span)
        if layout not in TENSORS:
            return self.coefficients[self.cell_index(Cell(0, cell.layer_group, cell.head_block))], num_tokens
        grid, head_dim = self.grid, self.geometry.head_dim(layout)
        return num_tokens, len(grid.layers(cell.layer_group)), grid.cell_heads, head_dim

    def data_name(self, data: DataObject) -> str:
        return self.key.data_name(data.data_digest)

    @property
    def levels(self) -> tuple[Level, ...]:
        """The levels of all variants."""
        return tuple(level for variant in self.variants for level in variant.levels)

    @property
    def num_dropped(self) -> int:
        """How many levels a store has dropped."""
        return max((variant.num_dropped for variant in self.variants), default=0)

    @property
    def num_droppable(self) -> int:
        """How many levels a store may drop, one after the other."""
        return max((len(each.levels) for each in self.variants), default=0)

    def coarser_by(self, count: int) -> Manifest:
        """Return the manifest without the last ``count`` levels.

        All variants hold the same values. So each loses as many levels. A variant that has fewer is left out: it would
        stay finer than the others.
        """
        if not count:
            return self
        kept = [each for each in self.variants if len(each.levels) >= count]
        coarser = (each.with_levels(len(each.levels) - count) for each in kept)
        return msgspec.structs.replace(self, variants=tuple(coarser))

    def too_coarse(self, most: int) -> str:
        """Say that the store has dropped more levels than the ``most`` that a reader may leave out; "" if it has
        not."""
        lost = self.num_dropped
        return f"{self.key.stem} has lost {lost} levels; {most} may be left out" if lost > most else ""

    @property
    def codings(self) -> list[StoredAs]:
        """How the segment is stored, once or several times."""
        return [StoredAs(sorted(each.codecs), each.resolution, each.size_bytes) for each in self.variants]

    @property
    def insides(self) -> list[list[object]]:
        """For each data object, what it holds of the segment: side pages, or layouts, and which of all levels."""
        coded = [_inside(variant, 0) for variant in self.variants]
        coded += (_inside(variant, n) for variant in self.variants for n, _ in enumerate(variant.levels, 1))
        return coded + [[(page.pool, page.page, page.num_bytes) for page in side.pages] for side in self.sides]

    @property
    def data(self) -> tuple[DataObject, ...]:
        """All data objects: the variants', then those of their levels, then the side pages'."""
        return (*self.variants, *self.levels, *self.sides)

    def with_data(self, data: Iterable[DataObject]) -> Manifest:
        """Return the manifest with ``data`` in place of its data objects' rows, in the order of `Manifest.data`."""
        rest = list(data)

        def taken(kind: type[Rows], count: int) -> tuple[Rows, ...]:
            some, rest[:count] = rest[:count], []
            assert all(isinstance(each, kind) for each in some)
            return tuple(some)  # type: ignore[arg-type]

        variants = taken(Variant, len(self.variants))
        variants = tuple(msgspec.structs.replace(v, levels=taken(Level, len(v.levels))) for v in variants)
        return msgspec.structs.replace(self, variants=variants, sides=taken(Side, len(self.sides)))

    @property
    def data_sizes(self) -> dict[str, int]:
        """The names and sizes of all data objects. Variants with identical data share one object."""
        return {self.data_name(data): data.size_bytes for data in self.data}

    @property
    def data_names(self) -> frozenset[str]:
        return frozenset(self.data_sizes)

    @property
    def key_ids(self) -> list[str]:
        """The ids of the keys that its data objects are encrypted with."""
        return sorted({rows.encryption.key for rows in self.data if rows.encryption})

    @property
    def is_encrypted(self) -> bool:
        return bool(self.key_ids)

    def locked(self, key_id: str) -> EncryptedError:
        """Return the error that this reader lacks the key of that id."""
        return EncryptedError(
            f"{self.key.stem} is encrypted with the key {key_id}, which this reader does not have "
            "(key_file, --key-file)"
        )

    def require_open(self) -> None:
        """Raise EncryptedError if the manifest is encrypted and was not opened."""
        if self.is_encrypted and not self.ciphers:
            raise self.locked(self.key_ids[0])

    @property
    def kv_bytes(self) -> int:
        """The size of these pages in the token-to-KV pool."""
        return self.num_pages * self.geometry.page_bytes

    @property
    def raw_bytes(self) -> int:
        """The size of these pages in all of SGLang's pools."""
        return self.kv_bytes + sum(page.num_bytes for side in self.sides for page in side.pages)

    def encode(self) -> bytes:
        """Return the manifest's bytes. Raises FormatError if they are more than readers accept."""
        assert not self.ciphers, "an opened manifest is not what is stored"
        labels = None if self.labels == Labels() else self.labels
        changed = {"namespace": asdict(self.namespace), "page_hashes": b"".join(self.page_hashes), "labels": labels}
        values = {name: getattr(self, name) for name in _Body.__struct_fields__} | changed
        packed = msgspec.msgpack.encode(_Body(**values))
        head = _HEADER.pack(MAGIC, FORMAT_MAJOR, FORMAT_MINOR, len(packed)) + packed
        num_bytes = len(head) + CHECKSUM_BYTES
        if num_bytes > MAX_MANIFEST_BYTES:
            rows = sum(len(each.chunks) for each in self.data)
            raise FormatError(f"manifest of {rows} chunks takes {num_bytes} bytes, more than {MAX_MANIFEST_BYTES}")
        return head + xxhash.xxh3_128_digest(head)


def decode_manifest(data: bytes) -> Manifest:
    """Parse and validate a manifest.

    Raises FormatVersionError for another major version, CorruptError if the checksum does not match, and FormatError
    for all other faults. Only sizes and the magic are looked at before the checksum is verified. After that, numbers
    are checked against the bounds above.
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
    found_bytes = len(data) - _HEADER.size - CHECKSUM_BYTES
    if body_bytes != found_bytes:
        raise FormatError(f"manifest's body: expected {body_bytes} bytes, found {found_bytes}")
    try:
        body = _bodies.decode(memoryview(data)[_HEADER.size : -CHECKSUM_BYTES])
    except DECODE_ERRORS as e:
        raise FormatError(f"manifest's body is malformed: {e}") from e
    return _validated(body)


def encryption_keys_of(data: bytes) -> set[str]:
    """Return the ids of the keys that a manifest's objects are encrypted with, without decoding the rest; none if an
    object is not encrypted. Raises FormatError."""
    try:
        body = _encryptions.decode(memoryview(data)[_HEADER.size : -CHECKSUM_BYTES])
    except DECODE_ERRORS as e:
        raise FormatError(f"manifest's body is malformed: {e}") from e
    levels = (level for variant in body.variants for level in variant.levels)
    found = [each.encryption for each in (*body.variants, *levels, *body.sides)]
    return {each.key for each in found if each} if all(found) else set()


def coarsened(manifest: Manifest, content: bytes) -> tuple[bytes, dict[str, int]] | None:
    """Return a stored manifest's bytes without its last level, and the sizes, by name, of the data objects that it then
    no longer needs. Return None if it has none. Raises FormatVersionError.

    This needs no key. A store can always take data away. Readers see how many levels a segment lacks, and refuse too
    many; an encrypted object decrypts only if that number is right (`protect`).
    """
    if not manifest.num_droppable:
        return None
    require_rewritable(content)
    coarser = manifest.coarser_by(1)
    unnamed = {name: size for name, size in manifest.data_sizes.items() if name not in coarser.data_names}
    return coarser.encode(), unnamed


def _inside(variant: Variant, level: int) -> list[object]:
    layouts = sorted(variant.layouts.items(), key=lambda item: item[0])
    shapes = ((name, *msgspec.to_builtins(layout).values()) for name, layout in layouts)
    return [len(variant.levels) + variant.num_dropped, level, *shapes]


def require_rewritable(data: bytes) -> None:
    """Raise FormatVersionError if a newer minor version wrote this manifest: to write it again would drop its new
    fields. ``data``: a manifest that decodes."""
    _, _, minor, _ = _HEADER.unpack_from(data)
    if minor > FORMAT_MINOR:
        raise FormatVersionError(
            f"manifest has format version {FORMAT_MAJOR}.{minor}, which this version can read but not write again"
        )


def _validated(body: _Body) -> Manifest:
    """Return the manifest of a decoded body. Raises FormatError if its parts contradict each other or the bounds."""
    num_pages, rest = divmod(len(body.page_hashes), PAGE_HASH_BYTES)
    if rest or not is_power_of_two(num_pages) or num_pages > MAX_SEGMENT_PAGES:
        raise FormatError(
            f"manifest has {len(body.page_hashes)} bytes of page hashes, expected a power of two of hashes of "
            f"{PAGE_HASH_BYTES} bytes, at most {MAX_SEGMENT_PAGES}"
        )
    if body.first_page % num_pages:
        raise FormatError(f"segment of {num_pages} pages starts at page {body.first_page}, which is not aligned")
    expected = PAGE_HASH_BYTES if body.first_page else None
    if (None if body.previous_hash is None else len(body.previous_hash)) != expected:
        raise FormatError(f"previous_hash: expected {expected} bytes in a segment at page {body.first_page}")
    namespace = checked_namespace(body.namespace)
    if body.num_heads % body.cell_heads or body.first_head + body.num_heads > namespace.num_heads:
        heads = first_to_last(body.first_head, body.first_head + body.num_heads)
        raise FormatError(
            f"heads {heads} do not fit blocks of {body.cell_heads}, or exceed the model's {namespace.num_heads}"
        )
    hashes = tuple(split_hashes(body.page_hashes))
    if len(set(hashes)) < num_pages:
        raise FormatError("manifest has the same page hash twice")  # hashes are chained: no prompt has that
    parsed = {"namespace": namespace, "page_hashes": hashes, "labels": body.labels or Labels()}
    manifest = Manifest(**msgspec.structs.asdict(body) | parsed)
    try:
        _ = manifest.geometry
    except UnsupportedError as e:
        raise FormatError(f"manifest's namespace is invalid: {e}") from e
    _check_parts(manifest)
    check_data(manifest)
    _check_sides(manifest)
    if len({rows.encryption is None for rows in manifest.data}) > 1:
        raise FormatError("manifest has encrypted objects and others, expected one kind")
    return manifest


def checked_namespace(found: Mapping[str, str | int]) -> Namespace:
    """Return the namespace with these fields. Raises FormatError for other fields, and for values out of bounds."""
    names = {field.name for field in fields(Namespace)}
    if found.keys() != names:
        # Its digest is over all fields: with others it would be another namespace, which we could not name.
        theirs = ", ".join(found)[:MAX_NAMESPACE_CHARS]
        raise FormatError(f"namespace has the fields {theirs}; expected {', '.join(sorted(names))}")
    try:
        namespace = msgspec.convert(found, Namespace)
    except msgspec.ValidationError as e:
        raise FormatError(f"manifest's namespace is malformed: {e}") from e
    if namespace.format_major != FORMAT_MAJOR:
        raise FormatVersionError(f"namespace has unknown format version {namespace.format_major}")
    if not 1 <= namespace.num_heads <= MAX_MODEL_HEADS:
        raise FormatError(f"num_heads is {namespace.num_heads}; supported are 1 to {MAX_MODEL_HEADS}")
    if not 0 <= namespace.first_layer < MAX_LAYERS:
        raise FormatError(f"first_layer is {namespace.first_layer}; supported are 0 to {MAX_LAYERS - 1}")
    return namespace


def _check_parts(manifest: Manifest) -> None:
    names = [part.name for part in manifest.parts]
    if len(set(names)) < len(names):
        raise FormatError(f"part names are not unique: {', '.join(names)}")
    others = {part.layout for part in manifest.parts} - {"", *TENSORS}
    if len(others) > 1:
        raise FormatError(f"parts use the layouts {', '.join(sorted(others))}, expected at most one besides k and v")
    expected = manifest.cells_per_span if others else 0
    if len(manifest.coefficients) != expected:
        raise FormatError(f"manifest lists coefficients of {len(manifest.coefficients)} cells, expected {expected}")


def check_data(manifest: Manifest) -> None:
    """Raise FormatError unless all variants fit. What encryption hides is not checked: `open_manifest` calls this
    again."""
    for variant in manifest.variants:
        _check_variant(manifest, variant)


def _check_variant(manifest: Manifest, variant: Variant) -> None:
    """Raise FormatError unless a variant fits its manifest."""
    num_chunks = manifest.num_spans * manifest.cells_per_span * manifest.chunks_per_cell
    if len(variant.chunks) != num_chunks:
        raise FormatError(f"manifest lists {len(variant.chunks)} chunks, expected {num_chunks} for its geometry")
    _check_levels(manifest, variant)
    expected = {part.layout for part in manifest.parts} - {""}
    if variant.layouts.keys() != expected:
        raise FormatError(f"layouts are for {', '.join(variant.layouts)}, expected {', '.join(sorted(expected))}")
    has_video = any(codec.startswith("hevc") for codec in variant.codecs)
    for name, layout in variant.layouts.items():
        if has_video and layout.is_flat:
            raise FormatError(f"{name} pictures are {layout.width}x1, and in a video codec")
    require_layouts(manifest, variant.layouts)


def _check_levels(manifest: Manifest, variant: Variant) -> None:
    """Raises FormatError if a variant's levels do not fit its codecs, or the number of its chunks."""
    is_hidden = ENCRYPTED in variant.codecs  # then the codecs are checked once the manifest is opened
    if is_hidden:
        pass
    elif LADDER in variant.codecs:
        if [part.layout for part in manifest.parts if part.layout] != [COEFFICIENTS]:
            raise FormatError(f"manifest has the codec {LADDER}, but not one part of {COEFFICIENTS}")
        if not all(layout.is_flat for layout in variant.layouts.values()):
            raise FormatError(f"manifest has the codec {LADDER} in a layout that is not flat")
    elif variant.levels or variant.num_dropped:
        raise FormatError(f"manifest has levels, but no chunk in the codec {LADDER}")
    if (num_levels := 1 + len(variant.levels) + variant.num_dropped) > MOST_LEVELS:
        raise FormatError(f"manifest has {num_levels} levels with those that were dropped, more than {MOST_LEVELS}")
    num_cells = manifest.num_spans * manifest.cells_per_span
    for level in variant.levels:
        codec = ENCRYPTED if is_hidden else DIGITS
        if len(level.chunks) != num_cells or level.codecs != {codec}:
            raise FormatError(f"manifest has a level of {len(level.chunks)} chunks, expected {num_cells} of {codec}")


def _check_sides(manifest: Manifest) -> None:
    pages = [page for side in manifest.sides for page in side.pages]
    if len({(page.pool, page.page) for page in pages}) < len(pages):
        raise FormatError("manifest has a side page twice")
    for page in pages:
        if page.page >= manifest.num_pages:
            raise FormatError(f"side page {page.page} of {page.pool}: the segment has {manifest.num_pages} pages")
        if len(page.chunks) != -(-page.num_bytes // SIDE_CHUNK_BYTES):
            raise FormatError(f"a side page of {page.pool} has {page.num_bytes} bytes in {len(page.chunks)} chunks")
        if max(chunk.size_bytes for chunk in page.chunks) > 2 * SIDE_CHUNK_BYTES:
            raise FormatError(f"a side page of {page.pool} has a chunk of more than {2 * SIDE_CHUNK_BYTES} bytes")
    for side in manifest.sides:
        if not side.pages:
            raise FormatError("manifest has an object without side pages")


def require_layouts(manifest: Manifest, layouts: Mapping[str, Layout]) -> None:
    """Raise FormatError if frames cannot hold the integers, or would take too much memory."""
    for name, layout in layouts.items():
        for side in () if layout.is_flat else (layout.width, layout.height):
            if side < MIN_PICTURE or side % PICTURE_MULTIPLE:
                raise FormatError(
                    f"{name} pictures are {layout.width}x{layout.height}; expected sides of at least {MIN_PICTURE} "
                    f"that are multiples of {PICTURE_MULTIPLE}"
                )
        if isinstance(layout, TileLayout) != (name in TENSORS):
            raise FormatError(f"layout {name!r} is of the wrong kind for its integers")
        for shape in _shapes(manifest, name):
            layout.require_fits(shape)
            held = shape[0] * shape[1] if len(shape) == 2 else shape[0] * PLANES * shape[2] * shape[3]
            frames = layout.num_frames(shape) * PLANES * layout.width * layout.height
            if frames > min(_MAX_EMPTINESS * held + _SMALL_FRAMES_BYTES, MAX_CHUNK_BYTES):
                raise FormatError(
                    f"{name} frames of {frames} bytes for {held} values; a chunk has at most {MAX_CHUNK_BYTES} bytes, "
                    f"and {_MAX_EMPTINESS} per value"
                )


def _shapes(manifest: Manifest, layout: str) -> set[tuple[int, ...]]:
    """Return the shapes that the cells of a full span have in this layout. This does not visit each cell, since there
    may be thousands."""
    if layout not in TENSORS:
        return {(count, manifest.span_tokens(0)) for count in manifest.coefficients}
    last = manifest.grid.num_layer_groups - 1  # the only one that may have fewer layers
    return {manifest.integers_shape(Cell(0, group, 0), layout) for group in (0, last)}
