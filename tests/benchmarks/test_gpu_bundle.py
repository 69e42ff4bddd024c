"""The bundle with which gpu_check runs where there is no network, without downloading anything."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu_check import bundle

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
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


CHECKS = """
import importlib, importlib.metadata, json, sys
from pathlib import Path
import torch
from benchmarks.gpu_check import ans, kernels, quantise
from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.runner import STEPS
from benchmarks.gpu_check.kernels import Span
from sgl_kvfetch.codec.bitstream import _ans
from sgl_kvfetch.codec.quant import _klt

assert all(Path(x.__file__).is_relative_to(Path.cwd()) for x in (_ans, _klt, quantise))
for step in STEPS:
    importlib.import_module(step.runs.partition(":")[0])
packages = importlib.metadata.packages_distributions()
print(json.dumps([name for module in sys.modules for name in packages.get(module, [])]))
record, cpu = Record(Path(sys.argv[1])), torch.device("cpu")
kernels.check(record, cpu, [Span(17, heads=2, dim=16, coefficients=20)])
ans.check(record, cpu, [ans.Rows(1, 2, 48)])
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "bundle"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle, "_download", make_wheel)
        bundle.make(folder)
    return folder


@pytest.fixture
def env() -> dict[str, str]:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "KVFETCH_PYTHON": sys.executable, "TRITON_INTERPRET": "1"}
    env.pop("PYTHONPATH", None)
    return env


def test_it_runs_from_the_bundle_alone(made: Path, env: dict[str, str], tmp_path: Path) -> None:
    with zipfile.ZipFile(made / "pynvvideocodec-9.9-py3-none-any.whl") as wheel:
        assert sorted(wheel.namelist()) == sorted(KEPT)
    command = [str(made / "gpu_check"), "--only", "kernels", "ans"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    machine, *steps = json.loads((made / "results" / "no-gpu.json").read_text())["steps"]
    found = {row["what"]: row["is"] for row in machine["rows"]}
    assert found["PyNvVideoCodec"] == "9.9"
    assert [(step["name"], step["outcome"]) for step in steps] == [("kernels", "skipped"), ("ans", "skipped")]


def test_its_tree_checks_the_kernels(made: Path, env: dict[str, str], tmp_path: Path) -> None:
    """With its own native modules, and in Triton's interpreter instead of on a GPU."""
    subprocess.run(["tar", "-x", "-f", made / "tree.tar.gz", "-C", tmp_path], check=True)
    command = [sys.executable, "-c", CHECKS, "found.json"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    needed = {re.split("[<=>]", each)[0] for each in ours} & {
        name.replace("_", "-") for name in json.loads(done.stdout)
    }
    assert needed <= {*bundle.PRESENT, *bundle.PACKAGES}, "in neither the bundle nor the list of what has to be there"
    found = json.loads((tmp_path / "found.json").read_text())
    assert not found["reason"]
    assert {row["found"] for row in found["rows"]} == {"as the reference's", "as the CPU's"}


STARTS = """
import sglang.launch_server, sglang.srt.entrypoints.http_server, sglang.srt.models.llama, sglang.version
from pathlib import Path
assert Path(sglang.__file__).is_relative_to(Path.cwd()), sglang.__file__
print(sglang.version.__version__)
"""


@pytest.mark.sglang
@pytest.mark.slow
def test_its_second_part_has_what_a_server_imports(env: dict[str, str], tmp_path: Path) -> None:
    """But for packages, which are this environment's here. They are listed, or have to be there."""
    bundle.pack_sglang(tmp_path / "sglang.tar.xz")
    assert (tmp_path / "sglang.tar.xz").stat().st_size < bundle.MAX_SGLANG_BYTES / 2
    with tarfile.open(tmp_path / "sglang.tar.xz") as archive:
        names = archive.getnames()
        archive.extractall(tmp_path, filter="data")
    assert any(re.fullmatch(r"sglang-[^/]+\.dist-info/METADATA", name) for name in names)
    assert not [name for name in names if name.endswith((".so", ".cu", ".pyc"))]
    command = [sys.executable, "-W", "ignore", "-c", STARTS]
    done = subprocess.run(
        command, cwd=tmp_path, env=env | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1].startswith("0.5.")
