"""Transcoding a variant to others does not change any decoded value."""

import msgspec
import pytest
import torch

from sgl_kvfetch.codec.container.manifest import Manifest, decode_manifest
from sgl_kvfetch.codec.container.reader import SegmentReader, first_readable
from sgl_kvfetch.codec.container.segment import CodedSegment, layouts_of
from sgl_kvfetch.codec.quant.registry import make_quantiser, quantiser_from_identity
from sgl_kvfetch.errors import CorruptError, FormatError
from sgl_kvfetch.tools.encoder import (
    Target,
    cheapest_variant,
    make_targets,
    target_layouts,
    transcode,
    verify_variant,
)
from sgl_kvfetch.types import KVGeometry
from tests.golden.make import CASES
from tests.segments import SMALL, make_segment

WIDE = KVGeometry(num_layers=3, num_heads=4, k_head_dim=64, v_head_dim=64, page_size=64, dtype="bfloat16")
TARGETS = (Target("hevc", "240p"), Target("hevc420", "480p"), Target("deflate", "1080p"), Target("ans", "flat"))


def decoded_equal(a: CodedSegment, i: int, b: CodedSegment, j: int) -> bool:
    """Return whether two variants decode to the same parts, without comparing checksums."""
    quantiser = quantiser_from_identity(a.manifest.namespace.quantiser)
    x, y = SegmentReader(a.manifest, quantiser, i), SegmentReader(b.manifest, quantiser, j)
    return all(
        torch.equal(one, other)
        for cell in a.manifest.cells()
        for one, other in zip(
            x.decode_cell(cell, x.chunks_in(cell, [a.contents[i]])),
            y.decode_cell(cell, y.chunks_in(cell, [b.contents[j]])),
            strict=True,
        )
    )


@pytest.mark.parametrize("codec", ["zstd", "hevc", "ans"])
@pytest.mark.parametrize("name", ["exact", "uint8", "cachegen"])
def test_transcoding_keeps_all_parts(name: str, codec: str) -> None:
    source, _ = make_segment(SMALL, 4, quantiser=make_quantiser(name), codec=codec)  # type: ignore[arg-type]
    made = transcode(source.manifest, source.data, TARGETS)
    assert [Target(v.codec, v.resolution) for v in made.manifest.variants] == list(TARGETS)
    original = [chunk.decoded_checksum for chunk in source.manifest.variants[0].chunks]
    for index, variant in enumerate(made.manifest.variants):
        assert [chunk.decoded_checksum for chunk in variant.chunks] == original
        assert decoded_equal(made, index, source, 0)
        assert variant.codecs <= {variant.codec, "raw", "zstd", "ans-tables"}
    assert decode_manifest(made.manifest.encode()) == made.manifest


def test_ans_becomes_video_and_comes_back_without_a_profile() -> None:
    case = CASES["klt-ans"]
    manifest = decode_manifest(case.path("kvm").read_bytes())
    ans, hevc = make_targets(["ans", "hevc"], ["240p", "480p"])[:2]
    assert (ans, hevc) == (Target("ans", "flat"), Target("hevc", "240p"))
    video = transcode(manifest, case.data(0), (hevc,), 0)
    assert video.data == case.data(1)
    assert transcode(video.manifest, video.data, (ans,)).data == case.data(0)
    assert cheapest_variant(manifest) == 0


def test_resolutions_differ_where_spans_fill_them() -> None:
    source, _ = make_segment(WIDE, 16, quantiser=make_quantiser("uint8"), span_pages=16)
    made = transcode(source.manifest, source.data, make_targets(["zstd"], ["240p", "480p", "640p", "1080p"]))
    layouts = [v.layouts["k"] for v in made.manifest.variants]
    assert layouts == sorted(layouts, key=lambda layout: layout.width * layout.height)
    assert len({(layout.width, layout.height) for layout in layouts}) == 4
    assert len(list(made.data_objects())) == 4


def test_identical_variants_share_an_object() -> None:
    source, _ = make_segment(SMALL, 1)
    made = transcode(source.manifest, source.data, make_targets(["hevc"], ["240p", "480p"]))
    assert len(made.manifest.variants) == 2
    ((name, data),) = made.data_objects()
    assert made.manifest.data_names == {name}
    assert made.contents[0] == made.contents[1] == data


def test_layout_of_the_same_resolution_is_kept() -> None:
    """A new variant of the same resolution keeps the layout; others get the default one."""
    quantiser = make_quantiser("uint8")
    source, _ = make_segment(WIDE, 8, quantiser=quantiser, codec="hevc", span_pages=8)
    (variant,) = source.manifest.variants
    assert variant.layouts["k"].width > 128
    own = variant.layouts | {"k": msgspec.structs.replace(variant.layouts["k"], width=128)}
    theirs = msgspec.structs.replace(variant, layouts=own)
    manifest = msgspec.structs.replace(source.manifest, variants=(theirs,))
    assert target_layouts(manifest, quantiser, "240p") == own
    assert target_layouts(manifest, quantiser, "1080p") == layouts_of(source.manifest, quantiser, "1080p")


@pytest.mark.parametrize("position", [0, 1000, -1])
def test_a_corrupt_source_is_not_transcoded(position: int) -> None:
    source, _ = make_segment(SMALL, 4)
    data = bytearray(source.data)
    data[position] ^= 1
    with pytest.raises(CorruptError):
        transcode(source.manifest, bytes(data), TARGETS[:1])
    with pytest.raises(CorruptError):
        verify_variant(source.manifest, 0, bytes(data))
    with pytest.raises(CorruptError):
        verify_variant(source.manifest, 0, source.data + b"x")
    verify_variant(source.manifest, 0, source.data)


def several() -> CodedSegment:
    source, _ = make_segment(SMALL, 4)
    return transcode(source.manifest, source.data, make_targets(["hevc", "zstd", "deflate"], ["240p"]))


def with_codec(manifest: Manifest, index: int, codec: str) -> Manifest:
    variants = list(manifest.variants)
    chunks = tuple(msgspec.structs.replace(chunk, codec=codec) for chunk in variants[index].chunks)
    variants[index] = msgspec.structs.replace(variants[index], chunks=chunks)
    return msgspec.structs.replace(manifest, variants=tuple(variants))


def test_readers_take_the_first_variant_that_they_can_decode() -> None:
    manifest = several().manifest
    exact = make_quantiser("exact")
    assert first_readable(manifest) == 0
    newer = with_codec(manifest, 0, "av2")
    assert first_readable(newer) == first_readable(newer, ["av2"]) == 1  # engines make none readable
    assert cheapest_variant(manifest) == 1  # which decodes fastest
    assert cheapest_variant(with_codec(manifest, 1, "av2")) == 2
    assert SegmentReader(newer, exact).variant is newer.variants[1]
    with pytest.raises(FormatError, match="'av2' is unknown"):
        SegmentReader(newer, exact, 0)
    all_newer = with_codec(with_codec(newer, 1, "av2"), 2, "av3")
    with pytest.raises(FormatError, match="'av2' is unknown"):
        SegmentReader(all_newer, exact)
    with pytest.raises(FormatError, match="codecs are av2, av3, known hevc"):
        cheapest_variant(all_newer)


@pytest.mark.parametrize(
    ("stored", "engine_codecs", "expected"),
    [
        (["hevc", "hevc420"], ["hevc", "hevc420"], "hevc"),
        (["hevc420", "hevc"], ["hevc", "hevc420"], "hevc420"),
        (["hevc", "hevc420"], ["hevc420"], "hevc420"),
        (["hevc420", "hevc"], ["hevc"], "hevc"),
        (["hevc", "hevc420"], [], "hevc"),
        (["hevc"], ["hevc420"], "hevc"),
        (["hevc", "zstd", "hevc420"], ["hevc420"], "zstd"),  # leaves no video to the CPU either, and comes first
        (["zstd", "hevc"], ["hevc"], "zstd"),
        (["hevc", "zstd"], [], "hevc"),
    ],
)
def test_readers_with_video_engines_prefer_variants_that_these_decode(
    stored: list[str], engine_codecs: list[str], expected: str
) -> None:
    source, _ = make_segment(SMALL, 4)
    manifest = transcode(source.manifest, source.data, make_targets(["hevc", "hevc420", "zstd"], ["240p"])).manifest
    variants = tuple(each for codec in stored for each in manifest.variants if each.codec == codec)
    # Noise is stored as it is if video was requested.
    assert all("raw" in each.codecs for each in variants if each.codec != "zstd")
    manifest = msgspec.structs.replace(manifest, variants=variants)
    assert variants[first_readable(manifest, engine_codecs)].codec == expected
