"""Tests of host mode with a fake NVDEC."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from sgl_kvfetch.codec.bitstream.nvdec import Nvdec
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.plane import service
from sgl_kvfetch.tools.encoder import make_targets, transcode
from tests.codec.bitstream.fake_nvdec import FakeNvc, make_caps, make_nvdec
from tests.plugin.backends import Make, keys, make_pool, store_pages, tokens
from tests.plugin.device.fake_streams import FakeDevice
from tests.plugin.planes import Served


@pytest.fixture
def nvc(monkeypatch: pytest.MonkeyPatch) -> FakeNvc:
    """Every data plane's, from now on."""
    nvc = FakeNvc(FakeDevice(seed=1))
    use_engines(monkeypatch, make_nvdec(nvc, num_engines=3))
    return nvc


def use_engines(monkeypatch: pytest.MonkeyPatch, engines: Nvdec) -> None:
    """Let data planes open these engines of the GPU that the engine's pool is on."""

    def open_nvdec_alone(index: int) -> tuple[Nvdec, str]:
        assert index == 3
        return engines, "decoded on NVDEC"

    monkeypatch.setattr(service, "open_nvdec_alone", open_nvdec_alone)


def make_gpu_pool() -> MHATokenToKVPoolHost:
    return make_pool(device_k_buffers=(SimpleNamespace(device=torch.device("cuda", 3)),))


@pytest.mark.parametrize("codec", ["hevc", "hevc420"])
@pytest.mark.parametrize(("quantiser", "most_error"), [("exact", 0), ("uint8", 0.05)])
def test_nvdec_decodes_and_the_cpu_restores(
    make: Make, nvc: FakeNvc, codec: str, quantiser: str, most_error: float
) -> None:
    backend = make(pool := make_gpu_pool(), codec=codec, quantiser=quantiser, codec_threads=1)
    store_pages(backend, keys(7), list(range(7)))
    there = [39, 12, 20, 21, 30, 8, 10]
    assert backend.batch_get_v1(keys(7), tokens(there)) == [True] * 7
    assert nvc.packets
    assert nvc.device.num_empty == 0  # frames were not kept on the device
    for buffer in pool.kv_buffer:
        torch.testing.assert_close(buffer[there], buffer[:7], rtol=0, atol=most_error)


def test_wrong_pixels_are_a_miss_and_the_segment_stays(
    make: Make, served: Served, nvc: FakeNvc, tmp_path: Path
) -> None:
    pool = make_gpu_pool()
    backend = make(pool, codec="hevc", quantiser="uint8")
    store_pages(backend, keys(2), [0, 1])
    nvc.fails = "pixels"
    before = [buffer.clone() for buffer in pool.kv_buffer]
    assert backend.batch_get_v1(keys(2), tokens([3, 4])) == [False, False]
    assert all(torch.equal(*each) for each in zip(pool.kv_buffer, before, strict=True))
    served.wait_until_idle()  # the store has looked at it
    nvc.fails = ""
    assert len(list(tmp_path.rglob("*.kvm"))) == 1
    assert backend.batch_get_v1(keys(2), tokens([3, 4])) == [True, True]


def test_the_variant_that_nvdec_decodes_is_read(
    make: Make, nvc: FakeNvc, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The store lists 4:4:4 first, but this GPU's engines decode only 4:2:0."""
    pool = make_gpu_pool()
    store_pages(make(pool, codec="hevc", quantiser="uint8"), keys(2), [0, 1])
    (path,) = tmp_path.rglob("*.kvm")
    manifest = decode_manifest(path.read_bytes())
    data = (tmp_path / manifest.data_name(manifest.variants[0])).read_bytes()
    made = transcode(manifest, data, make_targets(["hevc", "hevc420"], ["240p"]))
    for name, content in (*made.data_objects(), (manifest.key.manifest_name, made.manifest.encode())):
        (tmp_path / name).write_bytes(content)
    use_engines(monkeypatch, Nvdec(nvc, nvc.device, {"hevc420": make_caps()}))
    reading = make(pool, quantiser="uint8")
    assert not nvc.packets
    assert reading.batch_get_v1(keys(2), tokens([3, 4])) == [True, True]
    assert nvc.packets
