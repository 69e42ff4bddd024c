"""Stored segments as they were before they were encrypted."""

from __future__ import annotations

import msgspec
import xxhash

from sgl_kvfetch.codec.container.encryption import DataCipher, StoreKeys
from sgl_kvfetch.codec.container.objects import Chunk, DataObject
from sgl_kvfetch.codec.container.protect import open_manifest
from sgl_kvfetch.codec.container.segment import CodedSegment


def plain_segment(segment: CodedSegment, keys: StoreKeys) -> CodedSegment:
    """Return a stored segment without encryption. Raises EncryptedError, CorruptError and FormatError."""
    m = open_manifest(segment.manifest, keys)
    if not m.is_encrypted:
        return segment
    plain = [
        _plain(rows, data, m.ciphers[rows.data_digest], m.data_name(rows))
        for rows, data in zip(m.data, segment.contents, strict=True)
    ]
    manifest = msgspec.structs.replace(m.with_data(rows for rows, _ in plain), ciphers={})
    return segment.of(manifest, [data for _, data in plain])


def _plain(rows: DataObject, data: bytes, cipher: DataCipher, what: str) -> tuple[DataObject, bytes]:
    assert len(data) == rows.size_bytes, what
    pieces = [cipher.decrypt(number, piece, what) for number, piece in enumerate(rows.pieces(data))]
    checksum = xxhash.xxh3_128_digest
    chunks = [
        Chunk(row.codec, len(piece), checksum(piece), row.decoded_checksum)
        for row, piece in zip(rows.chunks, pieces, strict=True)
    ]
    data = b"".join(pieces)
    changed = msgspec.structs.replace(rows, data_digest=xxhash.xxh3_128_hexdigest(data), encryption=None)
    return changed.with_chunks(chunks), data
