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
from sgl_kvfetch.codec.bitstream import nvdec
from sgl_kvfetch.codec.bitstream.nvdec import DecodeCaps
from sgl_kvfetch.codec.bitstream.registry import CODECS
from sgl_kvfetch.errors import CorruptError
from sgl_kvfetch.plugin import seams, versions
from sgl_kvfetch.tools import doctor
from sgl_kvfetch.tools.doctor import Check, check_store
from sgl_kvfetch.tools.terminal import StoreAccess
from sgl_kvfetch.triton_kernels import ans, klt_choice, restore_exact
from sgl_kvfetch.user_files import TOKEN_ENV
from tests.segments import make_segment
from tests.tools.conftest import kvfetch, kvfetch_json, put


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
def test_a_store_s_machine_is_told_of_the_option_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sglang" else find_spec(name))
    monkeypatch.setattr(doctor, "check_codecs", lambda: [Check("codecs", "no", "torch is missing", "install it")])
    result = kvfetch("doctor", str(tmp_path))
    assert result.exit_code == 1
    assert f"On a store's machine, type: kvfetch doctor {tmp_path} --store-only" in result.stdout
    assert "--store-only" not in kvfetch("doctor").stdout


@pytest.mark.process
def test_a_machine_without_sglang_checks_the_store_alone(tmp_path: Path) -> None:
    """As with the install for stores, which has neither SGLang nor PyTorch."""
    put(tmp_path, make_segment(num_pages=1)[0])
    code = (
        "import sys; sys.modules['torch'] = sys.modules['sglang'] = None; from sgl_kvfetch.tools.app import app; "
        f"app(['doctor', {tmp_path.as_uri()!r}, '--store-only'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["store"] * 4 + ["the"]
    assert done.stdout.endswith("the store can be used from here\n")


@pytest.mark.usefixtures("healthy")
@pytest.mark.parametrize(("options", "also"), [((), "; host mode can run here"), (("--store-only",), "")])
def test_a_store_that_is_not_there(unused_tcp_port: int, options: tuple[str, ...], also: str) -> None:
    """Nothing of this machine is to be installed for it."""
    result = kvfetch("doctor", f"http://127.0.0.1:{unused_tcp_port}", *options)
    assert result.exit_code == 1
    assert result.stdout.endswith(f"the store cannot be used from here: 1 to fix{also}\n")
    assert "kvfetch serve" in result.stdout
    assert "models in the store" not in result.stdout


def test_an_sglang_that_is_missing_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", Mock(side_effect=importlib.metadata.PackageNotFoundError))
    (check,) = doctor.check_sglang()
    assert (check.status, check.advice) == ("no", f'pip install "sglang=={versions.NEWEST}"')
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.4.0")
    (check,) = doctor.check_sglang()
    assert (check.status, "0.4.0" in check.found, "pip install" in check.advice) == ("no", True, True)


def test_what_goes_wrong_with_the_right_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.NEWEST)
    monkeypatch.setattr(seams, "check_seams", lambda: ["a.b moved", "c.d moved"])
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    found = by_name(doctor.check_sglang())
    assert found["SGLang"].status == "yes"
    assert found["SGLang's seams"].found == "a.b moved (and 1 more)"
    assert found["plugin registered"].status == "no"
    assert found["C++ compiler"].found == "g++ and ninja not found on PATH"
    monkeypatch.setattr(seams, "check_seams", Mock(side_effect=RuntimeError("operator torchvision::nms is missing")))
    seam = by_name(doctor.check_sglang())["SGLang's seams"]
    assert (seam.status, "nms" in seam.found) == ("no", True)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [SimpleNamespace(name="kvfetch")])
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    assert by_name(doctor.check_sglang())["plugin registered"].advice == "add kvfetch to SGLANG_PLUGINS"
    monkeypatch.setenv("SGLANG_PLUGINS", "other, kvfetch")
    assert by_name(doctor.check_sglang())["plugin registered"].status == "yes"


def test_a_codec_that_lies_and_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(bitstream: bytes, shape: tuple[int, int, int]) -> torch.Tensor:
        return torch.zeros((shape[0], 3, *shape[1:]), dtype=torch.uint8)

    monkeypatch.setattr(CODECS["zstd"], "decode", wrong)
    monkeypatch.setattr(CODECS["hevc"], "decode", Mock(side_effect=CorruptError("no")))
    found = by_name(doctor.check_codecs())
    assert found["codec zstd"].status == found["codec hevc"].status == "no"
    assert found["codec deflate"].status == found["codec hevc420"].status == "yes"


def test_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check, nvdec = doctor.check_gpu()
    assert [check.status, nvdec.status] == ["warn", "warn"]
    assert "sglang_on_cpu is installed" in check.found
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install ./cpu_engine" in doctor.check_gpu()[0].advice


def test_how_servers_restore_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU leaves to the CPU, each on its own, by the trials that a server makes at its start."""

    def restoring(batches: str, of_ans: tuple[bool, str], fault_on_gpu: Mock) -> dict[str, Check]:
        monkeypatch.setattr(Device, "why_no_batches", lambda device: batches)
        monkeypatch.setattr(ans, "try_gpu_ans", lambda device: of_ans)
        for module in (klt_choice, restore_exact):
            monkeypatch.setattr(module, "fault_on_gpu", fault_on_gpu)
        return by_name(doctor._check_restoring(torch.device("cuda", 0)))

    found = restoring("", (True, "ans is decoded on the GPU"), Mock(return_value=""))
    assert {check.status for check in found.values()} == {"yes"}
    assert found["restore_klt"].found == found["restore_exact"].found == "gives the CPU's values"
    broken = Mock(side_effect=RuntimeError("PassManager::run failed"))
    faults = ((broken, "RuntimeError: PassManager::run failed"), (Mock(return_value="1.0% differ"), "1.0% differ"))
    for fault_on_gpu, fault in faults:
        found = restoring("a trial copied other bytes", (False, "decoded on the CPU: other integers"), fault_on_gpu)
        assert {name: check.status for name, check in found.items()} == dict.fromkeys(found, "warn")
        for name in ("klt", "exact"):
            assert found[f"restore_{name}"].found == f"{name} is restored on the CPU: {fault}"
        assert found["batches of copies"].found.endswith("copied other bytes")
        assert found["ans"].found.endswith("other integers")


class FakeNvcuvid:
    """libnvcuvid of a GPU that decodes the given chroma formats of 8-bit HEVC."""

    def __init__(self, *chromas: int) -> None:
        self.chromas = chromas

    def cuvidGetDecoderCaps(self, reference: Any) -> int:
        caps = reference._obj
        assert (caps.codec, caps.bit_depth_minus_8) == (8, 0)
        caps.is_supported = caps.chroma in self.chromas
        caps.num_engines, caps.max_width, caps.max_height = 7, 8192, 8192
        return 0


@pytest.mark.parametrize(
    ("chromas", "status", "found"),
    [
        ((1, 3), "yes", "HEVC 4:4:4 8-bit, 7 engines, up to 8192x8192"),
        ((1,), "warn", "HEVC 4:2:0 only, 7 engines"),
        ((), "warn", "decodes no HEVC; codecs run on the CPU"),
    ],
)
def test_what_nvdec_can_do(chromas: tuple[int, ...], status: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeNvcuvid(*chromas))
    check = by_name(doctor._check_nvdec())["NVDEC"]
    assert (check.status, check.found) == (status, found)


def test_the_decoders_structure_has_its_c_size() -> None:
    assert ctypes.sizeof(DecodeCaps) == 88
    assert (DecodeCaps.is_supported.offset, DecodeCaps.min_width.offset) == (24, 40)


def test_what_decodes_without_nvidias_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for nvdec_or_none, found, status in (
        (object(), "decoded on NVDEC, 7 engines: hevc", "yes"),
        (None, "HEVC is decoded on the CPU: no library", "warn"),
    ):
        monkeypatch.setattr(nvdec, "open_current_nvdec", lambda opened=(nvdec_or_none, found): opened)
        check = doctor._check_decoding()
        assert (check.status, check.found) == (status, found)
    monkeypatch.setattr(ctypes, "CDLL", Mock(side_effect=OSError("libnvcuvid.so.1: cannot open shared object file")))
    monkeypatch.setitem(sys.modules, "PyNvVideoCodec", None)
    checks = by_name(doctor._check_nvdec())
    assert checks["NVDEC"].status == checks["PyNvVideoCodec"].status == "warn"
    assert "libnvcuvid" in checks["NVDEC"].found
    assert "pip install" in checks["PyNvVideoCodec"].advice


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
    assert "on a GPU without NVENC a stub will do: docs/gpus.md" in check.advice
    (tmp_path / "PyNvVideoCodec.py").write_text("raise RuntimeError('Driver version is too old')")
    assert "update the NVIDIA driver" in doctor._check_binding().advice


def test_a_store_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_ENV, "a token of another store")
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
        args = ("doctor", "--json", store.url)
        found = {check["name"]: check for check in kvfetch_json("doctor", store.url, exit_code=1)}
        assert found["store reachable"]["status"] == "yes"
        assert found["store authorised"]["status"] == "no"
        assert "token" in found["store authorised"]["advice"]
        monkeypatch.setenv(TOKEN_ENV, "wrong")
        assert f"the token came from {TOKEN_ENV}" in kvfetch(*args).stdout
        monkeypatch.setenv(TOKEN_ENV, "secret")
        granted = kvfetch(*args)
        assert granted.exit_code == 0
        assert "secret" not in granted.stdout


@pytest.mark.parametrize(("version", "status"), [("3.5.1", "warn"), ("3.6.0", "yes"), ("3.10.0+git1", "yes")])
def test_an_old_triton_is_named(monkeypatch: pytest.MonkeyPatch, version: str, status: str) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    (check,) = doctor.check_triton()
    assert (check.status, version in check.found) == (status, True)
