"""Turn segments into what a store gets to see, encrypted, and manifests back.

How an object is encrypted does not depend on its kind, but only on its rows (`objects.DataObject`) and its place
(`_places`). Each object is encrypted under a key of its own, derived from its place, so it decrypts nowhere else. Its
place has what the rest of the manifest says about values: pages, cells, layouts, how fine they are, when they expire.
So who changes that makes the objects useless. Objects are encrypted before they are digested, so that a store can
verify the digests of objects that it cannot read.

An opened manifest (`open_manifest`) has what encryption hides. It is for readers, and is never stored.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

import msgspec
import xxhash

from sgl_kvfetch.codec.container.encryption import (
    ENCRYPTED,
    SALT_BYTES,
    TABLE_NONCE,
    DataCipher,
    Encryption,
    StoreKeys,
)
from sgl_kvfetch.codec.container.manifest import Manifest, check_data
from sgl_kvfetch.codec.container.objects import CHECKSUM_BYTES, Chunk, DataObject, Side, Table
from sgl_kvfetch.errors import DECODE_ERRORS, FormatError

if TYPE_CHECKING:  # importing it loads torch
    from sgl_kvfetch.codec.container.segment import CodedSegment

Rows = TypeVar("Rows", bound=DataObject)
_tables = msgspec.msgpack.Decoder(Table)  # made before there are threads, as in `manifest`


def secure_segment(segment: CodedSegment, keys: StoreKeys) -> CodedSegment:
    """Encrypt a segment's objects, if there are keys. Objects that are encrypted stay as they are; those with equal
    data and places share one object."""
    m = segment.manifest
    made: dict[object, tuple[DataObject, bytes]] = {}
    secured = []
    for rows, place, data in zip(m.data, _places(m), segment.contents, strict=True):
        kind = place, rows.data_digest, rows.table
        if kind not in made:
            made[kind] = _secured(rows, place, data, keys)
        secured.append((_with_rows_of(rows, made[kind][0]), made[kind][1]))
    return segment.of(m.with_data(rows for rows, _ in secured), [data for _, data in secured])


def secure_side(manifest: Manifest, side: Side, data: bytes, keys: StoreKeys) -> tuple[Side, bytes]:
    """Return an object of side pages that ``manifest`` does not name yet, and its bytes, as `secure_segment` makes
    them."""
    *_, place = _places(msgspec.structs.replace(manifest, sides=(side,)))
    return _secured(side, place, data, keys)


def open_manifest(manifest: Manifest, keys: StoreKeys) -> Manifest:
    """Return a stored manifest with everything that encryption hides, so that its data can be decoded. It cannot be
    encoded again. Raises EncryptedError if a key is missing, CorruptError and FormatError."""
    if not manifest.is_encrypted:
        return manifest
    ciphers: dict[str, DataCipher] = {}
    opened = []
    for rows, place in zip(manifest.data, _places(manifest), strict=True):
        encryption = rows.encryption
        assert encryption is not None
        if encryption.key not in keys:
            raise manifest.locked(encryption.key)
        cipher = keys.cipher(encryption.key, encryption.salt, place)
        ciphers[rows.data_digest] = cipher
        opened.append(_opened(rows, cipher, encryption.table, f"the table of {manifest.key.stem}"))
    whole = msgspec.structs.replace(manifest.with_data(opened), ciphers=ciphers)
    check_data(whole)
    return whole


def _secured(rows: Rows, place: bytes, data: bytes, keys: StoreKeys) -> tuple[Rows, bytes]:
    return _encrypted(rows, place, data, keys) if keys and rows.encryption is None else (rows, data)


def _encrypted(rows: Rows, place: bytes, data: bytes, keys: StoreKeys) -> tuple[Rows, bytes]:
    key, salt = keys.ids[0], os.urandom(SALT_BYTES)
    cipher = keys.cipher(key, salt, place)
    pieces = [cipher.encrypt(number, piece) for number, piece in enumerate(rows.pieces(data))]
    hidden = bytes(CHECKSUM_BYTES)
    chunks = [Chunk(ENCRYPTED, len(piece), xxhash.xxh3_128_digest(piece), hidden) for piece in pieces]
    data = b"".join(pieces)
    changed = msgspec.structs.replace(
        rows,
        data_digest=xxhash.xxh3_128_hexdigest(data),
        encryption=Encryption(key, salt, cipher.encrypt(TABLE_NONCE, msgspec.msgpack.encode(rows.table))),
    )
    return changed.with_chunks(chunks), data


def _opened(rows: Rows, cipher: DataCipher, packed: bytes, what: str) -> Rows:
    try:
        table = _tables.decode(cipher.decrypt(TABLE_NONCE, packed, what))
    except DECODE_ERRORS as e:
        raise FormatError(f"{what} is malformed: {e}") from e
    if len(table) != len(rows.chunks):
        raise FormatError(f"{what} has {len(table)} chunks, expected the manifest's {len(rows.chunks)}")
    chunks = [
        Chunk(codec, row.size_bytes, row.coded_checksum, checksum)
        for row, (codec, checksum) in zip(rows.chunks, table, strict=True)
    ]
    return rows.with_chunks(chunks)


def _with_rows_of(rows: Rows, secured: DataObject) -> Rows:
    """Return ``rows`` with the digest, chunks and encryption of an object that has the same data and place."""
    changed = msgspec.structs.replace(rows, data_digest=secured.data_digest, encryption=secured.encryption)
    return changed.with_chunks(secured.chunks)


def _places(manifest: Manifest) -> list[bytes]:
    """Return for each data object bytes that say where it belongs and how it is laid out: its segment's pages and
    cells, and what it holds of them (`Manifest.insides`)."""
    m = manifest
    cells = m.span_pages, m.cell_layers, m.cell_heads, m.coefficients
    where = m.key.namespace, m.first_page, m.previous_hash, b"".join(m.page_hashes), *cells, m.parts, m.expires
    return [msgspec.msgpack.encode((*where, inside)) for inside in m.insides]
