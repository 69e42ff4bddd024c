"""A manifest may claim anything, and a bitstream may decode to anything: a reader refuses it before it takes memory."""

from __future__ import annotations

import copy
import io
import math
import random
import struct
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from typing import Any

import av
import av.bitstream
import msgspec
import pytest
import torch
import xxhash
import zstandard

from sgl_kvfetch.codec.bitstream.hevc import join_access_units, split_access_units
from sgl_kvfetch.codec.bitstream.registry import get_codec
from sgl_kvfetch.codec.container.manifest import MAX_MANIFEST_BYTES, Manifest, decode_manifest, require_rewritable
from sgl_kvfetch.codec.container.objects import Chunk, Variant
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.container.segment import CodedSegment, SegmentSpec
from sgl_kvfetch.codec.quant.base import Quantiser
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.errors import CorruptError, FormatError, FormatVersionError
from sgl_kvfetch.types import KVGeometry
from tests.codec.bitstream.mutations import mutate_body
from tests.codec.quant.profiles import make_profile
from tests.segments import as_newer, make_heads, make_segment, page_hashes


def sealed(body: bytes | dict[str, Any]) -> bytes:
    """A manifest with this body, and a checksum that holds."""
    packed = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    head = struct.pack("<4sHHI", b"KVFM", 2, 0, len(packed)) + packed
    return head + xxhash.xxh3_128_digest(head)


def body_of(manifest: Manifest) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.msgpack.decode(manifest.encode()[12:-16])
    return body


def unread(spec: SegmentSpec, num_pages: int, **changes: Any) -> bytes:
    """A manifest whose chunks nobody has encoded."""
    manifest = msgspec.structs.replace(spec.manifest(0, None, page_hashes(num_pages)), **changes)
    row = Chunk("zstd", 48 << 10, bytes(16), bytes(16))
    num_chunks = manifest.num_spans * manifest.cells_per_span * manifest.chunks_per_cell
    layouts: dict[str, Any] = {**spec.layouts(manifest)}
    variant = Variant("0" * 32, layouts, (row,) * num_chunks)
    return msgspec.structs.replace(manifest, variants=(variant,)).encode()


# Sizes that a manifest claims


def test_a_chunk_of_gigabytes_is_refused() -> None:
    """48 KiB of zstd or deflate could decode to 6 GiB, all of it accounted for by the manifest."""
    geometry = KVGeometry(3, 8, 128, 128, 4096, "bfloat16")
    spec = SegmentSpec(make_heads(geometry), make_quantiser("exact"), "zstd", "240p", 512)
    with pytest.raises(FormatError, match=r"k frames of 6[0-9]{9} bytes .* at most 268435456 bytes"):
        decode_manifest(unread(spec, 512))
    decode_manifest(unread(replace(spec, span_pages=16), 512))


def test_a_manifest_has_a_size_that_writers_keep_and_readers_demand() -> None:
    manifest = make_segment()[0].manifest
    (variant,) = manifest.variants
    full = msgspec.structs.replace(manifest, variants=(msgspec.structs.replace(variant, chunks=variant.chunks * 2000),))
    with pytest.raises(FormatError, match=r"manifest of 32000 chunks takes 1[0-9]{6} bytes, more than 1048576"):
        full.encode()
    body = body_of(manifest)
    decode_manifest(sealed(body | {"later": bytes(MAX_MANIFEST_BYTES - 2000)}))
    with pytest.raises(FormatError, match="more than 1048576"):
        decode_manifest(sealed(body | {"later": bytes(MAX_MANIFEST_BYTES)}))


@pytest.mark.parametrize(("num_heads", "cell_heads", "expected"), [(8, 1, 128), (64, 2, 32), (32, 2, 64)])
def test_segments_are_so_long_that_a_manifest_has_room_for_two_variants(
    num_heads: int, cell_heads: int, expected: int
) -> None:
    geometry = KVGeometry(80, num_heads, 128, 128, 64, "bfloat16")
    spec = SegmentSpec(make_heads(geometry), make_quantiser("exact"), "zstd", "240p", 16, cell_heads)
    assert spec.longest_segment(128) == expected
    manifest = decode_manifest(unread(spec, expected))
    (variant,) = manifest.variants
    decode_manifest(msgspec.structs.replace(manifest, variants=(variant, variant)).encode())


def test_who_would_write_what_no_reader_takes_is_told() -> None:
    geometry, quantiser = KVGeometry(3, 8, 128, 128, 64, "bfloat16"), make_quantiser("exact")
    spec = SegmentSpec(make_heads(geometry), quantiser, "zstd", "240p", 16)
    wide = [make_heads(KVGeometry(layers, 128, 128, 128, 64, "bfloat16")) for layers in (80, 240)]
    for changes, message in (
        ({"span_pages": 2048}, "at most 268435456 bytes"),
        ({"heads": make_heads(geometry, model="m" * 2049)}, "length <= 2048"),
        ({"heads": wide[1], "cell_heads": 2}, r"one span would have 1[0-9]{6} bytes.* a smaller max_tp_size"),
    ):
        with pytest.raises(FormatError, match=message):
            replace(spec, **changes).require_readable()
    spec.require_readable()
    replace(spec, heads=wide[0], cell_heads=2).require_readable()


def klt() -> KltQuantiser:
    return KltQuantiser(make_profile(num_layers=5, num_heads=4, cell_heads=2, num_sinks=1), step=1.0)


KLT_GEOMETRY = KVGeometry(5, 4, 16, 16, 8, "bfloat16")


@pytest.mark.parametrize(
    ("quantiser", "geometry", "changes"),
    [
        (make_quantiser("uint8"), KVGeometry(5, 4, 16, 16, 8, "bfloat16"), {"cell_layers": 2}),
        (klt(), KLT_GEOMETRY, {"cell_heads": 4, "coefficients": (9, 9)}),
        (klt(), KLT_GEOMETRY, {"coefficients": (97, 9, 9, 9)}),
    ],
    ids=["layers", "heads", "coefficients"],
)
def test_cells_are_as_the_quantiser_makes_them(
    quantiser: Quantiser, geometry: KVGeometry, changes: dict[str, Any]
) -> None:
    spec = SegmentSpec(make_heads(geometry, quantiser), quantiser, "zstd", "240p", 2)
    SegmentReader(decode_manifest(unread(spec, 2)), quantiser)
    with pytest.raises(FormatError, match=r"has cells of|does not fit its quantiser"):
        SegmentReader(decode_manifest(unread(spec, 2, **changes)), quantiser)
    with pytest.raises(FormatError, match="is quantised as"):
        SegmentReader(decode_manifest(unread(spec, 2)), make_quantiser("exact"))


def with_part(coded: CodedSegment, index: int, raw: bytes) -> tuple[Manifest, bytes]:
    """The segment with other bytes in its first cell's part, and checksums that hold."""
    (variant,) = coded.manifest.variants
    bitstream = zstandard.ZstdCompressor().compress(raw)
    row = Chunk("zstd", len(bitstream), xxhash.xxh3_128_digest(bitstream), xxhash.xxh3_128_digest(raw))
    start = sum(chunk.size_bytes for chunk in variant.chunks[:index])
    data = coded.data[:start] + bitstream + coded.data[start + variant.chunks[index].size_bytes :]
    chunks = (*variant.chunks[:index], row, *variant.chunks[index + 1 :])
    made = msgspec.structs.replace(variant, chunks=chunks, data_digest=xxhash.xxh3_128_hexdigest(data))
    return msgspec.structs.replace(coded.manifest, variants=(made,)), data


@pytest.mark.parametrize("name", ["uint8", "cachegen", "klt"])
def test_parts_of_bytes_are_what_kernels_expect(name: Any) -> None:
    """They read scales and exponents by the cell's shape, and multiply by scales."""
    quantiser = klt() if name == "klt" else make_quantiser(name)
    coded, _ = make_segment(KLT_GEOMETRY, 2, quantiser=quantiser)
    reader, cell = SegmentReader(coded.manifest, quantiser), next(coded.manifest.cells())
    good = reader.decode_cell(cell, reader.chunks_in(cell, [coded.data]))[0].numpy().tobytes()
    bad = dict.fromkeys((good[:-1], good[:-2], good + good, b""), "scales|exponents")
    if name == "klt":
        bad |= dict.fromkeys((good[:-1] + bytes([x]) for x in (1, 119, 137)), "exponent is not 120 to 136")
    else:
        bad |= dict.fromkeys((good[:-2] + bytes.fromhex(x) for x in ("c07f", "807f", "80ff")), "a scale is not finite")
    for raw, message in bad.items():
        manifest, data = with_part(coded, 0, raw)
        reader = SegmentReader(manifest, quantiser)
        with pytest.raises(FormatError, match=message):
            reader.decode_cell(cell, reader.chunks_in(cell, [data]))


# What a bitstream decodes to


def pictures(side: int, count: int = 1) -> torch.Tensor:
    return torch.zeros((count, 3, side, side), dtype=torch.uint8)


@pytest.mark.parametrize("name", ["hevc", "hevc420"])
def test_hevc_of_many_nal_units_is_refused_before_it_is_decoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """libavcodec takes 4.6 KB for each, and leaves out those that it does not know: the pictures are right."""
    codec = get_codec(name)
    first, *others = map(bytes, split_access_units(codec.encode(pictures(144))))
    reserved = b"\0\0\1\x52\1"  # type 41
    few = join_access_units([first + reserved * 200, *others])
    assert torch.equal(codec.decode(few, (1, 144, 144)), pictures(144))
    monkeypatch.delattr(av, "Packet")
    with pytest.raises(CorruptError, match=r"picture has 304 NAL units, more than 256"):
        codec.decode(join_access_units([first + reserved * 300, *others]), (1, 144, 144))


@pytest.mark.parametrize("name", ["hevc", "hevc420"])
def test_hevc_of_many_pictures_is_refused_before_they_are_listed(name: str) -> None:
    """Each takes four bytes in the table, and hundreds in a list."""
    bitstream = join_access_units([b""] * 500_000)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError, match=f"{name} bitstream has 500000 pictures, expected [13]"):
            get_codec(name).decode(bitstream, (1, 144, 144))
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 1 << 20


def cropped(bitstream: bytes, by: int) -> bytes:
    units = split_access_units(bitstream)
    with av.open(io.BytesIO(b"".join(units)), format="hevc") as container:
        description = f"hevc_metadata=crop_right={by}:crop_bottom={by}"
        bsf = av.bitstream.BitStreamFilterContext(description, container.streams.video[0])
        return join_access_units([bytes(packet) for unit in units for packet in bsf.filter(av.Packet(bytes(unit)))])


def test_hevc_of_another_form_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures may be coded in whole units, and cropped by less than one."""
    codec, chroma = get_codec("hevc"), get_codec("hevc420")
    assert torch.equal(codec.decode(cropped(codec.encode(pictures(160)), 16), (1, 144, 144)), pictures(144))
    large, good = codec.encode(pictures(1024)), codec.encode(pictures(144, 2))
    (other,), (first, second) = (list(map(bytes, split_access_units(each))) for each in (large, good))
    bad = (
        (codec, large, 1, "1024x1024"),
        (chroma, chroma.encode(pictures(1024)), 1, "1024x1024"),
        (codec, cropped(large, 1024 - 144), 1, "coded as 1024x1024 and cropped to 144x144"),
        # A later picture that would switch to other parameters.
        (codec, join_access_units([first, other]), 2, "2 sequence parameter sets"),
        (codec, join_access_units([first, other[: len(other) // 2] + second]), 2, "2 sequence parameter sets"),
        # Other beginnings are taken for a configuration record, in which sizes take the place of start codes.
        (codec, join_access_units([b"\x01" + first, second]), 2, "start code"),
    )
    monkeypatch.delattr(av, "Packet")
    for which, bitstream, count, message in bad:
        with pytest.raises(CorruptError, match=message):
            which.decode(bitstream, (count, 144, 144))


# Shapes of a manifest


def changed(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    body = copy.deepcopy(body)
    node = body
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return body


_BODY, _NAMESPACE, _VARIANT, _LAYOUT = (), ("namespace",), ("variants", 0), ("variants", 0, "layouts", "k")
_STRINGS = "model", "model_dtype", "attention", "kv_dtype", "quantiser"
_DIGESTS = "0" * 32 + "\n", "0" * 31, "0" * 33, "A" * 32, "../" + "0" * 29
_EXPIRIES = -1, 1 << 37, 1 << 63, 1.5, math.inf, math.nan, "1800000000", True, b"1", [1]
# What is changed in which of a manifest's maps, None being removed, and what is said.
MALFORMED: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    # A namespace's digest is over its fields: with another one it would have another name.
    (_NAMESPACE, {"more": 1}, "namespace"),
    (_NAMESPACE, {"quantiser": None}, "namespace"),
    (_NAMESPACE, {"format_major": None}, "namespace"),
    (_NAMESPACE, {"page_size": "16"}, "namespace"),
    (_NAMESPACE, {"num_heads": 1 << 40}, "num_heads"),
    *((_NAMESPACE, {field: "m" * 2049}, rf"length <= 2048 - at `\$.{field}`") for field in _STRINGS),
    *((_VARIANT, {"data_digest": digest}, "regex") for digest in _DIGESTS),
    (_LAYOUT, {"width": 4096, "height": 2048}, "exceeds"),
    (_LAYOUT, {"width": 136, "height": 144}, "expected sides"),
    (_LAYOUT, {"width": 148, "height": 144}, "multiples of 8"),
    (_LAYOUT, {"width": 144, "height": 65536}, "exceeds"),
    (_LAYOUT, {"width": 2000, "height": 2000}, r"k frames of \d+ bytes for"),  # for a few coded bytes
    (_BODY, {"previous_hash": b""}, "previous_hash"),
    *((_BODY, {"expires": expires}, "expires") for expires in _EXPIRIES),
]


def test_malformed_manifests_are_refused() -> None:
    body = body_of(make_segment(codec="hevc")[0].manifest)
    decode_manifest(sealed(body))
    for path, changes, message in MALFORMED:
        node = body
        for key in path:
            node = node[key]
        value = {name: each for name, each in (node | changes).items() if each is not None}
        with pytest.raises(FormatError, match=message):
            decode_manifest(sealed(changed(body, path, value)))


@pytest.mark.parametrize("depth", [1000, 100_000])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a", b"\x81"], ids=["arrays", "maps", "keys"])
def test_deep_nesting_is_malformed_wherever_it_is(depth: int, opening: bytes) -> None:
    body = body_of(make_segment(codec="hevc", quantiser=make_quantiser("uint8"))[0].manifest)
    mark = msgspec.msgpack.Ext(7, b"\x07")
    nested = opening * depth + b"\xc0" * (depth + 1 if opening == b"\x81" else 1)
    inside = (*_NAMESPACE, "model"), (*_NAMESPACE, "another"), (*_VARIANT, "another"), (*_LAYOUT, "width")
    for path in ((), *((key,) for key in (*body, "another")), *inside):
        packed = msgspec.msgpack.encode(changed(body, path, mark)).replace(b"\xd4\x07\x07", nested)
        with pytest.raises(FormatError):
            decode_manifest(sealed(packed))


def test_versions() -> None:
    """A newer major one is named. A newer minor one is read, whatever new fields it has, and not written again."""
    manifest = make_segment()[0].manifest
    expiring = msgspec.structs.replace(manifest, expires=1_800_000_000)
    assert decode_manifest(expiring.encode()) == expiring
    assert body_of(expiring) == body_of(manifest) | {"expires": 1_800_000_000}
    raw = manifest.encode()
    assert struct.unpack_from("<H", raw, 6) == (8,)
    require_rewritable(raw)
    newer = as_newer(raw, msgspec.msgpack.encode({"more": 1}))
    assert decode_manifest(newer) == manifest
    with pytest.raises(FormatVersionError, match=r"version 2\.9"):
        require_rewritable(newer)
    for bad in (raw[:20], b"x" + raw[1:], raw[:-1] + bytes([raw[-1] ^ 1])):
        with pytest.raises(CorruptError):
            decode_manifest(bad)
    major = raw[:4] + struct.pack("<H", 3) + raw[6:-16]
    with pytest.raises(FormatVersionError, match="format version 3, this reader knows 2"):
        decode_manifest(major + xxhash.xxh3_128_digest(major))


# Everything else


@pytest.mark.parametrize("name", ["exact", "uint8", "cachegen", "klt"])
def test_nothing_but_format_errors_comes_out_of_a_reader(name: Any) -> None:
    """Whatever two values of a manifest are, with all checksums as they should be: memory stays bounded, too."""
    quantiser = klt() if name == "klt" else make_quantiser(name)
    coded, _ = make_segment(KLT_GEOMETRY, 2, quantiser=quantiser, codec="deflate", span_pages=1)
    rng = random.Random(name)
    outcomes = {"refused": 0, "read": 0}
    for _ in range(3000):
        bad = coded.manifest.encode()[12:-16]
        for _ in range(rng.randrange(1, 3)):
            bad = mutate_body(bad, rng)
        try:
            reader = SegmentReader(decode_manifest(sealed(bad)), quantiser)
            for cell in reader.manifest.cells():
                data = reader.chunks_in(cell, [coded.data])
                values = reader.dequantise_cell(cell, reader.decode_cell(cell, data))
                assert all(x.shape[0] == reader.manifest.span_tokens(cell.span) for x in values)
            outcomes["read"] += 1
        except FormatError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 20, outcomes


def test_noise_in_every_part_is_refused_or_read() -> None:
    """Bytes of any size and content that their checksums vouch for."""
    for quantiser in (klt(), make_quantiser("uint8"), make_quantiser("exact")):
        coded, _ = make_segment(KLT_GEOMETRY, 2, quantiser=quantiser, span_pages=1)
        cell, rng = next(coded.manifest.cells()), random.Random(1)
        for index in range(coded.manifest.chunks_per_cell):
            for size in (0, 1, 2, 8, 24, 96, 768, 3 * 144 * 144, 6 * 144 * 144):
                for raw in (bytes(size), rng.randbytes(size), bytes([128]) * size):
                    manifest, data = with_part(coded, index, raw)
                    reader = SegmentReader(manifest, quantiser)
                    try:
                        parts = reader.decode_cell(cell, reader.chunks_in(cell, [data]))
                        reader.dequantise_cell(cell, parts)
                    except FormatError:
                        pass


DECODE = """
import sys
import msgspec
from harness.small_segments import make_segment, page_hashes
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.stores.notes import Pin, decode_pin

manifest = make_segment(page_hashes(1), 0, 1).manifest.encode()
pin = Pin("", 1, bytes(32)).encode()
new = list[type("New", (msgspec.Struct,), {})]
for decode in (
    lambda: decode_manifest(manifest),
    lambda: decode_pin(pin),
    lambda: msgspec.json.decode(b"[]", type=new),
):
    looked_at = []
    sys.setprofile(lambda frame, event, arg: looked_at.append(frame.f_code.co_filename))
    decode()
    sys.setprofile(None)
    print(any(name.endswith("msgspec/_utils.py") for name in looked_at))
"""


@pytest.mark.process
def test_decoding_does_not_look_at_annotations() -> None:
    """What threads decode, msgspec knows before: it crashes if two of them are the first to decode a type."""
    done = subprocess.run([sys.executable, "-c", DECODE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True"]
