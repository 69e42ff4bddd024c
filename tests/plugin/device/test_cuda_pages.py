"""Tests of the GPU path on the CPU: which pools it takes, what it reads, and what it prepares."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

from sgl_kvfetch.codec.container.segment import SegmentSpec
from sgl_kvfetch.codec.cuda_streams import Device, Stream
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plane.config import parse_config
from sgl_kvfetch.plugin import starting
from sgl_kvfetch.plugin.device import linker, pages as pages_module
from sgl_kvfetch.plugin.device.gpu_pages import CudaPages
from sgl_kvfetch.plugin.device.pages import DevicePages, EnginePools
from sgl_kvfetch.types import TENSORS, KVGeometry
from tests.plugin.device.cuda_pages import (
    NUM_PAGES,
    NUM_SLOTS,
    PLACES,
    WIDE,
    make_klt,
    make_pages,
    make_pool,
    memory,
    slots_of,
)
from tests.plugin.device.fake_streams import FakeDevice
from tests.segments import make_heads

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("reference")]


def test_a_gpu_is_used_with_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    device = FakeDevice()
    monkeypatch.setattr(pages_module, "Device", lambda _: device)
    pool = make_pool()
    pools = EnginePools(pool, range(4))
    caplog.clear()  # of what SGLang says of a pool
    pages, takes_code = linker._open_pages(pools, 4, device.forward)
    assert type(pages) is DevicePages
    assert not takes_code
    assert not caplog.records
    pool.device = "cuda"
    caplog.set_level("INFO")
    pages, takes_code = linker._open_pages(pools, 4, device.forward)
    assert isinstance(pages, CudaPages)
    assert takes_code
    assert "has run on one GPU so far" in caplog.text
    assert "kvfetch: ans is decoded on the GPU" in caplog.text
    monkeypatch.setenv("KVFETCH_GPU", "0")
    assert not linker._open_pages(pools, 4, device.forward)[1]
    pool.device = "xpu"
    with pytest.raises(UnsupportedError, match="device mode does not support xpu: add --enable-hierarchical-cache"):
        linker._open_pages(pools, 4, device.forward)


def test_latent_vectors_are_read() -> None:
    """Both parts of MLA's vectors, which are one tensor in SGLang's pool."""
    geometry = KVGeometry(num_layers=4, num_heads=1, k_head_dim=16, v_head_dim=48, page_size=4, dtype="bfloat16")
    pool = MLATokenToKVPool(NUM_SLOTS, 4, torch.bfloat16, 48, 16, 4, "cpu", False)
    for buffer in pool.kv_buffer:
        buffer.copy_(torch.randn(buffer.shape))
    device = FakeDevice()
    pages = CudaPages(pool, 4, device, device.forward)
    assert pages.geometry == geometry
    opened = pages.open_reads(slots_of(PLACES))
    read = [opened.read(tensor, range(NUM_PAGES)).flatten(0, 1) for tensor in TENSORS]
    latent = torch.stack([x[slots_of(PLACES)] for x in pool.kv_buffer], dim=1)  # (tokens, layers, heads, dim)
    assert torch.equal(torch.cat([read[1], read[0]], dim=-1), latent)


def test_tables_are_uploaded_once() -> None:
    """A rotation serves all cells of its span. The table that was not used for longest goes."""
    device = FakeDevice()
    pages, calls = make_pages(device), []

    def table(number: int) -> torch.Tensor:
        calls.append(number)
        return torch.tensor([number])

    found = [int(pages.resident(table, number)) for number in (1, 2, 1, *range(3, 66), 1, 2)]
    assert found == [1, 2, 1, *range(3, 66), 1, 2]
    assert calls == [1, 2, *range(3, 66), 2]
    assert len(pages._tables) == 64


def test_kernels_are_compiled_before_the_data_plane_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quantiser = make_klt()
    pages = make_pages(FakeDevice(), WIDE)
    compiled: list[int] = []
    monkeypatch.setattr(starting, "DataPlane", lambda *_: compiled.append(len(pages._compiled)))
    config = parse_config({"store": f"file://{tmp_path}"})
    for takes_code in (False, True):
        opening = starting.Opening(make_heads(WIDE, quantiser), 0, pages, None, takes_code=takes_code)
        opening.open(config, quantiser)
    assert compiled == [0, 1]  # for the shape of its cells
    places = starting._cell_places(SegmentSpec(make_heads(WIDE, quantiser), quantiser, "zstd", "240p", 64))
    assert {*pages._inverses} == {(quantiser, x.layers, x.heads) for x in places}
    assert all(bool(buffer.isnan().all()) for buffer in (*memory(pages)["k"], *memory(pages)["v"]))


def test_a_failure_to_compile_is_only_logged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantiser = make_klt()
    pages = make_pages(FakeDevice(), WIDE)
    monkeypatch.setattr(CudaPages, "klt_model", lambda *_: 1 / 0)
    started: list[object] = []
    monkeypatch.setattr(starting, "DataPlane", lambda *arguments: started.append(arguments))
    config = parse_config({"store": f"file://{tmp_path}", "mode": "read_only"})
    starting.Opening(make_heads(WIDE, quantiser), 0, pages, None, takes_code=True).open(config, quantiser)
    assert "the restore kernels were not compiled at the start" in caplog.text
    assert started


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    forward = torch.cuda.Stream()
    device = Device(torch.device("cuda", 0))
    pages = CudaPages(make_pool(device="cuda"), 4, device, cast(Stream, forward))
    with torch.cuda.stream(forward):
        for tensor in TENSORS:
            for layer, buffer in enumerate(memory(pages)[tensor]):
                buffer[slots_of(PLACES).cuda()] = float(layer)
    reads = pages.open_reads(slots_of(PLACES).cuda())
    for tensor in TENSORS:
        found = reads.read(tensor, range(NUM_PAGES))  # (pages, page_size, layers, heads, dim)
        assert all(bool((found[:, :, layer] == layer).all()) for layer in range(pages.geometry.num_layers))
    assert pages.wait_until_unused(60)
