"""The benchmark of launches, on a short prefix."""

from __future__ import annotations

import pytest

from benchmarks import gpu_launches

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("on_device", [True, False])
def test_what_a_prefix_takes(on_device: bool) -> None:
    found = gpu_launches.measure(1024, on_device=on_device)
    assert found["cells"] == 11 * 4  # groups of three layers, and pairs of heads
    assert 2 <= found["launches"] <= 44  # K and V together, at most 32 cells at once
    assert found["us a cell"] > 0
