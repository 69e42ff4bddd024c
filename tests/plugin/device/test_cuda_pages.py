"""Tests of the GPU path on the CPU: which pools it takes, what it reads, and what it prepares."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

from sgl_kvfetch import metrics
from sgl_kvfetch.codec.cuda_streams import Device, Stream
from sgl_kvfetch.codec.quant.rope import Rotations
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plugin import starting
from sgl_kvfetch.plugin.device import linker, pools as pools_module
from sgl_kvfetch.plugin.device.gpu_pages import CudaPages
from sgl_kvfetch.plugin.device.pools import DevicePages, EnginePools
from sgl_kvfetch.protocol import quantiser as quantiser_module
from sgl_kvfetch.protocol.config import parse_config
from sgl_kvfetch.protocol.quantiser import written_places
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
    read_pages,
    slots_of,
)
from tests.plugin.device.fake_streams import FakeDevice
from tests.segments import make_heads

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("reference")]


def test_a_gpu_is_used_with_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    device = FakeDevice()
    monkeypatch.setattr(pools_module, "Device", lambda _: device)
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
    read = [x.flatten(0, 1) for x in read_pages(pages.open_reads(slots_of(PLACES)), NUM_PAGES, geometry)]
    latent = torch.stack([x[slots_of(PLACES)] for x in pool.kv_buffer], dim=1)  # (tokens, layers, heads, dim)
    assert torch.equal(torch.cat([read[1], read[0]], dim=-1), latent)


@pytest.mark.parametrize(("room_kib", "num_kept"), [(1024, 8), (60, 3), (4, 0)])
def test_the_rotations_of_the_first_spans_are_made_before_the_first_request(
    room_kib: int, num_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as they fit the device and the longest prompt. The device makes the others when a load needs them."""
    made, make_table = list[int](), Rotations.make_table

    def count(self: Rotations, first_token: int, num_tokens: int, device: torch.device | None = None) -> torch.Tensor:
        assert device == torch.device("cpu")
        made.append(first_token)
        return make_table(self, first_token, num_tokens, device)

    monkeypatch.setattr(Rotations, "make_table", count)
    monkeypatch.setattr(quantiser_module, "SPAN_TOKENS", 64)
    device = FakeDevice()
    device.num_free_bytes = 16 * (room_kib << 10)
    pages, quantiser = make_pages(device, WIDE), make_klt()
    places = written_places(parse_config({"store": "http://kv"}), make_heads(WIDE, quantiser), quantiser, 64)
    pages.prepare(quantiser, places)
    assert quantiser.profile is not None
    rotations = quantiser.profile.rotations
    assert rotations is not None
    for first_token in range(0, 512, 64):
        made.clear()
        table = pages.rotations_of(rotations, range(first_token, first_token + 64))
        assert torch.equal(table, make_table(rotations, first_token, 64))
        assert made.count(first_token) == (first_token >= num_kept * 64)
    pages.release()
    assert not pages._rotations and not pages._inverses and not pages._models  # noqa: PT018


def test_kernels_are_compiled_before_the_data_plane_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    quantiser = make_klt()
    pages = make_pages(FakeDevice(), WIDE)
    compiled: list[int] = []
    config = parse_config({"store": "http://nowhere"})
    for takes_code in (False, True):
        opening = starting.Opening(make_heads(WIDE, quantiser), 0, pages, None, None, {}, takes_code, None)
        opening.start(config, quantiser)
        compiled.append(len(pages._compiled))
    assert compiled == [0, 1]  # for the shape of its cells
    places = written_places(config, make_heads(WIDE, quantiser), quantiser)
    assert {*pages._inverses} == {(quantiser, x.layers, x.heads) for x in places}
    assert all(bool(buffer.isnan().all()) for buffer in (*memory(pages)["k"], *memory(pages)["v"]))


@pytest.mark.parametrize("fault", ["a kernel", "no memory"])
def test_without_its_kernels_the_gpu_gets_values(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The data plane is told before it starts. Another attempt may succeed."""
    quantiser, errors = make_klt(), [RuntimeError("PassManager::run failed"), torch.OutOfMemoryError("none left")]

    def fail(*_: object) -> None:
        if errors:
            raise errors.pop(0 if fault == "a kernel" else -1)

    pages = make_pages(FakeDevice(), WIDE)
    monkeypatch.setattr(CudaPages, "_compile" if fault == "a kernel" else "rotations_of", fail)
    config = parse_config({"store": "http://nowhere", "mode": "read_only"})
    opening = starting.Opening(make_heads(WIDE, quantiser), 0, pages, None, None, {}, True, None)
    assert not opening.start(config, quantiser).takes_code
    assert "klt is decoded and restored on the CPU: " in caplog.text
    assert metrics.LEFT_TO_CPU.labels("restore")._value.get() == 1
    assert not pages._inverses  # memory may be short
    errors.clear()
    monkeypatch.undo()
    assert opening.start(config, quantiser).takes_code
    assert metrics.LEFT_TO_CPU.labels("restore")._value.get() == 0


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    forward = torch.cuda.Stream()
    device = Device(torch.device("cuda", 0))
    pages = CudaPages(make_pool(device="cuda"), 4, device, cast(Stream, forward))
    with torch.cuda.stream(forward):
        for tensor in TENSORS:
            for layer, buffer in enumerate(memory(pages)[tensor]):
                buffer[slots_of(PLACES).cuda()] = float(layer)
    for found in read_pages(pages.open_reads(slots_of(PLACES).cuda()), NUM_PAGES):
        assert all(bool((found[:, :, layer] == layer).all()) for layer in range(pages.geometry.num_layers))
    assert pages.wait_until_unused(60)
