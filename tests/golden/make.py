"""Write the golden segments again: ``python -m tests.golden.make``. Only a new format version is a reason to.

Data and values come out as they were. The manifests of version 1.0 stay as its writer left them; those of 1.1, with
frame sums, lie beside them.
"""

from pathlib import Path

import torch

from sgl_kvfetch.container.segment import SegmentReader
from sgl_kvfetch.quant import make_quantiser
from sgl_kvfetch.types import KVGeometry
from tests.segments import make_segment

FOLDER = Path(__file__).parent
GEOMETRY = KVGeometry(num_layers=4, num_heads=1, k_head_dim=64, v_head_dim=48, page_size=16, dtype="bfloat16")
CASES = [
    ("exact", "hevc"),
    ("exact", "hevc420"),
    ("exact", "deflate"),
    ("uint8", "hevc"),
    ("uint8", "zstd"),
    ("cachegen", "hevc"),
]
CASES_1_1 = [case for case in CASES if case[1].startswith("hevc")]


def main() -> None:
    for quantiser_name, codec in CASES_1_1:
        quantiser = make_quantiser(quantiser_name)  # type: ignore[arg-type]
        coded, _ = make_segment(GEOMETRY, 4, quantiser=quantiser, codec=codec, first_page=8, span_pages=4)
        reader = SegmentReader(coded.manifest, quantiser)
        stem = FOLDER / f"{quantiser_name}-{codec}"
        (FOLDER / f"{stem.name}-1.1.kvm").write_bytes(coded.manifest.encode())
        stem.with_suffix(".kvd").write_bytes(coded.data)
        with stem.with_suffix(".values").open("wb") as out:
            for cell in coded.manifest.cells():
                piece = coded.data[slice(*reader.cell_range(cell))]
                values = reader.dequantise_cell(cell, reader.decode_cell(cell, piece))
                out.write(values.contiguous().view(torch.uint8).numpy().tobytes())


if __name__ == "__main__":
    main()
