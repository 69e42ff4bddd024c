"""The driver's video libraries, on a machine that lacks them or keeps them out of the library path."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.gpu_check import driver_libraries
from sgl_kvfetch.codec.bitstream import nvenc_caps

NAMES = ("libnvcuvid.so.1", "libnvidia-encode.so.1")

Complete = Callable[[], list[str]]


@pytest.fixture
def complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Complete:
    """Completes a machine whose library path has none of the driver's libraries. Its mount is ``tmp_path``."""
    loads = driver_libraries._loads
    monkeypatch.setattr(driver_libraries, "_loads", lambda library: "/" in library and loads(library))
    monkeypatch.setattr(driver_libraries, "_MOUNT", tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/before")
    return lambda: driver_libraries.complete(tmp_path / "libraries")


def loads_in_a_new_process(name: str) -> bool:
    return subprocess.run([sys.executable, "-c", f"import ctypes; ctypes.CDLL('{name}')"]).returncode == 0


def test_a_stub_stands_in_for_the_encoder(complete: Complete, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert complete() == [
        "libnvcuvid.so.1 is missing: install the driver's video libraries",
        "libnvidia-encode.so.1 is missing: a stub without an encoder stands in for it",
    ]
    assert os.environ["LD_LIBRARY_PATH"] == f"{tmp_path / 'libraries'}:/before"
    assert loads_in_a_new_process("libnvidia-encode.so.1")
    stub = tmp_path / "libraries" / "libnvidia-encode.so.1"
    version = ctypes.c_uint()
    assert ctypes.CDLL(str(stub)).NvEncodeAPIGetMaxSupportedVersion(ctypes.byref(version)) == 0
    assert version.value == 208  # with less, PyNvVideoCodec 2.2.4 takes its module for older drivers
    monkeypatch.setattr(nvenc_caps, "LIBRARY", str(stub))
    assert nvenc_caps.encode_caps() == {}


def test_libraries_in_the_drivers_folder_are_taken(complete: Complete, tmp_path: Path) -> None:
    (tmp_path / "lib64").mkdir()
    for name in NAMES:
        (tmp_path / "lib64" / name.replace(".1", ".0")).touch()  # a placeholder, which does not load
        source = "int about_the_same;"
        target = tmp_path / "lib64" / name.replace(".1", ".580.1")
        subprocess.run(["cc", "-shared", "-x", "c", "-", "-o", str(target)], input=source, text=True, check=True)
    found_in = f"is not on the library path: taken from {tmp_path / 'lib64'}"
    assert complete() == [f"{name} {found_in}" for name in NAMES]
    assert all(loads_in_a_new_process(name) for name in NAMES)


def test_without_a_compiler_it_says_what_to_install(complete: Complete, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    note = complete()[1]
    assert note.startswith("libnvidia-encode.so.1 is missing, and no stub could be made ([Errno 2]")
    assert note.endswith(": install gcc, or the driver's video libraries")
    assert os.environ["LD_LIBRARY_PATH"] == "/before"


def test_a_complete_machine_is_left_alone(complete: Complete, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_libraries, "_loads", lambda library: True)
    assert complete() == []
    assert os.environ["LD_LIBRARY_PATH"] == "/before"
