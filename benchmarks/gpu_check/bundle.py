"""Packs what gpu_check needs on a machine with a GPU and no network: wheels, this tree, and a script that uses both.

The tree has our native modules, too, built of the same commit: git has only their sources, and a folder of the same
name in the working directory hides an installed package.

Python 3.12 and what `PRESENT` names have to be there. SGLang is not needed. It is a second part, in a folder of its
own: the Python files of the release that is installed here, the packages that serving a Llama imports, and our wheel,
from which a server takes the plugin. `harness.sglang_standins` takes the place of what is missing.

Needs only Python's standard library, and setuptools and a C++ compiler for the native modules.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

MAX_BYTES = 64 << 20  # small enough to be copied anywhere
_PYTHON = "3.12"
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
_ROOT = Path(__file__).parents[2]
_SCRIPT = Path(__file__).with_name("from_bundle")
PRESENT = (
    *("aiohappyeyeballs", "aiohttp", "numpy", "pip", "prometheus-client", "pytest", "pytest-timeout", "rich"),
    *("safetensors", "torch", "transformers", "triton", "typer", "xxhash"),
)
# Packed in the versions that are installed here, with which the tests pass.
PACKAGES = (
    *("av", "lazy-loader", "msgspec", "zstandard", "pydantic", "pydantic-core", "annotated-types"),
    *("typing-extensions", "typing-inspection", "pytest-asyncio"),
)
# For SGLang, in the same way.
SGLANG_PACKAGES = (
    *("apache-tvm-ffi", "cffi", "compressed-tensors", "cryptography", "dill", "distro", "fastapi", "gguf"),
    *("interegular", "ipython", "jiter", "jsonschema", "jsonschema-specifications", "loguru", "openai"),
    *("opentelemetry-api", "orjson", "partial-json-parser", "psutil", "pybase64", "pycparser", "python-multipart"),
    *("pyzmq", "referencing", "rpds-py", "setproctitle", "sniffio", "starlette", "uvicorn", "uvloop", "xgrammar"),
)
MAX_SGLANG_BYTES = 30 << 20
# Native code, sources of CUDA, tests and pictures: no Llama needs them.
_SGLANG_SPARE = re.compile(
    r".*\.(so|cu|cuh|h|hpp|cpp|png|jpg|svg|mp4|pyc)$|.*/RECORD$"
    r"|sglang/(test|multimodal_gen/(test|apps|docs|\.agents)|kernels/jit/benchmark)/"
)
_VIDEO = "PyNvVideoCodec"  # usually not installed here, so as in pyproject.toml
_NATIVE = re.compile(r"sgl_kvfetch/.*\.abi3\.so$")  # modules in our wheel
# In its wheel, but of no use: FFmpeg's source, samples, and further copies of libraries, which are loaded as lib*.so.N.
_SPARE = re.compile(r"(samples|benchmarks)/|[^/]+\.data/|PyNvVideoCodec/lib\w+\.so(\.\d+\.\d+\.\d+)?$")


def make(folder: Path, *, with_sglang: bool = False) -> list[str]:
    """Fill ``folder``, which must not exist. Return lines that say what is in it, and how to use it. ``with_sglang``:
    add the second part, as ``folder/sglang``.

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
    if with_sglang:
        lines.append(f"{_add_sglang(folder.resolve() / 'sglang') / 2**20:6.2f} MiB  sglang")
    return [*lines, f"{sum(sizes.values()) / 2**20:6.2f} MiB in all; on the machine with the GPU: {script}"]


def _add_sglang(folder: Path) -> int:
    """Make the second part, and return its size. Raises ValueError if that is too large."""
    folder.mkdir()
    download(folder, [f"{name}=={importlib.metadata.version(name)}" for name in SGLANG_PACKAGES])
    with tempfile.TemporaryDirectory() as temporary:
        shutil.copy(_build_wheel(Path(temporary)), folder)
    pack_sglang(folder / "sglang.tar.xz")
    size = sum(path.stat().st_size for path in folder.iterdir())
    if size > MAX_SGLANG_BYTES:
        raise ValueError(f"SGLang's part has {size / 2**20:.1f} MiB, expected {MAX_SGLANG_BYTES / 2**20:.0f} at most")
    return size


def pack_sglang(path: Path) -> None:
    """Write the installed release of SGLang, without what a Llama does not need."""
    folders: set[str] = set()
    with tarfile.open(path, "w:xz", preset=1) as archive:  # a seventh of the default's time, a third more bytes
        for name in sorted(importlib.metadata.files("sglang") or (), key=str):
            there = Path(str(name.locate()))
            if name.parts[0] == ".." or not there.is_file():
                continue
            if not _SGLANG_SPARE.match(name.as_posix()):
                archive.add(there, name.as_posix(), filter=_anonymous)
            elif (parent := name.parent.as_posix()) not in folders:  # SGLang looks for some of these
                folders.add(parent)
                archive.add(there.parent, parent, recursive=False, filter=_anonymous)


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def _archive(path: Path) -> None:
    """Write the committed tree, with its native modules."""
    with tempfile.TemporaryDirectory() as temporary:
        added = []
        with zipfile.ZipFile(_build_wheel(Path(temporary))) as packed:
            for name in filter(_NATIVE.match, packed.namelist()):
                module = packed.extract(name, temporary)
                added += [f"--prefix={Path(name).parent.as_posix()}/", f"--add-file={module}"]
        command: list[str | Path] = ["git", "archive", "--output", path, *added, "--prefix=", "HEAD"]
        subprocess.run(command, cwd=_ROOT, check=True)


def _build_wheel(folder: Path) -> Path:
    """Build a wheel of the committed tree in an empty folder."""
    source, built = folder / "source", folder / "built"
    source.mkdir()
    tree = subprocess.run(["git", "archive", "HEAD"], cwd=_ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", source], input=tree, check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--wheel-dir", built, source], check=True)
    (wheel,) = built.glob("*.whl")
    return wheel


def _download(folder: Path) -> None:
    requirements = [f"{name}=={importlib.metadata.version(name)}" for name in PACKAGES]
    extras = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    download(folder, requirements + [each for each in extras["gpu"] if each.startswith(_VIDEO)])


def download(folder: Path, requirements: Sequence[str]) -> None:
    """Download wheels for the machine with the GPU."""
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
