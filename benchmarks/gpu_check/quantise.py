"""Checks the integers of `klt` that the device quantises against the CPU's, and measures the time of both.

The model is like Llama-3.1-8B, of which it has three layers: four cells. Its profile's transform changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.timing import seconds_of
from harness import stand_in_pool
from harness.layer_maps import plain_layers
from sgl_kvfetch.codec import Calibration, CellPlace, CellValues, Device, KltQuantiser, Profile, Quantised
from sgl_kvfetch.codec.quant.profile import CellProfile, MeasuredStep
from sgl_kvfetch.codec.quant.rope import Rope
from sgl_kvfetch.triton_kernels.quantise_klt import KltCells, KltInput
from sgl_kvfetch.types import TENSORS, CellGrid

LAYERS, HEADS, CELL_HEADS, DIM = 3, 8, 2, 128
_READS = 5  # that are timed
_MOST_OTHERS = 0.005  # share of exponents, and of integers, that the order of sums may round in another way


def run(record: Record) -> None:
    stand_in_pool.install_if_missing()
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        check(record, Device(torch.device("cuda", 0)), num_tokens=2048, dim=DIM, dtype=dtype)


def check(record: Record, device: Device, num_tokens: int, dim: int, dtype: torch.dtype) -> None:
    """``dtype``: of the pool."""
    from sgl_kvfetch.plugin.device.gpu_pages import (
        READ_BUFFER_BYTES,
        KltReads,
        Others,
        PoolCell,
        SlotReader,
        others_in,
    )

    quantiser, values = KltQuantiser(make_profile(dim), step=1.0), _make_values(num_tokens, dim, dtype)
    pool = [[x[:, layer].to(device.torch_device) for layer in range(LAYERS)] for x in values]
    grid, cells = quantiser.profile.grid, []
    for group, block in grid.cells():
        layers, heads = grid.layers(group), grid.heads(block)
        k, v = ([x[:, heads.start : heads.stop] for x in buffers] for buffers in pool)
        cells.append(PoolCell(CellPlace(layers, heads, range(num_tokens)), layers, heads, (k, v)))
    started_s = time.perf_counter()
    stream = device.new_stream()
    reads = KltReads(device, stream, quantiser, cells)
    raw = torch.uint8 if dtype.itemsize == 1 else dtype
    buffers = {tensor: [x.view(raw) for x in layers] for tensor, layers in zip(TENSORS, pool, strict=True)}
    reader = SlotReader(device, stream, device.pinned(READ_BUFFER_BYTES), buffers, dtype)
    if fault := reads.trial():
        record.fail(fault)
    first_s = time.perf_counter() - started_s
    slots = torch.arange(num_tokens, device=device.torch_device)
    memory = torch.empty(sum(reads.num_rows, len(cells)) * num_tokens, dtype=torch.uint8)  # shared, as far as it knows

    def read() -> list[Quantised]:
        exact = reads.quantise(slots, 0, reader, memory, 0)
        assert exact is not None
        exponents, *integers = torch.split(memory.view(-1, num_tokens), [len(cells), *reads.num_rows])
        return list(zip(exponents, exact, integers, strict=True))

    found = []
    for cell, (exponents, _, integers) in zip(cells, read(), strict=True):
        expected = quantiser.quantise(values.cell(cell.layers, cell.heads), cell.place)
        found.append(others_in((exponents, integers), expected))
    others = Others(*map(max, zip(*found, strict=True)))
    shares = {f"share_of_other_{name}": share for name, share in others._asdict().items()}
    name_of_dtype = str(dtype).removeprefix("torch.")
    record.row("klt: quantised", cells=len(cells), tokens=num_tokens, dtype=name_of_dtype, **shares)
    for name, share in others._asdict().items():
        if share > _MOST_OTHERS:
            record.fail(f"quantise_klt: {share:.1%} of a cell's {name} are not the CPU's")

    assert quantiser.profile.rotations is not None
    rotations = quantiser.profile.rotations.inverse_table(0, num_tokens).to(device.torch_device)
    kernels = KltCells([KltInput(quantiser.forward(c.place), *c.buffers) for c in cells], _copier_to(device))
    output = torch.empty((kernels.output_rows, num_tokens), dtype=torch.uint8, device=device.torch_device)
    kernels_s = seconds_of(lambda: kernels.quantise(slots, rotations, 0, output), device.torch_device, repeats=5)
    started_s, started_cpu_s = time.perf_counter(), time.thread_time()
    for _ in range(_READS):
        read()
    took_s = (time.perf_counter() - started_s) / _READS
    python_s = (time.thread_time() - started_cpu_s) / _READS
    reader.close()
    raw_bytes = sum(x.nbytes for x in values)
    record.row(
        "klt: speed of quantising",
        cells=len(cells),
        tokens=num_tokens,
        dtype=name_of_dtype,
        start_ms=1e3 * first_s,
        kernels_us=1e6 * kernels_s,
        with_copies_us=1e6 * took_s,
        cpu_us=1e6 * python_s,
        raw_gb_a_second=raw_bytes / took_s / 1e9,
    )


def _copier_to(device: Device) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.to(device.torch_device)


def make_profile(dim: int, num_layers: int = LAYERS) -> Profile:
    """Return a profile whose cells have up to ``LAYERS`` layers, with a transform that changes nothing."""
    grid = CellGrid(num_layers, HEADS, LAYERS, CELL_HEADS)
    by_size = {size: _cell(size, dim) for size in {len(grid.layers(group)) for group, _ in grid.cells()}}
    cells = {(group, block): by_size[len(grid.layers(group))] for group, block in grid.cells()}
    curve = (MeasuredStep(0.5, 1e-4, 1.0), MeasuredStep(2.0, 1e-2, 0.5))
    calibration = Calibration("numbers", "0" * 32, "none", 1, 1, 1)
    rope = Rope(inv_freq=tuple(10000.0 ** (-i / (dim // 2)) for i in range(dim // 2)))
    return Profile(grid, dim, dim, cells, plain_layers(num_layers, rope), 0, curve, 1.0, calibration)


def _cell(num_layers: int, dim: int) -> CellProfile:
    size = 2 * num_layers * CELL_HEADS * dim
    spread = _scales(size)
    return CellProfile(
        inverse=torch.eye(size, dtype=torch.bfloat16),
        k_weight=torch.eye(CELL_HEADS * dim).repeat(num_layers, 1, 1),
        v_weight=torch.eye(CELL_HEADS * dim).repeat(num_layers, 1, 1),
        mean=torch.zeros(size),
        spread=spread,
        reach=torch.stack((spread, 6 * spread)),
        sensitivity=torch.zeros(size + 2 * num_layers * CELL_HEADS + 1),
    )


def _scales(size: int) -> torch.Tensor:
    return torch.logspace(1, -1, size)


def _make_values(num_tokens: int, dim: int, dtype: torch.dtype) -> CellValues:
    """Return K and V, of which each cell has channels of these scales."""
    generator = torch.Generator().manual_seed(0)
    scales = (
        _scales(2 * LAYERS * CELL_HEADS * dim).view(2, LAYERS, CELL_HEADS, dim).repeat(1, 1, HEADS // CELL_HEADS, 1)
    )
    k, v = (scale * torch.randn((num_tokens, LAYERS, HEADS, dim), generator=generator) for scale in scales)
    return CellValues(k.to(dtype), v.to(dtype))
