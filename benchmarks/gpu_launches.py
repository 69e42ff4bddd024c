"""Measures the Python time and the kernel launches that restoring a prefix takes, without a GPU.

    python -m benchmarks.gpu_launches [--tokens N]

The cells are those of `klt` for a model like Llama-3.1-8B: three layers, two heads of 128, 1,114 coefficients, spans of
1,024 tokens, frames on the device. They come all at once. Streams are stubs. Kernels are counted and not run, so the
time lacks Triton's launcher and the driver. Torch's small operations run on the CPU in place of their launches. The
time is CPU time of all threads, since all need the interpreter lock.
"""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.report import make_parser, whole_number
from harness import stand_in_pool
from sgl_kvfetch.codec import CellFrames, CellPlace, Device, KltQuantiser, Stream
from sgl_kvfetch.codec.layout.regions import region_layout
from sgl_kvfetch.codec.quant.profile import Calibration, CellProfile, MeasuredStep, Profile
from sgl_kvfetch.codec.quant.rope import Rope
from sgl_kvfetch.triton_kernels import restore_klt
from sgl_kvfetch.types import CellGrid

LAYERS, HEADS, DIM, CELL_LAYERS, CELL_HEADS = 32, 8, 128, 3, 2
COEFFICIENTS, SPAN_TOKENS, PAGE_TOKENS = 1114, 1024, 64


class _Stub:
    """A stream, an event and a kernel: it does nothing, and counts its launches."""

    cuda_stream = 1
    num_launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> _Stub:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.num_launches += 1

    def record_event(self) -> _Stub:
        return self

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _StubDevice(Device):
    def new_stream(self) -> Stream:
        return _Stub()

    def current_stream(self) -> Stream:
        return _Stub()

    def launch(self, stream: Stream, work: Any) -> None:
        work()

    def mark(self, stream: Stream) -> Any:
        return stream

    def upload(self, x: Any, stream: Stream) -> Any:
        return x

    def empty(self, shape: Any, stream: Stream) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.uint8)

    def used_on(self, tensor: torch.Tensor, stream: Stream) -> None: ...

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)


def make_cells(num_tokens: int) -> list[CellFrames]:
    """Return the cells of a prefix. Cells with the same layers and heads share their frames."""
    quantiser = KltQuantiser(_make_profile(), step=1.0)
    layout = region_layout(COEFFICIENTS, SPAN_TOKENS)
    frames = torch.zeros(layout.frames_shape((COEFFICIENTS, SPAN_TOKENS)), dtype=torch.uint8)
    parts = torch.full((SPAN_TOKENS,), 128, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8), frames
    grid, cells = quantiser.profile.grid, []
    for first in range(0, num_tokens, SPAN_TOKENS):
        for layer_group, head_block in grid.cells():
            place = CellPlace(grid.layers(layer_group), grid.heads(head_block), range(first, first + SPAN_TOKENS))
            cells.append(
                CellFrames(
                    place=place,
                    layers=place.layers,
                    heads=place.heads,
                    parts=parts,
                    layouts=(None, None, layout),
                    is_on_device=(False, False, True),
                    quantiser=quantiser,
                )
            )
    return cells


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
    return Profile(grid, DIM, DIM, by_key, rope, 0, curve, 1.0, Calibration("zeros", "0" * 32, "none", 1, 1, 1))


def measure(num_tokens: int) -> dict[str, float]:
    """Return the cells, the kernel launches, and the time of Python, once tables are uploaded."""
    torch.set_num_threads(1)  # the stubs' copies stand for launches
    stand_in_pool.install_if_missing()
    from sgl_kvfetch.plugin.device import pages as device_pages
    from sgl_kvfetch.plugin.device.cuda_pages import CudaPages

    stand_in = stand_in_pool.MHATokenToKVPool
    pool = stand_in(PAGE_TOKENS, PAGE_TOKENS, torch.bfloat16, HEADS, DIM, LAYERS, "cpu", False, v_head_dim=DIM)
    kernel, cells = _Stub(), make_cells(num_tokens)
    with patch.object(device_pages, "MHATokenToKVPool", stand_in):
        pages = CudaPages(pool, PAGE_TOKENS, _StubDevice(torch.device("cpu")), _Stub())
    pages.prepare(cells[0].quantiser, (cell.place for cell in cells))
    with (
        patch.object(restore_klt, "restore_klt_kernel", kernel),
        patch.object(restore_klt, "exact_tokens_kernel", kernel),
        patch.object(restore_klt, "use_kernels", lambda device: True),
    ):
        per_span = len(cells) * SPAN_TOKENS // num_tokens
        for timed in (cells[:per_span], cells):
            opened = pages.open_round(torch.zeros(num_tokens, dtype=torch.int64))  # no kernel reads them
            kernel.num_launches, started_s, launched = 0, time.process_time(), []
            for cell in timed:
                first = cell.place.tokens.start // PAGE_TOKENS
                span_pages = range(SPAN_TOKENS // PAGE_TOKENS)
                launched.append(opened.restore(cell, span_pages, range(first, first + len(span_pages)), _always))
            for each in set(launched):
                each.result()
            seconds = time.process_time() - started_s
    us = 1e6 * seconds
    return {"cells": len(cells), "launches": kernel.num_launches, "ms": us / 1e3, "us a cell": us / len(cells)}


def _always(write: Any) -> bool:
    write()
    return True


def main() -> None:
    parser = make_parser("benchmarks.gpu_launches", __doc__)
    parser.add_argument("--tokens", type=whole_number, default=32768)
    found = measure(parser.parse_args().tokens)
    print("  ".join(f"{name} {value:.0f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
