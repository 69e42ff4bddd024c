"""The kernels as machine code, how often a server compiles them, and the package without Triton. Each in a process of
its own: this one interprets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.triton_kernels.conftest import run_python

pytestmark = pytest.mark.process

TARGET, OTHERS = "sm_90", ("sm_80", "sm_89", "sm_100", "gfx942")
TENSOR_CORES = {"sm_90": "wgmma.mma_async m64 k16", "sm_100": "tcgen05.mma"}
# By a kernel's first word; with 64 registers a thread, 32 programs of one warp fit an SM; with 80, 25; with 96, 21.
MOST_REGISTERS = {"ans_decode": 80, "xxh3": 96, "centre": 80, "round": 168, "restore_exact": 80, "decoding_tables": 80}
UNCHECKED = "exact_tokens"

Facts = dict[tuple[str, str], dict[str, Any]]


def facts_of(*targets: str, triton: Path | None = None) -> Facts:
    lines = run_python("-m", "benchmarks.compiled_kernels", "--targets", *targets, triton=triton).splitlines()
    return {(x["kernel"], x["target"]): x for x in map(json.loads, lines)}


def check_all(facts: Facts, target: str) -> None:
    kinds = {kernel.partition(" ")[0] for kernel, _ in facts}
    assert kinds == {*MOST_REGISTERS, "restore_klt", UNCHECKED}
    for (kernel, of), found in facts.items():
        kind = kernel.partition(" ")[0]
        if of == target and kind != UNCHECKED:
            try:
                check(kind, found, target)
            except AssertionError as e:
                raise AssertionError(f"{kernel}: {e}") from e


def check(kind: str, facts: dict[str, Any], target: str) -> None:
    """Whether registers suffice, so that several programs fit an SM, and memory is read in wide accesses."""
    is_amd = target == "gfx942"  # whose units have twice as many registers
    if kind == "restore_klt":  # with 128 registers a thread, two programs fit an SM; with more, one
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
    assert facts["registers"] <= MOST_REGISTERS[kind]
    if kind in ("ans_decode", "xxh3"):
        assert facts["shared_bytes"] <= 1024
    elif kind in ("centre", "round"):
        assert facts["access_bytes"] == (1 if kind == "round" else 16)
    else:
        assert facts["shared_bytes"] <= 8 << 10
        assert facts["access_bytes"] >= (8 if is_amd else 16)


def test_every_kernel_compiles() -> None:
    check_all(facts_of(TARGET), TARGET)


KERNELS = {
    "ans_decode_kernel": 2,  # for `ans`, and for `ans-tables`
    "centre_kernel": 2,  # for K, whose rotation it undoes, and for V
    "decoding_tables_kernel": 1,
    "exact_tokens_kernel": 1,
    "restore_exact_kernel": 1,
    "restore_klt_kernel": 2,  # for eight neighbouring tokens at once, and for segments of fewer
    "round_kernel": 1,
    "xxh3_kernel": 1,
}


@pytest.mark.parametrize("is_oldest", [False, True], ids=["newest", "oldest"])
def test_a_day_of_launches_compiles_each_kernel_once(is_oldest: bool, request: pytest.FixtureRequest) -> None:
    """Whatever the numbers of tokens, cells and layers, and wherever slots begin."""
    triton: Path | None = request.getfixturevalue("oldest_triton") if is_oldest else None
    assert json.loads(run_python("-m", "tests.triton_kernels.specialisations", triton=triton)) == KERNELS


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
xxh3.test_the_librarys_digest_of_every_range(xxh3_sums)
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


@pytest.fixture(scope="module")
def compiled_for_all() -> Facts:
    return facts_of(TARGET, *OTHERS)


@pytest.mark.parametrize("target", OTHERS)
def test_compiles_for_another_card(target: str, compiled_for_all: Facts) -> None:
    check_all(compiled_for_all, target)


def test_the_oldest_triton_compiles_every_kernel(compiled_for_all: Facts, oldest_triton: Path) -> None:
    """For one target, which takes half a minute. `test_emulated_kernels` takes another."""
    found = facts_of(TARGET, triton=oldest_triton)
    assert set(found) == {(kernel, target) for kernel, target in compiled_for_all if target == TARGET}
    for (kernel, target), facts in found.items():
        assert facts["stack_bytes"] == 0, f"{kernel}: registers spill"
        assert facts["access_bytes"] >= compiled_for_all[kernel, target]["access_bytes"], kernel
        assert facts["instructions"] == compiled_for_all[kernel, target]["instructions"], kernel
