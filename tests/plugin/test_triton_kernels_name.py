"""`triton_kernels` is also another project's name, which SGLang searches for: it must not find ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ASK = """
import importlib.util, sgl_kvfetch.plugin.register, sgl_kvfetch.triton_kernels
print(importlib.util.find_spec("triton_kernels"), *sgl_kvfetch.triton_kernels.__path__, sep="\\n")
"""


@pytest.mark.process
def test_sglang_does_not_find_ours(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", _ASK]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    found, *ours = done.stdout.splitlines()
    assert not any(path in found for path in ours)
    # In the repository's root, a folder with an `__init__.py` would win over an installed package of that name.
    assert not any(Path(path, "__init__.py").exists() for path in ours)
