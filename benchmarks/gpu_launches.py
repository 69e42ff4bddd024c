"""Measures the Python time and the launches that loading a prompt takes, without a GPU.

    python -m benchmarks.gpu_launches [--tokens N]

The cells are those of `klt` for a model like Llama-3.1-8B: three layers, two heads of 128, 1,114 coefficients, spans of
1,024 tokens. They have been staged as they are coded, and one call loads them, a part of a layer group at a time. The
figures are all that SGLang's process does for a prompt between parking its request and computing it: tables, launches,
checksums. They are measured for several sizes of scratch memory.

Streams are stubs. Launches, of kernels and copies, are counted and not run, so the time lacks Triton's launcher and the
driver. Torch's small operations run on the CPU in place of their launches. The time is CPU time of all threads, since
all need the interpreter lock.
"""

from __future__ import annotations

import time
from array import array
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.report import make_parser, whole_number
from harness import stand_in_pool
from harness.immediate_device import ImmediateDevice, ImmediateStream
from sgl_kvfetch.codec import CellPlace, Device, KltQuantiser, Stream
from sgl_kvfetch.codec.layout.regions import region_layout
from sgl_kvfetch.codec.quant import pack
from sgl_kvfetch.codec.quant.layer_map import plain_layers
from sgl_kvfetch.codec.quant.profile import Calibration, CellProfile, MeasuredStep, Profile
from sgl_kvfetch.codec.quant.rope import Rope
from sgl_kvfetch.plane.coded import CELL, StagedCode
from sgl_kvfetch.plane.staging import StagedValues
from sgl_kvfetch.triton_kernels import ans, restore_klt, xxh3
from sgl_kvfetch.triton_kernels.xxh3 import SUMS, digests_of
from sgl_kvfetch.types import CellGrid

if TYPE_CHECKING:
    from sgl_kvfetch.plugin.device.cuda_pages import CudaPages

LAYERS, HEADS, DIM, CELL_LAYERS, CELL_HEADS = 32, 8, 128, 3, 2
COEFFICIENTS, SPAN_TOKENS, PAGE_TOKENS = 1114, 1024, 64
CODED_BITS, SCRATCH_MIB = 1.33, (64, 256)


class _Kernel:
    """Does nothing, and counts its launches."""

    num_launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> _Kernel:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.num_launches += 1


def _make_profile() -> Profile:
    grid = CellGrid(LAYERS, HEADS, CELL_LAYERS, CELL_HEADS)
    cells = {}
    for layers in (grid.layers(0), grid.layers(-(-LAYERS // CELL_LAYERS) - 1)):
        size = 2 * len(layers) * CELL_HEADS * DIM
        reach = torch.zeros(2, size)
        reach[:, : min(size, COEFFICIENTS)] = 1.0
        weight = torch.zeros(len(layers), CELL_HEADS * DIM, CELL_HEADS * DIM)
        inverse = torch.zeros(size, size, dtype=torch.bfloat16)
        number = torch.zeros(size)
        cells[len(layers)] = CellProfile(inverse, weight, weight, number, number, reach, number)
    by_key = {key: cells[len(grid.layers(key[0]))] for key in grid.cells()}
    rope = Rope(inv_freq=tuple(10000.0 ** (-i / (DIM // 2)) for i in range(DIM // 2)))
    curve = (MeasuredStep(0.5, 1e-4, 1.0), MeasuredStep(2.0, 1e-2, 0.5))
    return Profile(
        grid,
        DIM,
        DIM,
        by_key,
        plain_layers(LAYERS, rope),
        0,
        curve,
        1.0,
        Calibration("zeros", "0" * 32, "none", 1, 1, 1),
    )


def _make_pages() -> CudaPages:
    stand_in_pool.install_if_missing()
    from sgl_kvfetch.plugin.device import pages as device_pages
    from sgl_kvfetch.plugin.device.cuda_pages import CudaPages

    stand_in = stand_in_pool.MHATokenToKVPool
    pool = stand_in(PAGE_TOKENS, PAGE_TOKENS, torch.bfloat16, HEADS, DIM, LAYERS, "cpu", False, v_head_dim=DIM)
    with patch.object(device_pages, "MHATokenToKVPool", stand_in):
        return CudaPages(pool, PAGE_TOKENS, ImmediateDevice(), ImmediateStream())


def make_staged(num_tokens: int) -> StagedValues:
    """Return the cells of a prompt as they are staged: coded bytes that are all zeros, at 1.33 bits a value."""
    profile = _make_profile()
    grid, layout = profile.grid, region_layout(COEFFICIENTS, SPAN_TOKENS, "flat")
    spans, pages = range(0, num_tokens, SPAN_TOKENS), SPAN_TOKENS // PAGE_TOKENS
    exponents = np.full(SPAN_TOKENS, 128, dtype=np.uint8)
    rows, packed, start, end = [], [], 0, 0
    for group in range(-(-LAYERS // CELL_LAYERS)):
        layers = grid.layers(group)
        size = int(len(layers) * CELL_HEADS * 2 * DIM * SPAN_TOKENS * CODED_BITS / 8) // 16 * 16
        for first in spans:
            for block in range(HEADS // CELL_HEADS):
                heads = grid.heads(block)
                table = array("i", range(first // PAGE_TOKENS, first // PAGE_TOKENS + pages)).tobytes()
                content, _ = pack(table, exponents, np.empty(0, dtype=np.uint8))
                place = layers.start, len(layers), heads.start, len(heads), layers.start, heads.start
                sizes = first, SPAN_TOKENS, pages, 0, start, size, end, _coefficients(len(layers))
                rows.append(
                    (
                        *place,
                        *sizes,
                        layout.width,
                        layout.height,
                        layout.token_rows,
                        layout.token_cols,
                        True,
                        np.zeros(16, np.uint8),
                    )
                )
                packed.append(content)
                start, end = start + size, end + len(content)
    cells = np.array(rows, dtype=CELL)
    sizes = cells["coefficients"] * cells["num_tokens"]
    cells["digest"] = digests_of(np.zeros((len(cells), SUMS), np.int64), sizes)
    code = StagedCode(cells, torch.frombuffer(bytearray(b"".join(packed)), dtype=torch.uint8))
    memory = torch.empty(start, dtype=torch.uint8)  # never touched
    return StagedValues(num_tokens // PAGE_TOKENS, num_tokens // PAGE_TOKENS, "landed", memory, code=code)


def _coefficients(num_layers: int) -> int:
    return min(2 * num_layers * CELL_HEADS * DIM, COEFFICIENTS)


def measure(num_tokens: int, scratch_bytes: int) -> dict[str, float]:
    """Return the cells, the launches, and the time of Python that a load takes, once tables are uploaded."""
    from sgl_kvfetch.plugin.device import coded_loads, pinned_memory
    from sgl_kvfetch.plugin.device.gpu_loads import GpuLoader
    from sgl_kvfetch.plugin.device.loads import Load

    torch.set_num_threads(1)
    pages, quantiser = _make_pages(), KltQuantiser(_make_profile(), step=1.0)
    staged, copies, kernel = make_staged(num_tokens), _Kernel(), _Kernel()
    assert staged.code is not None
    grid = quantiser.profile.grid
    pages.prepare(quantiser, (CellPlace(grid.layers(0), grid.heads(0), range(SPAN_TOKENS)) for _ in range(1)))
    loader = GpuLoader(pages, pages.device, scratch_bytes)
    slots = torch.zeros(num_tokens, dtype=torch.int64)  # no kernel reads them
    results = {}
    with ExitStack() as patches:
        for module, names in (
            (ans, ["ans_decode_kernel"]),
            (xxh3, ["xxh3_kernel"]),
            (restore_klt, ["restore_klt_kernel", "exact_tokens_kernel"]),
        ):
            for name in names:
                patches.enter_context(patch.object(module, name, kernel))
            patches.enter_context(patch.object(module, "use_kernels", lambda device: True))
        for module in (coded_loads, pinned_memory):
            patches.enter_context(patch.object(module, "copy", copies))
        patches.enter_context(patch.object(coded_loads, "_Results", _SoundResults))
        for _ in range(3):  # the first one makes and uploads tables of the model
            copies.num_launches = kernel.num_launches = 0
            started_s = time.process_time()
            is_loaded = loader.finish(loader.begin([Load(staged, 0, slots, lambda is_sound: None)]))
            seconds = time.process_time() - started_s
            assert is_loaded
            results = {
                "cells": len(staged.code.cells),
                "launches": kernel.num_launches + copies.num_launches,
                "of these, kernels": kernel.num_launches,
                "ms": 1e3 * seconds,
            }
    loader.close()
    return results


class _SoundResults:
    """The results of kernels that found nothing wrong."""

    def __init__(self, device: Device, stream: Stream | None, num_cells: int, num_status: int) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.sums = torch.zeros((num_cells, SUMS), dtype=torch.int64)
        self.status = torch.zeros(num_status, dtype=torch.int32)


def main() -> None:
    parser = make_parser("benchmarks.gpu_launches", __doc__)
    parser.add_argument("--tokens", type=whole_number, default=32768)
    num_tokens = parser.parse_args().tokens
    for size in SCRATCH_MIB:
        found = measure(num_tokens, size << 20)
        print(f"{size} MiB:", "  ".join(f"{key} {value:.1f}" for key, value in found.items()))


if __name__ == "__main__":
    main()
