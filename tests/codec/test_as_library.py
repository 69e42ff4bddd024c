"""The codec without SGLang, stores or a server, entered by its door: the example of decision 32."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from sgl_kvfetch.codec import CellValues, SegmentReader, SegmentSpec, decode_manifest
from sgl_kvfetch.codec.bitstream.registry import resolution_for
from sgl_kvfetch.codec.container.segment import encode_segment
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.keys import HeadSlice, Namespace

PAGE_SIZE, PAGES, LAYERS, HEADS, DIM = 16, 8, 6, 2, 32


def encode(values: CellValues) -> tuple[bytes, bytes]:
    """Encode eight pages. Return a manifest and data: two byte strings that any store can keep."""
    quantiser = make_quantiser("exact")
    namespace = Namespace(
        model="any name of the weights",
        model_dtype="",
        attention="mha",
        kv_dtype="bfloat16",
        page_size=PAGE_SIZE,
        num_layers=LAYERS,
        first_layer=0,
        num_heads=HEADS,
        k_head_dim=DIM,
        v_head_dim=DIM,
        quantiser=quantiser.identity,
    )
    spec = SegmentSpec(
        HeadSlice(namespace, range(HEADS)), quantiser, "ans", resolution_for("ans", "240p"), span_pages=2
    )
    hashes = [page.to_bytes(32, "big") for page in range(PAGES)]
    segment = encode_segment(spec, {"k": values.k, "v": values.v}, 0, None, hashes)
    return segment.manifest.encode(), segment.data


def restore(manifest: bytes, data: bytes, pages: range) -> CellValues:
    """Decode a range of pages, ``(tokens, layers, heads, dim)``. Only the spans that have some of them are decoded, and
    only their bytes are looked at."""
    reader = SegmentReader(decode_manifest(manifest), make_quantiser("exact"))
    out = CellValues(*(torch.zeros(len(pages) * PAGE_SIZE, LAYERS, HEADS, DIM, dtype=torch.bfloat16) for _ in "kv"))
    for span in range(PAGES // reader.manifest.span_pages):
        of_span = range(*reader.manifest.span_range(span))
        wanted = range(max(of_span.start, pages.start), min(of_span.stop, pages.stop))
        if not wanted:
            continue
        tokens, place = (
            slice(*((page - first) * PAGE_SIZE for page in (wanted.start, wanted.stop)))
            for first in (of_span.start, pages.start)
        )
        for cell in reader.span_cells(span):
            quantised = reader.decode_cell(cell, reader.chunks_in(cell, [data]))
            layers, heads = reader.manifest.grid.layers(cell.layer_group), reader.heads_of(cell)
            into = out.tokens(place).cell(layers, heads)
            for part, restored in zip(into, reader.dequantise_cell(cell, quantised, tokens), strict=True):
                part.copy_(restored)
    return out


@pytest.mark.parametrize("pages", [range(8), range(2, 4), range(1, 6)])
def test_any_pages_come_back_from_bytes(pages: range) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = PAGES * PAGE_SIZE, LAYERS, HEADS, DIM
    values = CellValues(*(torch.randn(shape, generator=generator).bfloat16() for _ in "kv"))
    tokens = slice(pages.start * PAGE_SIZE, pages.stop * PAGE_SIZE)
    for x, restored in zip(values, restore(*encode(values), pages), strict=True):
        assert torch.equal(restored, x[tokens])


@pytest.mark.process
def test_it_needs_no_engine_and_no_network() -> None:
    script = "import sys, tests.codec.test_as_library as t; print(*{m.partition('.')[0] for m in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert {"sglang", "aiohttp", "obstore", "redis", "triton", "av"}.isdisjoint(loaded)
