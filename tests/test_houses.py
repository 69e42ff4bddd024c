"""The houses: contracts that a linter checks, and doors through which all names can be had."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOUSES = ("codec", "stores", "directory", "server", "plane", "plugin", "tools")
INNER_DOORS = (
    *(f"codec/{folder}" for folder in ("bitstream", "calibrate", "container", "layout", "quant")),
    "stores/upkeep",
)


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).with_name("lint-imports"))
    command = [program, "--no-cache", "--config", str(ROOT / "pyproject.toml")]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "sgl_kvfetch", folder / "sgl_kvfetch", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.mark.parametrize(
    ("place", "line", "contract"),
    [
        ("plane", "from sgl_kvfetch.stores.http import HttpStore", "stores/ is entered by its door"),
        ("stores", "def f():\n    from sgl_kvfetch.directory import LocalStore", "Each house may enter only"),
        ("plugin", "from sgl_kvfetch.stores import Store", "The plugin enters the data plane and the codec alone"),
        ("plane", "import sglang", "Only plugin/ imports sglang"),
        ("plane", "from sgl_kvfetch.codec.quant.klt import KltQuantiser", "codec/ is entered by its door"),
        ("codec", "import aiohttp", "The codec and the directory do no network I/O"),
    ],
)
def test_a_violation_is_refused(copy: Path, place: str, line: str, contract: str) -> None:
    module = copy / "sgl_kvfetch" / place / "violation.py"
    module.write_text(f"{line}\n")
    try:
        linted = lint(copy)
    finally:
        module.unlink()
    assert linted.returncode == 1
    broken = re.findall(r"^(.*) BROKEN", linted.stdout, re.MULTILINE)
    assert broken
    assert any(name.startswith(contract) for name in broken), broken
    assert "violation" in linted.stdout


@pytest.mark.parametrize("house", [*HOUSES, *INNER_DOORS])
def test_a_door_says_what_its_house_is_for_and_opens(house: str) -> None:
    door = importlib.import_module(f"sgl_kvfetch.{house.replace('/', '.')}")
    assert door.__doc__
    assert len(door.__doc__.strip().splitlines()) >= (3 if "/" in house else 5)
    for name in door.__all__:
        assert getattr(door, name) is not None


@cache
def imported_by_doors() -> set[tuple[str, str]]:
    """Return all imports from a door, in the package and outside it, as pairs of house and name."""
    found = {("tools", "main")}  # the entry point of ``kvfetch``
    for folder in ("sgl_kvfetch", "triton_kernels", "harness", "benchmarks", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("sgl_kvfetch."):
                    found |= {(node.module.removeprefix("sgl_kvfetch."), alias.name) for alias in node.names}
    return found


@pytest.mark.parametrize("house", [*HOUSES, *INNER_DOORS])
def test_a_door_exports_nothing_that_nobody_uses(house: str) -> None:
    stub = ast.parse((ROOT / "sgl_kvfetch" / house / "__init__.pyi").read_text())
    exported = {
        (house.replace("/", "."), alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert exported <= imported_by_doors()
