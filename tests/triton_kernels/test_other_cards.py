"""The kernels as machine code for cards that `test_compiled_kernels.py` leaves out, and by the oldest Triton."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.triton_kernels.test_compiled_kernels import (
    EXACT_KERNELS,
    KLT_KERNELS,
    MOST_REGISTERS,
    QUANTISING_KERNELS,
    TARGET,
    Facts,
    check_exact,
    check_klt,
    check_one_warp,
    check_quantising,
    check_tensor_cores,
    facts_of,
)

pytestmark = pytest.mark.process

OTHERS = ("sm_80", "sm_89", "sm_100", "gfx942")


@pytest.fixture(scope="module")
def compiled() -> Facts:
    return facts_of(TARGET, *OTHERS)


@pytest.mark.parametrize("target", OTHERS)
def test_every_kernel_compiles(target: str, compiled: Facts) -> None:
    for kernel in KLT_KERNELS:
        check_klt(compiled, kernel, target)
        if target == "sm_100":
            check_tensor_cores(compiled, kernel, target, "tcgen05.mma")
    for kernel in MOST_REGISTERS:
        check_one_warp(compiled, kernel, target)
    for kernel in QUANTISING_KERNELS:
        check_quantising(compiled, kernel, target)
    for kernel in EXACT_KERNELS:
        check_exact(compiled, kernel, target)


def test_the_oldest_triton_compiles_every_kernel(compiled: Facts, oldest_triton: Path) -> None:
    """For one target, which takes half a minute. `test_emulated_kernels` takes another."""
    found = facts_of(TARGET, triton=oldest_triton)
    assert set(found) == {(kernel, target) for kernel, target in compiled if target == TARGET}
    for (kernel, target), facts in found.items():
        assert facts["stack_bytes"] == 0, f"{kernel}: registers spill"
        assert facts["access_bytes"] >= compiled[kernel, target]["access_bytes"], kernel
        assert facts["instructions"] == compiled[kernel, target]["instructions"], kernel
