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


def test_a_load_from_memory_takes_as_many_launches() -> None:
    """The spans of a part are one batch of copies."""
    spread, together = (gpu_launches.measure(2048, 64 << 20, from_memory=x) for x in (True, False))
    assert spread["launches"] == together["launches"]


def test_what_writing_takes() -> None:
    """Parts of 256 tokens: a launch for K, and one for V; a product and a rounding for cells of three layers, and for
    those of two; and a copy."""
    found = gpu_launches.measure_writing(512)
    assert found["cells"] == 11 * 4
    assert found["of these, kernels"] == 2 * (2 + 2)
    assert found["launches"] == 2 * (2 + 2 * 2 + 1)
    assert found["ms"] > 0
