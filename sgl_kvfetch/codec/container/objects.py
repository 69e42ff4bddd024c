"""Data objects: what a manifest says of each of them, and how their rows change.

A segment's bytes are in objects of three kinds. A `Variant` is the segment in one coding, a `Level` refines a variant's
coefficients, and a `Side` has side pages. Each is a list of consecutive chunks, with a digest that names it, and may
be encrypted. What holds for any data object is in `DataObject`, and `protect` works on lists of those. So it can
encrypt a new kind of object without a change.

The fields are declared by each kind, because their order is the order in which manifests store them.

An encoder leaves an object's bytes in several places (`Pieces`). A data object is named by the digest of all its bytes,
and is sent from its first byte to its last: neither needs them in one place. Joining them copies each byte once more,
into memory that the kernel clears first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, Self

import msgspec
import xxhash
from msgspec import Meta

from sgl_kvfetch.codec.bitstream import _ans
from sgl_kvfetch.codec.bitstream.base import LADDER, MOST_LEVELS
from sgl_kvfetch.codec.container.encryption import Encryption
from sgl_kvfetch.codec.layout.frames import RegionLayout, TileLayout
from sgl_kvfetch.errors import CorruptError


class Pieces:
    """Pieces of bytes, one after another. They must not change."""

    __slots__ = ("_num_bytes", "views")

    def __init__(self, pieces: Iterable[bytes | memoryview]) -> None:
        self.views = tuple(memoryview(piece).cast("B") for piece in pieces)
        self._num_bytes = sum(map(len, self.views))

    def __len__(self) -> int:
        return self._num_bytes

    def __getitem__(self, part: slice) -> bytes:
        """Return a copy of some bytes. ``part`` has no step."""
        start, end, step = part.indices(self._num_bytes)
        assert step == 1, part
        found = []
        for view in self.views:
            if start < len(view) and end > 0:
                found.append(view[max(0, start) : end])
            start, end = start - len(view), end - len(view)
        return b"".join(found)

    def joined(self) -> bytes:
        """Return a copy of all bytes, in huge pages. Releases the GIL."""
        return _ans.join(self.views)

    def hexdigest(self) -> str:
        """Return their xxh3-128, which names a data object."""
        hasher = xxhash.xxh3_128()
        for view in self.views:
            hasher.update(view)
        return hasher.hexdigest()


Content = bytes | Pieces  # of an object that is to be stored


def views_of(content: Content) -> tuple[memoryview, ...]:
    return content.views if isinstance(content, Pieces) else (memoryview(content),)


def bytes_of(content: Content) -> bytes:
    """Return a content in one place, for what takes no pieces."""
    return content.joined() if isinstance(content, Pieces) else content


CHECKSUM_BYTES = 16
# This bounds what a reader allocates for one chunk: its bitstream, and the frames or bytes that this decodes to.
MAX_CHUNK_BYTES = 1 << 28
MAX_SEGMENT_PAGES = 1 << 20
SIDE_CHUNK_BYTES = 4 << 20  # of a side page; its last chunk may be shorter
MAX_SIDE_PAGE_BYTES = 1 << 30

Checksum = Annotated[bytes, Meta(min_length=CHECKSUM_BYTES, max_length=CHECKSUM_BYTES)]
Name = Annotated[str, Meta(max_length=64)]
_DataDigest = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One chunk's row. Its position in the table identifies the chunk (see ``Manifest.cells``)."""

    codec: Name
    size_bytes: Annotated[int, Meta(ge=1, le=MAX_CHUNK_BYTES)]
    coded_checksum: Checksum  # xxh3-128 of the compressed bytes
    decoded_checksum: Checksum  # xxh3-128 of the integers, or of the part's bytes

    @classmethod
    def of(cls, codec: str, bitstream: bytes | memoryview, content: bytes | memoryview) -> Chunk:
        """Return the row of a chunk with this bitstream and content."""
        coded = xxhash.xxh3_128_digest(bitstream)
        decoded = coded if bitstream is content else xxhash.xxh3_128_digest(content)
        return cls(codec, len(bitstream), coded, decoded)

    def require_coded(self, bitstream: bytes | memoryview, what: object) -> None:
        """Raise CorruptError unless the compressed bytes have their checksum. ``what`` begins the message."""
        if xxhash.xxh3_128_digest(bitstream) != self.coded_checksum:
            raise CorruptError(f"{what}, compressed bytes: checksum does not match")

    def require_decoded(self, content: bytes | memoryview, *what: object) -> None:
        """Raise CorruptError unless the decoded content has its checksum. ``what`` begins the message."""
        if xxhash.xxh3_128_digest(content) != self.decoded_checksum:
            raise CorruptError(f"{', '.join(map(str, what))}: checksum does not match")


Table = tuple[tuple[Name, Checksum], ...]  # what the rows of an encrypted object hide: codec and decoded checksum


class DataObject(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a manifest says of one data object: its *rows*. ``data_digest`` names it."""

    if TYPE_CHECKING:

        @property
        def data_digest(self) -> str: ...

        @property
        def chunks(self) -> tuple[Chunk, ...]: ...

        @property
        def encryption(self) -> Encryption | None: ...

    @property
    def size_bytes(self) -> int:
        return sum(chunk.size_bytes for chunk in self.chunks)

    @property
    def codecs(self) -> frozenset[str]:
        """The codecs that a reader of this object needs."""
        return frozenset(chunk.codec for chunk in self.chunks)

    @property
    def offsets(self) -> list[int]:
        """Where each chunk begins in the object, and the object's end."""
        return list(accumulate((chunk.size_bytes for chunk in self.chunks), initial=0))

    def pieces(self, data: bytes | memoryview) -> Iterator[memoryview]:
        """Yield the chunks of the object's bytes."""
        view = memoryview(data)
        return (view[start:end] for start, end in pairwise(self.offsets))

    @property
    def table(self) -> Table:
        """What encryption hides of the rows."""
        return tuple((chunk.codec, chunk.decoded_checksum) for chunk in self.chunks)

    def with_chunks(self, chunks: Sequence[Chunk]) -> Self:
        """Return the rows with other chunks in the same places."""
        return msgspec.structs.replace(self, chunks=tuple(chunks))


class Level(DataObject, frozen=True, omit_defaults=True):
    """A data object that refines a variant's coefficients (`bitstream.ladder`): a chunk a cell, in storage order. The
    ``decoded_checksum`` of its chunks is over the integers that all levels up to it decode to."""

    data_digest: _DataDigest
    chunks: tuple[Chunk, ...]
    encryption: Encryption | None = None


class Variant(DataObject, frozen=True, omit_defaults=True):
    """One encoding of the segment: the table of its chunks in storage order, and the digest that names its data."""

    data_digest: _DataDigest
    layouts: dict[Name, TileLayout | RegionLayout]
    chunks: tuple[Chunk, ...]
    # The codec and resolution requested for this variant, if recorded. They cannot be derived from the rest: a chunk
    # may use another codec (noise does), and short spans have smaller pictures.
    codec: Name = ""
    resolution: Name = ""
    encryption: Encryption | None = None
    levels: Annotated[tuple[Level, ...], Meta(max_length=MOST_LEVELS - 1)] = ()
    num_dropped: Annotated[int, Meta(ge=0, lt=MOST_LEVELS)] = 0  # levels that a store has dropped

    @property
    def objects(self) -> tuple[Variant | Level, ...]:
        """The variant's data objects: itself, which has level 0 and all else, then each further level."""
        return self, *self.levels

    @property
    def contents(self) -> list[bytes]:
        """The checksums of what each chunk decodes to with all levels."""
        finest = iter(self.levels[-1].chunks if self.levels else ())
        return [(next(finest, row) if row.codec == LADDER else row).decoded_checksum for row in self.chunks]

    def with_levels(self, count: int) -> Variant:
        """Return the variant with only the first ``count`` levels; level 0, which it always has, is not counted."""
        dropped = self.num_dropped + len(self.levels[count:])
        return msgspec.structs.replace(self, levels=self.levels[:count], num_dropped=dropped)


class SidePage(msgspec.Struct, frozen=True, array_like=True):
    """What one of SGLang's side pools keeps of a page, as opaque bytes, in chunks of ``SIDE_CHUNK_BYTES``."""

    pool: Name
    page: Annotated[int, Meta(ge=0, lt=MAX_SEGMENT_PAGES)]  # counted from the segment's start
    num_bytes: Annotated[int, Meta(ge=1, le=MAX_SIDE_PAGE_BYTES)]
    chunks: tuple[Chunk, ...]

    @property
    def size_bytes(self) -> int:
        """The size in the data object."""
        return sum(chunk.size_bytes for chunk in self.chunks)


class Side(DataObject, frozen=True, omit_defaults=True):
    """A data object of side pages."""

    data_digest: _DataDigest
    pages: tuple[SidePage, ...]  # in storage order
    encryption: Encryption | None = None

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return tuple(chunk for page in self.pages for chunk in page.chunks)

    def with_chunks(self, chunks: Sequence[Chunk]) -> Self:
        left = iter(chunks)
        pages = (msgspec.structs.replace(page, chunks=tuple(next(left) for _ in page.chunks)) for page in self.pages)
        return msgspec.structs.replace(self, pages=tuple(pages))
