"""`triton_kernels` is also another project's name: SGLang's search for it must give the same result without us."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ASK = """
import sys
{before}
from sglang.srt.utils.common import is_triton_kernels_available
print("answer", is_triton_kernels_available())
"""
# Hides our distribution as if it were not installed: its import hooks, its paths and its modules.
_WITHOUT_US = """
sys.meta_path[:] = [f for f in sys.meta_path if "__editable___sgl_kvfetch" not in getattr(f, "__module__", "")]
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "sgl_kvfetch":
            raise ModuleNotFoundError(name)
for name in [n for n in sys.modules if n.partition(".")[0] == "sgl_kvfetch"]:
    del sys.modules[name]
sys.meta_path.insert(0, Refuse())
"""
_WITH_US = "import sgl_kvfetch.plugin.register, sgl_kvfetch.triton_kernels"


def _run(code: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.sglang
def test_sglang_gets_the_same_answer_with_and_without_us(tmp_path: Path) -> None:
    without = _run(_ASK.format(before=_WITHOUT_US), tmp_path)
    assert _run(_ASK.format(before=_WITH_US), tmp_path) == without
    assert "answer" in without


def test_the_folder_never_becomes_a_package() -> None:
    """In the repository's root, a folder with an `__init__.py` would win over an installed package of that name."""
    import sgl_kvfetch.triton_kernels

    assert not any(Path(path, "__init__.py").exists() for path in sgl_kvfetch.triton_kernels.__path__)
