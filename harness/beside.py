"""Installs other releases of packages beside the environment's own, in folders of the environment.

A folder that is first on PYTHONPATH hides the environment's release of its package. All other packages are shared.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


def install_beside(package: str, version: str) -> Path:
    """Return a folder with a release of a package, which is installed if it is not there yet. Raises RuntimeError, with
    what pip says."""
    return make_once(package, version, lambda folder: _install(folder, f"{package}=={version}"))


def environment(folder: Path) -> dict[str, str]:
    """Return this process's environment with the packages in a folder before all others."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


def make_once(package: str, name: str, make: Callable[[Path], None]) -> Path:
    """Return the environment's folder for ``package`` and ``name``. If it is missing, call ``make`` with the path of a
    temporary folder to create, and move that into place. So other processes never find it half made, although they may
    make it at the same time."""
    folder = Path(sys.prefix, package, name)
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            made = Path(temporary, name)
            make(made)
            try:
                made.rename(folder)
            except OSError:
                if not folder.exists():
                    raise
    return folder


def _install(folder: Path, requirement: str) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    run([*pip, "--target", str(folder), requirement], folder.parent)


def run(command: list[str], folder: Path, env: dict[str, str] | None = None) -> None:
    """Run a program in a folder. Raises RuntimeError, with what it says, if it fails."""
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stderr}")
