"""The least time that a kernel can take: the bytes that must cross memory, by the memory's published speed."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.kernel_bytes import Span, least_bytes
from sgl_kvfetch.triton_kernels.tuning import Operation

# Bytes a second, from NVIDIA's data sheets: A100 80GB SXM, H100 SXM, H200 SXM.
BANDWIDTHS = {"A100": 2.039e12, "H100": 3.35e12, "H200": 4.8e12}

_MHA = Span(1024)
_MLA = Span(1024, heads=1, dim=576)
_ROWS: tuple[tuple[str, Operation, Span, int, str], ...] = (
    ("`restore` or `pack`, symmetric", "restore_symmetric", _MHA, 2, "8 heads of 128, bf16"),
    ("`restore` or `pack`, exact", "restore_exact", _MHA, 2, "8 heads of 128, bf16"),
    ("`restore` or `pack`, exact", "restore_exact", _MHA, 1, "8 heads of 128, fp8"),
    ("`restore_klt`, K", "restore_klt", _MHA, 2, "8 heads of 128, bf16"),
    ("`restore` or `pack`, symmetric", "restore_symmetric", _MLA, 2, "MLA, 576, bf16"),
    ("`restore` or `pack`, exact", "restore_exact", _MLA, 2, "MLA, 576, bf16"),
    ("`restore` or `pack`, exact", "restore_exact", _MLA, 1, "MLA, 576, fp8"),
)


def floor_lines() -> Iterator[str]:
    """A Markdown table."""
    yield f"| computed: us for {_MHA.tokens} tokens x {_MHA.layers} layers | | MB | " + " | ".join(BANDWIDTHS) + " |"
    yield "|---|---|" + "---|" * (1 + len(BANDWIDTHS))
    for name, operation, span, itemsize, shape in _ROWS:
        num_bytes = least_bytes(operation, span, itemsize, block_heads=2, rotary_dim=span.dim)
        times = " | ".join(f"{1e6 * num_bytes / bandwidth:.1f}" for bandwidth in BANDWIDTHS.values())
        yield f"| {name} | {shape} | {num_bytes / 1e6:.1f} | {times} |"
