"""Tests of kernels that are compiled before the first fetch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sgl_kvfetch.codec.container.segment import SegmentSpec
from sgl_kvfetch.plane.config import parse_config
from sgl_kvfetch.plane.fetch.sink import GuardedSink
from sgl_kvfetch.plugin import data_plane as plane
from sgl_kvfetch.plugin.data_plane import prepare_restores
from sgl_kvfetch.triton_kernels import runtime
from tests.plugin.device.cuda_pages import WIDE, cells_of, make_pages, make_wide, memory, slots_of
from tests.plugin.device.fake_streams import FakeDevice
from tests.segments import make_heads, make_segment


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", False)


@pytest.mark.parametrize("name", ["exact", "uint8", "cachegen", "klt"])
def test_a_fetch_compiles_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither for full spans nor for segments that are shorter."""
    quantiser, segment = make_wide(name)
    device = FakeDevice()
    pages = make_pages(device, WIDE)
    caplog.clear()
    spec = SegmentSpec(make_heads(WIDE, quantiser), quantiser, "zstd", "240p", 64)
    prepare_restores(pages, spec)
    device.run()
    assert not caplog.records
    assert all(bool(buffer.isnan().all()) for buffer in (*memory(pages)["k"], *memory(pages)["v"]))
    compiled, inverses = set(pages._compiled), set(pages._inverses)
    for num_pages in (64, 32, 16, 8, 4):
        values = {tensor: x[: num_pages * 16] for tensor, x in segment[1].items()}
        short = make_segment(WIDE, num_pages, quantiser=quantiser, span_pages=64, first_page=64, values=values)
        for reader, cell, data in cells_of(short, quantiser):
            opened = pages.open_round(slots_of(list(range(num_pages)), 16))
            frames = reader.decode_frames(cell, data)
            opened.restore(frames, range(num_pages), range(num_pages), GuardedSink(opened).run).result(60)
    assert pages._compiled == compiled
    assert len(compiled) == 2 if name == "klt" else len(compiled) > 2  # all layouts of klt share kernels
    assert set(pages._inverses) == inverses


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


def test_a_failure_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    quantiser, _ = make_wide("exact")
    pages = make_pages(FakeDevice(), WIDE, restore_buffer_bytes=1024)
    prepare_restores(pages, SegmentSpec(make_heads(WIDE, quantiser), quantiser, "zstd", "240p", 64))
    assert "the restore kernels were not compiled at the start" in caplog.text
    assert "does not fit into buffers of 1024 bytes" in caplog.text


def test_kernels_are_compiled_before_the_data_plane_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quantiser, _ = make_wide("exact")
    pages = make_pages(FakeDevice(), WIDE)
    compiled: list[int] = []
    monkeypatch.setattr(plane, "DataPlane", lambda *_: compiled.append(len(pages._compiled)))
    config = parse_config({"store": f"file://{tmp_path}"})
    plane.open_plane(config, quantiser, make_heads(WIDE, quantiser), 0, pages, None)
    assert compiled[0] >= 2  # for cells of three layers and of one, and for each layout
