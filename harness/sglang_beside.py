"""Installs another SGLang beside the environment's own: a release, or ours with `patches/`.

``python -m harness.sglang_beside VERSION`` prints the folder, as does ``patched``. First on PYTHONPATH, it hides the
environment's SGLang. All other packages are shared.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

PATCHES = sorted(Path(__file__).parents[1].joinpath("patches").glob("*.patch"))


def install_beside(name: str) -> Path:
    """Return a folder with a release of SGLang, or with ours and ``patched``, made if it is not there yet. Raises
    RuntimeError, with what the program that makes it says."""
    if name != "patched":
        return _make_once(name, lambda folder: _install(folder, name))
    digest = hashlib.sha256(b"".join(patch.read_bytes() for patch in PATCHES)).hexdigest()
    version = importlib.metadata.version("sglang")
    return _make_once(f"{version}-patched-{digest[:16]}", _copy_and_patch) / "python"


def environment(folder: Path) -> dict[str, str]:
    """Return this process's environment with the packages in a folder before all others."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


def _make_once(name: str, make: Callable[[Path], None]) -> Path:
    folder = Path(sys.prefix, "sglang", name)
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            made = Path(temporary, name)
            make(made)
            made.rename(folder)
    return folder


def _install(folder: Path, version: str) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    _run([*pip, "--target", str(folder), f"sglang=={version}"], folder.parent)


def _copy_and_patch(folder: Path) -> None:
    """Lay SGLang out as in its repository, and apply our patches with their tests."""
    distribution = importlib.metadata.distribution("sglang")
    site_packages = Path(str(distribution.locate_file("")))
    for part in ("sglang", f"sglang-{distribution.version}.dist-info"):
        shutil.copytree(
            site_packages / part, folder / "python" / part, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True
        )
    # Or git would look for the files in the repository that the environment lies in.
    env = {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    _run(["git", "apply", *map(str, PATCHES)], folder, env)


def _run(command: list[str], folder: Path, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stderr}")


if __name__ == "__main__":
    try:
        print(install_beside(*sys.argv[1:]))
    except RuntimeError as error:
        raise SystemExit(str(error)) from error
