"""Runs the tests that need a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu_check.record import Record, SkippedError

_ROOT = Path(__file__).parents[2]
_NOTHING_COLLECTED = 5
_MARK = "pytest.mark.gpu"


def find_files() -> list[str]:
    """Return the files with such tests. Others are not imported, since they may need packages that are missing."""
    return sorted(str(p.relative_to(_ROOT)) for p in (_ROOT / "tests").rglob("test_*.py") if _MARK in p.read_text())


def run(record: Record) -> None:
    # If one is missing, the step is skipped. The settings in pyproject.toml need the plugins.
    import pytest
    import pytest_asyncio  # noqa: F401
    import pytest_timeout  # noqa: F401

    files = find_files()
    if importlib.util.find_spec("sglang") is None:
        record.note("tests of the plugin were left out: sglang is not installed")
        files = [name for name in files if not name.startswith("tests/plugin/")]
    # Warnings of other versions than ours are no failures of the GPU's.
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    print(done.stdout, done.stderr, sep="\n")
    last = next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "nothing")
    record.row("pytest -m gpu", pytest=pytest.__version__, found=last.strip("= "))
    if done.returncode == _NOTHING_COLLECTED:
        raise SkippedError("no test is marked gpu")
    if done.returncode:
        record.fail(f"pytest ended with {done.returncode}: {last.strip('= ')}")
