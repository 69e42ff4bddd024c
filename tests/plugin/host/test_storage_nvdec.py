"""Tests of host mode with a fake NVDEC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from harness.decoders import drop_decoders
from sgl_kvfetch.codec.bitstream.nvdec import Nvdec
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.plane import service, store
from sgl_kvfetch.plane.fetch.pool import DecodePool
from sgl_kvfetch.plugin.host.pool import HostPages
from sgl_kvfetch.tools.encoder import make_targets, transcode
from sgl_kvfetch.types import TENSORS
from tests.codec.bitstream.fake_nvdec import FakeNvc, make_caps, make_nvdec
from tests.plugin.backends import Make, keys, make_pool, store_pages, tokens, values_in
from tests.plugin.device.fake_streams import FakeDevice
from tests.plugin.planes import Served

# fixtures


@pytest.fixture
def nvc(monkeypatch: pytest.MonkeyPatch) -> FakeNvc:
    """Every data plane's, from now on."""
    nvc = FakeNvc(FakeDevice(seed=1))
    decode_on(monkeypatch, lambda: make_nvdec(nvc, num_engines=3))
    return nvc


def decode_on(monkeypatch: pytest.MonkeyPatch, make_engines: Callable[[], Nvdec]) -> list[int]:
    """Let data planes open these engines. Return the numbers of the GPUs that they ask for."""
    asked: list[int] = []

    def open_nvdec_alone(index: int) -> tuple[Nvdec, str]:
        asked.append(index)
        return make_engines(), "decoded on NVDEC"

    monkeypatch.setattr(service, "open_nvdec_alone", open_nvdec_alone)
    return asked


def make_gpu_pool(index: int = 0) -> MHATokenToKVPoolHost:
    return make_pool(device_k_buffers=(SimpleNamespace(device=torch.device("cuda", index)),))


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The decode sessions of the backends that are made from now on."""
    sessions: list[Any] = []

    class Recording(DecodePool[Any]):
        def __init__(self, opened: Sequence[Any], *args: Any, **options: Any) -> None:
            super().__init__(opened, *args, **options)
            sessions.extend(opened)

    monkeypatch.setattr(store, "DecodePool", Recording)
    return sessions


@pytest.mark.parametrize("codec", ["hevc", "hevc420"])
@pytest.mark.parametrize("quantiser", ["exact", "uint8"])
def test_nvdec_decodes_and_the_cpu_restores(
    make: Make, sessions: list[Any], nvc: FakeNvc, codec: str, quantiser: str
) -> None:
    pool = make_gpu_pool()
    backend = make(pool, codec=codec, quantiser=quantiser, codec_threads=1)
    pages = HostPages(pool)
    store_pages(backend, keys(7), list(range(7)))
    there = [39, 12, 20, 21, 30, 8, 10]
    assert backend.batch_get_v1(keys(7), tokens(there)) == [True] * 7
    assert nvc.packets
    on_nvdec = {tensor: values_in(pages, tensor, there) for tensor in TENSORS}
    if quantiser == "exact":
        assert all(torch.equal(on_nvdec[tensor], values_in(pages, tensor, range(7))) for tensor in TENSORS)
    num_packets = len(nvc.packets)
    nvc.fails = "create"  # from here on the CPU decodes
    for session in sessions:
        drop_decoders(session[codec]._nvdec)
    assert backend.batch_get_v1(keys(7), tokens(there)) == [True] * 7
    assert len(nvc.packets) == num_packets
    assert all(torch.equal(on_nvdec[tensor], values_in(pages, tensor, there)) for tensor in TENSORS)
    assert nvc.device.num_empty == 0  # frames were not kept on the device


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
    only_420 = Nvdec(nvc, nvc.device, {"hevc420": make_caps()})
    decode_on(monkeypatch, lambda: only_420)
    reading = make(pool, quantiser="uint8")
    assert not nvc.packets
    assert reading.batch_get_v1(keys(2), tokens([3, 4])) == [True, True]
    assert nvc.packets


def test_the_engines_gpu_is_asked(make: Make, nvc: FakeNvc, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = decode_on(monkeypatch, lambda: make_nvdec(nvc))
    make(make_pool())
    assert asked == []
    make(make_gpu_pool(3))
    assert asked == [3]
