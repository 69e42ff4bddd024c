"""The bundle with which gpu_check runs where there is no network, without downloading anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

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


def test_it_runs_from_the_bundle_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "bundle"
    monkeypatch.setattr(bundle, "_download", make_wheel)
    bundle.make(made)
    with zipfile.ZipFile(made / "pynvvideocodec-9.9-py3-none-any.whl") as wheel:
        assert sorted(wheel.namelist()) == sorted(KEPT)
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "KVFETCH_PYTHON": sys.executable}
    env.pop("PYTHONPATH", None)
    command = [str(made / "gpu_check"), "--only", "kernels"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    machine, kernels = json.loads((made / "results" / "no-gpu.json").read_text())["steps"]
    found = {row["what"]: row["is"] for row in machine["rows"]}
    assert found["PyNvVideoCodec"] == "9.9"
    assert (kernels["name"], kernels["outcome"]) == ("kernels", "skipped")
