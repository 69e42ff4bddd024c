"""Tests of the GPU path with its kernels, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

from sgl_kvfetch.codec.container.reader import CellFrames
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.plane.fetch.sink import GuardedSink
from sgl_kvfetch.plugin.device.cuda_pages import CudaPages
from sgl_kvfetch.triton_kernels import runtime
from sgl_kvfetch.types import TENSORS, KVGeometry
from tests.plugin.device.cuda_pages import (
    NUM_PAGES,
    NUM_SLOTS,
    PLACES,
    Segment,
    cells_of,
    make_pages,
    restore_all,
    slots_of,
    stored,
)
from tests.plugin.device.fake_streams import FakeDevice
from tests.segments import make_segment

pytestmark = pytest.mark.filterwarnings("ignore")


def test_by_the_kernels(exact: Segment, decoded: list[CellFrames]) -> None:
    """Runs the kernels in Triton's interpreter, as all tests without a GPU do."""
    assert runtime.INTERPRETED
    device = FakeDevice()
    pages = make_pages(device)
    cell = decoded[0]
    opened = pages.open_round(slots_of(PLACES))
    opened.restore(cell, range(4), range(4), GuardedSink(opened).run)
    device.run()
    assert (cell.layers, cell.heads) == (range(3), range(2))
    for tensor in TENSORS:
        assert torch.equal(stored(pages, tensor, PLACES[:4])[:, :3], exact[1][tensor][:16, :3])


def test_latent_vectors() -> None:
    """Both parts of MLA's vectors, which are one tensor in SGLang's pool, restored by the kernels and read again."""
    geometry = KVGeometry(num_layers=4, num_heads=1, k_head_dim=16, v_head_dim=48, page_size=4, dtype="bfloat16")
    pool = MLATokenToKVPool(NUM_SLOTS, 4, torch.bfloat16, 48, 16, 4, "cpu", False)
    for buffer in pool.kv_buffer:
        buffer.fill_(float("nan"))
    device = FakeDevice()
    pages = CudaPages(pool, 4, device, device.forward)
    assert pages.geometry == geometry
    segment = make_segment(geometry, NUM_PAGES, span_pages=4)
    cells = [reader.decode_frames(cell, data) for reader, cell, data in cells_of(segment, make_quantiser("exact"))]
    restore_all(cells, pages.open_round(slots_of(PLACES)))
    device.run()
    latent, rotated = segment[1]["v"], segment[1]["k"]
    expected = torch.cat([latent, rotated], dim=-1)  # (tokens, layers, heads, dim)
    assert torch.equal(torch.stack([x[slots_of(PLACES)] for x in pool.kv_buffer], dim=1), expected)
    assert all(bool(x[slots_of([1, 5])].isnan().all()) for x in pool.kv_buffer)
