"""Tests of kernels that are compiled before the first fetch."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_kvfetch.codec.container.segment import SegmentSpec
from sgl_kvfetch.plane.config import parse_config
from sgl_kvfetch.plane.fetch.sink import GuardedSink
from sgl_kvfetch.plugin import data_plane as plane
from sgl_kvfetch.plugin.data_plane import compile_kernels
from sgl_kvfetch.triton_kernels import runtime
from tests.plugin.device.fake_streams import FakeDevice
from tests.plugin.device.test_cuda_pages import WIDE, cells_of, make_pages, make_wide, memory, slots_of
from tests.segments import make_heads


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", False)


@pytest.mark.parametrize("name", ["exact", "uint8", "cachegen", "klt"])
def test_a_fetch_compiles_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    quantiser, segment = make_wide(name)
    device = FakeDevice()
    pages = make_pages(device, WIDE)
    caplog.clear()
    compile_kernels(pages, SegmentSpec(make_heads(WIDE, quantiser), quantiser, "zstd", "240p", 64))
    device.run()
    assert not caplog.records
    assert all(bool(buffer.isnan().all()) for buffer in (*memory(pages)["k"], *memory(pages)["v"]))
    compiled = set(pages._compiled)
    for reader, cell, data in cells_of(segment, quantiser):
        opened = pages.open_round(slots_of(list(range(64)), 16))
        opened.restore(reader.decode_frames(cell, data), range(64), range(64), GuardedSink(opened).run)
    assert pages._compiled == compiled


def test_a_failure_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    quantiser, _ = make_wide("exact")
    pages = make_pages(FakeDevice(), WIDE, restore_buffer_bytes=1024)
    compile_kernels(pages, SegmentSpec(make_heads(WIDE, quantiser), quantiser, "zstd", "240p", 64))
    assert "the restore kernels were not compiled at the start" in caplog.text
    assert "do not fit into buffers of 1024 bytes" in caplog.text


def test_kernels_are_compiled_before_the_data_plane_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quantiser, _ = make_wide("exact")
    pages = make_pages(FakeDevice(), WIDE)
    compiled: list[int] = []
    monkeypatch.setattr(plane, "DataPlane", lambda *_: compiled.append(len(pages._compiled)))
    config = parse_config({"store": f"file://{tmp_path}"})
    plane.open_plane(config, quantiser, make_heads(WIDE, quantiser), 0, pages, None)
    assert compiled == [2]  # for cells of three layers, and of one
