"""What a package index would get: the wheel and the sources are valid, and a store's machine needs no torch."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.conftest import PACKAGES, ROOT, copy_sources, pip

LIGHT = ("s3", "tracing", "plot")
BUILD = "import sys, setuptools.build_meta; setuptools.build_meta.build_sdist(sys.argv[1])"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's sources, as an archive."""
    folder, built = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("built")
    copy_sources(folder)
    subprocess.run([sys.executable, "-c", BUILD, str(built)], cwd=folder, capture_output=True, check=True)
    (archive,) = built.glob("*.tar.gz")
    return archive


def test_the_sources_have_all_that_a_wheel_is_built_from(sources: Path) -> None:
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()]
    ours = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts and path.suffix != ".so"}
    with tarfile.open(sources) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert ours | {"pyproject.toml", "setup.py", "README.md", "LICENSE"} <= names


def test_an_index_would_take_them(wheel: Path, sources: Path) -> None:
    if importlib.util.find_spec("twine") is None:
        pytest.skip("needs twine, as in the extra `dev`")
    check = [sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sources)]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_light_extras_bring_no_torch(wheel: Path, tmp_path: Path) -> None:
    """Asked of the index, without an installation. scripts/check_release does it for each extra."""
    report = tmp_path / "report.json"
    options = ("--quiet", "--dry-run", "--ignore-installed", "--report", str(report))
    pip("install", *options, f"{wheel}[{','.join(LIGHT)}]")
    names = {each["metadata"]["name"].lower() for each in json.loads(report.read_text())["install"]}
    assert {"obstore", "redis", "matplotlib", "opentelemetry-sdk", "aiohttp"} <= names
    assert {name for name in names if name.startswith(("torch", "nvidia", "cuda", "triton", "av"))} == set()
