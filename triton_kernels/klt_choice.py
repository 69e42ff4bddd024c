"""Chooses how `restore_klt` is compiled, by a trial at each start with the shapes of its model.

**What the kernels write** for two made-up cells is compared with what the CPU makes of them: a compiler, a driver or a
card may give other values, and nothing later would notice. Options that differ are not taken. If none is left, the CPU
restores.

Which of the others is fastest depends on the device, and on what this Triton makes of the kernel: on an H200 one option
took 281 us where another took 419. So each is timed. Nothing is kept but Triton's own cache of compiled code, without
which a trial takes seconds.

Triton's autotuner stays out. It could leave options out by such a comparison (``early_config_prune``) and keep times
(``cache_results``), but it would time each new kind of arguments while requests are served, in SGLang's KV buffers, its
file knows neither card nor driver, and the times are the shortest part of this module.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from sgl_kvfetch.codec import pack
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.log import brief
from sgl_kvfetch.triton_kernels.restore_klt import (
    EXACT,
    OPTIONS,
    KltCell,
    KltModel,
    KltOptions,
    KltShape,
    klt_shape,
    launch_klt,
    restore_klt_reference,
    vector_of,
)

logger = logging.getLogger(__name__)

_TOKENS, _CELLS = 1024, 32  # that are timed: a column of cells of a long prompt
_LAUNCHES, _ROUNDS = 4, 3
# Compared: a whole program of each option and a part of one, and a number of tokens whose integers are loaded one by
# one.
_COMPARED, _COMPARED_SINGLY = 272, 37
_SPARE_SLOTS = 16  # that nothing may write to
_ATOL = 1e-3  # of values around 10: sums in another order differ by less

Seconds = Callable[[Callable[[], object]], float]  # what a launch takes


def choose_options(
    shape: KltShape, dtype: torch.dtype, coefficients: int, device: torch.device
) -> tuple[KltOptions, str]:
    """Return the fastest options for cells of these sizes on a GPU, and a sentence about them. Waits for the device;
    seconds, if this Triton has not compiled them yet on this machine. Its launches go to the current stream, and write
    to no KV buffer. Raises UnsupportedError if no options give the CPU's values."""
    return choose_by(_seconds_on_gpu, shape, dtype, coefficients, device)


def choose_by(
    seconds: Seconds, shape: KltShape, dtype: torch.dtype, coefficients: int, device: torch.device
) -> tuple[KltOptions, str]:
    """Do the same with another clock."""
    started_s, found = time.monotonic(), dict[KltOptions, float]()
    compared = [_compare(shape, dtype, coefficients, tokens, device) for tokens in (_COMPARED, _COMPARED_SINGLY)]
    launch = _column(shape, dtype, coefficients, device)
    faults = [next(filter(None, (each.fault_of(options) for each in compared)), "") for options in OPTIONS]
    for options, fault in zip(OPTIONS, faults, strict=True):
        if fault:
            logger.warning("kvfetch: restore_klt is not used with %s: %s", options, fault)
        else:
            found[options] = seconds(partial(launch, options))
    if not found:
        raise UnsupportedError(f"restore_klt: {faults[0]}")
    best, took_s = min(found, key=found.__getitem__), time.monotonic() - started_s
    times = ", ".join(f"{options} {1e6 * found[options]:.0f}" for options in found)
    about = f"restore_klt is compiled with {best}, chosen in a trial of {took_s:.1f} s (us a column of cells: {times})"
    return best, about


def fault_on_gpu(device: torch.device) -> str:
    """Return what is wrong with `restore_klt` on a GPU, for a made-up model; an empty string if nothing is. Raises what
    a compiler and a driver raise."""
    buffer = torch.empty((1, 8, 128), dtype=torch.bfloat16, device=device)
    shape = klt_shape(buffer[:, :2], buffer[:, :2], 3, 128)
    return _compare(shape, buffer.dtype, 700, _COMPARED, device).fault_of(OPTIONS[0])


def _column(
    shape: KltShape, dtype: torch.dtype, coefficients: int, device: torch.device
) -> Callable[[KltOptions], object]:
    """Return what restores a column of made-up cells with some options."""
    cell = made_up_cell(shape, dtype, coefficients, _TOKENS, device)
    table = torch.frombuffer(bytearray(cell.row() * _CELLS), dtype=torch.uint8).to(device)
    slots = torch.arange(_TOKENS, device=device)
    # All cells are one, and write the same.
    return lambda options: launch_klt(shape, dtype, vector_of(_TOKENS), options, table, slots, 1, _TOKENS, 0)


class _Compared(NamedTuple):
    """A made-up cell on the device, and what the CPU has written of it."""

    cell: KltCell
    slots: torch.Tensor
    expected: list[torch.Tensor]

    def fault_of(self, options: KltOptions) -> str:
        """Restore the cell. Return how its buffers differ from the CPU's, or what failed; an empty string if
        nothing."""
        model, num_tokens = self.cell.model, self.cell.num_tokens
        buffers = [*model.k, *model.v]
        table = torch.frombuffer(bytearray(self.cell.row()), dtype=torch.uint8).to(self.slots.device)
        try:
            for buffer in buffers:
                buffer.zero_()
            vector = vector_of(num_tokens)
            launch_klt(model.shape, model.dtype, vector, options, table, self.slots, 1, num_tokens, self.cell.num_exact)
            found = [buffer.cpu() for buffer in buffers]
        except Exception as error:  # a compiler and a driver fail in many ways
            return f"it cannot be compiled or launched: {brief(error)}"
        limits = {"rtol": torch.finfo(model.dtype).eps, "atol": _ATOL, "equal_nan": True}
        for x, y in zip(found, self.expected, strict=True):
            is_far = ~torch.isclose(x.float(), y.float(), **limits)
            if bool(is_far.any()):
                return f"{float(is_far.float().mean()):.1%} of a trial's values are not the CPU's"
        return ""


def _compare(
    shape: KltShape, dtype: torch.dtype, coefficients: int, num_tokens: int, device: torch.device
) -> _Compared:
    """Restore a made-up cell on the CPU. Some of its tokens are exact, one is skipped, and its slots are scattered."""
    here, there = (
        made_up_cell(shape, dtype, coefficients, num_tokens, each, 3) for each in (torch.device("cpu"), device)
    )
    slots = torch.randperm(num_tokens + _SPARE_SLOTS, generator=torch.Generator().manual_seed(0))[:num_tokens]
    slots[1] = -1
    restore_klt_reference(here, slots, 1)
    return _Compared(there, slots.to(device), [*here.model.k, *here.model.v])


def made_up_cell(
    shape: KltShape,
    dtype: torch.dtype,
    coefficients: int,
    num_tokens: int,
    device: torch.device,
    num_exact: int = 0,
) -> KltCell:
    """Return a cell of random integers, the same on each device, of pages of one token, with buffers of its own. Its
    last tokens are kept exact."""
    generator = torch.Generator().manual_seed(0)
    k, v = (
        [
            torch.zeros((num_tokens + _SPARE_SLOTS) * side.slot, dtype=dtype, device=device).as_strided(
                (num_tokens + _SPARE_SLOTS, shape.heads, side.dim), (side.slot, side.head, 1)
            )
            for _ in range(shape.layers)
        ]
        for side in (shape.k, shape.v)
    )
    channels = shape.layers * shape.heads * (shape.k.dim + shape.v.dim)
    matrix = torch.randn((coefficients, channels), generator=generator) / coefficients**0.5
    mean, scales = torch.randn(channels, generator=generator), torch.full((256,), 0.1)
    turns = [i % 2 if shape.mixed else 0 for i in range(shape.layers)]
    model = KltModel(shape, matrix.to(torch.bfloat16).to(device), mean.to(device), scales.to(device), k, v, turns)
    integers = torch.randint(0, 256, (coefficients, num_tokens), generator=generator, dtype=torch.uint8)
    rotations = torch.rand((1 + max(turns), num_tokens, shape.k.rotary_dim), generator=generator)
    exponents = np.full(num_tokens, 128, dtype=np.uint8)
    exponents[num_tokens - num_exact :] = EXACT
    size = (num_exact * channels * dtype.itemsize,)
    packed, num_exact = pack(exponents, torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).numpy())
    pages = np.arange(num_tokens, dtype=np.int32).tobytes()  # of one token
    data = torch.frombuffer(bytearray(pages + packed), dtype=torch.uint8).to(device)
    rotated = rotations.to(device) if shape.k.rotary_dim else None
    return KltCell(model, integers.to(device), rotated, num_tokens, num_exact, data, 0)


def _seconds_on_gpu(launch: Callable[[], object]) -> float:
    least = float("inf")
    for _ in range(_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(_LAUNCHES):
            launch()
        end.record()
        end.synchronize()
        least = min(least, begin.elapsed_time(end) / 1e3 / _LAUNCHES)
    return least
