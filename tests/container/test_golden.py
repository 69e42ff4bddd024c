"""What was written once must be readable for ever: segments and a profile lie in tests/golden."""

import pytest
import torch

from sgl_kvfetch.container.manifest import decode_manifest
from sgl_kvfetch.container.segment import SegmentReader
from sgl_kvfetch.quant.klt import EXACT, UNIT, KltQuantiser
from tests.golden.make import CASES, FOLDER, GEOMETRY, golden_quantiser, restored
from tests.segments import page_hashes


@pytest.mark.parametrize(("name", "codec", "first_page"), CASES)
def test_golden_segments_read_as_on_the_day_they_were_written(name: str, codec: str, first_page: int) -> None:
    stem = FOLDER / f"{name}-{codec}"
    raw = stem.with_suffix(".kvm").read_bytes()
    manifest = decode_manifest(raw)
    expected = torch.frombuffer(bytearray(stem.with_suffix(".values").read_bytes()), dtype=torch.bfloat16)

    assert manifest.geometry == GEOMETRY
    assert manifest.first_page == first_page
    assert list(manifest.page_hashes) == page_hashes(4, "", first_page)
    assert codec in {chunk.codec for chunk in manifest.variants[0].chunks}
    # Digests and names are part of the format: other writers and stores go by them.
    assert manifest.key.num_pages == 4
    assert manifest.encode() == raw
    assert bool(manifest.variants[0].frame_sums) == codec.startswith("hevc")

    values = restored(SegmentReader(manifest, golden_quantiser(name)), stem.with_suffix(".kvd").read_bytes())
    if name == "klt":  # sums of products, which CPUs round differently
        assert torch.allclose(values.float(), expected.float(), rtol=2**-7, atol=0.01)
    else:
        assert torch.equal(values.view(torch.int16), expected.view(torch.int16))


def test_the_golden_klt_segments_have_all_that_klt_may_store() -> None:
    quantiser = golden_quantiser("klt")
    assert isinstance(quantiser, KltQuantiser)
    kept, wide = quantiser.coefficient_shares
    assert 0 < wide < kept < 1
    manifest = decode_manifest((FOLDER / "klt-hevc.kvm").read_bytes())
    reader, data = SegmentReader(manifest, quantiser), (FOLDER / "klt-hevc.kvd").read_bytes()
    for cell in manifest.cells():
        exponents, exact, _ = reader.decode_cell(cell, data[slice(*reader.cell_range(cell))])
        assert exponents[0] == EXACT
        assert exact.numel()
        assert len(set(exponents.tolist()) - {EXACT, UNIT}) >= 2


def test_the_golden_namespaces_keep_their_digests() -> None:
    digests = {
        name: decode_manifest((FOLDER / f"{name}-hevc.kvm").read_bytes()).namespace.digest()
        for name in ("exact", "uint8", "cachegen", "klt")
    }
    assert digests == DIGESTS


DIGESTS = {
    "exact": "75e4d282f6f453e5b6084435109154f0",
    "uint8": "dc563d52a6beb25040ef615ec5f36383",
    "cachegen": "34c62d012e0ea3db4e7f22ecd0f53aad",
    "klt": "add37a96bfa7895acd13c23efeda3d1c",
}
