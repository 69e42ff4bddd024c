"""Measures how fast one thread restores stored cells into a pool: verifying, decoding, joining.

    python -m benchmarks.restoring

That is the whole of what a data plane's decoding thread does with bytes that have arrived. The cells are of
Llama-3.1-8B's shape, in six layers, of values whose channels differ in scale; pages are scattered. MB/s of raw
bfloat16, by CPU time, the fastest of some rounds; values are compared with what was stored.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
from collections.abc import Sequence

import torch
from rich.console import Console

from benchmarks.heads import make_heads
from benchmarks.report import make_parser, make_table, whole_number
from sgl_kvfetch.codec import SegmentReader, SegmentSpec
from sgl_kvfetch.codec.bitstream.registry import writers_resolution
from sgl_kvfetch.codec.container.segment import encode_segment
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.plane.fetch.fetcher import PoolPages, restore_cells
from sgl_kvfetch.plane.fetch.plan import PageSource, ReadUnit, span_parts
from sgl_kvfetch.protocol.arena import StridedPages
from sgl_kvfetch.types import TENSORS, KVGeometry, TensorName

_GEOMETRY = KVGeometry(6, 8, 128, 128, 64, "bfloat16")
_SPAN_PAGES = 16


def measure(codec: str, num_pages: int, rounds: int) -> tuple[float, float]:
    """Return raw bytes a second of CPU time, and the stored bytes for each raw one."""
    quantiser = make_quantiser("exact")
    resolution = writers_resolution(codec, "240p")
    spec = SegmentSpec(make_heads(_GEOMETRY, quantiser), quantiser, codec, resolution, _SPAN_PAGES)
    generator, values = torch.Generator().manual_seed(0), dict[TensorName, torch.Tensor]()
    shape = _GEOMETRY.num_layers, _GEOMETRY.num_heads, _GEOMETRY.k_head_dim
    for tensor in TENSORS:
        x = torch.randn((num_pages * _GEOMETRY.page_size, *shape), generator=generator)
        values[tensor] = (x * torch.randn(shape, generator=generator).exp()).to(_GEOMETRY.torch_dtype)
    hashes = [hashlib.sha256(str(page).encode()).digest() for page in range(num_pages)]
    segment = encode_segment(spec, values, 0, None, hashes)
    reader = SegmentReader(segment.manifest, quantiser)
    pool = [torch.zeros((2 * num_pages, _GEOMETRY.page_size, *shape), dtype=_GEOMETRY.torch_dtype) for _ in TENSORS]
    pages = random.Random(0).sample(range(2 * num_pages), num_pages)
    data, took_s = memoryview(bytearray(segment.data)), []
    for _ in range(rounds):
        destination, began_s = PoolPages(StridedPages(pool), pages), time.thread_time()
        for part in span_parts([PageSource(reader, page) for page in range(num_pages)]):
            for cell in reader.span_cells(part.span):
                restore_cells(destination, part, ReadUnit(reader, (cell,)), [reader.chunks_in(cell, [data])], {})
        took_s.append(time.thread_time() - began_s)
    for x, there in zip(values.values(), pool, strict=True):
        if not torch.equal(there[pages].flatten(0, 1), x):
            raise SystemExit(f"exact in {codec} gave other values")
    raw_bytes = sum(x.nbytes for x in values.values())
    return raw_bytes / min(took_s), len(segment.data) / raw_bytes


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("benchmarks.restoring", __doc__)
    parser.add_argument("--pages", type=whole_number, default=32, help="of 64 tokens, a power of two")
    parser.add_argument("--rounds", type=whole_number, default=5, help="how many")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = []
    for codec in ("ans", "zstd", "raw"):
        bytes_s, share = measure(codec, args.pages, args.rounds)
        rows.append((codec, f"{bytes_s / 1e6:,.0f}", f"{share:.2f}"))
    columns = ("`exact` in", "restored, MB/s", "of the raw bytes")
    Console().print(make_table("One thread, MB/s of raw KV", columns, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
