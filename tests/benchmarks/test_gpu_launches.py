"""The benchmark of launches, on a short prefix."""

from __future__ import annotations

import pytest

from benchmarks import gpu_launches

pytestmark = pytest.mark.filterwarnings("ignore")


def test_what_a_load_takes() -> None:
    found = gpu_launches.measure(1024, 64 << 20)
    assert found["cells"] == 11 * 4  # groups of three layers, and pairs of heads
    assert found["of these, kernels"] == 4 * 3  # for parts of 1, 2, 4 and 4 layer groups: decode, restore, checksum
    assert found["launches"] == 4 * 5 + 2  # the tables and coded bytes of each; pages before, and the results after
    assert 0 < found["first ms"] < found["ms"]
