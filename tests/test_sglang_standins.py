"""Stand-ins for `sgl_kernel`: what a server's process sees of them."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import sglang_standins
from harness.sglang_standins import finder, kernels


def test_a_kernel_without_a_stand_in_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STANDIN_LOG", str(tmp_path / "log"))
    with pytest.raises(kernels.NoStandInError, match="compiled kernel moe has no stand-in"):
        kernels.load("moe")
    with pytest.raises(RuntimeError, match=r"sgl_kernel\.topk has no stand-in"):
        finder.Missing("sgl_kernel.topk")()
    said = (tmp_path / "log").read_text()
    assert "compiled kernel moe (): NONE" in said
    assert "CALLED sgl_kernel.topk" in said


_IN_A_SERVER = """
import sys
import sgl_kernel, sgl_kernel.utils
from sgl_kernel.elementwise import whatever
assert sgl_kernel.rmsnorm.__module__ == "sglang_standins.kernels"
assert not sgl_kernel.utils.is_arch_support_pdl()
try:
    whatever(1)
except RuntimeError as e:
    assert str(e) == "sgl_kernel.elementwise.whatever has no stand-in"
else:
    raise AssertionError
assert "harness" not in sys.modules
from sglang.srt.mem_cache.cpp_utils import native_hash
print(*native_hash._load_native_hash_module().get_hash(range(8), 8, 1, False, None, 4))
"""


@pytest.mark.sglang
def test_what_a_server_imports(tmp_path: Path) -> None:
    """SGLang's page hash, too, which it would compile."""
    env = sglang_standins.lay_out(tmp_path, tmp_path / "log")
    done = subprocess.run(
        [sys.executable, "-c", _IN_A_SERVER], cwd=tmp_path, env=os.environ | env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    first = hashlib.sha256(b"".join(i.to_bytes(4, "little") for i in range(4)))
    second = hashlib.sha256(first.digest() + b"".join(i.to_bytes(4, "little") for i in range(4, 8)))
    assert done.stdout.split() == [first.hexdigest(), second.hexdigest()]
    assert "made module sgl_kernel.elementwise" in (tmp_path / "log").read_text()
