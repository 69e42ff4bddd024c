"""The kernels run on a GPU, or, without one, in Triton's interpreter. Processes of their own run Python with the newest
Triton that the project supports, which is the environment's own, or with the oldest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.beside import environment, install_beside
from sgl_kvfetch.triton_kernels.runtime import use_kernels
from tests.triton_kernels.cases import DEVICE

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def kernels_run() -> None:
    """Otherwise the tests would compare the reference with itself."""
    assert use_kernels(DEVICE), "Triton does not interpret: it was imported before TRITON_INTERPRET=1 was set"


@pytest.fixture(scope="session")
def oldest_triton() -> Path:
    """The folder of the oldest Triton that pyproject.toml allows, installed at its first use (170 MB)."""
    (version,) = set(re.findall(r'"triton>=([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    try:
        return install_beside("triton", version)
    except RuntimeError as error:
        pytest.skip(f"the oldest Triton cannot be installed: {error}")


def run_python(*arguments: str, triton: Path | None = None) -> str:
    """Run Python without Triton's interpreter, with the Triton in a folder if there is one. Return what it prints."""
    env = os.environ if triton is None else environment(triton)
    command = [sys.executable, "-W", "error", *arguments]
    done = subprocess.run(command, cwd=ROOT, env={**env, "TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
