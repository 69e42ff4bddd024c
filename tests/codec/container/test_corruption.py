"""Ten thousand corruptions: only domain errors, and never wrong data."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator

import msgspec
import pytest
import xxhash

from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.codec.container.objects import CHECKSUM_BYTES
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.errors import CorruptError, FormatError, FormatVersionError, KVFetchError
from sgl_kvfetch.types import KVGeometry
from tests.segments import make_segment

TINY = KVGeometry(num_layers=2, num_heads=1, k_head_dim=48, v_head_dim=48, page_size=1, dtype="bfloat16")
NUM_CORRUPTIONS = 5000  # of each kind


def corrupt(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    place = rng.randrange(len(out))
    match rng.randrange(6):
        case 0:
            out[place] ^= 1 << rng.randrange(8)
        case 1:
            del out[place:]
        case 2:
            del out[place : place + rng.randrange(1, 40)]
        case 3:
            out[place:place] = rng.randbytes(rng.randrange(1, 40))
        case 4:
            out[place : place + 8] = rng.randbytes(8)
        case 5:
            other = rng.randrange(len(out))
            size = rng.randrange(1, 32)
            out[place : place + size], out[other : other + size] = out[other : other + size], out[place : place + size]
    return bytes(out)


def corruptions(data: bytes, seed: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    made = 0
    while made < NUM_CORRUPTIONS:
        bad = corrupt(data, rng)
        if bad != data:
            made += 1
            yield bad


def resealed(data: bytes) -> bytes:
    """With a checksum that holds, as a malicious or a broken writer would leave it."""
    body = data[:-CHECKSUM_BYTES]
    return body + xxhash.xxh3_128_digest(body)


@pytest.fixture(scope="module")
def coded() -> CodedSegment:
    return make_segment(TINY, 4, codec="hevc", quantiser=make_quantiser("uint8"))[0]


@pytest.mark.parametrize("seal", [lambda data: data, resealed], ids=["as is", "resealed"])
def test_corrupt_manifests(coded: CodedSegment, seal: Callable[[bytes], bytes]) -> None:
    """Without the checksum's protection a manifest may still parse, but then its geometry is within bounds and its
    chunks' checksums guard the data."""
    raw = coded.manifest.encode()
    outcomes = {"refused": 0, "parsed": 0}
    for bad in corruptions(raw, seed=1):
        try:
            manifest = decode_manifest(seal(bad))
        except FormatError:
            outcomes["refused"] += 1
            continue
        outcomes["parsed"] += 1
        assert seal is resealed
        try:
            reader = SegmentReader(manifest, make_quantiser("uint8"))
            cell = next(manifest.cells())
            reader.decode_cell(cell, reader.chunks_in(cell, [coded.data]))
        except KVFetchError:
            pass
    assert outcomes["refused"] > NUM_CORRUPTIONS / 2


def test_corrupt_data(coded: CodedSegment) -> None:
    reader = SegmentReader(coded.manifest, make_quantiser("uint8"))
    cells = list(coded.manifest.cells())
    good = {cell: reader.decode_cell(cell, reader.chunks_in(cell, [coded.data])) for cell in cells}
    num_refused = 0
    for bad in corruptions(coded.data, seed=2):
        for cell in cells:
            piece = reader.chunks_in(cell, [bad])
            if piece == reader.chunks_in(cell, [coded.data]):
                continue
            with pytest.raises(CorruptError):
                reader.decode_cell(cell, piece)
            num_refused += 1
            break
    assert num_refused > NUM_CORRUPTIONS * 0.9
    assert len(good) == len(cells)


def test_a_newer_format_is_named(coded: CodedSegment) -> None:
    newer = bytearray(coded.manifest.encode())
    struct.pack_into("<H", newer, 4, 3)
    with pytest.raises(FormatVersionError, match="format version 3, this reader knows 2"):
        decode_manifest(resealed(bytes(newer)))


def test_a_newer_minor_version_with_a_new_field_is_read(coded: CodedSegment) -> None:
    raw = coded.manifest.encode()
    body = msgspec.msgpack.decode(raw[12:-CHECKSUM_BYTES])
    body["later"] = {"more": 1}
    packed = msgspec.msgpack.encode(body)
    newer = struct.pack("<4sHHI", b"KVFM", 2, 8, len(packed)) + packed + bytes(CHECKSUM_BYTES)
    assert decode_manifest(resealed(newer)) == coded.manifest
