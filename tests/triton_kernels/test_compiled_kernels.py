"""The kernels as machine code, and the package without Triton. Each in a process of its own: this one interprets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CAPABILITIES = (80, 89, 90, 100)
KERNELS = [
    f"{operation}-{kind}-{dtype}"
    for operation in ("pack", "restore")
    for kind in ("exact", "head", "layer")
    for dtype in ("float32", "bfloat16", "float16", "float8_e4m3fn")
    if kind == "exact" or dtype != "float8_e4m3fn"
]
KLT_KERNELS = [
    *(f"restore-klt-neox-128-{dtype}" for dtype in ("float32", "bfloat16", "float16")),
    *(f"restore-klt-{kind}-bfloat16" for kind in ("none-128", "gptj-128", "neox-80", "neox-256")),
]


def run_python(*args: str) -> str:
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    result = subprocess.run([sys.executable, *args], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="session")
def compiled() -> dict[tuple[str, int], dict[str, Any]]:
    script = Path(__file__).with_name("compile_kernels.py")
    results = [json.loads(line) for line in run_python("-W", "error", str(script)).splitlines()]
    return {(r["kernel"], r["capability"]): r for r in results}


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_compiles(kernel: str, capability: int, compiled: dict[tuple[str, int], dict[str, Any]]) -> None:
    result = compiled[kernel, capability]
    assert result["cubin_bytes"] > 0
    assert result["stack"] == 0, "registers spill"
    assert result["reg"] <= 64, "fewer than 1024 threads fit an SM"
    assert result["wide"], "KV buffers are not accessed 16 bytes at a time"


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kernel", KLT_KERNELS)
def test_compiles_klt(kernel: str, capability: int, compiled: dict[tuple[str, int], dict[str, Any]]) -> None:
    result = compiled[kernel, capability]
    assert result["cubin_bytes"] > 0
    assert result["stack"] == 0, "registers spill"
    assert result["reg"] <= (160 if "gptj" in kernel else 128), "fewer than 512 threads fit an SM; with GPT-J's, 256"
    assert result["shared_bytes"] <= 48 << 10
    # GPT-J's pairs are stored two apart.
    assert result["wide"] or "gptj" in kernel, "KV buffers are not accessed 16 bytes at a time"


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiles_frame_sum(capability: int, compiled: dict[tuple[str, int], dict[str, Any]]) -> None:
    result = compiled["frame-sum", capability]
    assert result["cubin_bytes"] > 0
    assert result["stack"] == 0, "registers spill"
    assert result["reg"] <= 64, "fewer than 1024 threads fit an SM"
    assert result["wide"], "frames are not read 16 bytes at a time"


def test_every_variant_is_named_here(compiled: dict[tuple[str, int], dict[str, Any]]) -> None:
    assert {kernel for kernel, _ in compiled} == {*KERNELS, *KLT_KERNELS, "frame-sum"}


def test_references_need_no_triton() -> None:
    run_python(
        "-c",
        """
import sys
sys.modules["triton"] = None
import torch
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.layout.choose import default_layout
from sgl_kvfetch.triton_kernels.frame_sum import frame_sum
from sgl_kvfetch.triton_kernels.pack import pack
from sgl_kvfetch.triton_kernels.restore import restore
from sgl_kvfetch.triton_kernels.restore_klt import restore_klt

buffer, output, slots = torch.randn(9, 2, 64), torch.zeros(9, 2, 64), torch.arange(9)
layout = default_layout(2, 64, 9)
restore(list(pack([buffer], slots, layout).frames), layout, slots, [output])
assert torch.equal(buffer, output)
restore_klt(
    pack([buffer], slots, layout, centres=[127]).frames[0],
    layout,
    slots,
    [output],
    scales=torch.ones((9, 1, 1), dtype=torch.bfloat16),
    inverse=torch.eye(64, dtype=torch.bfloat16).expand(1, 2, 64, 64).contiguous(),
    step=0.0,
    means=torch.full((1, 2, 64), 3.0),
)
assert bool((output == 3.0).all())
try:
    frame_sum(pack([buffer], slots, layout).frames[0])
    pack([buffer.to("meta")], slots.to("meta"), layout)
except UnsupportedError as e:
    assert "triton" in str(e)
else:
    raise AssertionError("no error")
""",
    )
