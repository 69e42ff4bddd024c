"""Installs another SGLang beside the environment's own: a release, or ours with `patches/`.

``python -m harness.sglang_beside VERSION`` prints the folder, as does ``patched``; see ``harness.beside``.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
import sys
from pathlib import Path

from harness.beside import install_beside, make_once, run

PATCHES = sorted(Path(__file__).parents[1].joinpath("patches").glob("*.patch"))


def install_sglang_beside(name: str) -> Path:
    """Return a folder with a release of SGLang, or with ours and ``patched``, made if it is not there yet. Raises
    RuntimeError, with what the program that makes it says."""
    if name != "patched":
        return install_beside("sglang", name)
    digest = hashlib.sha256(b"".join(patch.read_bytes() for patch in PATCHES)).hexdigest()
    version = importlib.metadata.version("sglang")
    return make_once("sglang", f"{version}-patched-{digest[:16]}", _copy_and_patch) / "python"


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
    run(["git", "apply", *map(str, PATCHES)], folder, env)


if __name__ == "__main__":
    try:
        print(install_sglang_beside(*sys.argv[1:]))
    except RuntimeError as error:
        raise SystemExit(str(error)) from error
