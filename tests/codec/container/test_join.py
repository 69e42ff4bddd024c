"""Short segments of a span become one, without changing a value."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from harness.small_segments import expiring
from sgl_kvfetch.codec.bitstream.base import MOST_LEVELS
from sgl_kvfetch.codec.container.join import join_segments
from sgl_kvfetch.codec.container.segment import CodedSegment, SegmentSpec, encode_segment
from sgl_kvfetch.codec.container.sides import encode_side, side_places
from sgl_kvfetch.codec.layout.frames import FLAT
from sgl_kvfetch.codec.quant import PlainQuantiserName
from sgl_kvfetch.codec.quant.base import CellValues, Quantiser, join_parts
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.errors import FormatError
from sgl_kvfetch.types import TENSORS, KVGeometry
from tests.codec.container.plain import cells_of, same
from tests.codec.quant.profiles import make_profile, values_of
from tests.segments import SMALL, make_heads, make_segment, page_hashes, with_side

SPAN = 8


def pieces_of(quantiser: Quantiser, lengths: Sequence[int], first_page: int = 16) -> list[CodedSegment]:
    found = []
    for num_pages in lengths:
        found.append(make_segment(SMALL, num_pages, quantiser=quantiser, span_pages=SPAN, first_page=first_page)[0])
        first_page += num_pages
    return found


def spec_of(quantiser: Quantiser) -> SegmentSpec:
    return SegmentSpec(make_heads(SMALL, quantiser), quantiser, "zstd", "240p", SPAN)


@pytest.mark.parametrize("name", ["exact", "uint8"])
@pytest.mark.parametrize("lengths", [(4, 4), (4, 2, 1, 1), (1, 1, 2, 4)], ids=str)
def test_integers_and_scales_stay_as_they_are(name: PlainQuantiserName, lengths: Sequence[int]) -> None:
    quantiser = make_quantiser(name)
    pieces = pieces_of(quantiser, lengths)
    joined = join_segments(spec_of(quantiser), pieces).joined()
    of_pieces = zip(*(cells_of(piece) for piece in pieces), strict=True)
    parts = quantiser.parts(torch.bfloat16)
    assert same(cells_of(joined), (join_parts(parts, each) for each in of_pieces))
    assert list(joined.manifest.page_hashes) == page_hashes(SPAN, "", 16)
    assert joined.manifest.span_pages == SPAN
    assert joined.manifest.previous_hash == page_hashes(1, "", 15)[0]


@pytest.mark.parametrize("num_levels", [1, MOST_LEVELS])
def test_klt_is_joined_with_its_exact_tokens_and_levels(num_levels: int) -> None:
    profile = make_profile(num_layers=4, num_heads=2, head_dim=16, cell_heads=1, num_sinks=3)
    quantiser = KltQuantiser(profile, step=0.5)
    values = CellValues(*(x.bfloat16() for x in values_of(profile, 4 * SPAN)))
    heads = make_heads(KVGeometry(4, 2, 16, 16, 4, "bfloat16"), quantiser)
    spec = SegmentSpec(heads, quantiser, "ans", FLAT, SPAN, num_levels=num_levels)
    hashes = page_hashes(SPAN)

    def coded(first: int, end: int) -> CodedSegment:
        of_pages = {t: x[4 * first : 4 * end] for t, x in zip(TENSORS, values, strict=True)}
        return encode_segment(spec, of_pages, first, hashes[first - 1] if first else None, hashes[first:end])

    joined = join_segments(spec, [coded(0, 4), coded(4, 6), coded(6, 8)]).joined()
    assert (joined.manifest, joined.contents) == (coded(0, SPAN).manifest, coded(0, SPAN).contents)


def test_side_pages_come_along_and_the_whole_expires_with_the_first_of_its_pieces() -> None:
    quantiser = make_quantiser("exact")
    left, right = pieces_of(quantiser, (4, 4))
    left, right = (
        with_side(x, *encode_side({("window", page): torch.full((40,), value, dtype=torch.uint8)}))
        for x, page, value in ((expiring(left, 7), 3, 1), (expiring(right, 5), 2, 2))
    )
    joined = join_segments(spec_of(quantiser), [left, right]).joined()
    assert side_places(joined.manifest).keys() == {("window", 3), ("window", 6)}
    assert len(joined.manifest.sides) == 1
    assert joined.manifest.expires == 5


def test_what_is_not_one_span_is_refused() -> None:
    quantiser = make_quantiser("exact")
    for lengths, first_page in (((4, 2), 16), ((4, 4, 4), 16), ((2, 4, 2), 18)):
        with pytest.raises(FormatError, match="expected segments that make up one span of 8 pages"):
            join_segments(spec_of(quantiser), pieces_of(quantiser, lengths, first_page))
