"""Tests of the GPU path on the CPU: which pools it takes, what it reads, and what it prepares."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

from sgl_kvfetch import metrics
from sgl_kvfetch.codec.cuda_streams import Device, Stream
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plugin import starting
from sgl_kvfetch.plugin.device import linker, pages as pages_module
from sgl_kvfetch.plugin.device.gpu_pages import CudaPages
from sgl_kvfetch.plugin.device.pages import DevicePages, EnginePools
from sgl_kvfetch.protocol.config import parse_config
from sgl_kvfetch.protocol.messages import Start
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
    """A rotation serves all cells of its span. Beyond the room for them a random one goes, so that some are still there
    when a longer prompt asks for all of its own again, in their order."""
    device = FakeDevice()
    pages, calls = make_pages(device), []
    pages._most_table_bytes = 64 << 10

    def table(number: int, device: torch.device) -> torch.Tensor:
        calls.append(number)
        return torch.full((1 << 7 if number < 100 else 65 << 7,), number, device=device)

    def ask(numbers: Iterable[int]) -> int:
        calls.clear()
        assert all(int(pages.resident(table, number)[0]) == number for number in numbers)
        return len(calls)

    assert [ask(range(64)) for _ in range(2)] == [64, 0]
    assert ask(range(96)) == 32
    assert all(0 < ask(range(96)) < 96 for _ in range(3))
    assert pages._table_bytes == sum(x.nbytes for x in pages._tables.values()) == 64 << 10
    assert len(pages.resident(table, 100)) == 65 << 7  # never kept
    assert pages._table_bytes == 64 << 10


def test_what_is_kept_of_rotations_fits_the_device() -> None:
    """A profile's rotations may be many, and tables are made before the first request."""
    device = FakeDevice()
    device.num_free_bytes = 16 * (200 << 10)
    pages = make_pages(device, WIDE)
    quantiser = make_klt()
    places = written_places(parse_config({"store": "http://kv"}), make_heads(WIDE, quantiser), quantiser, 64)
    pages.prepare(quantiser, places)
    assert 0 < pages._table_bytes <= 200 << 10
    pages.release()
    assert not pages._tables and not pages._inverses and not pages._models  # noqa: PT018


def test_the_log_says_how_much_of_the_gpus_memory_is_ours(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    device = FakeDevice()
    pages = make_pages(device)
    device.num_free_bytes -= 300 << 20
    pages.log_memory()
    assert "uses 300 MiB of the GPU beside the KV pool, and up to 32 MiB more" in caplog.text
    assert "--mem-fraction-static does not count: 512 MiB were free before" in caplog.text


def test_kernels_are_compiled_before_the_data_plane_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    quantiser = make_klt()
    pages = make_pages(FakeDevice(), WIDE)
    compiled: list[int] = []
    monkeypatch.setattr(starting, "DataPlane", lambda *_: compiled.append(len(pages._compiled)))
    config = parse_config({"store": "http://nowhere"})
    for takes_code in (False, True):
        opening = starting.Opening(make_heads(WIDE, quantiser), 0, pages, None, takes_code=takes_code)
        opening.open(config, quantiser)
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
    started: list[Start] = []
    monkeypatch.setattr(starting, "DataPlane", lambda start, *_: started.append(start))
    config = parse_config({"store": "http://nowhere", "mode": "read_only"})
    opening = starting.Opening(make_heads(WIDE, quantiser), 0, pages, None, takes_code=True)
    opening.open(config, quantiser)
    assert [start.takes_code for start in started] == [False]
    assert "klt is decoded and restored on the CPU: " in caplog.text
    assert metrics.LEFT_TO_CPU.labels("restore")._value.get() == 1
    assert not pages._inverses  # memory may be short
    errors.clear()
    monkeypatch.undo()
    monkeypatch.setattr(starting, "DataPlane", lambda start, *_: started.append(start))
    opening.open(config, quantiser)
    assert [start.takes_code for start in started] == [False, True]
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
    reads = pages.open_reads(slots_of(PLACES).cuda())
    for tensor in TENSORS:
        found = reads.read(tensor, range(NUM_PAGES))  # (pages, page_size, layers, heads, dim)
        assert all(bool((found[:, :, layer] == layer).all()) for layer in range(pages.geometry.num_layers))
    assert pages.wait_until_unused(60)
