import itertools
from typing import Any

import pytest
import torch
import xxhash

from sgl_kvfetch.codec.bitstream.registry import resolution_for
from sgl_kvfetch.codec.container.manifest import Manifest, decode_manifest
from sgl_kvfetch.codec.container.objects import Pieces, bytes_of, views_of
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.container.segment import SegmentSpec, encode_segment
from sgl_kvfetch.codec.quant import PlainQuantiserName
from sgl_kvfetch.codec.quant.base import CellValues
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.registry import make_quantiser, quantiser_from_identity
from sgl_kvfetch.types import TENSORS, KVGeometry, TensorName
from tests.codec.quant.profiles import make_profile, values_of
from tests.segments import SMALL, make_heads, make_segment, page_hashes, there_and_back

GEOMETRIES = [
    KVGeometry(1, 1, 48, 48, 1, "float32"),
    KVGeometry(2, 8, 128, 128, 16, "bfloat16"),
    KVGeometry(4, 3, 80, 80, 16, "float16"),
    KVGeometry(7, 2, 96, 64, 5, "bfloat16"),
    KVGeometry(3, 128, 48, 48, 2, "float8_e4m3fn"),
    KVGeometry(1, 1, 256, 192, 64, "float8_e5m2"),
]


def read_all(manifest: Manifest, data: bytes, quantiser: Any) -> dict[TensorName, torch.Tensor]:
    reader = SegmentReader(manifest, quantiser)
    geometry = reader.geometry
    out: dict[TensorName, torch.Tensor] = {
        t: torch.full(
            (manifest.num_pages * geometry.page_size, geometry.num_layers, geometry.num_heads, geometry.head_dim(t)),
            57.0,
        ).to(geometry.torch_dtype)
        for t in TENSORS
    }
    for cell in manifest.cells():
        tokens = slice(*(page * geometry.page_size for page in manifest.span_range(cell.span)))
        layers, heads = manifest.grid.layers(cell.layer_group), manifest.grid.heads(cell.head_block)
        values = reader.dequantise_cell(cell, reader.decode_cell(cell, reader.chunks_in(cell, [data])))
        for whole, part in zip(CellValues(out["k"], out["v"]).tokens(tokens).cell(layers, heads), values, strict=True):
            whole.copy_(part)
    return out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


EXACT = [("exact", codec) for codec in ("hevc", "hevc420", "zstd", "deflate")]


@pytest.mark.parametrize(("name", "codec"), [*EXACT, ("uint8", "hevc"), ("cachegen", "hevc")])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_values_are_what_the_quantiser_alone_gives_back(
    geometry: KVGeometry, name: PlainQuantiserName, codec: str
) -> None:
    quantiser = make_quantiser(name)
    for num_pages in (1, 8):
        coded, values = make_segment(geometry, num_pages, quantiser=quantiser, codec=codec, span_pages=4)
        expected = values if name == "exact" else there_and_back(quantiser, values)
        restored = read_all(coded.manifest, coded.data, quantiser)
        assert all(same_bits(restored[t], expected[t]) for t in TENSORS)


@pytest.mark.parametrize(("codec", "resolution"), [("hevc", "240p"), ("zstd", "1080p")])
def test_values_of_klt_are_what_the_quantiser_alone_gives_back(codec: str, resolution: str) -> None:
    """Cells of several heads and layers, a short last group, sinks in one span alone. Decoding needs no profile."""
    profile = make_profile(num_layers=5, num_heads=4, cell_heads=2, v_head_dim=24, num_sinks=2)
    quantiser, geometry = KltQuantiser(profile, step=0.7), KVGeometry(5, 4, 16, 24, 8, "bfloat16")
    k, v = (x.bfloat16() for x in values_of(profile, 64))
    coded, values = make_segment(
        geometry, 8, quantiser=quantiser, codec=codec, resolution=resolution, span_pages=4, values={"k": k, "v": v}
    )
    manifest = decode_manifest(coded.manifest.encode())
    restored, expected = read_all(manifest, coded.data, quantiser), there_and_back(quantiser, values)
    assert all(same_bits(restored[t], expected[t]) for t in TENSORS)
    known = SegmentReader(manifest, quantiser_from_identity(quantiser.identity))
    for cell in manifest.cells():
        known.decode_cell(cell, known.chunks_in(cell, [coded.data]))


@pytest.mark.parametrize("name", ["exact", "uint8"])
def test_heads_are_the_same_in_cells_of_any_size(name: PlainQuantiserName) -> None:
    quantiser = make_quantiser(name)
    one, _ = make_segment(SMALL, 4, quantiser=quantiser, cell_heads=1)
    both, _ = make_segment(SMALL, 4, quantiser=quantiser)
    assert (one.manifest.cell_heads, both.manifest.cell_heads) == (1, 2)
    found, expected = (read_all(each.manifest, each.data, quantiser) for each in (one, both))
    assert all(same_bits(found[t], expected[t]) for t in TENSORS)
    coded, _ = make_segment(SMALL, 4, quantiser=make_quantiser("cachegen"), cell_heads=1)
    assert coded.manifest.cell_heads == 2  # its scales are over all of them


def codecs_for(values: torch.Tensor, codec: str) -> list[str]:
    """Return the codecs of the planes of K and of V, which are equal, of a segment of one span."""
    num_tokens, num_layers, _, _ = values.shape
    geometry = KVGeometry(num_layers, 8, 128, 128, 64, str(values.dtype).removeprefix("torch."))
    spec = SegmentSpec(make_heads(geometry), make_quantiser("exact"), codec, resolution_for(codec, "240p"), 4)
    coded = encode_segment(spec, {"k": values, "v": values}, 0, None, page_hashes(num_tokens // 64))
    chunks = coded.manifest.variants[0].chunks
    for chunk in chunks:
        assert chunk.codec != "raw" or chunk.coded_checksum == chunk.decoded_checksum
        assert chunk.size_bytes == values.numel() if chunk.codec == "raw" else chunk.size_bytes < values.numel()
    return [chunk.codec for chunk in chunks]


def test_noise_is_stored_as_it_is() -> None:
    """The low mantissa bytes of exact values are noise; HEVC would make them a third larger, and frames add to it."""
    generator = torch.Generator().manual_seed(4)
    bits = torch.randint(1 << 23, (256, 3, 8, 128), generator=generator, dtype=torch.int32)
    values = (bits | 0x3F800000).view(torch.float32)  # the numbers from 1 to 2
    values *= torch.randint(0, 2, values.shape, generator=generator) * 2 - 1
    assert codecs_for(values, "hevc") == ["raw", "raw", "raw", "hevc"] * 2
    assert codecs_for(torch.randn((256, 2, 8, 128), generator=generator).bfloat16(), "ans") == ["raw", "ans-tables"] * 2


@pytest.mark.parametrize(("num_different", "codec"), [(8, "zstd"), (256, "ans-tables")])
def test_zstd_is_tried_for_v_of_the_first_layers_where_its_tokens_repeat(num_different: int, codec: str) -> None:
    values = torch.randn((num_different, 1, 8, 128), generator=torch.Generator().manual_seed(5)).bfloat16()
    of_k_and_v = codecs_for(values.repeat(256 // num_different, 1, 1, 1), "ans")
    assert of_k_and_v[1::2] == ["ans-tables", codec]


PARTS: list[bytes | memoryview] = [b"abc", b"", memoryview(b"defg"), b"h"]
WHOLE = b"abcdefgh"


def test_pieces_are_one_content() -> None:
    pieces = Pieces(PARTS)
    assert len(pieces) == len(WHOLE)
    assert pieces.joined() == bytes_of(pieces) == b"".join(views_of(pieces)) == WHOLE
    assert pieces.hexdigest() == xxhash.xxh3_128_hexdigest(WHOLE)
    assert bytes_of(WHOLE) is WHOLE
    for start, end in itertools.product([None, *range(-2, 10)], repeat=2):
        assert pieces[start:end] == WHOLE[start:end]
