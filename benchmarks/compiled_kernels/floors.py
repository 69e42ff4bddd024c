"""Computes each kernel's least possible time: its memory traffic divided by the published memory bandwidth."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.kernel_bytes import Span, restore_klt_bytes

# Bytes per second, from NVIDIA's data sheets: A100 80GB SXM, H100 SXM, H200 SXM.
BANDWIDTHS = {"A100": 2.039e12, "H100": 3.35e12, "H200": 4.8e12}

_CELL = Span(1024, heads=2, coefficients=700)
_ROWS = (
    ("`restore_klt`, K and V", "2 heads of 128, 700 coefficients, bf16", restore_klt_bytes(_CELL, 2, rotary_dim=128)),
)


def floor_lines() -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield f"| computed: us for {_CELL.tokens} tokens x {_CELL.layers} layers | | MB | " + " | ".join(BANDWIDTHS) + " |"
    yield "|---|---|" + "---|" * (1 + len(BANDWIDTHS))
    for name, shape, num_bytes in _ROWS:
        times = " | ".join(f"{1e6 * num_bytes / bandwidth:.1f}" for bandwidth in BANDWIDTHS.values())
        yield f"| {name} | {shape} | {num_bytes / 1e6:.1f} | {times} |"
