"""Transcoding a variant to others does not change any decoded value."""

import math

import msgspec
import pytest
import torch

from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.codec.container.reader import SegmentReader, first_readable
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.codec.quant.registry import make_quantiser, quantiser_from_identity
from sgl_kvfetch.errors import FormatError
from sgl_kvfetch.tools.encoder import Target, cheapest_variant, make_targets, transcode
from sgl_kvfetch.types import KVGeometry
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


@pytest.mark.parametrize(("name", "codec"), [("exact", "ans"), ("uint8", "zstd"), ("cachegen", "hevc")])
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


def test_variants_share_an_object_unless_spans_fill_their_resolutions() -> None:
    small, all_sizes = ["240p", "480p"], ["240p", "480p", "640p", "1080p"]
    for geometry, num_pages, resolutions, num_objects in ((SMALL, 1, small, 1), (WIDE, 16, all_sizes, 4)):
        source, _ = make_segment(geometry, num_pages, quantiser=make_quantiser("uint8"), span_pages=num_pages)
        made = transcode(source.manifest, source.data, make_targets(["zstd"], resolutions))
        sizes = [(layouts["k"].width, layouts["k"].height) for layouts in (v.layouts for v in made.manifest.variants)]
        assert len(set(sizes)) == len(list(made.data_objects())) == len(made.manifest.data_names) == num_objects
        assert sizes == sorted(sizes, key=math.prod)


@pytest.mark.parametrize(
    ("stored", "engine_codecs", "expected"),
    [
        (["hevc420", "hevc"], [], "hevc420"),
        (["hevc", "hevc420"], ["hevc420"], "hevc420"),
        (["hevc"], ["hevc420"], "hevc"),
        (["hevc", "zstd", "hevc420"], ["hevc420"], "zstd"),  # leaves no video to the CPU either, and comes first
        (["newer", "hevc", "zstd"], [], "hevc"),
        (["newer"], [], None),
    ],
)
def test_readers_take_the_first_variant_that_they_or_their_video_engines_decode(
    stored: list[str], engine_codecs: list[str], expected: str | None
) -> None:
    source, _ = make_segment(SMALL, 4)
    manifest = transcode(source.manifest, source.data, make_targets(["hevc", "hevc420", "zstd"], ["240p"])).manifest
    by_codec = {each.codec: each for each in manifest.variants}
    # Noise is stored as it is if video was requested.
    assert all("raw" in each.codecs for codec, each in by_codec.items() if codec != "zstd")
    chunks = tuple(msgspec.structs.replace(chunk, codec="av2") for chunk in by_codec["zstd"].chunks)
    by_codec["newer"] = msgspec.structs.replace(by_codec["zstd"], codec="newer", chunks=chunks)
    manifest = msgspec.structs.replace(manifest, variants=tuple(by_codec[codec] for codec in stored))
    if expected is None:
        with pytest.raises(FormatError, match="'av2' is unknown"):
            SegmentReader(manifest, make_quantiser("exact"))
        with pytest.raises(FormatError, match="codecs are av2, known hevc"):
            cheapest_variant(manifest)
        return
    assert stored[first_readable(manifest, engine_codecs)] == expected
    assert "zstd" not in stored or stored[cheapest_variant(manifest)] == "zstd"  # which decodes fastest
