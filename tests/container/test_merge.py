import pytest
import torch

from sgl_kvfetch.container.manifest import decode_manifest
from sgl_kvfetch.container.merge import merge_segments
from sgl_kvfetch.container.segment import CodedSegment, SegmentReader, SegmentSpec
from sgl_kvfetch.errors import FormatError
from sgl_kvfetch.quant import Quantised, Quantiser, make_quantiser
from sgl_kvfetch.quant.registry import QuantiserName
from tests.segments import SMALL, make_namespace, make_segment, page_hashes


def cells(segment: CodedSegment, quantiser: Quantiser) -> dict[tuple[int, str], Quantised]:
    """Integers and scales of each layer group of K and V, whole."""
    reader = SegmentReader(decode_manifest(segment.manifest.encode()), quantiser)
    parts: dict[tuple[int, str], list[Quantised]] = {}
    for cell in segment.manifest.cells():
        piece = reader.decode_cell(cell, segment.data[slice(*reader.cell_range(cell))])
        parts.setdefault((cell.layer_group, cell.tensor), []).append(piece)
    return {
        key: Quantised(
            torch.cat([p.integers for p in pieces], dim=1),
            None if pieces[0].scales is None else torch.cat([p.scales for p in pieces if p.scales is not None]),
        )
        for key, pieces in parts.items()
    }


def halves(num_pages: int, span_pages: int, quantiser: Quantiser) -> tuple[CodedSegment, CodedSegment, SegmentSpec]:
    left, _ = make_segment(SMALL, num_pages, quantiser=quantiser, codec="hevc", span_pages=span_pages, first_page=16)
    right, _ = make_segment(
        SMALL, num_pages, quantiser=quantiser, codec="hevc", span_pages=span_pages, first_page=16 + num_pages
    )
    return left, right, SegmentSpec(make_namespace(SMALL, quantiser), quantiser, "hevc", "240p", span_pages)


@pytest.mark.parametrize("name", ["exact", "uint8"])
@pytest.mark.parametrize(
    ("num_pages", "span_pages"), [(1, 8), (2, 8), (4, 8), (4, 4), (8, 4)], ids=lambda value: str(value)
)
def test_integers_and_scales_stay_as_they_are(name: QuantiserName, num_pages: int, span_pages: int) -> None:
    quantiser = make_quantiser(name)
    left, right, spec = halves(num_pages, span_pages, quantiser)
    merged = merge_segments(spec, left, right)
    assert merged.manifest.first_page == 16
    assert merged.manifest.previous_hash == page_hashes(1, "", 15)[0]
    assert list(merged.manifest.page_hashes) == page_hashes(2 * num_pages, "", 16)
    assert merged.manifest.span_pages == min(span_pages, 2 * num_pages)
    found, a, b = (cells(segment, quantiser) for segment in (merged, left, right))
    for key, quantised in found.items():
        assert torch.equal(quantised.integers, torch.cat((a[key].integers, b[key].integers), dim=1))
        if quantised.scales is not None:
            assert torch.equal(quantised.scales, torch.cat((a[key].scales, b[key].scales)))  # type: ignore[arg-type]


def test_whole_spans_are_copied_not_coded_again() -> None:
    left, right, spec = halves(4, 4, make_quantiser("exact"))
    assert merge_segments(spec, left, right).data == left.data + right.data


def test_only_buddies_merge() -> None:
    left, right, spec = halves(2, 8, make_quantiser("exact"))
    shorter, _ = make_segment(SMALL, 1, first_page=18)
    elsewhere, _ = make_segment(SMALL, 2, first_page=18, seed="other")
    for pair in ((right, left), (left, left), (left, shorter), (left, elsewhere)):
        with pytest.raises(FormatError, match="not neighbours of one length"):
            merge_segments(spec, *pair)
    odd = [make_segment(SMALL, 2, first_page=p, codec="hevc")[0] for p in (18, 20)]
    with pytest.raises(FormatError, match="not buddies"):
        merge_segments(spec, *odd)
