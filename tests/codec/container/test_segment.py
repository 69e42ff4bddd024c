from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch

from sgl_kvfetch.codec.container.manifest import Manifest, decode_manifest
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.container.segment import SegmentSpec, encode_segment
from sgl_kvfetch.codec.layout.frames import FLAT
from sgl_kvfetch.codec.quant import PlainQuantiserName
from sgl_kvfetch.codec.quant.base import CellPlace, CellValues
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.registry import make_quantiser, quantiser_from_identity
from sgl_kvfetch.errors import CorruptError, FormatError
from sgl_kvfetch.types import TENSORS, KVGeometry, TensorName
from tests.codec.quant.profiles import make_profile, place_of, values_of
from tests.segments import SMALL, make_heads, make_segment, make_values, page_hashes

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


@pytest.mark.parametrize("codec", ["hevc", "hevc420", "zstd", "deflate"])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_exact_gives_back_every_bit(geometry: KVGeometry, codec: str) -> None:
    for num_pages in (1, 8):
        coded, values = make_segment(geometry, num_pages, codec=codec, span_pages=4)
        restored = read_all(coded.manifest, coded.data, make_quantiser("exact"))
        assert all(same_bits(restored[t], values[t]) for t in ("k", "v"))


@pytest.mark.parametrize("name", ["uint8", "cachegen"])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_quantised_gives_back_what_the_quantiser_alone_does(geometry: KVGeometry, name: PlainQuantiserName) -> None:
    quantiser = make_quantiser(name)
    coded, values = make_segment(geometry, 4, quantiser=quantiser, codec="hevc")
    restored = read_all(coded.manifest, coded.data, quantiser)
    k, v = values["k"], values["v"]
    for first in range(0, geometry.num_layers, 3):
        layers = range(first, min(first + 3, geometry.num_layers))
        part = CellValues(k[:, layers.start : layers.stop], v[:, layers.start : layers.stop])
        place = CellPlace(layers, range(geometry.num_heads), range(len(k)))
        alone = quantiser.dequantise(quantiser.quantise(part, place), k.dtype, place)
        for tensor, x in zip(TENSORS, alone, strict=True):
            assert same_bits(restored[tensor][:, layers.start : layers.stop], x)


@pytest.mark.parametrize("codec", ["hevc", "zstd"])
@pytest.mark.parametrize("resolution", ["240p", "1080p"])
def test_klt_gives_back_what_the_quantiser_alone_does(codec: str, resolution: str) -> None:
    """Cells of several heads and layers, a short last group, sinks in the first span alone."""
    profile = make_profile(num_layers=5, num_heads=4, cell_heads=2, v_head_dim=24, num_sinks=2)
    quantiser = KltQuantiser(profile, step=0.7)
    geometry = KVGeometry(5, 4, 16, 24, 8, "bfloat16")
    values = CellValues(*(x.bfloat16() for x in values_of(profile, 64)))
    spec = SegmentSpec(make_heads(geometry, quantiser), quantiser, codec, resolution, 4)
    coded = encode_segment(spec, {"k": values.k, "v": values.v}, 0, None, page_hashes(8))
    manifest = decode_manifest(coded.manifest.encode())
    assert len(set(manifest.coefficients)) > 1
    restored = read_all(manifest, coded.data, quantiser)
    for key in profile.cells:
        for first in (0, 32):
            place = place_of(profile, key, 32, first)
            part = values.tokens(slice(first, first + 32)).cell(place.layers, place.heads)
            expected = quantiser.dequantise(quantiser.quantise(part, place), torch.bfloat16, place)
            found = (
                CellValues(restored["k"], restored["v"])
                .tokens(slice(first, first + 32))
                .cell(place.layers, place.heads)
            )
            assert all(same_bits(x, y) for x, y in zip(found, expected, strict=True))
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


def test_cachegen_has_all_heads_in_a_cell() -> None:
    """Its scales are over all of them."""
    coded, _ = make_segment(SMALL, 4, quantiser=make_quantiser("cachegen"), cell_heads=1)
    assert coded.manifest.cell_heads == 2


def test_an_executor_changes_nothing() -> None:
    quantiser = make_quantiser("uint8")
    spec = SegmentSpec(make_heads(SMALL, quantiser), quantiser, "hevc", "240p", 2)
    values, hashes = make_values(SMALL, 8), page_hashes(8)
    with ThreadPoolExecutor(3) as pool:
        assert encode_segment(spec, values, 0, None, hashes, pool) == encode_segment(spec, values, 0, None, hashes)


def test_noise_is_not_coded_as_video() -> None:
    """The low mantissa bytes of exact values are noise; HEVC would make them a third larger."""
    geometry = KVGeometry(3, 8, 128, 128, 64, "float32")
    generator = torch.Generator().manual_seed(4)
    bits = torch.randint(1 << 23, (256, 3, 8, 128), generator=generator, dtype=torch.int32)
    values = (bits | 0x3F800000).view(torch.float32)  # the numbers from 1 to 2
    values *= torch.randint(0, 2, values.shape, generator=generator) * 2 - 1
    spec = SegmentSpec(make_heads(geometry), make_quantiser("exact"), "hevc", "240p", 4)
    coded = encode_segment(spec, {"k": values, "v": values}, 0, None, page_hashes(4))
    chunks = coded.manifest.variants[0].chunks
    assert [chunk.codec for chunk in chunks] == ["raw", "raw", "raw", "hevc"] * 2
    assert chunks[0].size_bytes == values.numel()
    assert chunks[3].size_bytes <= 0.01 * values.numel()


@pytest.mark.parametrize("num_layers", [3, 2])
def test_noise_is_stored_as_it_is_without_what_frames_add(num_layers: int) -> None:
    geometry = KVGeometry(num_layers, 8, 128, 128, 64, "bfloat16")
    values = torch.randn((256, num_layers, 8, 128), generator=torch.Generator().manual_seed(4)).bfloat16()
    spec = SegmentSpec(make_heads(geometry), make_quantiser("exact"), "ans", FLAT, 4)
    coded = encode_segment(spec, {"k": values, "v": values}, 0, None, page_hashes(4))
    chunks = coded.manifest.variants[0].chunks
    assert [chunk.codec for chunk in chunks] == ["raw", "ans-tables"] * 2
    assert chunks[0].size_bytes == values.numel()
    assert chunks[0].coded_checksum == chunks[0].decoded_checksum


@pytest.mark.parametrize(("num_different", "codec"), [(8, "zstd"), (256, "ans-tables")])
def test_zstd_is_tried_for_v_of_the_first_layers_where_its_tokens_repeat(num_different: int, codec: str) -> None:
    geometry = KVGeometry(1, 8, 128, 128, 64, "bfloat16")
    values = torch.randn((num_different, 1, 8, 128), generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    values = values.repeat(256 // num_different, 1, 1, 1)
    spec = SegmentSpec(make_heads(geometry), make_quantiser("exact"), "ans", "240p", 4)
    coded = encode_segment(spec, {"k": values, "v": values}, 0, None, page_hashes(4))
    _, k_high, _, v_high = coded.manifest.variants[0].chunks
    assert (k_high.codec, v_high.codec) == ("ans-tables", codec)


def test_another_quantisers_segment_is_refused() -> None:
    coded, _ = make_segment()
    with pytest.raises(FormatError, match="is quantised as"):
        SegmentReader(coded.manifest, make_quantiser("uint8"))


def test_a_codec_that_lies_about_its_integers_is_found_out() -> None:
    """The second checksum: the compressed bytes are as written, but decode to something else."""
    coded, _ = make_segment()
    variant = coded.manifest.variants[0]
    first = msgspec.structs.replace(variant.chunks[0], decoded_checksum=bytes(16))
    lying = msgspec.structs.replace(variant, chunks=(first, *variant.chunks[1:]))
    manifest = msgspec.structs.replace(coded.manifest, variants=(lying,))
    with pytest.raises(CorruptError, match="decoded k byte 0: checksum"):
        read_all(manifest, coded.data, make_quantiser("exact"))


def test_an_unknown_codec_is_refused_before_anything_is_read() -> None:
    coded, _ = make_segment()
    variant = coded.manifest.variants[0]
    chunks = (msgspec.structs.replace(variant.chunks[0], codec="av1"), *variant.chunks[1:])
    manifest = msgspec.structs.replace(coded.manifest, variants=(msgspec.structs.replace(variant, chunks=chunks),))
    with pytest.raises(FormatError, match="'av1' is unknown"):
        SegmentReader(manifest, make_quantiser("exact"))
