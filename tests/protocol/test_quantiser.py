"""The cells that the engine expects are those that the data plane writes."""

from __future__ import annotations

import pytest

from sgl_kvfetch.codec import KltQuantiser, Quantiser, SegmentSpec
from sgl_kvfetch.codec.container.reader import cell_place
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.keys import PAGE_HASH_BYTES
from sgl_kvfetch.protocol import parse_config
from sgl_kvfetch.protocol.quantiser import cell_heads, span_pages, written_places
from sgl_kvfetch.types import KVGeometry
from tests.codec.quant.profiles import make_profile
from tests.segments import make_heads

GEOMETRY = KVGeometry(num_layers=5, num_heads=4, k_head_dim=16, v_head_dim=16, page_size=16, dtype="bfloat16")


@pytest.mark.parametrize(
    "quantiser", [make_quantiser("exact"), make_quantiser("cachegen"), KltQuantiser(make_profile(num_layers=5))]
)
@pytest.mark.parametrize("most_pages", [None, 8])
def test_places_are_those_of_what_is_written(quantiser: Quantiser, most_pages: int | None) -> None:
    config = parse_config({"store": "http://kv", "max_tp_size": 2})
    heads = make_heads(GEOMETRY, quantiser)
    wanted = cell_heads(heads, config.max_tp_size)
    assert wanted == 2
    spec = SegmentSpec(heads, quantiser, "ans", "flat", span_pages(heads, most_pages), wanted)
    manifest = spec.manifest(0, None, [bytes(PAGE_HASH_BYTES)] * spec.span_pages)
    expected = [cell_place(manifest, cell) for cell in manifest.span_cells(0)]
    assert written_places(config, heads, quantiser, most_pages) == expected
    assert len(expected[0].tokens) == (1024 if most_pages is None else 128)
