"""Tests of the GPU path on the CPU: what it restores, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pytest
import torch

from sgl_kvfetch.codec.container.reader import CellFrames, SegmentReader
from sgl_kvfetch.codec.cuda_streams import Device, Stream
from sgl_kvfetch.codec.quant import klt
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plane.fetch.restore import restore_cell
from sgl_kvfetch.plane.fetch.sink import GuardedSink
from sgl_kvfetch.plugin.device import cache, pages as pages_module
from sgl_kvfetch.plugin.device.cuda_pages import DEVICE_BYTES, CudaPages
from sgl_kvfetch.plugin.device.pages import DevicePages
from sgl_kvfetch.types import TENSORS
from tests.plugin.device.cuda_pages import (
    NUM_PAGES,
    NUM_SLOTS,
    PLACES,
    WIDE,
    Segment,
    cells_of,
    frames_bytes,
    make_pages,
    make_pool,
    make_wide,
    memory,
    restore_all,
    slots_of,
    unordered,
)
from tests.plugin.device.fake_streams import FakeDevice
from tests.segments import make_segment

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("reference")]


@pytest.mark.parametrize("name", ["exact", "uint8", "cachegen", "klt"])
def test_the_same_values_as_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for product in ("_HAS_BFLOAT16", "_HAS_INTEGERS"):
        monkeypatch.setattr(klt, product, False)  # these products round more than one in float32
    quantiser, segment = make_wide(name)
    expected = DevicePages(make_pool(WIDE), WIDE.page_size)
    cells = []
    for reader, cell, data in cells_of(segment, quantiser):
        restore_cell(
            reader, cell, data, {}, span_pages=range(3, 64, 4), pool_pages=range(1, 17), sink=GuardedSink(expected)
        )
        cells.append(reader.decode_frames(cell, data))
    assert {len(cell.layers) for cell in cells} == {3, 1}
    # As frames go into a buffer: one by one, or all. Coefficients are restored all at once.
    ways = [(1, 1)] if name == "klt" else [(1, 2 * 3), (3, 2)]
    for at_once, num_writes in ways:
        device = FakeDevice()
        room = {} if name == "klt" else {"restore_buffer_bytes": at_once * frames_bytes(cells[0]) // 3 + 60_000}
        pages = make_pages(device, WIDE, **room)
        for frames in cells:
            guard = Mock(side_effect=GuardedSink(pages).run)
            opened = pages.open_round(slots_of(list(range(1, 17)), 16))
            opened.restore(frames, range(3, 64, 4), range(16), guard).result(60)
            assert guard.call_count == num_writes
        device.run()
        for tensor in TENSORS:
            for ours, theirs in zip(memory(pages)[tensor], memory(expected)[tensor], strict=True):
                if name == "klt":  # sums in another order
                    torch.testing.assert_close(ours, theirs, rtol=2.0**-7, atol=1e-5, equal_nan=True)
                else:
                    assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


def test_a_picture_larger_than_a_buffer_is_refused(decoded: list[CellFrames]) -> None:
    pages = make_pages(FakeDevice(), restore_buffer_bytes=1000)
    with pytest.raises(UnsupportedError, match=r"a frame of 2 parts, .* does not fit into buffers of 1000 bytes"):
        restore_all(decoded, unordered(pages, PLACES))


def test_coefficients_that_do_not_fit_at_once_are_refused() -> None:
    quantiser, segment = make_wide("klt")
    reader, cell, data = next(cells_of(segment, quantiser))
    frames = reader.decode_frames(cell, data)
    pages = make_pages(FakeDevice(), WIDE, restore_buffer_bytes=frames_bytes(frames) // 2)  # no room for a row
    with pytest.raises(UnsupportedError, match=r"bytes do not fit into staging memory"):
        pages.restore(frames, range(3, 64, 4), range(1, 17), GuardedSink(pages).run).result(60)


@pytest.mark.parametrize("when", ["before", "between two pictures"])
def test_nothing_is_written_once_the_sink_is_closed(when: str) -> None:
    quantiser = make_quantiser("exact")
    segment = make_segment(WIDE, 64, span_pages=64)
    device = FakeDevice()
    pages = make_pages(device, WIDE, restore_buffer_bytes=950_000)
    reader, cell, data = next(cells_of(segment, quantiser))
    calls = iter([when != "before", False])

    def guarded(write: Callable[[], None]) -> bool:
        if is_open := next(calls):
            write()
        return is_open

    opened = pages.open_round(slots_of(list(range(1, 17)), 16))
    opened.restore(reader.decode_frames(cell, data), range(3, 64, 4), range(16), guarded)
    device.run()
    untouched = memory(pages)["k"][0].isnan().all(dim=(1, 2))
    assert untouched.sum() == (NUM_SLOTS + 16 if when == "before" else NUM_SLOTS + 16 - first_picture_tokens(reader))


def first_picture_tokens(reader: SegmentReader) -> int:
    """Return how many of the wanted tokens the first picture holds."""
    num_frames = reader.variant.layouts["k"].num_frames((1024,))
    return sum(token % num_frames == 0 for page in range(3, 64, 4) for token in range(page * 16, page * 16 + 16))


def test_device_memory_of_a_fetch_is_bounded() -> None:
    assert DEVICE_BYTES < 64 << 20


def test_a_gpu_is_used_with_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    device = FakeDevice()
    monkeypatch.setattr(pages_module, "Device", lambda _: device)
    pool = make_pool()
    caplog.clear()  # of what SGLang says of a pool
    worker = SimpleNamespace(model_runner=SimpleNamespace(forward_stream=device.forward))
    assert type(cache._open_pages(pool, 4, worker)) is DevicePages
    assert not caplog.records
    pool.device = "cuda"
    caplog.set_level("INFO")
    pages = cache._open_pages(pool, 4, worker)
    assert isinstance(pages, CudaPages)
    assert list(pages.spare_decoders) == ["ans"]
    assert "has not been run by its authors" in caplog.text
    assert "kvfetch: ans is decoded on the GPU, too" in caplog.text
    monkeypatch.setenv("KVFETCH_GPU_ANS", "0")
    pages = cache._open_pages(pool, 4, worker)
    assert isinstance(pages, CudaPages)
    assert not pages.spare_decoders
    pool.device = "xpu"
    with pytest.raises(UnsupportedError, match="device mode does not support xpu: add --enable-hierarchical-cache"):
        cache._open_pages(pool, 4, worker)


@pytest.mark.gpu
def test_on_a_gpu(exact: Segment, decoded: list[CellFrames]) -> None:
    forward = torch.cuda.Stream()
    pages = CudaPages(make_pool(device="cuda"), 4, Device(torch.device("cuda", 0)), cast(Stream, forward))
    opened = pages.open_round(slots_of(PLACES).cuda())
    restore_all(decoded, opened)
    opened.publish()
    forward.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(forward):
        copies = {t: [buffer.clone() for buffer in memory(pages)[t]] for t in TENSORS}
    forward.synchronize()
    for tensor in TENSORS:
        found = torch.stack([copy.cpu()[slots_of(PLACES)] for copy in copies[tensor]], dim=1)
        assert torch.equal(found, exact[1][tensor])
        reads = pages.open_reads(slots_of(PLACES).cuda())
        assert torch.equal(reads.read(tensor, range(NUM_PAGES)).flatten(0, 1), exact[1][tensor])
