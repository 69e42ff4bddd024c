"""What a package index would get: what the wheel contains, that it works where nothing else of this checkout is, that
it and the sources are valid, and that a store's machine needs no torch."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import PACKAGES, ROOT, copy_sources, pip

FIND = """
import importlib.metadata, inspect, sys
sys.path.insert(0, sys.argv[1])
for found in importlib.metadata.distribution(sys.argv[2]).entry_points:
    if found.group.startswith("sglang."):
        print(found.group, found.name, inspect.getfile(found.load()))
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


def test_sglang_finds_the_plugin_of_the_wheel_and_no_platform(wheel: Path, tmp_path: Path) -> None:
    register = tmp_path / "sgl_kvfetch" / "plugin" / "register.py"
    assert found_by_sglang(wheel, "sgl_kvfetch", tmp_path) == [f"sglang.srt.plugins kvfetch {register}"]


def test_the_cpu_engine_is_in_a_wheel_of_its_own(engine_wheel: Path, tmp_path: Path) -> None:
    """With one name in both groups, so that SGLANG_PLUGINS cannot leave one of them out."""
    sources = {path.name for path in (ROOT / "cpu_engine" / "sglang_on_cpu").glob("*.py")}
    with zipfile.ZipFile(engine_wheel) as files:
        names = {name for name in files.namelist() if ".dist-info/" not in name}
    assert names == {f"sglang_on_cpu/{name}" for name in sources}
    package = tmp_path / "sglang_on_cpu"
    assert sorted(found_by_sglang(engine_wheel, "sglang_on_cpu", tmp_path)) == [
        f"sglang.srt.platforms sglang_on_cpu {package / 'platform.py'}",
        f"sglang.srt.plugins sglang_on_cpu {package / 'seams.py'}",
    ]


def found_by_sglang(wheel: Path, name: str, folder: Path) -> list[str]:
    """Install a wheel into a folder. Return the group, the name and the file of each of its entry points."""
    pip("install", "--quiet", "--no-deps", "--target", str(folder), str(wheel))
    command = [sys.executable, "-W", "ignore", "-c", FIND, str(folder), name]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_native_modules_are_hardened(wheel: Path, tmp_path: Path) -> None:
    """They parse what stores have. ``readelf`` comes with the compiler that built the wheel."""
    with zipfile.ZipFile(wheel) as files:
        native = [files.extract(name, tmp_path) for name in files.namelist() if name.endswith(".so")]
    assert len(native) == 3
    for path in native:
        readelf = ("readelf", "--wide", "--dynamic", "--program-headers", "--dyn-syms", path)
        said = subprocess.run(readelf, capture_output=True, text=True, check=True).stdout
        assert "GNU_RELRO" in said, path
        assert "BIND_NOW" in said, path
        (stack,) = [line for line in said.splitlines() if "GNU_STACK" in line]
        assert " RW " in stack, path  # and not executable
        assert "__stack_chk_fail" in said, path


LIGHT = ("s3", "tracing")
BUILD = "import sys, setuptools.build_meta; setuptools.build_meta.build_sdist(sys.argv[1])"


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


def test_light_extras_bring_no_torch(wheel: Path) -> None:
    """By what the installed packages say that they need."""
    with zipfile.ZipFile(wheel) as files:
        (path,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        ours = files.read(path).decode()
    needed = [line.removeprefix("Requires-Dist: ") for line in ours.splitlines() if line.startswith("Requires-Dist: ")]
    asked = [each for text in needed for each in wanted(text, LIGHT)]
    names: set[str] = set()
    while asked:
        package = asked.pop()
        if (name := canonicalize_name(package.name)) not in names:
            names.add(name)
            asked += [each for text in requires(name) or () for each in wanted(text, package.extras)]
    assert {"obstore", "redis", "hiredis", "opentelemetry-sdk", "aiohttp"} <= names
    assert {name for name in names if name.startswith(("torch", "nvidia", "cuda", "triton", "av"))} == set()


def wanted(text: str, extras: Iterable[str]) -> list[Requirement]:
    """Return the requirement in a list, unless its marker leaves it out here, for all of these extras and for none."""
    requirement = Requirement(text)
    marker = requirement.marker
    is_wanted = marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))
    return [requirement] if is_wanted else []
