"""The benchmark of launches, on a short prefix."""

from __future__ import annotations

import pytest

from benchmarks import gpu_launches

pytestmark = pytest.mark.filterwarnings("ignore")


def test_what_a_load_takes() -> None:
    found = gpu_launches.measure(1024, 64 << 20)
    assert found["cells"] == 11 * 4  # groups of three layers, and pairs of heads
    assert found["of these, kernels"] == 11 * 3  # for each layer group: decode, checksum, restore
    assert found["launches"] == 11 * 4 + 2  # the coded bytes of each, the tables before and the results after
    assert found["ms"] > 0
