import ctypes
import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from harness.store_process import StoreProcess
from sgl_kvfetch.codec import Device
from sgl_kvfetch.codec.bitstream.nvdec import DecodeCaps
from sgl_kvfetch.codec.bitstream.registry import CODECS
from sgl_kvfetch.errors import CorruptError
from sgl_kvfetch.plugin import seams, versions
from sgl_kvfetch.tools import doctor
from sgl_kvfetch.tools.doctor import Check, check_store
from sgl_kvfetch.tools.terminal import StoreAccess
from sgl_kvfetch.triton_kernels import ans, klt_choice, restore_exact
from sgl_kvfetch.user_files import TOKEN_ENV
from tests.tools.conftest import kvfetch, kvfetch_json


def by_name(found: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in found}


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the checks that take seconds."""
    monkeypatch.setattr(doctor, "check_sglang", lambda: [Check("SGLang", "yes", "0")])


@pytest.mark.slow
@pytest.mark.sglang
def test_this_machine_runs_host_mode(tmp_path: Path) -> None:
    """As the tests of the plugin show that it does."""
    command = [sys.executable, "-m", "sgl_kvfetch.tools", "doctor", "--json", tmp_path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {check["name"]: check["status"] for check in json.loads(done.stdout)}
    assert found["SGLang"] == found["SGLang's seams"] == found["plugin registered"] == "yes"
    assert found["C++ compiler"] == found["store lookup"] == "yes"
    assert all(found[f"codec {name}"] == "yes" for name in CODECS)
    assert found["CUDA GPU"] == ("yes" if torch.cuda.is_available() else "warn")
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("healthy")
def test_the_table_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a check that fails unforeseen."""
    result = kvfetch("doctor")
    assert result.exit_code == 0
    assert "host mode can run here" in result.stdout
    assert [line.split()[1] for line in result.stderr.splitlines()] == ["SGLang,", "for", "Triton", "codecs", "audits"]
    monkeypatch.setattr(doctor, "check_triton", lambda: [Check("Triton", "no", "2.7", "update it")])
    monkeypatch.setattr(doctor, "check_codecs", Mock(side_effect=OSError("libfoo.so: cannot open\nand more")))
    result = kvfetch("doctor")
    assert result.exit_code == 1
    assert "update it" in result.stdout
    assert "OSError: libfoo.so: cannot open" in result.stdout
    assert "host mode cannot run here: 2 to fix" in result.stdout


@pytest.mark.usefixtures("healthy")
@pytest.mark.parametrize(("options", "also"), [((), "; host mode can run here"), (("--store-only",), "")])
def test_a_store_that_is_not_there(unused_tcp_port: int, options: tuple[str, ...], also: str) -> None:
    """Nothing of this machine is to be installed for it."""
    result = kvfetch("doctor", f"http://127.0.0.1:{unused_tcp_port}", *options)
    assert result.exit_code == 1
    assert result.stdout.endswith(f"the store cannot be used from here: 1 to fix{also}\n")
    assert "kvfetch serve" in result.stdout


def test_a_codec_that_lies_and_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(bitstream: bytes, shape: tuple[int, int, int]) -> torch.Tensor:
        return torch.zeros((shape[0], 3, *shape[1:]), dtype=torch.uint8)

    monkeypatch.setattr(CODECS["zstd"], "decode", wrong)
    monkeypatch.setattr(CODECS["hevc"], "decode", Mock(side_effect=CorruptError("no")))
    found = by_name(doctor.check_codecs())
    assert found["codec zstd"].status == found["codec hevc"].status == "no"
    assert found["codec deflate"].status == found["codec hevc420"].status == "yes"


def test_what_is_wrong_with_sglang_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> str:
        check = by_name(doctor.check_sglang())[name]
        return f"{check.status}: {check.found}; {check.advice}"

    monkeypatch.setattr(importlib.metadata, "version", Mock(side_effect=importlib.metadata.PackageNotFoundError))
    assert found("SGLang") == f'no: not installed; pip install "sglang=={versions.NEWEST}"'
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.4.0")
    assert found("SGLang").startswith("no: ")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.NEWEST)
    monkeypatch.setattr(seams, "check_seams", lambda: ["a.b moved", "c.d moved"])
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    assert found("SGLang's seams").startswith("no: a.b moved (and 1 more)")
    assert found("plugin registered").startswith("no: ")
    assert found("C++ compiler").startswith("no: g++ and ninja not found on PATH")
    monkeypatch.setattr(seams, "check_seams", Mock(side_effect=RuntimeError("torchvision::nms is missing")))
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [SimpleNamespace(name="kvfetch")])
    assert "nms is missing" in found("SGLang's seams")
    for chosen, status in (("other", "no"), ("other, kvfetch", "yes")):
        monkeypatch.setenv("SGLANG_PLUGINS", chosen)
        assert found("plugin registered").startswith(status)


@pytest.mark.parametrize(
    ("fault_on_gpu", "said"),
    [
        (Mock(return_value=""), ""),
        (Mock(return_value="1.0% differ"), "is restored on the CPU: 1.0% differ"),
        (Mock(side_effect=RuntimeError("PassManager::run failed")), "RuntimeError: PassManager::run failed"),
    ],
)
def test_what_a_gpu_leaves_to_the_cpu_is_said(monkeypatch: pytest.MonkeyPatch, fault_on_gpu: Mock, said: str) -> None:
    """By the trials that a server makes at its start."""
    monkeypatch.setattr(Device, "why_no_batches", lambda device: said)
    monkeypatch.setattr(ans, "try_gpu_ans", lambda device: (not said, said))
    for module in (klt_choice, restore_exact):
        monkeypatch.setattr(module, "fault_on_gpu", fault_on_gpu)
    found = doctor._check_restoring(torch.device("cuda", 0))
    assert {check.status for check in found} == {"warn" if said else "yes"}
    assert all(said in check.found for check in found)


@pytest.mark.parametrize(
    ("chromas", "status", "found"),
    [
        ((1, 3), "yes", "HEVC 4:4:4 8-bit, 7 engines, up to 8192x8192"),
        ((1,), "warn", "HEVC 4:2:0 only, 7 engines"),
        ((), "warn", "decodes no HEVC; codecs run on the CPU"),
        (None, "warn", "libnvcuvid.so.1: cannot open; codecs run on the CPU"),
    ],
)
def test_what_nvdec_can_do(
    chromas: tuple[int, ...] | None, status: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``chromas``: the formats of 8-bit HEVC that the GPU decodes; None if the library is missing."""

    def fill(reference: Any) -> int:
        caps = reference._obj
        assert (caps.codec, caps.bit_depth_minus_8) == (8, 0)
        caps.is_supported = caps.chroma in (chromas or ())
        caps.num_engines, caps.max_width, caps.max_height = 7, 8192, 8192
        return 0

    missing = OSError("libnvcuvid.so.1: cannot open") if chromas is None else None
    library = Mock(return_value=SimpleNamespace(cuvidGetDecoderCaps=fill), side_effect=missing)
    monkeypatch.setattr(ctypes, "CDLL", library)
    check = by_name(doctor._check_nvdec())["NVDEC"]
    assert (check.status, check.found) == (status, found)
    assert ctypes.sizeof(DecodeCaps) == 88
    assert (DecodeCaps.is_supported.offset, DecodeCaps.min_width.offset) == (24, 40)


def test_a_missing_encoder_library_keeps_the_binding_from_importing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "Failed to load NVENC library: libnvidia-encode.so.1: cannot open shared object file"  # by version 2.2.4
    (tmp_path / "PyNvVideoCodec.py").write_text(f"raise RuntimeError({message!r})")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "PyNvVideoCodec", raising=False)
    check = doctor._check_binding()
    assert (check.status, check.found) == ("warn", f"does not import: {message}")
    assert "NVIDIA_DRIVER_CAPABILITIES" in check.advice


@pytest.mark.parametrize(("version", "status"), [("3.5.1", "warn"), ("3.10.0+git1", "yes")])
def test_an_old_triton_is_named(monkeypatch: pytest.MonkeyPatch, version: str, status: str) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    (check,) = doctor.check_triton()
    assert (check.status, version in check.found) == (status, True)


def test_a_store_on_disk(tmp_path: Path) -> None:
    assert {check.status for check in check_store(tmp_path.as_uri(), StoreAccess())} == {"yes"}
    new = tmp_path / "not" / "yet"
    found = by_name(check_store(new.as_uri(), StoreAccess()))
    assert "created at the first write" in found["store writable"].found
    assert not new.parent.exists()
    (tmp_path / "file").touch()
    assert by_name(check_store((tmp_path / "file").as_uri(), StoreAccess()))["store writable"].status == "no"


@pytest.mark.usefixtures("healthy")
def test_a_served_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    with StoreProcess(tmp_path / "store", extra_args=("--token-file", str(token))) as store:
        found = {check["name"]: check["status"] for check in kvfetch_json("doctor", store.url, exit_code=1)}
        assert (found["store reachable"], found["store authorised"]) == ("yes", "no")
        monkeypatch.setenv(TOKEN_ENV, "wrong")
        assert f"the token came from {TOKEN_ENV}" in kvfetch("doctor", store.url).stdout
        monkeypatch.setenv(TOKEN_ENV, "secret")
        granted = kvfetch("doctor", store.url)
        assert granted.exit_code == 0
        assert "secret" not in granted.stdout
