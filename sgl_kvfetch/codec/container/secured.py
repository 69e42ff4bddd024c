"""Turn segments into what a store gets to see, and back: encrypted, and with the digests that signatures cover."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, TypeVar

import msgspec
import xxhash

from sgl_kvfetch.codec.container.encryption import (
    ENCRYPTED,
    SALT_BYTES,
    TABLE_NONCE,
    DataCipher,
    Encryption,
    EncryptionKeys,
)
from sgl_kvfetch.codec.container.manifest import (
    CHECKSUM_BYTES,
    Chunk,
    Level,
    Manifest,
    Side,
    Table,
    Variant,
    check_variant,
    tables,
)
from sgl_kvfetch.codec.container.signing import chunk_digest
from sgl_kvfetch.errors import CorruptError, FormatError

if TYPE_CHECKING:  # importing it loads torch
    from sgl_kvfetch.codec.container.segment import CodedSegment

Rows = TypeVar("Rows", Variant, Side)
SignedRows = TypeVar("SignedRows", Variant, Level, Side)


def secure_segment(segment: CodedSegment, keys: EncryptionKeys | None, signs: bool) -> CodedSegment:
    """Return the segment as `secure_rows` leaves its objects. Variants with identical data still share an object."""
    m = segment.manifest
    made: dict[object, tuple[Variant, bytes]] = {}
    variants, contents = [], []
    for index, variant in enumerate(m.variants):
        kind = variant.data_digest, variant.chunks, variant.frame_sums, repr(variant.layouts)
        if kind not in made:
            made[kind] = secure_rows(m, variant, segment.variant_data(index), keys, signs)
        rows, data = made[kind]
        variants.append(msgspec.structs.replace(rows, codec=variant.codec, resolution=variant.resolution))
        contents.append(data)
    if m.levels:
        if keys is not None:
            raise FormatError("levels of coefficients cannot be encrypted yet")
        signed = iter([_with_digests(*each, signs) for each in zip(m.levels, segment.level_data, strict=True)])
        variants = [msgspec.structs.replace(v, levels=tuple(next(signed) for _ in v.levels)) for v in variants]
    secured = [secure_rows(m, side, data, keys, signs) for side, data in zip(m.sides, segment.side_data, strict=True)]
    manifest = msgspec.structs.replace(m, variants=tuple(variants), sides=tuple(side for side, _ in secured))
    return _with_data(segment, manifest, contents, [data for _, data in secured])


def secure_rows(
    manifest: Manifest, rows: Rows, data: bytes, keys: EncryptionKeys | None, signs: bool
) -> tuple[Rows, bytes]:
    """Return a data object's rows and its bytes, encrypted with the first of ``keys``, if there are any, and with chunk
    digests if the store ``signs``. What is encrypted or has digests already stays as it is."""
    if keys is not None and rows.encryption is None:
        rows, data = _encrypted(manifest, rows, data, keys)
    return _with_digests(rows, data, signs), data


def _with_digests(rows: SignedRows, data: bytes, signs: bool) -> SignedRows:
    if not signs or rows.chunk_digests:
        return rows
    return msgspec.structs.replace(rows, chunk_digests=b"".join(map(chunk_digest, _pieces(rows, data))))


def open_manifest(manifest: Manifest, keys: EncryptionKeys | None) -> Manifest:
    """Return a stored manifest with everything that encryption hides, so that its data can be decoded. It cannot be
    encoded again. Raises EncryptedError if a key is missing, CorruptError and FormatError."""
    if not manifest.is_encrypted:
        return manifest
    ciphers: dict[str, DataCipher] = {}

    def opened(rows: Rows) -> Rows:
        encryption = rows.encryption
        assert encryption is not None
        if keys is None or encryption.key not in keys:
            raise manifest.locked(encryption.key)
        cipher = keys.cipher(encryption.key, encryption.salt, _place(manifest, rows))
        ciphers[rows.data_digest] = cipher
        packed = cipher.decrypt(TABLE_NONCE, encryption.table, f"the table of {manifest.key.stem}")
        try:
            table = tables.decode(packed)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
            raise FormatError(f"the table of {manifest.key.stem} is malformed: {e}") from e
        if len(table.chunks) != len(rows.chunks):
            raise FormatError(f"the table is of {len(table.chunks)} chunks, the manifest of {len(rows.chunks)}")
        chunks = [
            Chunk(codec, row.size_bytes, row.coded_checksum, checksum)
            for row, (codec, checksum) in zip(rows.chunks, table.chunks, strict=True)
        ]
        return _with_chunks(rows, chunks, table.frame_sums)

    variants, sides = tuple(map(opened, manifest.variants)), tuple(map(opened, manifest.sides))
    for variant in variants:
        check_variant(manifest, variant)
    return msgspec.structs.replace(manifest, variants=variants, sides=sides, ciphers=ciphers)


def plain_segment(segment: CodedSegment, keys: EncryptionKeys | None) -> CodedSegment:
    """Return a stored segment without encryption. Raises EncryptedError, CorruptError and FormatError."""
    m = open_manifest(segment.manifest, keys)
    if not m.is_encrypted:
        return segment

    def plain(rows: Rows, data: bytes) -> tuple[Rows, bytes]:
        if len(data) != m.data_bytes(rows):
            raise CorruptError(f"{m.data_name(rows)} has {len(data)} bytes, expected {m.data_bytes(rows)}")
        cipher, what = m.ciphers[rows.data_digest], m.data_name(rows)
        pieces = [cipher.decrypt(number, piece, what) for number, piece in enumerate(_pieces(rows, data))]
        checksum = xxhash.xxh3_128_digest
        chunks = [
            Chunk(row.codec, len(piece), checksum(piece), row.decoded_checksum)
            for row, piece in zip(rows.chunks, pieces, strict=True)
        ]
        data, sums = b"".join(pieces), rows.frame_sums if isinstance(rows, Variant) else ()
        digest = xxhash.xxh3_128_hexdigest(data)
        changed = msgspec.structs.replace(rows, data_digest=digest, encryption=None, chunk_digests=b"")
        return _with_chunks(changed, chunks, sums), data

    variants = [plain(each, segment.variant_data(index)) for index, each in enumerate(m.variants)]
    sides = [plain(side, data) for side, data in zip(m.sides, segment.side_data, strict=True)]
    manifest = msgspec.structs.replace(
        m, variants=tuple(rows for rows, _ in variants), sides=tuple(rows for rows, _ in sides), ciphers={}
    )
    return _with_data(segment, manifest, [data for _, data in variants], [data for _, data in sides])


def _with_data(
    segment: CodedSegment, manifest: Manifest, variants: Sequence[bytes], sides: Sequence[bytes]
) -> CodedSegment:
    first, *more = variants
    return replace(segment, manifest=manifest, data=first, more_data=tuple(more), side_data=tuple(sides))


def _encrypted(manifest: Manifest, rows: Rows, data: bytes, keys: EncryptionKeys) -> tuple[Rows, bytes]:
    salt = os.urandom(SALT_BYTES)
    cipher = keys.cipher(keys.first, salt, _place(manifest, rows))
    pieces = [cipher.encrypt(number, piece) for number, piece in enumerate(_pieces(rows, data))]
    sums = rows.frame_sums if isinstance(rows, Variant) else ()
    table = Table(tuple((chunk.codec, chunk.decoded_checksum) for chunk in rows.chunks), sums)
    hidden = bytes(CHECKSUM_BYTES)
    chunks = [Chunk(ENCRYPTED, len(piece), xxhash.xxh3_128_digest(piece), hidden) for piece in pieces]
    data = b"".join(pieces)
    changed = msgspec.structs.replace(
        rows,
        data_digest=xxhash.xxh3_128_hexdigest(data),
        encryption=Encryption(keys.first, salt, cipher.encrypt(TABLE_NONCE, msgspec.msgpack.encode(table))),
        chunk_digests=b"",
    )
    return _with_chunks(changed, chunks, ()), data


def _place(manifest: Manifest, rows: Variant | Side) -> bytes:
    """Return what says where a data object belongs, and how it is laid out: its segment's pages and cells, and its
    layouts or side pages."""
    m = manifest
    if isinstance(rows, Variant):
        layouts = sorted(rows.layouts.items(), key=lambda item: item[0])
        inside: list[object] = [(name, *msgspec.to_builtins(layout).values()) for name, layout in layouts]
    else:
        inside = [(page.pool, page.page, page.num_bytes) for page in rows.pages]
    cells = m.span_pages, m.cell_layers, m.cell_heads
    where = m.key.namespace, m.first_page, m.previous_hash, b"".join(m.page_hashes), *cells, m.parts, inside
    return msgspec.msgpack.encode(where)


def _pieces(rows: Variant | Level | Side, data: bytes) -> Iterator[memoryview]:
    """Yield the chunks of a data object."""
    view = memoryview(data)
    ends = accumulate((chunk.size_bytes for chunk in rows.chunks), initial=0)
    return (view[start:end] for start, end in pairwise(ends))


def _with_chunks(rows: Rows, chunks: Sequence[Chunk], frame_sums: tuple[int | None, ...]) -> Rows:
    """Return a data object's rows with other chunks, in the same places."""
    if isinstance(rows, Variant):
        return msgspec.structs.replace(rows, chunks=tuple(chunks), frame_sums=frame_sums)
    left = iter(chunks)
    pages = (msgspec.structs.replace(page, chunks=tuple(next(left) for _ in page.chunks)) for page in rows.pages)
    return msgspec.structs.replace(rows, pages=tuple(pages))
