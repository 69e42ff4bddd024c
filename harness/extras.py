"""Ask pip what each extra of a wheel installs, and try the light ones: ``python -m harness.extras WHEEL [EXTRA]...``.

It needs nothing but pip, and runs outside this project's environment.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

_HEAVY = ("torch", "nvidia-", "cuda-")  # beginnings of the names of packages that take gigabytes
_NEEDS_TORCH = ("codec", "sglang", "gpu", "bench", "testing")
_NOT_FOR_USERS = ("dev",)
_TRY = {"": "sgl_kvfetch.server", "s3": "obstore, redis", "tracing": "opentelemetry.sdk.trace"}


def main(wheel: str, extras: Sequence[str]) -> int:
    """Print a line for each extra. Return 1 if an extra installs torch and should not, or should and does not."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    known = [each for each in project["optional-dependencies"] if each not in _NOT_FOR_USERS]
    failed = False
    for extra in extras or ("", *known):
        names = _would_install(wheel, extra)
        heavy = [name for name in names if name.startswith(_HEAVY)]
        is_right = bool(heavy) == (extra in _NEEDS_TORCH)
        failed |= not is_right
        size = f", {_install(wheel, extra):.0f} MB" if not heavy else ""
        found = f"{len(names)} packages{size}, {f'with {len(heavy)} of torch and CUDA' if heavy else 'without torch'}"
        print(f"{f'[{extra}]' if extra else 'no extra'}: {found}{'' if is_right else ': WRONG'}", flush=True)
    return failed


def _would_install(wheel: str, extra: str) -> list[str]:
    command = ("install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-", _with(wheel, extra))
    report = json.loads(_run(sys.executable, "-m", "pip", *command))
    return [each["metadata"]["name"].lower() for each in report["install"]]


def _install(wheel: str, extra: str) -> float:
    """Install an extra into an empty environment, and run what it is for. Return the environment's size in MB."""
    with tempfile.TemporaryDirectory(prefix="kvfetch-extra-") as folder:
        venv.create(folder)
        python = str(Path(folder, "bin", "python"))
        _run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", _with(wheel, extra))
        _run(str(Path(folder, "bin", "kvfetch")), "--version")
        _run(python, "-c", f"import {_TRY[extra]}")
        return sum(path.lstat().st_size for path in Path(folder).rglob("*") if not path.is_symlink()) / 1e6


def _with(wheel: str, extra: str) -> str:
    return f"{wheel}[{extra}]" if extra else wheel


def _run(*command: str) -> str:
    """Return what a command prints. If it fails, end this program with all that it said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
