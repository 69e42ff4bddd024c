from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from sgl_kvfetch.codec.container.encryption import ManifestKeys, StoreKeys, chunk_digest, read_manifest_keys
from sgl_kvfetch.codec.container.manifest import Cell, decode_manifest, split_signature
from sgl_kvfetch.codec.container.merge import merge_segments
from sgl_kvfetch.codec.container.protect import secure_segment
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.container.segment import SegmentSpec
from sgl_kvfetch.codec.quant.registry import make_quantiser, quantiser_from_identity
from sgl_kvfetch.errors import ConfigError, CorruptError, FormatError
from sgl_kvfetch.testing import make_segment, page_hashes
from tests.segments import SMALL, make_heads, make_segment as make_large

KEYS = ManifestKeys([b"k" * 32])
SIGNS = StoreKeys(KEYS)
SEGMENT = secure_segment(make_segment(page_hashes(8), 0, 4), SIGNS)
MANIFEST = SEGMENT.manifest.encode()


def is_signed(data: bytes, keys: ManifestKeys | None = KEYS) -> bool:
    assert keys is not None
    return keys.is_signed(*split_signature(data))


def test_a_signed_manifest_is_read_as_an_unsigned_one() -> None:
    signed = KEYS.sign(MANIFEST)
    assert decode_manifest(signed) == decode_manifest(MANIFEST) == SEGMENT.manifest
    assert is_signed(signed)
    assert not is_signed(MANIFEST)


def test_every_byte_counts() -> None:
    signed = KEYS.sign(MANIFEST)
    for position in range(len(signed)):
        changed = bytearray(signed)
        changed[position] ^= 1
        assert not is_signed(bytes(changed)), position
    for other in (signed[:-1], signed + b"x", signed[:-36], b""):
        assert not is_signed(other)


def test_a_malformed_trailer_is_a_format_error() -> None:
    for bad in (MANIFEST + b"KVFS", MANIFEST + b"KVFX" + bytes(32), KEYS.sign(MANIFEST) + b"x"):
        with pytest.raises(FormatError):
            decode_manifest(bad)


def test_keys_are_replaced_one_after_another() -> None:
    old, new = b"o" * 32, b"n" * 32
    both = ManifestKeys([new, old])
    assert is_signed(ManifestKeys([old]).sign(MANIFEST), both)
    assert is_signed(both.sign(MANIFEST), ManifestKeys([new]))
    assert not is_signed(both.sign(MANIFEST), ManifestKeys([old]))


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("n" * 64 + "\n\n" + "o" * 64 + "\n")
    assert is_signed(ManifestKeys([b"n" * 64]).sign(MANIFEST), read_manifest_keys(path))
    assert is_signed(ManifestKeys([b"o" * 64]).sign(MANIFEST), read_manifest_keys(path))
    for bad in ("", "\n", "s3cret", "n" * 64 + "\ns3cret"):
        path.write_text(bad)
        with pytest.raises(ConfigError, match="32 or more characters") as caught:
            read_manifest_keys(path)
        assert "s3cret" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_manifest_keys(tmp_path / "missing")


def test_digests_find_bytes_that_the_checksum_does_not() -> None:
    """Whoever wants to can make other bytes with the same checksum; here the manifest is changed instead."""
    (variant,) = SEGMENT.manifest.variants
    other = make_segment(page_hashes(8), 0, 4, content=5)
    (forged,) = other.manifest.variants
    forged = msgspec.structs.replace(forged, chunk_digests=variant.chunk_digests)
    manifest = msgspec.structs.replace(SEGMENT.manifest, variants=(forged,))
    reader = SegmentReader(manifest, quantiser_from_identity(manifest.namespace.quantiser))
    cell = Cell(0, 0, 0)
    with pytest.raises(CorruptError, match="digest"):
        reader.decode_cell(cell, reader.chunks_in(cell, [other.data]))


def test_a_merged_segment_has_the_digests_of_its_halves_whatever_their_data() -> None:
    """Merging copies chunks without reading them: digests of the copy would vouch for a store's bytes."""
    quantiser = make_quantiser("exact")
    left, right = (
        secure_segment(make_large(SMALL, 8, quantiser=quantiser, span_pages=4, first_page=first)[0], SIGNS)
        for first in (16, 24)
    )
    tampered = dataclasses.replace(right, data=bytes(len(right.data)))
    spec = SegmentSpec(make_heads(SMALL, quantiser), quantiser, "zstd", "240p", 4)
    (variant,) = secure_segment(merge_segments(spec, left, tampered), SIGNS).manifest.variants
    assert variant.chunk_digests == b"".join(half.manifest.variants[0].chunk_digests for half in (left, right))


def test_chunk_digests_must_be_complete() -> None:
    (variant,) = SEGMENT.manifest.variants
    short = msgspec.structs.replace(variant, chunk_digests=variant.chunk_digests[:-1])
    with pytest.raises(FormatError, match="digests"):
        decode_manifest(msgspec.structs.replace(SEGMENT.manifest, variants=(short,)).encode())
    first = SEGMENT.data[: variant.chunks[0].size_bytes]
    assert variant.chunk_digests.startswith(chunk_digest(first))
