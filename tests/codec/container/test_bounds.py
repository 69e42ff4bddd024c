"""A manifest may claim anything, and a bitstream may decode to anything: a reader refuses it before it takes memory."""

from __future__ import annotations

import copy
import io
import math
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
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


def test_who_would_write_such_chunks_is_told() -> None:
    geometry = KVGeometry(3, 8, 128, 128, 64, "bfloat16")
    spec = SegmentSpec(make_heads(geometry), make_quantiser("exact"), "zstd", "240p", 16)
    spec.require_readable()
    with pytest.raises(FormatError, match="at most 268435456 bytes"):
        replace(spec, span_pages=2048).require_readable()


def test_a_manifest_has_a_size_that_writers_keep_and_readers_demand() -> None:
    manifest = make_segment()[0].manifest
    (variant,) = manifest.variants
    full = msgspec.structs.replace(manifest, variants=(msgspec.structs.replace(variant, chunks=variant.chunks * 2000),))
    with pytest.raises(FormatError, match=r"manifest of 32000 chunks takes 1[0-9]{6} bytes, more than 1048576"):
        full.encode()
    body = body_of(manifest)
    for padding, fault in ((MAX_MANIFEST_BYTES - 2000, None), (MAX_MANIFEST_BYTES, "more than 1048576")):
        large = sealed(body | {"later": bytes(padding)})
        if fault is None:
            decode_manifest(large)
            continue
        with pytest.raises(FormatError, match=fault):
            decode_manifest(large)


def test_strings_of_a_namespace_have_bounds() -> None:
    heads = make_heads(model="m" * 2049)
    body = body_of(make_segment()[0].manifest)
    for field in ("model", "model_dtype", "attention", "kv_dtype", "quantiser"):
        with pytest.raises(FormatError, match=rf"length <= 2048 - at `\$.{field}`"):
            decode_manifest(sealed(body | {"namespace": body["namespace"] | {field: "m" * 2049}}))
    with pytest.raises(FormatError, match="length <= 2048"):
        SegmentSpec(heads, make_quantiser("exact"), "zstd", "240p", 2).require_readable()


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


def test_who_would_write_only_manifests_that_are_too_large_is_told() -> None:
    spec = SegmentSpec(
        make_heads(KVGeometry(80, 128, 128, 128, 64, "bfloat16")), make_quantiser("exact"), "raw", "240p", 16, 2
    )
    spec.require_readable()
    with pytest.raises(FormatError, match=r"one span would have 1[0-9]{6} bytes.* a smaller max_tp_size"):
        replace(spec, heads=make_heads(KVGeometry(240, 128, 128, 128, 64, "bfloat16"))).require_readable()


@pytest.mark.parametrize(("width", "height"), [(4096, 2048), (136, 144), (148, 144), (144, 65536)])
def test_pictures_have_bounds(width: int, height: int) -> None:
    manifest = make_segment()[0].manifest
    (variant,) = manifest.variants
    layout = msgspec.structs.replace(variant.layouts["k"], width=width, height=height)
    bad = msgspec.structs.replace(variant, layouts={**variant.layouts, "k": layout})
    with pytest.raises(FormatError, match=r"exceeds|expected sides"):
        decode_manifest(msgspec.structs.replace(manifest, variants=(bad,)).encode())


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
def test_parts_of_bytes_have_their_size(name: Any) -> None:
    """Kernels read scales and exponents by the cell's shape."""
    quantiser = klt() if name == "klt" else make_quantiser(name)
    coded, _ = make_segment(KLT_GEOMETRY, 2, quantiser=quantiser)
    reader = SegmentReader(coded.manifest, quantiser)
    cell = next(coded.manifest.cells())
    good = bytes(reader.decode_cell(cell, reader.chunks_in(cell, [coded.data]))[0].numpy())
    for raw in (good[:-1], good[:-2], good + good, b""):
        manifest, data = with_part(coded, 0, raw)
        bad = SegmentReader(manifest, quantiser)
        with pytest.raises(FormatError, match=r"scales|exponents"):
            bad.decode_cell(cell, bad.chunks_in(cell, [data]))


@pytest.mark.parametrize("name", ["uint8", "cachegen"])
@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_scales_are_finite(name: Any, scale: float) -> None:
    quantiser = make_quantiser(name)
    coded, _ = make_segment(KLT_GEOMETRY, 2, quantiser=quantiser)
    reader = SegmentReader(coded.manifest, quantiser)
    cell = next(coded.manifest.cells())
    scales = reader.decode_cell(cell, reader.chunks_in(cell, [coded.data]))[0].view(torch.bfloat16).clone()
    scales[-1] = scale
    manifest, data = with_part(coded, 0, scales.view(torch.uint8).numpy().tobytes())
    bad = SegmentReader(manifest, quantiser)
    with pytest.raises(FormatError, match="a scale is not finite"):
        bad.decode_cell(cell, bad.chunks_in(cell, [data]))


# What a bitstream decodes to


@pytest.fixture
def decodes_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a picture was given to the decoder")

    monkeypatch.setattr(av, "Packet", fail)


def pictures(side: int, count: int = 1) -> torch.Tensor:
    return torch.zeros((count, 3, side, side), dtype=torch.uint8)


@pytest.mark.usefixtures("decodes_no_picture")
@pytest.mark.parametrize("name", ["hevc", "hevc420"])
def test_hevc_of_another_size_is_refused_before_it_is_decoded(name: str) -> None:
    codec = get_codec(name)
    with pytest.raises(CorruptError, match="1024x1024"):
        codec.decode(codec.encode(pictures(1024)), (1, 144, 144))


@pytest.mark.parametrize("name", ["hevc", "hevc420"])
def test_hevc_of_many_nal_units_is_refused_before_it_is_decoded(name: str, request: pytest.FixtureRequest) -> None:
    """libavcodec takes 4.6 KB for each, and leaves out those that it does not know: the pictures are right."""
    codec = get_codec(name)
    first, *others = map(bytes, split_access_units(codec.encode(pictures(144))))
    reserved = b"\0\0\1\x52\1"  # type 41
    few = join_access_units([first + reserved * 200, *others])
    assert torch.equal(codec.decode(few, (1, 144, 144)), pictures(144))
    request.getfixturevalue("decodes_no_picture")
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


def test_hevc_that_is_cropped_to_the_right_size_is_refused(request: pytest.FixtureRequest) -> None:
    codec = get_codec("hevc")
    cropped = filtered(codec.encode(pictures(1024)), f"hevc_metadata=crop_right={1024 - 144}:crop_bottom={1024 - 144}")
    request.getfixturevalue("decodes_no_picture")
    with pytest.raises(CorruptError, match="coded as 1024x1024 and cropped to 144x144"):
        codec.decode(cropped, (1, 144, 144))


def test_hevc_may_be_coded_in_whole_units() -> None:
    codec = get_codec("hevc")
    frames = codec.decode(
        filtered(codec.encode(pictures(160)), "hevc_metadata=crop_right=16:crop_bottom=16"), (1, 144, 144)
    )
    assert torch.equal(frames, pictures(144))


def filtered(bitstream: bytes, description: str) -> bytes:
    units = split_access_units(bitstream)
    with av.open(io.BytesIO(b"".join(units)), format="hevc") as container:
        bsf = av.bitstream.BitStreamFilterContext(description, container.streams.video[0])
        return join_access_units([bytes(packet) for unit in units for packet in bsf.filter(av.Packet(bytes(unit)))])


@pytest.mark.usefixtures("decodes_no_picture")
def test_hevc_has_one_size() -> None:
    """Also where a later picture would switch to other parameters."""
    codec = get_codec("hevc")
    units = split_access_units(codec.encode(pictures(144, 2)))
    (large,) = split_access_units(codec.encode(pictures(1024)))
    for bad in ([units[0], large], [units[0], bytes(large)[: len(large) // 2] + bytes(units[1])]):
        with pytest.raises(CorruptError, match="2 sequence parameter sets"):
            codec.decode(join_access_units([bytes(unit) for unit in bad]), (2, 144, 144))


@pytest.mark.usefixtures("decodes_no_picture")
def test_hevc_begins_with_a_start_code() -> None:
    """libavcodec takes other beginnings for a configuration record, in which sizes take the place of start codes."""
    codec = get_codec("hevc")
    (unit,) = split_access_units(codec.encode(pictures(144)))
    with pytest.raises(CorruptError, match="start code"):
        codec.decode(join_access_units([b"\x01" + bytes(unit)]), (1, 144, 144))


def test_zstd_states_its_size_and_ends_there() -> None:
    raw = bytes(3 * 144 * 144)
    whole = zstandard.ZstdCompressor().compress(raw)
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(raw)
    assert get_codec("zstd").decode(whole, (1, 144, 144)).numel() == len(raw)
    for bad in (silent, whole + b"x", whole + whole, zstandard.ZstdCompressor().compress(raw + b"x")):
        with pytest.raises(CorruptError):
            get_codec("zstd").decode(bad, (1, 144, 144))


def test_nothing_follows_deflate() -> None:
    codec = get_codec("deflate")
    bitstream = codec.encode(pictures(144))
    for bad in (bitstream + b"x", bitstream + bitstream):
        with pytest.raises(CorruptError):
            codec.decode(bad, (1, 144, 144))


# Shapes of a manifest


@pytest.mark.parametrize("change", [{"more": 1}, {"quantiser": None}, {"format_major": None}, {"page_size": "16"}])
def test_a_namespace_has_exactly_its_fields(change: dict[str, Any]) -> None:
    """Its digest is over its fields: with another one it would have another name."""
    body = body_of(make_segment()[0].manifest)
    namespace = {name: value for name, value in (body["namespace"] | change).items() if value is not None}
    with pytest.raises(FormatError, match="namespace"):
        decode_manifest(sealed(body | {"namespace": namespace}))


@pytest.mark.parametrize("digest", ["0" * 32 + "\n", "0" * 31, "0" * 33, "A" * 32, "../" + "0" * 29])
def test_a_data_digest_is_32_hex_digits(digest: str) -> None:
    body = body_of(make_segment()[0].manifest)
    with pytest.raises(FormatError, match="regex"):
        decode_manifest(sealed(body | {"variants": [body["variants"][0] | {"data_digest": digest}]}))


def test_the_first_segment_has_no_hash_before_it() -> None:
    body = body_of(make_segment()[0].manifest)
    with pytest.raises(FormatError, match="previous_hash"):
        decode_manifest(sealed(body | {"previous_hash": b""}))


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to the values of a body, a few of each array, and to fields that it does not have."""
    yield path
    if isinstance(node, dict):
        for key in [*node, "another"]:
            yield from places(node.get(key), (*path, key))
    elif isinstance(node, list):
        for index in range(min(2, len(node))):
            yield from places(node[index], (*path, index))


def changed(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    body = copy.deepcopy(body)
    node = body
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return body


@pytest.mark.parametrize("depth", [900, 1000, 100_000])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a", b"\x81"], ids=["arrays", "maps", "keys"])
def test_deep_nesting_is_malformed_wherever_it_is(depth: int, opening: bytes) -> None:
    body = body_of(make_segment(codec="hevc", quantiser=make_quantiser("uint8"))[0].manifest)
    mark = msgspec.msgpack.Ext(7, b"\x07")
    nested = opening * depth + b"\xc0" * (depth + 1 if opening == b"\x81" else 1)
    for path in places(body):
        packed = msgspec.msgpack.encode(changed(body, path, mark)).replace(b"\xd4\x07\x07", nested)
        try:
            decode_manifest(sealed(packed))
        except FormatError:
            continue
        assert path[-1:] == ("another",)
        assert depth < 1000


def test_a_manifest_has_the_minor_version_of_its_writer() -> None:
    manifest = make_segment()[0].manifest
    expiring = msgspec.structs.replace(manifest, expires=1_800_000_000)
    assert decode_manifest(expiring.encode()) == expiring
    assert [struct.unpack_from("<H", each.encode(), 6) for each in (manifest, expiring)] == [(8,)] * 2
    assert body_of(expiring) == body_of(manifest) | {"expires": 1_800_000_000}
    assert "expires" not in body_of(manifest)


@pytest.mark.parametrize("expires", [-1, 1 << 37, 1 << 63, 1.5, math.inf, math.nan, "1800000000", True, b"1", [1]])
def test_an_expiry_is_a_number_of_seconds_within_bounds(expires: object) -> None:
    body = body_of(make_segment()[0].manifest)
    with pytest.raises(FormatError, match="expires"):
        decode_manifest(sealed(body | {"expires": expires}))


def test_what_a_newer_version_wrote_is_not_written_again() -> None:
    manifest = make_segment()[0].manifest
    require_rewritable(manifest.encode())
    newer = as_newer(manifest.encode())
    assert decode_manifest(newer) == manifest
    with pytest.raises(FormatVersionError, match=r"version 2\.9"):
        require_rewritable(newer)


# Everything else


ODD: list[Callable[[random.Random], Any]] = [
    lambda rng: rng.choice([0, 1, 2, 3, 7, 16, 144, 1 << 16, 1 << 31, 1 << 40, (1 << 64) - 1, -1]),
    lambda rng: rng.randrange(1, 300),
    lambda rng: rng.choice(
        ["", "k", "v", "coefficients", "zstd", "raw", "deflate", "hevc", "tiles", "regions", "x" * 70]
    ),
    lambda rng: rng.choice(["float32", "float16", "float8_e4m3fn", "uint8(k=256;v=256)", "cachegen(k=4;v=4)", "exact"]),
    lambda rng: rng.choice([None, True, 1.5, float("nan"), [], {}, [1], {"a": 1}]),
    lambda rng: rng.randbytes(rng.choice([0, 1, 16, 32, 64])),
]


@pytest.mark.parametrize("name", ["exact", "uint8", "cachegen", "klt"])
def test_nothing_but_format_errors_comes_out_of_a_reader(name: Any) -> None:
    """Whatever two values of a manifest are, with all checksums as they should be: memory stays bounded, too."""
    quantiser = klt() if name == "klt" else make_quantiser(name)
    coded, _ = make_segment(KLT_GEOMETRY, 2, quantiser=quantiser, codec="deflate", span_pages=1)
    body, rng = body_of(coded.manifest), random.Random(name)
    paths = [path for path in places(body) if path]
    outcomes = {"refused": 0, "read": 0}
    for _ in range(3000):
        bad = body
        for path in rng.sample(paths, rng.randrange(1, 3)):
            try:
                bad = changed(bad, path, rng.choice(ODD)(rng))
            except (KeyError, IndexError, TypeError):
                continue  # the first change left no such place
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
