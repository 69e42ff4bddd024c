"""The kernels as machine code, and the package without Triton. Each in a process of its own: this one interprets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.triton_kernels.tritons import run_python

pytestmark = pytest.mark.process

FLOATS = ("float32", "bfloat16", "float16")
FP8 = ("float8_e4m3fn", "float8_e5m2")
TARGET = "sm_90"
TENSOR_CORES = {"sm_90": "wgmma.mma_async m64 k16", "sm_100": "tcgen05.mma"}
MOST_REGISTERS = {
    "ans_decode": 80,
    "ans_decode fitted": 80,
    "xxh3": 96,
}  # with 64, 32 programs of one warp fit an SM; with 80, 25; with 96, 21
KLT_KERNELS = [
    *(f"restore_klt {which} {dtype} 2x128" for which in ("rotated", "interleaved") for dtype in FLOATS),
    *(f"restore_klt {which}bfloat16 {shape}" for which in ("", "rotated ") for shape in ("3x64", "2x80", "2x256")),
    *(f"restore_klt rotated {dtype} 2x128" for dtype in FP8),
    "restore_klt bfloat16 2x128",
    "restore_klt mixed bfloat16 2x128",
]
QUANTISING_KERNELS = [*(f"centre rotated {dtype} 2x128" for dtype in (*FLOATS, *FP8)), "centre bfloat16 2x128", "round"]
EXACT_KERNELS = [
    *(f"restore_exact {dtype} 2x128" for dtype in (*FLOATS, FP8[0])),
    *(f"restore_exact bfloat16 {shape}" for shape in ("2x80", "1x64+512")),
    "decoding_tables",
]

Facts = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def compiled() -> Facts:
    return facts_of(TARGET)


def facts_of(*targets: str, triton: Path | None = None) -> Facts:
    lines = run_python("-m", "benchmarks.compiled_kernels", "--targets", *targets, triton=triton).splitlines()
    return {(x["kernel"], x["target"]): x for x in map(json.loads, lines)}


@pytest.mark.parametrize("kernel", [*KLT_KERNELS, *QUANTISING_KERNELS, *EXACT_KERNELS, *MOST_REGISTERS])
def test_compiles(kernel: str, compiled: Facts) -> None:
    check(kernel, compiled[kernel, TARGET], TARGET)


def check(kernel: str, facts: dict[str, Any], target: str) -> None:
    """Whether registers suffice, so that several programs fit an SM, and memory is read in wide accesses."""
    is_amd = target == "gfx942"  # whose units have twice as many registers
    if kernel in KLT_KERNELS:  # with 128 registers a thread, two programs fit an SM; with more, one
        assert facts["stack_bytes"] <= (128 if is_amd else 8), "registers spill"
        assert facts["registers"] <= (512 if is_amd else 255)
        assert facts["shared_bytes"] <= 99 << 10
        assert facts["access_bytes"] >= (8 if is_amd else 16)
        assert not is_amd or facts["loop"] is None
        if target in TENSOR_CORES:
            # Integers are converted once for all channels of a tile: about as many instructions as tensor cores take.
            assert facts["instructions"] == [TENSOR_CORES[target]]
            assert facts["loop"][0] <= 340
        return
    assert facts["stack_bytes"] == 0, "registers spill"
    if kernel in MOST_REGISTERS:
        assert facts["registers"] <= MOST_REGISTERS[kernel]
        assert facts["shared_bytes"] <= 1024
    elif kernel in QUANTISING_KERNELS:  # with 80 registers a thread six programs fit an SM, with 168 three
        assert facts["registers"] <= (168 if kernel == "round" else 80)
        assert facts["access_bytes"] == (1 if kernel == "round" else 16)
    else:
        assert facts["registers"] <= 80
        assert facts["shared_bytes"] <= 8 << 10
        assert facts["access_bytes"] >= (8 if is_amd else 16)


def test_every_variant_is_named_here(compiled: Facts) -> None:
    exact = {f"exact_tokens {dtype} 2x128" for dtype in (*FLOATS, FP8[0])}
    named = {*KLT_KERNELS, *QUANTISING_KERNELS, *EXACT_KERNELS, *MOST_REGISTERS}
    assert {kernel for kernel, _ in compiled} == named | exact


REFERENCES = """
import sys
sys.modules["triton"] = None
import torch
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.triton_kernels.quantise_klt import KltCells, KltInput
from sgl_kvfetch.triton_kernels.xxh3 import xxh3_sums
from tests.triton_kernels import test_ans_kernel as ans, test_restore_klt_kernel as klt, test_xxh3_kernel as xxh3
ans.test_the_native_coders_bits_at_any_number_of_tokens()
klt.run_case(klt.run_kernels, klt.SMALL)
xxh3.test_extremes()
elsewhere = torch.zeros((9, 2, 64), device="meta")
calls = (
    lambda: xxh3_sums(torch.zeros(288, dtype=torch.uint8, device="meta"), [(0, 288)]),
    lambda: KltCells([KltInput(None, [elsewhere], [elsewhere])], None),
)
for call in calls:
    try:
        call()
    except UnsupportedError as e:
        assert "triton" in str(e)
    else:
        raise AssertionError("no error")
"""


def test_references_need_no_triton() -> None:
    run_python("-c", REFERENCES)


# Of a release

OTHERS = ("sm_80", "sm_89", "sm_100", "gfx942")


@pytest.fixture(scope="module")
def compiled_for_all() -> Facts:
    return facts_of(TARGET, *OTHERS)


@pytest.mark.parametrize("target", OTHERS)
def test_compiles_for_another_card(target: str, compiled_for_all: Facts) -> None:
    for (kernel, of), facts in compiled_for_all.items():
        if of == target and not kernel.startswith("exact_tokens"):
            check(kernel, facts, target)


def test_the_oldest_triton_compiles_every_kernel(compiled_for_all: Facts, oldest_triton: Path) -> None:
    """For one target, which takes half a minute. `test_emulated_kernels` takes another."""
    found = facts_of(TARGET, triton=oldest_triton)
    assert set(found) == {(kernel, target) for kernel, target in compiled_for_all if target == TARGET}
    for (kernel, target), facts in found.items():
        assert facts["stack_bytes"] == 0, f"{kernel}: registers spill"
        assert facts["access_bytes"] >= compiled_for_all[kernel, target]["access_bytes"], kernel
        assert facts["instructions"] == compiled_for_all[kernel, target]["instructions"], kernel
