"""Packs what gpu_check needs on a machine with a GPU and no network: wheels, this tree, and a script that uses both.

The tree has our native modules, too, built of the same commit: git has only their sources, and a folder of the same
name in the working directory hides an installed package.

Python 3.12 and what `PRESENT` names have to be there. SGLang is neither packed nor needed. Needs only Python's standard
library, and setuptools and a C++ compiler for the native modules.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

MAX_BYTES = 64 << 20  # small enough to be copied anywhere
_PYTHON = "3.12"
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
_ROOT = Path(__file__).parents[2]
_SCRIPT = Path(__file__).with_name("from_bundle")
PRESENT = (
    *(
        "aiohappyeyeballs",
        "aiohttp",
        "numpy",
        "pip",
        "prometheus-client",
        "pytest",
        "pytest-timeout",
        "rich",
        "safetensors",
        "torch",
    ),
    *("transformers", "triton", "typer", "xxhash"),
)
# Packed in the versions that are installed here, with which the tests pass.
PACKAGES = (
    "av",
    "lazy-loader",
    "msgspec",
    "zstandard",
    "tenacity",
    "pydantic",
    "pydantic-core",
    "annotated-types",
    "typing-extensions",
    "typing-inspection",
    "pytest-asyncio",
)
_VIDEO = "PyNvVideoCodec"  # usually not installed here, so as in pyproject.toml
_NATIVE = re.compile(r"sgl_kvfetch/.*\.abi3\.so$")  # modules in our wheel
# In its wheel, but of no use: FFmpeg's source, samples, and further copies of libraries, which are loaded as lib*.so.N.
_SPARE = re.compile(r"(samples|benchmarks)/|[^/]+\.data/|PyNvVideoCodec/lib\w+\.so(\.\d+\.\d+\.\d+)?$")


def make(folder: Path) -> list[str]:
    """Fill ``folder``, which must not exist. Return lines that say what is in it, and how to use it.

    Raises CalledProcessError if pip, git or the C++ compiler fail, PackageNotFoundError if this environment lacks a
    package, ValueError if the bundle is too large.
    """
    folder.mkdir(parents=True)
    _download(folder)
    for wheel in folder.glob("*.whl"):
        if wheel.name.lower().startswith(_VIDEO.lower()):
            slim(wheel)
    _archive(folder.resolve() / "tree.tar.gz")
    script = shutil.copy(_SCRIPT, folder / "gpu_check")
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    lines = [f"{size / 2**20:6.2f} MiB  {name}" for name, size in sizes.items()]
    if sum(sizes.values()) > MAX_BYTES:
        raise ValueError("\n".join([*lines, f"the bundle is larger than {MAX_BYTES / 2**20:.0f} MiB"]))
    status = subprocess.run(["git", "status", "--porcelain"], cwd=_ROOT, capture_output=True, check=True)
    if status.stdout:
        lines.append("uncommitted changes were left out")
    return [*lines, f"{sum(sizes.values()) / 2**20:6.2f} MiB in all; on the machine with the GPU: {script}"]


def _archive(path: Path) -> None:
    """Write the committed tree, with its native modules."""
    with tempfile.TemporaryDirectory() as temporary:
        source, built = Path(temporary, "source"), Path(temporary, "built")
        source.mkdir()
        tree = subprocess.run(["git", "archive", "HEAD"], cwd=_ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", source], input=tree, check=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--no-build-isolation", "--wheel-dir", built, source], check=True)
        (wheel,) = built.glob("*.whl")
        added = []
        with zipfile.ZipFile(wheel) as packed:
            for name in filter(_NATIVE.match, packed.namelist()):
                module = packed.extract(name, built)
                added += [f"--prefix={Path(name).parent.as_posix()}/", f"--add-file={module}"]
        command: list[str | Path] = ["git", "archive", "--output", path, *added, "--prefix=", "HEAD"]
        subprocess.run(command, cwd=_ROOT, check=True)


def _download(folder: Path) -> None:
    requirements = [f"{name}=={importlib.metadata.version(name)}" for name in PACKAGES]
    extras = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    requirements += [each for each in extras["gpu"] if each.startswith(_VIDEO)]
    machine = ["--only-binary=:all:", "--implementation=cp", f"--python-version={_PYTHON}"]
    machine += [f"--platform={name}" for name in _PLATFORMS]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, *machine, "--dest", folder, *requirements], check=True)


def slim(wheel: Path) -> None:
    """Take the spare files out of PyNvVideoCodec's wheel."""
    slimmed = wheel.with_suffix(".slimmed")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(slimmed, "w", zipfile.ZIP_DEFLATED) as target:
        for info in source.infolist():
            if not _SPARE.match(info.filename):
                target.writestr(info, source.read(info))
    slimmed.replace(wheel)
