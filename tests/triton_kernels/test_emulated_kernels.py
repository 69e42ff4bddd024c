"""Every kernel as PTX for two GPUs, from the newest and the oldest Triton, in the emulator."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.triton_kernels import emulated_cases
from tests.triton_kernels.conftest import run_python
from tests.triton_kernels.test_compiled_kernels import KERNELS

TARGETS = ("sm_80", "sm_89", "sm_90")  # `mma.sync`, and `wgmma`
NAMES = [*emulated_cases.CASES, *emulated_cases.CONTROLS]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module", params=["newest", "oldest"])
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    triton = request.getfixturevalue("oldest_triton") if request.param == "oldest" else None
    result: dict[str, Any] = json.loads(
        run_python("-m", "tests.triton_kernels.emulated_cases", *TARGETS, triton=triton)
    )
    return result


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_does_what_the_reference_does(name: str, target: str, found: dict[str, Any]) -> None:
    """Or, for a control, the emulator sees what is wrong."""
    assert not found[target]["wrong"][name]


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_has_run(target: str, found: dict[str, Any]) -> None:
    assert found[target]["kernels"] == sorted(KERNELS)
