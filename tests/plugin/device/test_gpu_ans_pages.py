"""Tests of `ans` decoded on a GPU into its pool, with a fake device."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_kvfetch.codec.bitstream import gpu_ans
from sgl_kvfetch.codec.bitstream.gpu_ans import GpuAnsDecoder
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.quant import klt
from sgl_kvfetch.errors import CorruptError
from sgl_kvfetch.plane import client, parse_config
from sgl_kvfetch.plane.adapt.decode_profile import DecodeProfile, VariantProfile
from sgl_kvfetch.plugin.device.cuda_pages import CudaPages
from sgl_kvfetch.plugin.device.pages import DevicePages
from sgl_kvfetch.triton_kernels import runtime
from sgl_kvfetch.triton_kernels.ans import ans_decode
from sgl_kvfetch.types import TENSORS
from tests.codec.bitstream.fake_nvdec import FakeNvc, make_nvdec
from tests.plugin.device.cuda_pages import (
    GEOMETRY,
    NUM_PAGES,
    PLACES,
    make_pages,
    make_pool,
    memory,
    slots_of,
)
from tests.plugin.device.fake_streams import FakeDevice
from tests.plugin.device.test_nvdec_pages import fetch, make_segment_of

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", False)


async def test_the_same_values_as_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for product in ("_HAS_BFLOAT16", "_HAS_INTEGERS"):
        monkeypatch.setattr(klt, product, False)  # these products round more than one in float32
    quantiser, segment = make_segment_of("klt", "ans")
    reader = SegmentReader(segment[0].manifest, quantiser)
    expected = DevicePages(make_pool(), GEOMETRY.page_size)
    await fetch(reader, segment[0].data, expected, tmp_path / "cpu")
    num_ans = [chunk.codec for chunk in reader.variant.chunks].count("ans")
    assert num_ans
    device = FakeDevice(seed=1)
    decoder = GpuAnsDecoder(device)
    # Frames go through no buffer: exact tokens and a batch's table need less.
    pages = CudaPages(make_pool(), GEOMETRY.page_size, device, device.forward, restore_buffer_bytes=1 << 17)
    pages = pages.open_round(slots_of(PLACES))
    result, _ = await fetch(reader, segment[0].data, pages, tmp_path / "gpu", lambda: {"ans": decoder})
    assert (result.num_pages, result.failures) == (NUM_PAGES, ())
    device.run()
    for tensor in TENSORS:
        for ours, theirs in zip(memory(pages)[tensor], memory(expected)[tensor], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2.0**-7, atol=1e-5, equal_nan=True)  # sums in another order
    assert sum(x.dtype == torch.uint8 for x, _ in device.used) == num_ans  # frames; others are tables


def changed(data: torch.Tensor, chunks: Any, out: torch.Tensor) -> torch.Tensor:
    status = ans_decode(data, chunks, out)
    for chunk in chunks:
        out[chunk.out_start + 5] ^= 1
    return status


def refused(data: torch.Tensor, chunks: Any, out: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(ans_decode(data, chunks, out))


@pytest.mark.parametrize(
    ("kernel", "message"), [(changed, "checksum does not match"), (refused, "does not decode on the GPU")]
)
async def test_wrong_integers_are_a_miss_and_the_segment_stays(
    kernel: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU decodes again what the GPU got wrong, before anything is deleted."""
    monkeypatch.setattr(gpu_ans, "ans_decode", kernel)
    quantiser, segment = make_segment_of("klt", "ans")
    reader = SegmentReader(segment[0].manifest, quantiser)
    device = FakeDevice()
    decoder = GpuAnsDecoder(device)
    pages = make_pages(device).open_round(slots_of(PLACES))
    result, is_stored = await fetch(reader, segment[0].data, pages, tmp_path, lambda: {"ans": decoder})
    assert result.num_pages == 0
    assert {type(failure) for failure in result.failures} == {CorruptError}
    assert message in str(result.failures[0])
    assert is_stored
    device.run()
    assert all(bool(buffer.isnan().all()) for buffer in (*memory(pages)["k"], *memory(pages)["v"]))


def test_sessions_of_the_gpu_come_last_and_the_profile_has_none(tmp_path: Path) -> None:
    """A chunk goes to the first idle session. All of them may use NVDEC."""
    device = FakeDevice()
    spare, nvdec = {"ans": GpuAnsDecoder(device)}, make_nvdec(FakeNvc(device), num_engines=3)
    options = {"store": "file:///kv", "model_id": "m", "codec_threads": 2}
    with closing(client._open_pool(parse_config(options), None, spare)) as pool:
        assert pool._sessions == [{}] * 2 + [spare] * 24
    with closing(client._open_pool(parse_config(options), nvdec, spare)) as pool:
        assert [sorted(session) for session in pool._sessions] == (
            [["hevc", "hevc420"]] * 3 + [["ans", "hevc", "hevc420"]] * 24
        )
    path = tmp_path / "profile.json"
    variant = VariantProfile(name="ans flat", size_bytes=1000, decode_s=(1.0,) * 5)
    path.write_bytes(DecodeProfile(device="made up", source="for tests", variants=(variant,)).encode())
    with closing(client._open_pool(parse_config(options | {"decode_profile": str(path)}), None, spare)) as pool:
        assert pool._sessions == [{}] * 5
