"""``kvfetch decoders``, on a cell that is small enough to be quick."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from typer.testing import CliRunner, Result

from sgl_kvfetch import codec
from sgl_kvfetch.plane.fetch.pool import DecodeProfile, load_decode_profile
from sgl_kvfetch.tools.app import app
from tests.codec.bitstream.fake_nvdec import FakeNvc, make_nvdec
from tests.plugin.device.fake_streams import FakeDevice

SMALL = ("--tokens", 32, "--rounds", 1)


def kvfetch(*args: object) -> Result:
    return CliRunner().invoke(app, ["decoders", *map(str, (*SMALL, *args))])


def test_it_measures_every_codec_and_resolution(tmp_path: Path) -> None:
    path = tmp_path / "decode.json"
    result = kvfetch("--resolutions", "240p,480p", "--concurrency", 2, "--out", path)
    assert result.exit_code == 0, result.output
    assert "hevc 480p" in result.stdout
    profile = load_decode_profile(path)
    assert {v.name for v in profile.variants} == {"hevc 240p", "hevc 480p", "zstd"}
    assert profile.max_concurrency == 2
    assert profile.cell_values == 32 * 3 * 8 * 128
    sizes = [v.size_bytes for v in profile.variants]
    assert sizes == sorted(sizes)
    assert "synthetic" in profile.source


def test_json_is_the_profile_itself() -> None:
    result = kvfetch("--codecs", "zstd", "--concurrency", 1, "--json")
    assert result.exit_code == 0, result.output
    assert [v.name for v in msgspec.json.decode(result.stdout, type=DecodeProfile).variants] == ["zstd"]
    assert json.loads(result.stdout)["version"] == 1


@pytest.fixture
def nvc(monkeypatch: pytest.MonkeyPatch) -> FakeNvc:
    """A GPU with one video engine, and with no room for a server's decoders, which is nothing to what is measured."""
    nvc = FakeNvc(FakeDevice())
    nvdec = make_nvdec(nvc, num_engines=1)
    nvdec.surface_limit_bytes = 1
    found = nvdec, "decoded on NVDEC, 1 engines: hevc, hevc420"
    monkeypatch.setattr(codec, "open_current_nvdec", lambda: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Made Up 1000")
    return nvc


@pytest.mark.parametrize("device", ["auto", "nvdec"])
def test_nvdec_is_measured_where_it_is(nvc: FakeNvc, device: str) -> None:
    result = kvfetch("--resolutions", "240p,480p", "--tokens", 512, "--device", device, "--json")
    assert result.exit_code == 0, result.output
    profile = msgspec.json.decode(result.stdout, type=DecodeProfile)
    assert {v.name for v in profile.variants} == {"hevc 240p", "hevc 480p", "zstd"}
    assert profile.max_concurrency == 2  # two sessions an engine
    assert profile.device.startswith("Made Up 1000, ")
    assert "hevc on NVDEC (1 engines), all else on the CPU" in profile.source
    sizes = {call[1:] for call in nvc.calls}
    assert len(sizes) >= 2
    assert len(nvc.calls) <= profile.max_concurrency * len(sizes)
    assert nvc.packets


def test_the_cpu_is_measured_where_it_is_asked_for(nvc: FakeNvc) -> None:
    result = kvfetch("--resolutions", "240p", "--device", "cpu", "--concurrency", 1, "--json")
    assert result.exit_code == 0, result.output
    profile = msgspec.json.decode(result.stdout, type=DecodeProfile)
    assert ", CPU, " in profile.source
    assert "Made Up 1000" not in profile.device
    assert not nvc.packets


def test_an_nvdec_that_decodes_none_of_the_codecs_is_not_measured(nvc: FakeNvc) -> None:
    result = kvfetch("--codecs", "zstd", "--concurrency", 1, "--json")
    assert result.exit_code == 0, result.output
    assert ", CPU, " in msgspec.json.decode(result.stdout, type=DecodeProfile).source
    result = kvfetch("--codecs", "zstd", "--device", "nvdec")
    assert result.exit_code == 2
    assert "--device nvdec: this machine's NVDEC decodes none of zstd" in result.stderr


def test_the_cpus_time_does_not_pass_for_nvdecs(nvc: FakeNvc) -> None:
    nvc.fails = "create"
    result = kvfetch("--resolutions", "240p", "--concurrency", 1)
    assert result.exit_code == 2
    assert "NVDEC did not decode hevc" in result.stderr


def test_without_a_gpu_nvdec_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = kvfetch("--device", "nvdec")
    assert result.exit_code == 2
    assert "finds no usable GPU" in result.stderr
