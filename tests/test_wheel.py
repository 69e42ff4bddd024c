"""The wheel: what it contains, and that it works where nothing else of this checkout is."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import PACKAGES, ROOT, pip

FIND = """
import importlib.metadata, inspect, sys
sys.path.insert(0, sys.argv[1])
for group, name in ("plugins", "kvfetch"), ("platforms", "kvfetch_cpu"):
    for found in importlib.metadata.entry_points(group=f"sglang.srt.{group}", name=name):
        print(inspect.getfile(found.load()))
"""
pytestmark = pytest.mark.slow


def test_the_wheel_has_all_our_files_and_no_others(wheel: Path) -> None:
    ours = {path.relative_to(ROOT) for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()}
    expected = {
        (Path("sgl_kvfetch") / path if path.parts[0] == "triton_kernels" else path).as_posix()
        for path in ours
        if "__pycache__" not in path.parts and path.suffix not in (".cpp", ".so")
    } | {f"sgl_kvfetch/codec/{name}.abi3.so" for name in ("bitstream/_ans", "quant/_exact", "quant/_klt")}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "-cp311-abi3-" in wheel.name  # one for all Pythons
    metadata = {name for name in names if ".dist-info/" in name}
    assert names - metadata == expected
    assert "sgl_kvfetch/triton_kernels/restore_klt.py" in names
    assert {name.partition("/")[2] for name in metadata} >= {"METADATA", "entry_points.txt", "licenses/LICENSE"}


def test_sglang_finds_the_plugin_of_the_wheel(wheel: Path, tmp_path: Path) -> None:
    pip("install", "--quiet", "--no-deps", "--target", str(tmp_path), str(wheel))
    done = subprocess.run([sys.executable, "-c", FIND, str(tmp_path)], capture_output=True, text=True, check=True)
    plugin = tmp_path / "sgl_kvfetch" / "plugin"
    assert done.stdout.splitlines() == [str(plugin / "register.py"), str(plugin / "cpu" / "platform.py")]
