"""Runs Python with the newest Triton that the project supports, which is the environment's own, or with the oldest.

Each run is a process of its own: the tests' own processes interpret kernels, and have imported one Triton already.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from harness.beside import environment

ROOT = Path(__file__).parents[2]


def oldest_version() -> str:
    """Return the version that pyproject.toml allows at least."""
    (version,) = set(re.findall(r'"triton>=([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    return str(version)


def run_python(*arguments: str, triton: Path | None = None) -> str:
    """Run Python without Triton's interpreter, with the Triton in a folder if there is one. Return what it prints."""
    env = os.environ if triton is None else environment(triton)
    command = [sys.executable, "-W", "error", *arguments]
    done = subprocess.run(command, cwd=ROOT, env={**env, "TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
