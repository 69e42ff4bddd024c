"""Writes the facts about the compiled kernels, and the least time that their bytes take, as a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import triton

from benchmarks.compiled_kernels.machine_code import TARGETS, Facts
from benchmarks.compiled_kernels.variants import LAYERS
from benchmarks.kernel_bytes import Span, restore_klt_bytes

_HEAD = f"""# The kernels as machine code

`python -m benchmarks.compiled_kernels` wrote this page, with Triton {triton.__version__}. Everything was compiled for \
GPUs that were not there: **nothing of it has run**.

Each cell is *registers of a thread / shared memory of a program / stack of a thread / widest access to a KV buffer*, \
the last three in bytes. Where the stack is 0, no register spills. On gfx942 registers are vector registers.

Shapes are heads x values of a head, of {LAYERS} layers. `restore_klt` restores cells with such heads, K and V. \
`exact_tokens` copies their exact tokens. `xxh3` reads frames instead of KV buffers, and `ans_decode` writes \
them. `centre` and `round` are of `quantise_klt`: they read KV buffers, and write channels and integers.
"""
_NOTES = """
Every kernel compiles for every target.

## Matrix instructions

They add up products, and in which order is theirs to say.
"""
_LOOPS = """
## The loop over coefficients

The instructions of a warp in one turn of `restore_klt`'s loop, and how many of them multiply matrices. A turn \
multiplies 128 tokens x 64 coefficients by 64 coefficients x the channels of a head, up to 128. A program has eight \
warps.
"""


def page(facts: Sequence[Facts]) -> str:
    usage = _table(facts, lambda x: f"{x.registers} / {x.shared_bytes} / {x.stack_bytes} / {x.access_bytes}")
    instructions = _table([x for x in facts if x.instructions], lambda x: ", ".join(x.instructions))
    loops = _table([x for x in facts if x.loop], lambda x: " / ".join(map(str, x.loop or ())))
    return "\n".join([_HEAD, *usage, _NOTES, *instructions, _LOOPS, *loops]) + "\n"


def _table(facts: Sequence[Facts], cell: Callable[[Facts], str]) -> Iterator[str]:
    """Yield a table's lines: one row per kernel, one column per target."""
    yield "| | " + " | ".join(TARGETS) + " |"
    yield "|---|" + "---|" * len(TARGETS)
    cells = {(x.kernel, x.target): cell(x) for x in facts}
    for kernel in dict.fromkeys(x.kernel for x in facts):
        yield f"| `{kernel}` | " + " | ".join(cells.get((kernel, target), "") for target in TARGETS) + " |"


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
