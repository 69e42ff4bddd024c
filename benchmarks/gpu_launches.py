"""Measures the Python time and the launches that loading and writing a prompt take, without a GPU.

    python -m benchmarks.gpu_launches [--tokens N]

The cells are those of `klt` for a model like Llama-3.1-8B: three layers, two heads of 128, 1,114 coefficients, spans of
1,024 tokens. They have been staged as they are coded, and one call loads them, part by part. The figures are all that
SGLang's process does for a prompt between parking its request and computing it: tables, launches, checksums; and what
it does before the first kernel. They are measured for several sizes of scratch memory.

Streams are stubs. Launches, of kernels and copies, are counted and not run, so the time lacks Triton's launcher and the
driver. Torch's small operations run on the CPU in place of their launches. The time is CPU time of all threads, since
all need the interpreter lock.

Writing is what the copying thread does between SGLang's offload and the data plane: it quantises the prompt's pages
into shared memory, and queues them. No token is kept exact.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import time
from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.report import make_parser, whole_number
from harness import stand_in_pool
from harness.immediate_device import ImmediateDevice, ImmediateStream
from sgl_kvfetch.codec import CellPlace, Device, KltQuantiser, Stream, pack
from sgl_kvfetch.codec.cuda_streams import BATCH_ARGUMENTS, copy_batch
from sgl_kvfetch.codec.quant.layer_map import plain_layers
from sgl_kvfetch.codec.quant.profile import Calibration, CellProfile, MeasuredStep, Profile
from sgl_kvfetch.codec.quant.rope import Rope
from sgl_kvfetch.plane import DataPlane, protocol
from sgl_kvfetch.plane.coded import CELL, StagedCode
from sgl_kvfetch.plane.process import Line, Quantising, Run, Running
from sgl_kvfetch.plane.staging import StagedValues
from sgl_kvfetch.triton_kernels import ans, quantise_klt, restore_klt, xxh3
from sgl_kvfetch.triton_kernels.xxh3 import SUMS, digests_of
from sgl_kvfetch.types import CellGrid, KVGeometry, TensorName

if TYPE_CHECKING:
    from sgl_kvfetch.plugin.device.gpu_pages import CudaPages

LAYERS, HEADS, DIM, CELL_LAYERS, CELL_HEADS = 32, 8, 128, 3, 2
COEFFICIENTS, SPAN_TOKENS, PAGE_TOKENS = 1114, 1024, 64
CODED_BITS, SCRATCH_MIB = 1.33, (64, 256, 512)


class _CountingDevice(ImmediateDevice):
    """Counts copies of ranges, and calls a function of C's for each with the driver's arguments, which does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.num_copies = 0
        self._nothing = ctypes.CDLL(None).abs  # looks at no more than its first argument
        self._nothing.argtypes, self._nothing.restype = BATCH_ARGUMENTS, None

    def copy_ranges(
        self,
        into: torch.Tensor,
        places: np.ndarray,
        source: torch.Tensor,
        begins: np.ndarray,
        sizes: np.ndarray,
        *,
        is_pinned: bool = True,
    ) -> None:
        self.num_copies += 1
        copy_batch(self._nothing, 1, into.data_ptr() + places, source.data_ptr() + begins, sizes)


class _Kernel:
    """Does nothing, and counts its launches. ``first_s``: the process's CPU time at the first one."""

    num_launches = 0
    first_s = 0.0

    def __getitem__(self, grid: tuple[int, ...]) -> _Kernel:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.first_s = self.first_s or time.process_time()
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
        sensitivity = torch.zeros(size + 2 * len(layers) * CELL_HEADS + 1)
        cells[len(layers)] = CellProfile(inverse, weight, weight, number, number, reach, sensitivity)
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
    from sgl_kvfetch.plugin.device.gpu_pages import CudaPages

    stand_in = stand_in_pool.MHATokenToKVPool
    pool = stand_in(PAGE_TOKENS, PAGE_TOKENS, torch.bfloat16, HEADS, DIM, LAYERS, "cpu", False, v_head_dim=DIM)
    with patch.object(device_pages, "MHATokenToKVPool", stand_in):
        return CudaPages(pool, PAGE_TOKENS, _CountingDevice(), ImmediateStream())


def make_staged(num_tokens: int, *, from_memory: bool = False) -> StagedValues:
    """Return the cells of a prompt as they are staged: coded bytes that are all zeros, at 1.33 bits a value. They lie
    together by layers; ``from_memory``: by spans, as in `memory_cache`."""
    profile = _make_profile()
    grid = profile.grid
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
                content = table + pack(exponents, np.empty(0, dtype=np.uint8))[0]
                place = layers.start, len(layers), heads.start, len(heads), layers.start, heads.start
                sizes = first, SPAN_TOKENS, pages, 0, start, size, end, _coefficients(len(layers))
                rows.append(
                    (
                        *place,
                        *sizes,
                        True,
                        np.zeros(16, np.uint8),
                    )
                )
                packed.append(content)
                start, end = start + size, end + len(content)
    cells = np.array(rows, dtype=CELL)
    if from_memory:
        by_span = np.argsort(cells["first_token"], kind="stable")
        cells["start"][by_span] = np.cumsum(cells["size"][by_span]) - cells["size"][by_span]
    sizes = cells["coefficients"] * cells["num_tokens"]
    cells["digest"] = digests_of(np.zeros((len(cells), SUMS), np.int64), sizes)
    memory = torch.empty(start + end, dtype=torch.uint8)  # bitstreams are never touched
    memory[start:] = torch.frombuffer(bytearray(b"".join(packed)), dtype=torch.uint8)
    code = StagedCode(cells, memory[start:])
    return StagedValues(num_tokens // PAGE_TOKENS, num_tokens // PAGE_TOKENS, memory, code=code)


def _coefficients(num_layers: int) -> int:
    return min(2 * num_layers * CELL_HEADS * DIM, COEFFICIENTS)


def measure(num_tokens: int, scratch_bytes: int, *, from_memory: bool = False) -> dict[str, float]:
    """Return the cells, the launches, and the time of Python that a load takes, once tables are uploaded. Other
    arguments as for `make_staged`."""
    from sgl_kvfetch.plugin.device import gpu_loads
    from sgl_kvfetch.plugin.device.gpu_loads import GpuLoader
    from sgl_kvfetch.plugin.device.pages import EnginePools, Load

    torch.set_num_threads(1)
    pages, quantiser = _make_pages(), KltQuantiser(_make_profile(), step=1.0)
    staged, copies, kernel = make_staged(num_tokens, from_memory=from_memory), _Kernel(), _Kernel()
    assert staged.code is not None
    grid = quantiser.profile.grid
    pages.prepare(quantiser, (CellPlace(grid.layers(0), grid.heads(0), range(SPAN_TOKENS)) for _ in range(1)))
    device = pages.device
    assert isinstance(device, _CountingDevice)
    loader = GpuLoader(pages, EnginePools(None, range(LAYERS)), scratch_bytes)
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
        patches.enter_context(patch.object(gpu_loads, "copy", copies))
        patches.enter_context(patch.object(gpu_loads, "_Results", _SoundResults))
        for _ in range(3):  # the first one makes and uploads tables of the model
            copies.num_launches = kernel.num_launches = device.num_copies = 0
            kernel.first_s = 0.0
            started_s = time.process_time()
            is_loaded = loader.finish(loader.begin([Load(staged, 0, slots, lambda is_sound: None)]))
            seconds = time.process_time() - started_s
            assert is_loaded
            results = {
                "cells": len(staged.code.cells),
                "launches": kernel.num_launches + copies.num_launches + device.num_copies,
                "of these, kernels": kernel.num_launches,
                "first ms": 1e3 * (kernel.first_s - started_s),
                "ms": 1e3 * seconds,
            }
    loader.close()
    return results


def measure_writing(num_tokens: int) -> dict[str, float]:
    """Return the launches, and the time of Python that writing a prompt takes."""
    from sgl_kvfetch.plugin.device.gpu_pages import KltReads

    torch.set_num_threads(1)
    pages, quantiser = _make_pages(), KltQuantiser(_make_profile(), step=1.0)
    grid, kernel, others = quantiser.profile.grid, _Kernel(), _Kernel()

    def product(centred: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        others()
        return torch.empty(centred.shape)

    def copy_(self: torch.Tensor, other: torch.Tensor, non_blocking: bool = False) -> None:
        others()

    with ExitStack() as patches:
        for name in ("centre_kernel", "round_kernel"):
            patches.enter_context(patch.object(quantise_klt, name, kernel))
        patches.enter_context(patch.object(quantise_klt, "_product", product))
        patches.enter_context(patch.object(quantise_klt, "use_kernels", lambda device: True))
        patches.enter_context(patch.object(quantise_klt, "require_buffers", lambda *args: None))  # reads slots on CPUs
        patches.enter_context(patch.object(KltReads, "trial", lambda self: ""))
        places = [CellPlace(grid.layers(group), grid.heads(block), range(1)) for group, block in grid.cells()]
        device = pages.device
        assert isinstance(device, _CountingDevice)
        pages.prepare_writes(quantiser, places)
        plane = _TakingPlane(pages.geometry)
        hashes = [index.to_bytes(32, "big") for index in range(num_tokens // PAGE_TOKENS)]
        results = {}
        for _ in range(3):  # the first one touches memory
            opened = pages.open_reads(torch.zeros(num_tokens, dtype=torch.int64))
            quantising = Quantising(opened.num_rows, partial(opened.quantise, 0))
            kernel.num_launches = others.num_launches = device.num_copies = 0
            with patch.object(torch.Tensor, "copy_", copy_):
                started_s = time.thread_time()
                num_queued = plane.write(0, None, hashes, range(len(hashes)), _no_values, quantising=quantising)
                seconds = time.thread_time() - started_s
            assert num_queued == len(hashes)
            results = {
                "cells": len(places),
                "launches": kernel.num_launches + others.num_launches + device.num_copies,
                "of these, kernels": kernel.num_launches,
                "ms": 1e3 * seconds,
            }
    return results


def _no_values(tensor: TensorName, pages: Sequence[int]) -> torch.Tensor:
    raise AssertionError("pages were not quantised")


class _TakingRun(Run):
    """The engine's side of a data plane that is not there: it has taken at once whatever is written."""

    def ask(self, command: Any, lost: Any, *args: Any, **kwargs: Any) -> Any:
        answer: Future[Any] = Future()
        answer.set_result(protocol.Taken(command.work))
        return answer


def _launch_nothing(line: Line) -> Running:
    line.commands.close()
    line.events.close()
    return cast(Running, None)


class _TakingPlane(DataPlane):
    def __init__(self, geometry: KVGeometry) -> None:
        self._numbers, self._refused_s, self._geometry = itertools.count(1), math.inf, geometry
        self._queue_bytes = 128 << 20
        self._run = _TakingRun(_launch_nothing, geometry, {}, self._queue_bytes, PAGE_TOKENS)
        self._run.channel.close()
        self._run._pages.whole.fill_(128)  # exponents: no token is exact


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
    for from_memory, size in itertools.product((False, True), SCRATCH_MIB):
        found = measure(num_tokens, size << 20, from_memory=from_memory)
        name = "a load from memory_cache" if from_memory else "a load"
        print(f"{name}, {size} MiB:", "  ".join(f"{key} {value:.1f}" for key, value in found.items()))
    written = measure_writing(num_tokens)
    print("writing:", "  ".join(f"{key} {value:.1f}" for key, value in written.items()))


if __name__ == "__main__":
    main()
