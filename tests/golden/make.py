"""Write the golden segments again: ``python -m tests.golden.make``. Only a new format version is a reason to."""

from dataclasses import replace
from pathlib import Path

import torch

from sgl_kvfetch.container.segment import SegmentReader
from sgl_kvfetch.quant import Quantiser, make_quantiser
from sgl_kvfetch.quant.klt import KltQuantiser
from sgl_kvfetch.quant.profile import load_profile
from sgl_kvfetch.quant.rope import Rope
from sgl_kvfetch.types import KVGeometry
from tests.quant.profiles import make_profile
from tests.segments import make_segment

FOLDER = Path(__file__).parent
PROFILE = FOLDER / "klt.profile"
STEP = 2.0  # of klt: coefficients of two integers, and some that are left out
GEOMETRY = KVGeometry(num_layers=4, num_heads=2, k_head_dim=16, v_head_dim=8, page_size=16, dtype="bfloat16")
FIRST_PAGE = 8
CASES = [
    ("exact", "hevc", FIRST_PAGE),
    ("exact", "hevc420", FIRST_PAGE),
    ("exact", "deflate", FIRST_PAGE),
    ("uint8", "hevc", FIRST_PAGE),
    ("uint8", "zstd", FIRST_PAGE),
    ("cachegen", "hevc", FIRST_PAGE),
    ("klt", "hevc", 0),  # with an exact token
    ("klt", "zstd", FIRST_PAGE),
]


def golden_quantiser(name: str) -> Quantiser:
    return KltQuantiser(load_profile(PROFILE), step=STEP) if name == "klt" else make_quantiser(name)  # type: ignore[arg-type]


def restored(reader: SegmentReader, data: bytes) -> torch.Tensor:
    """The values of all cells, K before V, bfloat16."""
    values = []
    for cell in reader.manifest.cells():
        values += reader.dequantise_cell(cell, reader.decode_cell(cell, data[slice(*reader.cell_range(cell))]))
    return torch.cat([x.flatten() for x in values])


def main() -> None:
    rope = Rope(inv_freq=tuple(10000 ** (-i / 8) for i in range(8)))
    profile = make_profile(
        num_layers=4, num_heads=2, head_dim=16, v_head_dim=8, cell_layers=3, cell_heads=1, rope=rope, num_sinks=1
    )
    # Tokens of several scales.
    cells = {
        key: replace(cell, sensitivity=torch.linspace(-0.5, 0.5, len(cell.sensitivity)))
        for key, cell in profile.cells.items()
    }
    replace(profile, cells=cells).save(PROFILE)
    for name, codec, first_page in CASES:
        quantiser = golden_quantiser(name)
        coded, _ = make_segment(GEOMETRY, 4, quantiser=quantiser, codec=codec, first_page=first_page, span_pages=4)
        stem = FOLDER / f"{name}-{codec}"
        stem.with_suffix(".kvm").write_bytes(coded.manifest.encode())
        stem.with_suffix(".kvd").write_bytes(coded.data)
        values = restored(SegmentReader(coded.manifest, quantiser), coded.data)
        stem.with_suffix(".values").write_bytes(values.view(torch.uint8).numpy().tobytes())


if __name__ == "__main__":
    main()
