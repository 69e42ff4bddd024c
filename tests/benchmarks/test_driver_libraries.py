"""The driver's video libraries, on a machine that lacks them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_check import driver_libraries

pytestmark = pytest.mark.process


def test_a_stub_stands_in_for_the_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = driver_libraries._loads
    monkeypatch.setattr(driver_libraries, "_loads", lambda library: "/" in library and loads(library))
    monkeypatch.setattr(driver_libraries, "_MOUNT", tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/before")
    assert driver_libraries.complete(tmp_path / "libraries") == [
        "libnvcuvid.so.1 is missing: install the driver's video libraries",
        "libnvidia-encode.so.1 is missing: a stub without an encoder stands in for it",
    ]
    assert os.environ["LD_LIBRARY_PATH"] == f"{tmp_path / 'libraries'}:/before"
    new_process = [sys.executable, "-c", "import ctypes; ctypes.CDLL('libnvidia-encode.so.1')"]
    assert subprocess.run(new_process).returncode == 0
    stub = tmp_path / "libraries" / "libnvidia-encode.so.1"
    version = ctypes.c_uint()
    assert ctypes.CDLL(str(stub)).NvEncodeAPIGetMaxSupportedVersion(ctypes.byref(version)) == 0
    assert version.value == 208  # with less, PyNvVideoCodec 2.2.4 takes its module for older drivers
    assert ctypes.CDLL(str(stub)).NvEncodeAPICreateInstance(None) == 1  # no device can encode
