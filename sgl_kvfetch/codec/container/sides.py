"""Side pages: what SGLang keeps of a page in pools beside that of its KV, such as the states of a Mamba layer.

They are bytes, stored with the KV of their pages: in data objects of their own, which the segment's manifest
names. A segment has them for some of its pages, and more can be added later. No I/O: that is the caller's.

Only SGLang knows what they mean. Most are values of bfloat16, keys and values of a window or a layer's states, of which
general compression sees little. So each chunk is coded both ways, and stored in the smaller one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

import msgspec
import torch
import xxhash

from sgl_kvfetch.codec.bitstream.ans import AnsTablesCodec
from sgl_kvfetch.codec.bitstream.entropy import ZstdCodec
from sgl_kvfetch.codec.container.encryption import DataCipher
from sgl_kvfetch.codec.container.manifest import Manifest
from sgl_kvfetch.codec.container.objects import SIDE_CHUNK_BYTES, Chunk, Side, SidePage
from sgl_kvfetch.codec.layout.frames import PLANES
from sgl_kvfetch.codec.quant.base import from_planes, to_planes
from sgl_kvfetch.errors import CorruptError, FormatError
from sgl_kvfetch.types import SideKey

_ZSTD, _TABLES = ZstdCodec(), AnsTablesCodec()
# Rows of the exponents: bytes whose places differ by a multiple of it share a row. The heads of most models have 64 or
# 128 dimensions, so a row has values of one dimension.
_WIDTH = 128
_ROWS = PLANES * _WIDTH

SideData = tuple[Side, bytes]  # an object and its content


@dataclass(frozen=True, slots=True)
class SidePlace:
    """Where a side page is stored: bytes ``[start, start + size_bytes)`` of an object."""

    data_name: str
    start: int
    page: SidePage
    first_chunk: int  # the page's first one, counted in the object
    cipher: DataCipher | None

    @property
    def size_bytes(self) -> int:
        return self.page.size_bytes

    def decode(self, data: bytes | memoryview) -> bytearray:
        """Verify a side page's bytes and return its content. Raises CorruptError, FormatError."""
        content = bytearray()
        for piece in self.decode_chunks(data):
            content += piece
        return content

    def decode_chunks(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Verify a side page's bytes and yield its content, chunk by chunk: a few bytes may decode to 1 GiB. Raises
        CorruptError, FormatError."""
        what = f"side page {self.page.page} of {self.page.pool}"
        if len(data) != self.size_bytes:
            raise CorruptError(f"{what} has {len(data)} bytes, expected {self.size_bytes}")
        left = self.page.num_bytes
        view = memoryview(data)
        for index, chunk in enumerate(self.page.chunks):
            piece, view = view[: chunk.size_bytes], view[chunk.size_bytes :]
            if chunk.codec not in _DECODE:
                raise FormatError(f"{what} is in codec {chunk.codec!r}, expected one of {', '.join(_DECODE)}")
            chunk.require_coded(piece, what)
            bitstream = self.cipher.decrypt(self.first_chunk + index, piece, what) if self.cipher else piece
            raw = _DECODE[chunk.codec](bitstream, min(left, SIDE_CHUNK_BYTES))
            chunk.require_decoded(raw, what)
            if len(raw) != min(left, SIDE_CHUNK_BYTES):
                raise CorruptError(f"{what}, chunk {index}: {len(raw)} bytes, expected {min(left, SIDE_CHUNK_BYTES)}")
            left -= len(raw)
            yield raw


def side_places(manifest: Manifest) -> dict[SideKey, SidePlace]:
    """Return where each of a segment's side pages is stored."""
    places = (place for side in manifest.sides for place in places_in(manifest, side))
    return {(place.page.pool, place.page.page): place for place in places}


def places_in(manifest: Manifest, side: Side) -> Iterator[SidePlace]:
    """Yield where the side pages of one object are stored, in their order."""
    name, cipher = manifest.data_name(side), manifest.ciphers.get(side.data_digest)  # once: it hashes the namespace
    start = first = 0
    for page in side.pages:
        end = first + len(page.chunks)
        place = SidePlace(name, start, page, first, cipher)
        yield place
        start, first = start + place.size_bytes, end


def encode_side(pages: Mapping[SideKey, torch.Tensor], executor: Executor | None = None) -> SideData:
    """Encode side pages, each given as contiguous uint8 ``(bytes,)``, into one object."""
    pieces = [(key, piece) for key, x in pages.items() for piece in torch.split(x, SIDE_CHUNK_BYTES)]
    run: Callable[..., Iterable[tuple[Chunk, bytes]]] = executor.map if executor else map
    chunks: dict[SideKey, list[Chunk]] = {key: [] for key in pages}
    contents = []
    for (key, _), (chunk, content) in zip(pieces, run(_encode, [piece for _, piece in pieces]), strict=True):
        chunks[key].append(chunk)
        contents.append(content)
    rows = (SidePage(*key, pages[key].numel(), tuple(chunks[key])) for key in pages)
    data = b"".join(contents)
    return Side(xxhash.xxh3_128_hexdigest(data), tuple(rows)), data


def _encode(piece: torch.Tensor) -> tuple[Chunk, bytes]:
    raw = piece.numpy().tobytes()
    coded = {"zstd": _ZSTD.compress(raw)}
    if len(raw) % 2 == 0:
        coded["bfloat16"] = _encode_bfloat16(piece)
    codec = min(coded, key=lambda name: len(coded[name]))
    return Chunk.of(codec, coded[codec], raw), coded[codec]


def _encode_bfloat16(piece: torch.Tensor) -> bytes:
    """Return the mantissas of values as they are, and their exponents as `ans-tables`. Both as `exact` splits them."""
    mantissas, exponents = to_planes(piece.view(torch.bfloat16))
    frames = torch.zeros((-(-len(exponents) // _ROWS), PLANES, 1, _WIDTH), dtype=torch.uint8)
    frames.view(-1)[: len(exponents)] = exponents
    return b"".join((mantissas.numpy().data, _TABLES.encode(frames)))


def _decode_bfloat16(bitstream: bytes | memoryview, num_bytes: int) -> bytes:
    """Raises CorruptError."""
    num_values = num_bytes // 2
    if num_bytes % 2 or len(bitstream) < num_values:
        raise CorruptError(f"bfloat16 bitstream has {len(bitstream)} bytes for {num_bytes} bytes of values")
    view = memoryview(bitstream)
    exponents = _TABLES.decode(view[num_values:], (-(-num_values // _ROWS), 1, _WIDTH)).view(-1)[:num_values]
    mantissas = torch.frombuffer(bytearray(view[:num_values]), dtype=torch.uint8)
    values = from_planes((mantissas, exponents), torch.bfloat16)
    return bytes(values.view(torch.uint8).numpy())


# By codec. Each gets the bytes that the chunk has when decoded, which it must not exceed.
_DECODE: dict[str, Callable[[bytes | memoryview, int], bytes]] = {
    "zstd": _ZSTD.decompress,
    "bfloat16": _decode_bfloat16,
}


def join_sides(halves: Iterable[tuple[int, Iterable[SideData]]]) -> SideData | None:
    """Return one object with the side pages of several segments, or None if these have none.

    ``halves``: for each segment, the position of its first page in the joined segment, and its objects.
    """
    pages: list[SidePage] = []
    contents = []
    for first_page, objects in halves:
        for side, data in objects:
            pages += (msgspec.structs.replace(page, page=first_page + page.page) for page in side.pages)
            contents.append(data)
    if not pages:
        return None
    data = b"".join(contents)
    return Side(xxhash.xxh3_128_hexdigest(data), tuple(pages)), data
