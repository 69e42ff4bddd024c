"""What checksums cost beside coding, on frames as few as there can be."""

from __future__ import annotations

from benchmarks.checksums import measure


def test_a_frame_sum_costs_little_beside_coding() -> None:
    """A writer computes it for each plane that it encodes, a reader on a CPU for each that it decodes."""
    found = measure(64, repeats=3)
    assert all(rate > 0 for rate in found.values())
    assert found["frame sum"] > found["encode hevc"]
