"""From NVDEC's device memory into a GPU's pool, over fakes of both."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_kvfetch.adapt.pool import DecodePool
from sgl_kvfetch.codecs.nvdec import Nvdec
from sgl_kvfetch.container.segment import SegmentReader
from sgl_kvfetch.errors import CorruptError
from sgl_kvfetch.fetch.fetcher import Fetcher
from sgl_kvfetch.fetch.plan import PageSource
from sgl_kvfetch.fetch.sink import GuardedSink, PagePool
from sgl_kvfetch.plugin.device.cuda_pages import CudaPages
from sgl_kvfetch.plugin.device.pages import DevicePages
from sgl_kvfetch.quant import make_quantiser
from sgl_kvfetch.stores.local import LocalStore
from sgl_kvfetch.triton_kernels import runtime
from sgl_kvfetch.types import TENSORS
from tests.codecs.fake_nvdec import CountingDevice, FakeNvc, make_nvdec
from tests.plugin.device.fake_streams import FakeDevice
from tests.plugin.device.test_cuda_pages import GEOMETRY, NUM_PAGES, PLACES, make_pool
from tests.segments import make_segment, without_frame_sums

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", False)


async def fetch(
    reader: SegmentReader, data: bytes, pages: PagePool, folder: Path, nvdec: Nvdec | None = None
) -> tuple[Any, bool]:
    """A segment, as a server does. And whether it is still stored in the end."""
    store = LocalStore(folder)
    await store.put(reader.data_name, data)
    await store.put(reader.manifest.key.manifest_name, reader.manifest.encode())
    sessions = [{} if nvdec is None else nvdec.open_session() for _ in range(2)]
    with closing(DecodePool(sessions)) as pool:
        fetcher = Fetcher(store, pool, read_bytes=1 << 20, inflight_bytes=1 << 22, may_delete=True)
        sources = [PageSource(reader, page) for page in range(NUM_PAGES)]
        result = await fetcher.fetch(sources, PLACES, GuardedSink(pages), 20)
        await asyncio.gather(*fetcher._condemning.values())
    is_stored = await store.get(reader.manifest.key.manifest_name) is not None
    await store.close()
    return result, is_stored


@pytest.mark.parametrize("codec", ["hevc", "hevc420"])
@pytest.mark.parametrize("name", ["exact", "uint8"])
async def test_the_same_values_as_on_the_cpu(name: Any, codec: str, tmp_path: Path) -> None:
    quantiser = make_quantiser(name)
    segment = make_segment(GEOMETRY, NUM_PAGES, quantiser=quantiser, codec=codec, span_pages=4)
    reader = SegmentReader(segment[0].manifest, quantiser)
    expected = DevicePages(make_pool(), GEOMETRY.page_size)
    await fetch(reader, segment[0].data, expected, tmp_path / "cpu")
    # Low bytes of exact values are noise, and so not coded as video: a cell's planes are in both memories then.
    codecs = [chunk.codec for chunk in reader.variant.chunks]
    assert set(codecs) == {codec, "zstd"}  # uint8's scales
    device = CountingDevice(seed=1)
    # Frames that are on the device already go through no buffer: slots and scales need a few bytes.
    pages = CudaPages(
        make_pool(),
        GEOMETRY.page_size,
        device,
        device.forward,
        restore_buffer_bytes=2048 if name == "uint8" else 1 << 20,
    )
    device.pinned_bytes.clear()  # what the buffers take
    result, _ = await fetch(reader, segment[0].data, pages, tmp_path / "gpu", make_nvdec(FakeNvc(device)))
    assert (result.num_pages, result.failures) == (NUM_PAGES, ())
    device.run()
    for tensor in TENSORS:
        for ours, theirs in zip(pages._buffers[tensor], expected._buffers[tensor], strict=True):
            assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
    assert len(device.used) == codecs.count(codec)
    assert {id(stream) for _, stream in device.used} == {id(pages._restores)}
    assert set(device.pinned_bytes) == {8}  # sums, and no frames


@pytest.mark.parametrize("codec", ["hevc", "hevc420"])
async def test_frames_of_older_segments_are_verified_on_the_host(codec: str, tmp_path: Path) -> None:
    quantiser = make_quantiser("uint8")
    segment = make_segment(GEOMETRY, NUM_PAGES, quantiser=quantiser, codec=codec, span_pages=4)
    reader = SegmentReader(without_frame_sums(segment[0].manifest), quantiser)
    device = CountingDevice()
    nvc = FakeNvc(device)
    pages = CudaPages(make_pool(), GEOMETRY.page_size, device, device.forward)
    device.pinned_bytes.clear()
    result, _ = await fetch(reader, segment[0].data, pages, tmp_path / "right", make_nvdec(nvc))
    assert (result.num_pages, result.failures) == (NUM_PAGES, ())
    frame_bytes = [
        frames.nbytes
        for cell in reader.manifest.cells()
        for frames in reader.decode_frames(cell, segment[0].data[slice(*reader.cell_range(cell))]).frames
    ]
    assert max(device.pinned_bytes) == max(frame_bytes)
    nvc.fails = "one pixel"
    result, is_stored = await fetch(reader, segment[0].data, pages, tmp_path / "wrong", make_nvdec(nvc))
    assert result.num_pages == 0
    assert "decoded integers: checksum does not match" in str(result.failures[0])
    assert is_stored


@pytest.mark.parametrize("fault", ["pixels", "one pixel", "planes"])
async def test_wrong_pixels_are_a_miss_and_the_segment_stays(fault: str, tmp_path: Path) -> None:
    """What NVDEC gets wrong is looked at again on the CPU, before anything is deleted."""
    quantiser = make_quantiser("uint8")
    segment = make_segment(GEOMETRY, NUM_PAGES, quantiser=quantiser, codec="hevc", span_pages=4)
    reader = SegmentReader(segment[0].manifest, quantiser)
    device = FakeDevice()
    nvc = FakeNvc(device)
    nvc.fails = fault
    pages = CudaPages(make_pool(), GEOMETRY.page_size, device, device.forward)
    result, is_stored = await fetch(reader, segment[0].data, pages, tmp_path, make_nvdec(nvc))
    assert result.num_pages == 0
    assert {type(failure) for failure in result.failures} == {CorruptError}
    assert "decoded frames: frame sum does not match" in str(result.failures[0])
    assert is_stored
    device.run()
    assert all(bool(buffer.isnan().all()) for buffer in (*pages._buffers["k"], *pages._buffers["v"]))
