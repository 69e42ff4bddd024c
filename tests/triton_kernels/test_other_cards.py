"""The kernels as machine code for cards that `test_compiled_kernels.py` leaves out, and by the oldest Triton."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.triton_kernels.test_compiled_kernels import TARGET, Facts, check, facts_of

pytestmark = pytest.mark.process

OTHERS = ("sm_80", "sm_89", "sm_100", "gfx942")


@pytest.fixture(scope="module")
def compiled() -> Facts:
    return facts_of(TARGET, *OTHERS)


@pytest.mark.parametrize("target", OTHERS)
def test_every_kernel_compiles(target: str, compiled: Facts) -> None:
    for (kernel, of), facts in compiled.items():
        if of == target and not kernel.startswith("exact_tokens"):
            check(kernel, facts, target)


def test_the_oldest_triton_compiles_every_kernel(compiled: Facts, oldest_triton: Path) -> None:
    """For one target, which takes half a minute. `test_emulated_kernels` takes another."""
    found = facts_of(TARGET, triton=oldest_triton)
    assert set(found) == {(kernel, target) for kernel, target in compiled if target == TARGET}
    for (kernel, target), facts in found.items():
        assert facts["stack_bytes"] == 0, f"{kernel}: registers spill"
        assert facts["access_bytes"] >= compiled[kernel, target]["access_bytes"], kernel
        assert facts["instructions"] == compiled[kernel, target]["instructions"], kernel
