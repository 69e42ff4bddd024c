"""From NVDEC's device memory into a GPU's pool, over fakes of both."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_kvfetch.codecs.base import FrameDecoder
from sgl_kvfetch.codecs.hevc import Hevc420Codec, HevcCodec
from sgl_kvfetch.codecs.nvdec import NvdecDecoder, NvdecSession
from sgl_kvfetch.container.segment import SegmentReader
from sgl_kvfetch.errors import CorruptError
from sgl_kvfetch.fetch.fetcher import Fetcher
from sgl_kvfetch.fetch.plan import PageSource
from sgl_kvfetch.fetch.sink import GuardedSink
from sgl_kvfetch.plugin.device.cuda_pages import CudaPages
from sgl_kvfetch.plugin.device.pages import DevicePages
from sgl_kvfetch.quant import make_quantiser
from sgl_kvfetch.stores.local import LocalStore
from sgl_kvfetch.triton_kernels import runtime
from sgl_kvfetch.types import TENSORS
from tests.codecs.fake_nvdec import CountingDevice, FakeNvc, make_caps
from tests.plugin.device.fake_streams import FakeDevice
from tests.plugin.device.test_cuda_pages import GEOMETRY, NUM_PAGES, PLACES, make_pool
from tests.segments import make_segment, without_frame_sums

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", False)


def make_decoders(nvc: FakeNvc) -> Mapping[str, FrameDecoder]:
    sessions: queue.LifoQueue[NvdecSession] = queue.LifoQueue()
    for _ in range(2):
        sessions.put(NvdecSession(nvc, nvc.device))
    return {codec.name: NvdecDecoder(codec, make_caps(), sessions) for codec in (HevcCodec(), Hevc420Codec())}


async def fetch(reader: SegmentReader, data: bytes, pages: DevicePages, folder: Path) -> tuple[Any, bool]:
    """A segment, as a server does. And whether it is still stored in the end."""
    store = LocalStore(folder)
    await store.put(reader.data_name, data)
    await store.put(reader.manifest.key.manifest_name, reader.manifest.encode())
    with ThreadPoolExecutor(2) as threads:
        fetcher = Fetcher(store, threads, read_bytes=1 << 20, inflight_bytes=1 << 22, may_delete=True)
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
        decoders=make_decoders(FakeNvc(device)),
        restore_buffer_bytes=2048 if name == "uint8" else 1 << 20,
    )
    device.downloads_bytes.clear()  # what the buffers take
    result, _ = await fetch(reader, segment[0].data, pages, tmp_path / "gpu")
    assert (result.num_pages, result.failures) == (NUM_PAGES, ())
    device.run()
    for tensor in TENSORS:
        for ours, theirs in zip(pages._buffers[tensor], expected._buffers[tensor], strict=True):
            assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
    assert len(device.used) == codecs.count(codec)
    assert {id(stream) for _, stream in device.used} == {id(pages._restores)}
    assert device.downloads_bytes == [8] * codecs.count(codec)  # sums, and no frames


@pytest.mark.parametrize("codec", ["hevc", "hevc420"])
async def test_frames_of_older_segments_are_verified_on_the_host(codec: str, tmp_path: Path) -> None:
    quantiser = make_quantiser("uint8")
    segment = make_segment(GEOMETRY, NUM_PAGES, quantiser=quantiser, codec=codec, span_pages=4)
    reader = SegmentReader(without_frame_sums(segment[0].manifest), quantiser)
    device = CountingDevice()
    nvc = FakeNvc(device)
    pages = CudaPages(make_pool(), GEOMETRY.page_size, device, device.forward, decoders=make_decoders(nvc))
    device.downloads_bytes.clear()
    result, _ = await fetch(reader, segment[0].data, pages, tmp_path / "right")
    assert (result.num_pages, result.failures) == (NUM_PAGES, ())
    frame_bytes = [
        frames.nbytes
        for cell in reader.manifest.cells()
        for frames in reader.decode_frames(cell, segment[0].data[slice(*reader.cell_range(cell))]).frames
    ]
    assert sorted(device.downloads_bytes) == sorted(frame_bytes)
    nvc.fails = "one pixel"
    result, is_stored = await fetch(reader, segment[0].data, pages, tmp_path / "wrong")
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
    pages = CudaPages(make_pool(), GEOMETRY.page_size, device, device.forward, decoders=make_decoders(nvc))
    result, is_stored = await fetch(reader, segment[0].data, pages, tmp_path)
    assert result.num_pages == 0
    assert {type(failure) for failure in result.failures} == {CorruptError}
    assert "decoded frames: frame sum does not match" in str(result.failures[0])
    assert is_stored
    device.run()
    assert all(bool(buffer.isnan().all()) for buffer in (*pages._buffers["k"], *pages._buffers["v"]))
