"""Predicts what `ans_decode` and a load of coded cells take on a GPU, from constants, beside what was measured.

    python -m benchmarks.gpu_model

The measurements are of one NVIDIA H200, on 2026-11-26, with bitstreams that had no groups. docs/gpu/model.md explains
the formulas. Whoever has no GPU can ask this model what a change would give.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

MULTIPROCESSORS, CLOCK_HZ = 132, 1.98e9
LANES, SPAN_TOKENS = 32, 1024
MiB = 1 << 20

# Of the kernel without groups.
ROW_S, STEP_S = 0.45e-6, 0.26e-6  # what a warp waits: besides the steps of a row, and for a step of 32 tokens
STEP_INSTRUCTIONS = 82
LINES = 38  # of the first cache that a step reads, one a cycle: 32 of the table, and 6 others

# Of a load.
COPY_BYTES_S = 55.3e9  # from pinned memory
RESTORE_S = 281e-6 / 32  # a cell: `restore_klt` with two stages; a column of cells has 32
CHECKSUM_S, CHECKSUM_CHAIN_S = 1.07e-3 / 1408, 0.3e-3  # `xxh3`: a cell of a full chip, and one alone
CONNECTIONS = 8  # of streams to the device: CUDA_DEVICE_MAX_CONNECTIONS
LAUNCH_S = 10e-6
GROUP_CELLS, LAYER_GROUPS = 128, 11
ROWS, CODED_BYTES = 999, 540e6  # of a cell, and of the load that was measured


@dataclass(frozen=True)
class Kernel:
    """What `ans_decode` waits and computes. ``tokens``: of a bitstream, or of a group."""

    tokens: int = SPAN_TOKENS
    row_s: float = ROW_S
    step_s: float = STEP_S
    step_instructions: float = STEP_INSTRUCTIONS

    def chain_s(self, rows: int) -> float:
        """Return what a launch of few warps takes."""
        return rows * (self.row_s + self.step_s * self.tokens / LANES)

    def busy_s(self, cells: float, rows: int) -> float:
        """Return what the first caches of a full chip take."""
        return cells * rows * SPAN_TOKENS / LANES * LINES / (MULTIPROCESSORS * CLOCK_HZ)

    def launch_s(self, cells: int, rows: int) -> float:
        steps = cells * rows * (SPAN_TOKENS / LANES + SPAN_TOKENS / self.tokens)  # a row's class is one, too
        issue_s = steps * self.step_instructions / (4 * MULTIPROCESSORS * CLOCK_HZ)
        return norm(3, self.chain_s(rows), self.busy_s(cells, rows), issue_s)


def norm(power: float, *seconds: float) -> float:
    """Return a time that is at least the longest of these, and a little more if several are as long."""
    return float(math.fsum(s**power for s in seconds) ** (1 / power))


def load_s(streams: int, scratch_mib: int, kernel: Kernel, rows: int = ROWS, coded_bytes: float = CODED_BYTES) -> float:
    """Return what a load of 32,768 tokens takes whose parts go to streams in turn."""
    all_cells = GROUP_CELLS * LAYER_GROUPS
    cell_bytes = coded_bytes / all_cells
    fit = int(scratch_mib * MiB / (cell_bytes + rows * SPAN_TOKENS))
    parts = LAYER_GROUPS * math.ceil(GROUP_CELLS / min(fit, GROUP_CELLS))
    cells = all_cells / parts
    part_s = (
        4 * LAUNCH_S
        + cells * cell_bytes / COPY_BYTES_S
        + kernel.launch_s(math.ceil(cells), rows)
        + max(CHECKSUM_CHAIN_S, cells * CHECKSUM_S)
        + cells * RESTORE_S
    )
    busy_s = coded_bytes / COPY_BYTES_S + kernel.busy_s(all_cells, rows) + all_cells * (CHECKSUM_S + RESTORE_S)
    rounds = math.ceil(parts / min(streams, CONNECTIONS))
    return part_s * parts if streams == 1 else norm(1.6, part_s * rounds, busy_s)


DECODED_MS = {  # `sub.py`: tokens of a bitstream, then cells and milliseconds; 699 rows
    1024: {1: 6.24, 43: 6.26, 128: 6.67, 1408: 7.31},
    512: {1: 3.33, 43: 3.49, 128: 3.55, 1408: 5.37},
    256: {1: 1.93, 43: 2.00, 128: 1.95, 1408: 4.83},
    128: {1: 1.20, 43: 1.14, 128: 1.17, 1408: 4.51},
    64: {1: 0.70, 43: 0.71, 128: 0.79, 1408: 4.86},
    32: {1: 0.46, 43: 0.48, 128: 0.76, 1408: 6.30},
}
LOADED_MS = {  # `ring.py`: streams and MiB of scratch memory of each
    (1, 64): 348,
    (2, 64): 182,
    (4, 64): 103,
    (8, 64): 69,
    (16, 64): 65,
    (1, 256): 135,
    (4, 256): 60,
    (8, 32): 104,
    (16, 32): 95,
}


def rows() -> Iterator[tuple[str, float, float]]:
    """Yield what was measured: its name, the predicted milliseconds, and the measured ones."""
    for tokens, by_cells in DECODED_MS.items():
        for cells, measured in by_cells.items():
            yield (f"ans_decode, {cells} cells of {tokens} tokens a bitstream", _ms(Kernel(tokens), cells), measured)
    for (streams, mib), measured in LOADED_MS.items():
        yield f"a load, {streams} x {mib} MiB", 1e3 * load_s(streams, mib, Kernel()), measured


# The kernel of groups, with its 57 instructions a step. At worst a step waits as long as before; at best 175 cycles, by
# the latencies that docs/kernels.md adds up.
NOW = {
    "at worst": Kernel(128, ROW_S, STEP_S, 57),
    "at best": Kernel(128, 150 / CLOCK_HZ, 175 / CLOCK_HZ, 57),
}


def predictions() -> Iterator[tuple[str, float, float]]:
    """Yield what has not been measured: its name, and the milliseconds at best and at worst."""
    best, worst = NOW["at best"], NOW["at worst"]
    for cells in (1, 43, 1408):
        yield f"ans_decode, {cells} cells, 699 rows", _ms(best, cells), _ms(worst, cells)
    for streams, mib in ((1, 64), (2, 64), (2, 256), (4, 128)):
        at_best, at_worst = (1e3 * load_s(streams, mib, kernel, 700, 403e6) for kernel in (best, worst))
        yield f"a load, 700 rows, 403 MB, {streams} x {mib} MiB", at_best, at_worst


def _ms(kernel: Kernel, cells: int) -> float:
    return 1e3 * kernel.launch_s(cells, 699)


def main() -> int:
    print("| milliseconds, H200 | predicted | measured | error |\n|---|---|---|---|")
    for name, predicted, measured in rows():
        print(f"| {name} | {predicted:.2f} | {measured:g} | {100 * (predicted / measured - 1):+.0f}% |")
    print("\n| not measured | at best | at worst |\n|---|---|---|")
    for name, best, worst in predictions():
        print(f"| {name} | {best:.2f} | {worst:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
