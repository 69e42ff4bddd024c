"""Measures the Python time and the kernel launches that restoring a prefix takes, without a GPU.

    python -m benchmarks.gpu_launches [--tokens N]

The cells are those of `klt` for a model like Llama-3.1-8B: three layers, two heads of 128, 1,114 coefficients, spans of
1,024 tokens. They come all at once. Their frames are on the device, as after a GPU decoded them, and then on the host,
as after a CPU did: these are copied to staging memory, which needs no interpreter lock and is counted by itself.
Streams are stubs. Kernels are counted and not run, and nothing is uploaded, so the time lacks Triton's launcher and the
driver. Torch's small operations run on the CPU in place of their launches. The time is CPU time of all threads, since
all need the interpreter lock.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
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

    def wait(self, stream: object) -> None: ...

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


def make_cells(num_tokens: int, *, on_device: bool) -> list[CellFrames]:
    """Return the cells of a prefix. All share their frames."""
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
                    is_on_device=(False, False, on_device),
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


def measure(num_tokens: int, *, on_device: bool = True) -> dict[str, float]:
    """Return the cells, the kernel launches, and the time of Python, once tables are uploaded, without that of copying
    frames. ``on_device``: where the cells' frames are."""
    torch.set_num_threads(1)  # the stubs' copies stand for launches
    stand_in_pool.install_if_missing()
    from sgl_kvfetch.plugin.device import pages as device_pages
    from sgl_kvfetch.plugin.device.cuda_pages import CudaPages
    from sgl_kvfetch.plugin.device.staging import StagingBuffer

    stand_in = stand_in_pool.MHATokenToKVPool
    pool = stand_in(PAGE_TOKENS, PAGE_TOKENS, torch.bfloat16, HEADS, DIM, LAYERS, "cpu", False, v_head_dim=DIM)
    put, copying_s = StagingBuffer.put, array("d")

    def timed_put(buffer: StagingBuffer, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        started_s = time.thread_time()
        views = put(buffer, tensors)
        copying_s.append(time.thread_time() - started_s)
        return views

    kernel, cells = _Stub(), make_cells(num_tokens, on_device=on_device)
    with patch.object(device_pages, "MHATokenToKVPool", stand_in):
        pages = CudaPages(pool, PAGE_TOKENS, _StubDevice(torch.device("cpu")), _Stub())
    pages.prepare(cells[0].quantiser, (cell.place for cell in cells))
    with (
        patch.object(restore_klt, "restore_klt_kernel", kernel),
        patch.object(restore_klt, "exact_tokens_kernel", kernel),
        patch.object(restore_klt, "use_kernels", lambda device: True),
        patch.object(StagingBuffer, "upload", lambda buffer: None),
        patch.object(StagingBuffer, "put", timed_put),
    ):
        per_span = len(cells) * SPAN_TOKENS // num_tokens
        for timed in (cells[:per_span], cells):
            opened = pages.open_round(torch.zeros(num_tokens, dtype=torch.int64))  # no kernel reads them
            del copying_s[:]
            kernel.num_launches, started_s, launched = 0, time.process_time(), []
            for cell in timed:
                first = cell.place.tokens.start // PAGE_TOKENS
                span_pages = range(SPAN_TOKENS // PAGE_TOKENS)
                launched.append(opened.restore(cell, span_pages, range(first, first + len(span_pages)), _always))
            for each in set(launched):
                each.result()
            seconds = time.process_time() - started_s - sum(copying_s)
    return {
        "cells": len(cells),
        "launches": kernel.num_launches,
        "ms": 1e3 * seconds,
        "us a cell": 1e6 * seconds / len(cells),
        "ms of copying frames": 1e3 * sum(copying_s),
    }


def _always(write: Any) -> bool:
    write()
    return True


def main() -> None:
    parser = make_parser("benchmarks.gpu_launches", __doc__)
    parser.add_argument("--tokens", type=whole_number, default=32768)
    num_tokens = parser.parse_args().tokens
    for name, on_device in (("on the device", True), ("on the host", False)):
        found = measure(num_tokens, on_device=on_device)
        print(f"frames {name}:", "  ".join(f"{key} {value:.0f}" for key, value in found.items()))


if __name__ == "__main__":
    main()
