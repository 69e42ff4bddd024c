"""Tests of restoring from NVDEC's device memory into a GPU's pool, with fakes of both."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.fetching import fetch_pages
from harness.waiting import until_idle
from sgl_kvfetch.codec.bitstream.base import Decoders
from sgl_kvfetch.codec.bitstream.registry import resolution_for
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.quant import klt
from sgl_kvfetch.codec.quant.base import Quantiser
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import CorruptError
from sgl_kvfetch.plane.adapt.pool import DecodePool
from sgl_kvfetch.plane.fetch.fetcher import Fetcher
from sgl_kvfetch.plane.fetch.plan import PageSource
from sgl_kvfetch.plane.fetch.sink import GuardedSink, Pool
from sgl_kvfetch.plugin.device.cuda_pages import CudaPages
from sgl_kvfetch.plugin.device.pages import DevicePages
from sgl_kvfetch.triton_kernels import runtime
from sgl_kvfetch.types import TENSORS, TensorName
from tests.codec.bitstream.fake_nvdec import CountingDevice, FakeNvc, make_nvdec
from tests.codec.quant.profiles import make_profile, values_of
from tests.plugin.device.cuda_pages import (
    GEOMETRY,
    NUM_PAGES,
    PLACES,
    Segment,
    make_pages,
    make_pool,
    memory,
    slots_of,
)
from tests.plugin.device.fake_streams import FakeDevice
from tests.segments import make_segment, without_frame_sums

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", False)


async def fetch(
    reader: SegmentReader, data: bytes, pages: Pool, folder: Path, open_session: Callable[[], Decoders] = dict
) -> tuple[Any, bool]:
    """A segment, as a server does. And whether it is still stored in the end."""
    store = LocalStore(folder)
    await store.put(reader.data_name, data)
    await store.put(reader.manifest.key.manifest_name, reader.manifest.encode())
    with closing(DecodePool([open_session() for _ in range(2)])) as pool:
        fetcher = Fetcher(store, pool, read_bytes=1 << 20, inflight_bytes=1 << 22, may_delete=True)
        sources = [PageSource(reader, page) for page in range(NUM_PAGES)]
        numbers = range(NUM_PAGES) if isinstance(pages, CudaPages) else PLACES
        result = await fetch_pages(fetcher, sources, numbers, GuardedSink(pages), 20)
        await until_idle()
    is_stored = await store.get(reader.manifest.key.manifest_name) is not None
    await store.close()
    return result, is_stored


def make_segment_of(name: Any, codec: str) -> tuple[Quantiser, Segment]:
    if name != "klt":
        quantiser = make_quantiser(name)
        return quantiser, make_segment(GEOMETRY, NUM_PAGES, quantiser=quantiser, codec=codec, span_pages=4)
    profile = make_profile(num_layers=4, num_heads=2, cell_heads=2, head_dim=48, v_head_dim=64, num_sinks=1)
    quantiser = KltQuantiser(profile, step=0.5)
    k, v = (x.to(torch.bfloat16) for x in values_of(profile, NUM_PAGES * GEOMETRY.page_size))
    values: dict[TensorName, torch.Tensor] = {"k": k, "v": v}
    segment = make_segment(
        GEOMETRY,
        NUM_PAGES,
        quantiser=quantiser,
        codec=codec,
        span_pages=4,
        values=values,
        resolution=resolution_for(codec, "240p"),
    )
    return quantiser, segment


@pytest.mark.parametrize("codec", ["hevc", "hevc420"])
@pytest.mark.parametrize("name", ["exact", "uint8", "klt"])
async def test_the_same_values_as_on_the_cpu(
    name: str, codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for product in ("_HAS_BFLOAT16", "_HAS_INTEGERS"):
        monkeypatch.setattr(klt, product, False)  # these products round more than one in float32
    quantiser, segment = make_segment_of(name, codec)
    reader = SegmentReader(segment[0].manifest, quantiser)
    expected = DevicePages(make_pool(), GEOMETRY.page_size)
    await fetch(reader, segment[0].data, expected, tmp_path / "cpu")
    # Low bytes of exact values are noise, so they are not coded as video: the cell's planes are in both memories.
    codecs = [chunk.codec for chunk in reader.variant.chunks]
    assert set(codecs) == {codec, "zstd"}
    device = CountingDevice(seed=1)
    # Frames that are on the device already go through no buffer: scales, exact tokens and a batch's table need less.
    pages = CudaPages(
        make_pool(),
        GEOMETRY.page_size,
        device,
        device.forward,
        restore_buffer_bytes=1 << 20 if name == "exact" else 1 << 17,
    ).open_round(slots_of(PLACES))
    device.pinned_bytes.clear()  # what the buffers take
    result, _ = await fetch(reader, segment[0].data, pages, tmp_path / "gpu", make_nvdec(FakeNvc(device)).open_session)
    assert (result.num_pages, result.failures) == (NUM_PAGES, ())
    device.run()
    for tensor in TENSORS:
        for ours, theirs in zip(memory(pages)[tensor], memory(expected)[tensor], strict=True):
            if name == "klt":  # sums in another order
                torch.testing.assert_close(ours, theirs, rtol=2.0**-7, atol=1e-5, equal_nan=True)
            else:
                assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
    assert sum(x.dtype == torch.uint8 for x, _ in device.used) == codecs.count(codec)  # frames; others are tables
    assert {id(stream) for _, stream in device.used} == {id(pages._restores)}
    assert set(device.pinned_bytes) == {8}  # sums, and no frames


@pytest.mark.parametrize("codec", ["hevc", "hevc420"])
async def test_frames_without_sums_are_verified_on_the_host(codec: str, tmp_path: Path) -> None:
    quantiser = make_quantiser("uint8")
    segment = make_segment(GEOMETRY, NUM_PAGES, quantiser=quantiser, codec=codec, span_pages=4)
    reader = SegmentReader(without_frame_sums(segment[0].manifest), quantiser)
    device = CountingDevice()
    nvc = FakeNvc(device)
    pages = make_pages(device).open_round(slots_of(PLACES))
    device.pinned_bytes.clear()
    result, _ = await fetch(reader, segment[0].data, pages, tmp_path / "right", make_nvdec(nvc).open_session)
    assert (result.num_pages, result.failures) == (NUM_PAGES, ())
    assert max(device.pinned_bytes) == max(
        prod(layout.frames_shape(reader.manifest.integers_shape(cell, name)))
        for cell in reader.manifest.cells()
        for name, layout in reader.variant.layouts.items()
    )
    nvc.fails = "one pixel"
    result, is_stored = await fetch(reader, segment[0].data, pages, tmp_path / "wrong", make_nvdec(nvc).open_session)
    assert result.num_pages == 0
    assert "decoded k: checksum does not match" in str(result.failures[0])
    assert is_stored


@pytest.mark.parametrize("fault", ["pixels", "one pixel", "planes"])
async def test_wrong_pixels_are_a_miss_and_the_segment_stays(fault: str, tmp_path: Path) -> None:
    """The CPU decodes again what NVDEC got wrong, before anything is deleted."""
    quantiser = make_quantiser("uint8")
    segment = make_segment(GEOMETRY, NUM_PAGES, quantiser=quantiser, codec="hevc", span_pages=4)
    reader = SegmentReader(segment[0].manifest, quantiser)
    device = FakeDevice()
    nvc = FakeNvc(device)
    nvc.fails = fault
    pages = make_pages(device).open_round(slots_of(PLACES))
    result, is_stored = await fetch(reader, segment[0].data, pages, tmp_path, make_nvdec(nvc).open_session)
    assert result.num_pages == 0
    assert {type(failure) for failure in result.failures} == {CorruptError}
    assert "decoded frames: frame sum does not match" in str(result.failures[0])
    assert is_stored
    device.run()
    assert all(bool(buffer.isnan().all()) for buffer in (*memory(pages)["k"], *memory(pages)["v"]))
