"""The bundle with which gpu_check runs where there is no network, without downloading anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_check import bundle

KEPT = [
    "PyNvVideoCodec/__init__.py",
    "PyNvVideoCodec/PyNvVideoCodec_130.cpython-312-x86_64-linux-gnu.so",
    "PyNvVideoCodec/libavutil.so.61",
    "pynvvideocodec./libcudart-c64a25f3.so.12.3.101",
    "pynvvideocodec-9.9.dist-info/METADATA",
    "pynvvideocodec-9.9.dist-info/WHEEL",
    "pynvvideocodec-9.9.dist-info/RECORD",
]
SPARE = [
    "PyNvVideoCodec/libavutil.so",
    "PyNvVideoCodec/libavutil.so.61.1.101",
    "pynvvideocodec-9.9.data/data/external/ffmpeg/src/ffmpeg-9.0.1.tar.xz",
    "samples/basic/encode.py",
    "benchmarks/requirements.txt",
]
CONTENT = {
    KEPT[-3]: "Metadata-Version: 2.1\nName: PyNvVideoCodec\nVersion: 9.9\n",
    KEPT[-2]: "Wheel-Version: 1.0\nGenerator: none\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    KEPT[-1]: "".join(f"{name},,\n" for name in [*KEPT, *SPARE]),
}


def make_wheel(folder: Path) -> None:
    with zipfile.ZipFile(folder / "pynvvideocodec-9.9-py3-none-any.whl", "w") as wheel:
        for name in [*SPARE, *KEPT]:
            wheel.writestr(name, CONTENT.get(name, ""))


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle with one wheel."""
    monkeypatch.setattr(bundle, "_download", make_wheel)
    bundle.make(tmp_path / "bundle")
    return tmp_path / "bundle"


def test_wheels_are_those_of_the_tests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[Any]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    bundle._download(tmp_path)
    (command,) = commands
    assert {"--no-deps", "--only-binary=:all:", "--python-version=3.12"} <= set(command)
    assert {f"{name}=={version(name)}" for name in ("av", "pydantic-core", "pytest-asyncio")} <= set(command)
    assert command[-1] == "PyNvVideoCodec>=2.2.4"


def test_spare_files_are_left_out(made: Path) -> None:
    with zipfile.ZipFile(made / "pynvvideocodec-9.9-py3-none-any.whl") as wheel:
        assert sorted(wheel.namelist()) == sorted(KEPT)


def test_a_bundle_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "_download", make_wheel)
    monkeypatch.setattr(bundle, "MAX_BYTES", 1 << 20)
    with pytest.raises(ValueError, match="the bundle is larger than 1 MiB"):
        bundle.make(tmp_path / "bundle")


def test_it_runs_from_the_bundle_alone(made: Path, tmp_path: Path) -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "KVFETCH_PYTHON": sys.executable}
    env.pop("PYTHONPATH", None)
    command = [made / "gpu_check", "--only", "kernels"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    machine, kernels = json.loads((made / "results" / "no-gpu.json").read_text())["steps"]
    found = {row["what"]: row["is"] for row in machine["rows"]}
    assert found["PyNvVideoCodec"] == "9.9"
    assert (kernels["name"], kernels["outcome"]) == ("kernels", "skipped")
