"""Segments written by the first release must be readable for ever: their bytes lie in tests/golden."""

import pytest
import torch

from sgl_kvfetch.container.manifest import decode_manifest
from sgl_kvfetch.container.segment import SegmentReader
from sgl_kvfetch.quant import make_quantiser
from tests.golden.make import CASES, CASES_1_1, FOLDER, GEOMETRY
from tests.segments import page_hashes


@pytest.mark.parametrize(
    ("quantiser_name", "codec", "version"), [*((*case, "") for case in CASES), *((*case, "-1.1") for case in CASES_1_1)]
)
def test_golden_segments_read_as_on_the_day_they_were_written(quantiser_name: str, codec: str, version: str) -> None:
    stem = FOLDER / f"{quantiser_name}-{codec}"
    raw = (FOLDER / f"{stem.name}{version}.kvm").read_bytes()
    manifest = decode_manifest(raw)
    data = stem.with_suffix(".kvd").read_bytes()
    expected = stem.with_suffix(".values").read_bytes()

    assert manifest.geometry == GEOMETRY
    assert manifest.first_page == 8
    assert list(manifest.page_hashes) == page_hashes(4, "", 8)
    assert codec in {chunk.codec for chunk in manifest.variants[0].chunks}
    # Digests and names are part of the format: other writers and stores go by them.
    assert manifest.key.num_pages == 4
    assert manifest.encode() == raw
    assert bool(manifest.variants[0].frame_sums) == bool(version)

    reader = SegmentReader(manifest, make_quantiser(quantiser_name))  # type: ignore[arg-type]
    restored = b""
    for cell in manifest.cells():
        quantised = reader.decode_cell(cell, data[slice(*reader.cell_range(cell))])
        values = reader.dequantise_cell(cell, quantised)
        restored += values.contiguous().view(torch.uint8).numpy().tobytes()
    assert restored == expected


def test_the_golden_namespaces_keep_their_digests() -> None:
    digests = {
        name: decode_manifest((FOLDER / f"{name}-hevc.kvm").read_bytes()).namespace.digest()
        for name in ("exact", "uint8", "cachegen")
    }
    assert digests == DIGESTS


DIGESTS = {
    "exact": "c34ea1cad2cc6a99539f8b297ce9b3ba",
    "uint8": "aad667b438f88920a15e40edcf65ad7d",
    "cachegen": "0d6274c997277ff362509f5c71f3994d",
}
