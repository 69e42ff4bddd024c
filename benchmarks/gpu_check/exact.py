"""Checks the kernels of `exact`, `ans_decode` of `ans-tables` and `restore_exact`, and measures them beside a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.timing import seconds_of
from sgl_kvfetch.codec.quant.base import to_planes
from sgl_kvfetch.triton_kernels.ans import DECODING_TABLE_BYTES, fitted_decode_table
from sgl_kvfetch.triton_kernels.restore_exact import (
    coded_planes,
    exact_rows,
    exact_shape,
    fault_on_gpu,
    launch_exact,
    outputs_of,
)

DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2
_LAYERS = 3
_DECODES = 5  # that are timed


class Cells(NamedTuple):
    """Equal cells of K and V in bfloat16."""

    number: int
    heads: int = 4
    dim: int = 128
    tokens: int = 1024


# Of a model like Llama-3.1-8B: one, as many as an H100 has multiprocessors, and those of 32,768 tokens.
MEASURED = Cells(1), Cells(132), Cells(704)


def run(record: Record) -> None:
    device = torch.device("cuda", 0)
    check(record, device)
    for cells in MEASURED:
        measure(record, device, cells)


def check(record: Record, device: torch.device, dtypes: Sequence[torch.dtype] = DTYPES) -> None:
    for dtype in dtypes:
        buffers = [torch.empty((1, 1, 128), dtype=dtype, device=device)]
        fault = fault_on_gpu(device, exact_shape(buffers, buffers, _LAYERS))
        record.row("exact: bits", dtype=str(dtype), found=fault or "as the values")
        if fault:
            record.fail(f"exact, {dtype}: {fault}")


def measure(record: Record, device: torch.device, cells: Cells) -> None:
    """Decode and restore cells, each into slots of its own. All must have the values of the first one."""
    prompt = _Prompt(cells, device)
    decode_s = seconds_of(prompt.decode, device, repeats=_DECODES, warm_ups=1)
    restore_s = seconds_of(prompt.restore, device)
    copied = torch.empty(2 * prompt.num_values, dtype=torch.uint8, device=device)
    target = torch.empty_like(copied)
    copy_s = seconds_of(lambda: target.copy_(copied), device)
    record.row(
        "exact: speed",
        cells=cells.number,
        decode_ms=1e3 * decode_s,
        integers_gb_a_second=prompt.num_values / decode_s / 1e9,
        restore_ms=1e3 * restore_s,
        copy_ms=1e3 * copy_s,
        share_of_copy=copy_s / restore_s,
    )
    if not prompt.is_right():
        record.fail(f"exact: {cells} have other values")


class _Prompt:
    def __init__(self, cells: Cells, device: torch.device) -> None:
        count, heads, dim, tokens = cells
        self._cells, self.num_values = cells, 2 * count * tokens * _LAYERS * heads * dim
        generator, spread = torch.Generator().manual_seed(0), torch.logspace(-2, 1, dim)
        shape = tokens, _LAYERS, heads, dim
        self._values = [(spread * torch.randn(shape, generator=generator)).to(torch.bfloat16) for _ in "kv"]
        (k_low, k_high), (v_low, v_high) = map(to_planes, self._values)
        data, slots, chunks = coded_planes([k_high, v_high])
        num_tables, size = chunks[-1].first_table + chunks[-1].num_tables, k_high.numel()
        rows = [
            chunk._replace(out_start=(2 * i + number) * size, first_table=i * num_tables + chunk.first_table)
            for i in range(count)
            for number, chunk in enumerate(chunks)
        ]

        def there(x: bytes) -> torch.Tensor:
            return torch.frombuffer(bytearray(x), dtype=torch.uint8).to(device)

        self._out = torch.empty(2 * count * size, dtype=torch.uint8, device=device)
        self._status = torch.zeros(len(rows), dtype=torch.int32, device=device)
        tables = torch.empty(count * num_tables * DECODING_TABLE_BYTES // 4, dtype=torch.int32, device=device)
        table = torch.tensor(rows, dtype=torch.int64, device=device)
        decoded = there(data), table, tokens, there(slots), tables, self._out, self._status
        self.decode: Callable[[], object] = lambda: fitted_decode_table(*decoded)

        self._buffers = [
            [torch.zeros((count * tokens, heads, dim), dtype=torch.bfloat16, device=device) for _ in range(_LAYERS)]
            for _ in "kv"
        ]
        shape_of = exact_shape(*self._buffers, _LAYERS)
        mantissas = torch.stack((k_low.flatten(), v_low.flatten())).to(device).repeat(count, 1)
        pages = torch.arange(count, dtype=torch.int32, device=device)  # a cell is a page
        order = np.arange(count)
        k, v = (which + 2 * order for which in (0, 1))
        planes = [base.data_ptr() + at * size for at in (k, v) for base in (mantissas, self._out)]
        fields = {
            "tokens": np.full(count, tokens),
            "pages": pages.data_ptr() + 4 * order,
            "planes": np.stack(planes, axis=1),
            "outputs": np.zeros(count, dtype=np.int64),
        }
        launched = torch.from_numpy(exact_rows(shape_of, fields, [outputs_of(shape_of, *self._buffers)])).to(device)
        in_pages = torch.arange(count * tokens, device=device)
        self._held = pages, mantissas, launched  # by their addresses
        self.restore: Callable[[], object] = lambda: launch_exact(shape_of, launched, in_pages, tokens, tokens, heads)

    def is_right(self) -> bool:
        """Return whether every cell's slots have the values."""
        return not bool(self._status.any()) and all(
            torch.equal(cell.cpu(), x[:, layer])
            for x, side in zip(self._values, self._buffers, strict=True)
            for layer, there in enumerate(side)
            for cell in torch.split(there, self._cells.tokens)
        )
