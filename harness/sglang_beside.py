"""Installs another release of SGLang beside the environment's own. ``python -m harness.sglang_beside VERSION`` prints
the folder; first on PYTHONPATH, it hides the environment's SGLang. All other packages are shared.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path


def install_beside(version: str) -> Path:
    """Return a folder with this release of SGLang, installed if it is not there yet. Raises RuntimeError, with what pip
    says, if it cannot be had."""
    folder = Path(sys.prefix, "sglang", version)
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
            target = ["--target", str(Path(made, version)), f"sglang=={version}"]
            done = subprocess.run([*pip, *target], stdin=subprocess.DEVNULL, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"sglang {version} cannot be installed:\n{done.stderr}")
            Path(made, version).rename(folder)
    return folder


def environment(folder: Path) -> dict[str, str]:
    """Return this process's environment with the packages in a folder before all others."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


if __name__ == "__main__":
    try:
        print(install_beside(*sys.argv[1:]))
    except RuntimeError as error:
        raise SystemExit(str(error)) from error
