"""A server compiles each kernel once, and not again while it serves requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.triton_kernels.tritons import run_python

pytestmark = pytest.mark.process

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
    """Whatever the numbers of tokens, cells and layers, and wherever slots begin. What a load launches is among what
    `test_compiled_kernels` compiles."""
    triton: Path | None = request.getfixturevalue("oldest_triton") if is_oldest else None
    found = json.loads(run_python("-m", "tests.triton_kernels.specialisations", triton=triton))
    assert found == {"specialisations": KERNELS, "without variant": []}
