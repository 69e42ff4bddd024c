"""The kernels as machine code, and the package without Triton. Each in a process of its own: this one interprets."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compiled_kernels.floors import floor_lines

ROOT = Path(__file__).parents[2]
FLOATS = ("float32", "bfloat16", "float16")
TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942")
KERNELS = [
    *(f"{operation} {dtype} 8x128" for operation in ("pack_exact", "restore_exact") for dtype in (*FLOATS, "uint8")),
    *(f"{operation} {dtype} 8x128" for operation in ("pack_head", "pack_layer") for dtype in FLOATS),
    *(f"restore_symmetric {scales} scales {dtype} 8x128" for scales in ("head", "layer") for dtype in FLOATS),
]
LATENT_KERNELS = [
    *(
        f"{operation} {dtype} 1x576"
        for operation in ("pack_exact", "pack_head", "pack_layer", "restore_exact", "restore_symmetric head scales")
        for dtype in ("bfloat16", "float16")
    ),
    *(f"{operation} uint8 1x{row}" for operation in ("pack_exact", "restore_exact") for row in (576, 656)),
]
KLT_KERNELS = [
    *(f"restore_klt rotated {dtype} 8x128" for dtype in FLOATS),
    "restore_klt bfloat16 8x128",
    *(f"restore_klt rotated bfloat16 8x{dim}" for dim in (64, 80, 256)),
    *(f"restore_klt_interleaved rotated {dtype} 8x128" for dtype in FLOATS),
]

Facts = dict[tuple[str, str], dict[str, Any]]


def run_python(*args: str) -> str:
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "error", *args]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def run_command(what: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run_python("-m", "benchmarks.compiled_kernels", what).splitlines()]


@pytest.fixture(scope="session")
def compiled() -> Facts:
    """As the table cuts them."""
    return {(x["kernel"], x["target"]): x for x in run_command("facts")}


def assert_good(facts: dict[str, Any], registers: int) -> None:
    assert facts["stack_bytes"] == 0, "registers spill"
    assert facts["registers"] <= registers
    assert facts["access_bytes"] == 16, "KV buffers are not accessed 16 bytes at a time"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_compiles(kernel: str, target: str, compiled: Facts) -> None:
    """With 64 registers a thread, 1024 threads fit an SM."""
    assert_good(compiled[kernel, target], registers=64)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", LATENT_KERNELS)
def test_compiles_for_latent_vectors(kernel: str, target: str, compiled: Facts) -> None:
    """656 bytes are cut into rows of 16, so that threads compute more addresses."""
    assert_good(compiled[kernel, target], registers=96 if "656" in kernel else 64)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", KLT_KERNELS)
def test_compiles_klt(kernel: str, target: str, compiled: Facts) -> None:
    """With 128 registers a thread, 512 threads fit an SM; with GPT-J's pairs, 256. An AMD unit has twice as many."""
    facts = compiled[kernel, target]
    assert facts["stack_bytes"] == 0, "registers spill"
    assert facts["registers"] <= (256 if target == "gfx942" else 160 if "interleaved" in kernel else 128)
    assert facts["shared_bytes"] <= 48 << 10
    if "interleaved" not in kernel:
        assert facts["access_bytes"] >= (8 if target == "gfx942" else 16)


@pytest.mark.parametrize("target", TARGETS)
def test_compiles_frame_sum(target: str, compiled: Facts) -> None:
    assert_good(compiled["frame_sum", target], registers=64)


def test_every_variant_is_named_here(compiled: Facts) -> None:
    assert {kernel for kernel, _ in compiled} == {*KERNELS, *LATENT_KERNELS, *KLT_KERNELS, "frame_sum"}


def test_what_the_table_says_spills_nothing(compiled: Facts) -> None:
    assert not [x for x in compiled.values() if x["stack_bytes"]]


def test_however_it_is_cut_restore_klt_adds_with_one_instruction() -> None:
    instructions = defaultdict(set)
    for x in run_command("candidates"):
        instructions[x["kernel"], x["target"]].add(tuple(x["instructions"]))
    assert {target for _, target in instructions} == set(TARGETS)
    for case, found in instructions.items():
        assert len(found) == 1, case
        assert len(found.pop()) == 1, case


def test_the_page_says_what_is_compiled_now(compiled: Facts, tmp_path: Path) -> None:
    """``python -m benchmarks.compiled_kernels`` writes it anew."""
    written = (ROOT / "docs" / "gpu" / "compiled.md").read_text()
    if f"with Triton {importlib.metadata.version('triton')}." not in written:
        pytest.skip("it was compiled with another Triton")
    run_python("-m", "benchmarks.compiled_kernels", "page", "--out", str(tmp_path / "page.md"))
    assert (tmp_path / "page.md").read_text() == written


def test_the_docs_have_the_floors_that_are_computed_now() -> None:
    assert "\n".join(floor_lines()) in (ROOT / "docs" / "kernels.md").read_text()


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
