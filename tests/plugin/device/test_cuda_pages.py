"""Tests of the GPU path on the CPU: which pools it takes, what it reads and prepares, and in which order.

Work is done late and in random order, as far as streams and events allow. For each ordering rule, a test checks that
some of the tried orders give wrong results without the rule.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import cast
from unittest.mock import patch

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

from harness.metrics import own_metric
from harness.waiting import polls
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
    always_and_without,
    is_set,
    make_klt,
    make_pages,
    make_pool,
    memory,
    read_pages,
    set_slots,
    slots_of,
)
from tests.plugin.device.fake_streams import FakeDevice, FakeEvent
from tests.segments import make_heads

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("reference")]


def test_a_gpu_is_used_with_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    device, pool = FakeDevice(), make_pool()
    monkeypatch.setattr(pools_module, "Device", lambda _: device)
    pools = EnginePools(pool, range(4))
    caplog.clear()  # of what SGLang says of a pool
    caplog.set_level("INFO")
    pages, takes_code = linker._open_pages(pools, 4, device.forward)
    assert (type(pages), takes_code, caplog.text) == (DevicePages, False, "")
    pool.device = "cuda"
    pages, takes_code = linker._open_pages(pools, 4, device.forward)
    assert (type(pages), takes_code) == (CudaPages, True)
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
    monkeypatch.setattr(quantiser_module, "SPAN_TOKENS", 64)
    device, quantiser, make_table = FakeDevice(), make_klt(), Rotations.make_table
    device.num_free_bytes = 16 * (room_kib << 10)
    pages = make_pages(device, WIDE)
    places = written_places(parse_config({"store": "http://kv"}), make_heads(WIDE, quantiser), quantiser, 64)
    pages.prepare(quantiser, places)
    assert quantiser.profile is not None
    rotations = quantiser.profile.rotations
    assert rotations is not None
    for first_token in range(0, 512, 64):
        with patch.object(Rotations, "make_table", autospec=True, side_effect=make_table) as made:
            table = pages.rotations_of(rotations, range(first_token, first_token + 64))
        calls = [call.args[1:] for call in made.mock_calls]
        assert calls == [(first_token, 64, device.torch_device)] * (first_token >= num_kept * 64)
        assert torch.equal(table, make_table(rotations, first_token, 64))


@pytest.mark.parametrize("fault", ["", "a kernel", "no memory"])
def test_kernels_are_compiled_before_the_data_plane_starts(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If that fails, the GPU gets values: the data plane is told before it starts. Another attempt may succeed."""
    quantiser, pages, config = make_klt(), make_pages(FakeDevice(), WIDE), parse_config({"store": "http://nowhere"})
    heads = make_heads(WIDE, quantiser)
    opening = starting.Opening(heads, 0, pages, None, None, {}, True, None)

    def fail(*_: object) -> None:
        raise RuntimeError("PassManager::run failed") if fault == "a kernel" else torch.OutOfMemoryError("none left")

    if fault:
        with monkeypatch.context() as patch:
            patch.setattr(CudaPages, "_compile" if fault == "a kernel" else "rotations_of", fail)
            assert not opening.start(config, quantiser).takes_code
        assert "klt is decoded and restored on the CPU: " in caplog.text
        assert own_metric("sgl_kvfetch_left_to_cpu", work="restore") == 1
        assert not pages._inverses  # memory may be short
    assert opening.start(config, quantiser).takes_code
    assert own_metric("sgl_kvfetch_left_to_cpu", work="restore") == 0
    assert len(pages._compiled) == 1  # for the shape of its cells
    assert {*pages._inverses} == {(quantiser, x.layers, x.heads) for x in written_places(config, heads, quantiser)}
    assert all(bool(buffer.isnan().all()) for buffer in (*memory(pages)["k"], *memory(pages)["v"]))


def load(pages: CudaPages, slots: torch.Tensor, stream: Stream, value: float, *, fences: bool = True) -> None:
    """Launch a write to slots, as a load does."""
    there = pages.open_load(slots)
    for fence in pages.fences() if fences else ():
        stream.wait_event(fence)

    def write() -> None:
        for layer in range(pages.geometry.num_layers):
            for buffer in pages.layer_buffers(layer):
                buffer[there] = value

    pages.device.launch(stream, write)


@pytest.mark.parametrize("is_late", ["slots", "a pass"])
def test_loads_come_after_their_slots_are_computed_and_a_pass_that_still_writes_them(is_late: str) -> None:
    def is_right(seed: int, fences: bool) -> bool:
        device, slots = FakeDevice(seed), slots_of(PLACES)
        pages = make_pages(device)
        if is_late == "slots":
            slots = torch.full((32,), 500)
            device.launch(device.scheduler, lambda: slots.copy_(slots_of(PLACES)))
        else:
            device.forward_pass(lambda: set_slots(pages, PLACES, 3.0))  # its request has ended in the meantime
        load(pages, slots, pages.new_stream(), 5.0, fences=fences)
        device.run()
        return is_set(pages, PLACES, 5.0)

    assert always_and_without(is_right) == (True, False)


def test_pages_are_read_after_they_are_computed() -> None:
    def is_right(seed: int, fences: bool) -> bool:
        device = FakeDevice(seed)
        pages = make_pages(device)
        device.forward_pass(lambda: set_slots(pages, PLACES, 3.0))  # of a chunked prefill; SGLang does not wait for it
        with nullcontext() if fences else patch.object(pages, "fences", return_value=[]):
            opened = pages.open_reads(slots_of(PLACES))
        read = read_pages(opened, len(PLACES))
        assert [values.shape for values in read] == [(8, 4, 4, 2, 48), (8, 4, 4, 2, 64)]
        return all(bool((values == 3.0).all()) for values in read)

    assert always_and_without(is_right) == (True, False)


def test_pages_do_not_wait_for_the_pass_behind_which_others_are_handed_over() -> None:
    """A chunked prompt hands pages over in each pass, and the next pass is launched before they are read."""
    device = FakeDevice()
    pages = make_pages(device)
    device.forward_pass(lambda: set_slots(pages, PLACES, 3.0))
    first = pages.open_reads(slots_of(PLACES))
    device.run()
    device.forward.wait_event(FakeEvent(device))  # the next pass, whose end never comes
    pages.open_reads(slots_of(PLACES))
    assert all(bool((values == 3.0).all()) for values in read_pages(first, len(PLACES)))


def test_writing_to_the_store_does_not_hold_up_loads() -> None:
    device = FakeDevice()
    pages = make_pages(device)
    stream, fences = pages.new_stream(), pages.fences()
    device.forward.wait_event(FakeEvent(device))  # its end never comes
    pages._reader.after(pages.fences())
    for fence in fences:
        stream.wait_event(fence)
    device.launch(stream, lambda: set_slots(pages, PLACES, 5.0))
    device.run(lambda: is_set(pages, PLACES, 5.0))


def test_the_memory_goes_only_when_the_device_has_ended_all_loads_and_reads() -> None:
    """SGLang unmaps the pool then: what runs later would be an illegal access. Loads are launched, and late."""
    device = FakeDevice()
    pages = make_pages(device)
    forward_is_over = FakeEvent(device)
    device.forward.wait_event(forward_is_over)
    load(pages, slots_of(PLACES), pages.new_stream(), 5.0)
    pages._reader.after(pages.fences())
    assert not pages.wait_until_unused(0.01)
    held: list[bool] = []

    def wait() -> None:
        assert pages.wait_until_unused(60)
        held.append(is_set(pages, PLACES, 5.0))

    waiting = threading.Thread(target=wait)
    waiting.start()
    forward_is_over.is_done = True
    device.run()
    for _ in polls():  # events that are recorded since
        if not waiting.is_alive():
            break
        device.run()
    assert held == [True]
    device.forward.wait_event(FakeEvent(device))  # its end never comes
    pages._reader.after(pages.fences())
    assert not pages.wait_until_unused(0.01)


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
