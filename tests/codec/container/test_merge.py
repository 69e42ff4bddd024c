from dataclasses import replace

import msgspec
import pytest
import torch

from harness.small_segments import expiring
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.codec.container.merge import merge_segments
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.container.segment import CodedSegment, SegmentSpec, encode_segment
from sgl_kvfetch.codec.quant.base import CellValues, Quantised, Quantiser, join_parts
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.registry import PlainQuantiserName, make_quantiser
from sgl_kvfetch.errors import FormatError
from sgl_kvfetch.keys import Labels
from sgl_kvfetch.tools.encoder import make_targets, transcode
from sgl_kvfetch.types import KVGeometry
from tests.codec.quant.profiles import make_profile, values_of
from tests.segments import SMALL, make_heads, make_segment, page_hashes, with_labels


def cells(segment: CodedSegment, quantiser: Quantiser) -> dict[tuple[int, int], Quantised]:
    """The parts of each layer group and head block, whole."""
    reader = SegmentReader(decode_manifest(segment.manifest.encode()), quantiser)
    pieces: dict[tuple[int, int], list[Quantised]] = {}
    for cell in segment.manifest.cells():
        piece = reader.decode_cell(cell, reader.chunks_in(cell, [segment.data]))
        pieces.setdefault((cell.layer_group, cell.head_block), []).append(piece)
    parts = quantiser.parts(reader.geometry.torch_dtype)
    return {key: join_parts(parts, each) for key, each in pieces.items()}


def require_joined(found: CodedSegment, left: CodedSegment, right: CodedSegment, quantiser: Quantiser) -> None:
    parts = quantiser.parts(left.manifest.geometry.torch_dtype)
    a, b = cells(left, quantiser), cells(right, quantiser)
    for key, quantised in cells(found, quantiser).items():
        assert all(torch.equal(x, y) for x, y in zip(quantised, join_parts(parts, [a[key], b[key]]), strict=True))


def halves(num_pages: int, span_pages: int, quantiser: Quantiser) -> tuple[CodedSegment, CodedSegment, SegmentSpec]:
    left, _ = make_segment(SMALL, num_pages, quantiser=quantiser, codec="hevc", span_pages=span_pages, first_page=16)
    right, _ = make_segment(
        SMALL, num_pages, quantiser=quantiser, codec="hevc", span_pages=span_pages, first_page=16 + num_pages
    )
    return left, right, SegmentSpec(make_heads(SMALL, quantiser), quantiser, "hevc", "240p", span_pages)


@pytest.mark.parametrize("name", ["exact", "uint8"])
@pytest.mark.parametrize(
    ("num_pages", "span_pages"), [(1, 8), (2, 8), (4, 8), (4, 4), (8, 4)], ids=lambda value: str(value)
)
def test_integers_and_scales_stay_as_they_are(name: PlainQuantiserName, num_pages: int, span_pages: int) -> None:
    quantiser = make_quantiser(name)
    left, right, spec = halves(num_pages, span_pages, quantiser)
    merged = merge_segments(spec, left, right)
    assert merged.manifest.first_page == 16
    assert merged.manifest.previous_hash == page_hashes(1, "", 15)[0]
    assert list(merged.manifest.page_hashes) == page_hashes(2 * num_pages, "", 16)
    assert merged.manifest.span_pages == min(span_pages, 2 * num_pages)
    require_joined(merged, left, right, quantiser)


@pytest.mark.parametrize(("left_s", "right_s", "whole_s"), [(5, 7, 5), (7, 5, 5), (5, None, 5), (None, 7, 7)])
@pytest.mark.parametrize("span_pages", [2, 4], ids=["chunks are copied", "chunks are joined"])
def test_the_whole_expires_with_its_earlier_half(
    left_s: int | None, right_s: int | None, whole_s: int, span_pages: int
) -> None:
    left, right, spec = halves(2, span_pages, make_quantiser("exact"))
    merged = merge_segments(spec, expiring(left, left_s), expiring(right, right_s))
    assert merged.manifest.expires == whole_s
    assert merge_segments(spec, left, right).manifest.expires is None


@pytest.mark.parametrize(("other", "whole"), [("a", "a"), ("b", "")])
@pytest.mark.parametrize("span_pages", [2, 4], ids=["chunks are copied", "chunks are joined"])
def test_the_whole_is_of_the_writer_of_both_halves(other: str, whole: str, span_pages: int) -> None:
    """Whoever merges has not computed the values."""
    left, right, spec = halves(2, span_pages, make_quantiser("exact"))
    merging = replace(spec, heads=replace(spec.heads, labels=Labels("model", writer="c")))
    of_right = with_labels(right, Labels("model", writer=other))
    merged = merge_segments(merging, with_labels(left, Labels("model", writer="a")), of_right)
    assert merged.manifest.labels == Labels("model", writer=whole)


@pytest.mark.parametrize("num_pages", [1, 4])
def test_cells_keep_their_heads(num_pages: int) -> None:
    """A server may have been configured anew between the halves and their merging."""
    uint8 = make_quantiser("uint8")
    left, right = (
        make_segment(SMALL, num_pages, quantiser=uint8, first_page=first, span_pages=2, cell_heads=1)[0]
        for first in (0, num_pages)
    )
    spec = SegmentSpec(make_heads(SMALL, uint8), uint8, "zstd", "240p", 2)
    merged = merge_segments(spec, left, right)
    assert merged.manifest.cell_heads == 1
    require_joined(merged, left, right, uint8)


@pytest.mark.parametrize("num_pages", [1, 2, 4])
def test_klt_merges_with_its_exact_tokens(num_pages: int) -> None:
    profile = make_profile(num_layers=4, num_heads=2, head_dim=16, cell_heads=1, num_sinks=3)
    quantiser = KltQuantiser(profile, step=0.5)
    geometry = KVGeometry(4, 2, 16, 16, 4, "bfloat16")
    values = CellValues(*(x.bfloat16() for x in values_of(profile, 8 * num_pages)))
    spec = SegmentSpec(make_heads(geometry, quantiser), quantiser, "hevc", "240p", 4)
    hashes = page_hashes(2 * num_pages)
    left, right = (
        encode_segment(
            spec,
            {"k": values.k[first * 4 : (first + num_pages) * 4], "v": values.v[first * 4 : (first + num_pages) * 4]},
            first,
            hashes[first - 1] if first else None,
            hashes[first : first + num_pages],
        )
        for first in (0, num_pages)
    )
    merged = merge_segments(spec, left, right)
    assert merged.manifest.coefficients == left.manifest.coefficients
    require_joined(merged, left, right, quantiser)


def test_whole_spans_are_copied_not_coded_again() -> None:
    left, right, spec = halves(4, 4, make_quantiser("exact"))
    assert merge_segments(spec, left, right).data == left.data + right.data


def test_only_buddies_merge() -> None:
    left, right, spec = halves(2, 8, make_quantiser("exact"))
    shorter, _ = make_segment(SMALL, 1, first_page=18)
    elsewhere, _ = make_segment(SMALL, 2, first_page=18, seed="other")
    for pair in ((right, left), (left, left), (left, shorter), (left, elsewhere)):
        with pytest.raises(FormatError, match="not neighbours of equal length"):
            merge_segments(spec, *pair)
    odd = [make_segment(SMALL, 2, first_page=p, codec="hevc")[0] for p in (18, 20)]
    with pytest.raises(FormatError, match="not buddies"):
        merge_segments(spec, odd[0], odd[1])


def encoded(segment: CodedSegment, *resolutions: str) -> CodedSegment:
    return transcode(segment.manifest, segment.data, make_targets(["hevc"], resolutions))


@pytest.mark.parametrize("name", ["exact", "uint8"])
def test_variants_that_both_halves_have_are_merged(name: PlainQuantiserName) -> None:
    quantiser = make_quantiser(name)
    left, right, spec = halves(4, 4, quantiser)
    merged = merge_segments(spec, encoded(left, "1080p", "240p"), encoded(right, "240p", "480p", "1080p"))
    assert [(v.codec, v.resolution) for v in merged.manifest.variants] == [("hevc", "1080p"), ("hevc", "240p")]
    for index in range(2):
        only = CodedSegment(
            msgspec.structs.replace(merged.manifest, variants=merged.manifest.variants[index : index + 1]),
            merged.variant_data(index),
        )
        require_joined(only, left, right, quantiser)


def test_a_half_that_is_encoded_merges_with_one_that_is_not() -> None:
    """The whole is of no one codec then, and says so: the background encoder takes it up."""
    quantiser = make_quantiser("exact")
    left, right, spec = halves(4, 4, quantiser)
    fast, _ = make_segment(SMALL, 4, codec="zstd", span_pages=4, first_page=20)
    merged = merge_segments(spec, encoded(left, "240p"), fast)
    (variant,) = merged.manifest.variants
    assert (variant.codec, variant.resolution) == ("", "240p")
    require_joined(merged, left, right, quantiser)


def test_short_halves_with_variants_become_one_variant() -> None:
    quantiser = make_quantiser("uint8")
    left, right, spec = halves(2, 8, quantiser)
    merged = merge_segments(spec, encoded(left, "240p", "480p"), encoded(right, "480p"))
    assert [(v.codec, v.resolution) for v in merged.manifest.variants] == [("hevc", "240p")]
