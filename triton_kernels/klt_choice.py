"""Chooses how `restore_klt` is compiled, by a trial on this machine with the shapes of its model.

Which of `OPTIONS` is fastest depends on the device, and on what this Triton makes of the kernel: on an H200 one option
took 281 us where another took 419. So each is timed once, at the start, and the choice is kept in Triton's own cache
folder, beside the code that was compiled for it.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sgl_kvfetch.codec import pack
from sgl_kvfetch.log import brief
from sgl_kvfetch.triton_kernels.restore_klt import (
    OPTIONS,
    KltCell,
    KltModel,
    KltOptions,
    KltShape,
    launch_klt,
    vector_of,
)
from sgl_kvfetch.triton_kernels.runtime import triton

logger = logging.getLogger(__name__)

_TOKENS, _CELLS = 1024, 32  # of a trial: a column of cells of a long prompt
_LAUNCHES, _ROUNDS = 4, 3

Seconds = Callable[[Callable[[], object]], float]  # what a launch takes


def choose_options(
    shape: KltShape, dtype: torch.dtype, coefficients: int, device: torch.device
) -> tuple[KltOptions, str]:
    """Return the fastest options for cells of these sizes on a GPU, and a sentence about them. Waits for a trial if
    none was made before with this card and Triton. Its launches go to the current stream, and write to no KV buffer.
    Raises nothing."""
    card = torch.cuda.get_device_name(device)
    return choose_by(_seconds_on_gpu, shape, dtype, coefficients, device, card)


def choose_by(
    seconds: Seconds, shape: KltShape, dtype: torch.dtype, coefficients: int, device: torch.device, card: str
) -> tuple[KltOptions, str]:
    """Do the same with another clock."""
    key = f"{card}, Triton {triton.__version__}, {coefficients} coefficients, {dtype}, {shape}"
    if (found := _known(choices().get(key))) is None:
        started_s = time.monotonic()
        found = _trial(seconds, shape, dtype, coefficients, device)
        about = f"chosen in a trial of {time.monotonic() - started_s:.1f} s"
        if found:
            _keep(key, found)
    else:
        about = "as in an earlier trial"
    if not found:
        return OPTIONS[0], f"restore_klt is compiled with {OPTIONS[0]}: no options passed a trial"
    best = min(found, key=lambda options: found[options])
    times = ", ".join(f"{options} {1e6 * found[options]:.0f}" for options in found)
    return best, f"restore_klt is compiled with {best}, {about} (us a column of cells: {times})"


def choices() -> Mapping[str, Any]:
    """Return what trials have found on this machine: by card, Triton and shape, microseconds by options."""
    try:
        found = json.loads(_path().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def chosen(card: str) -> list[str]:
    """Return a phrase for each choice that was made on this machine for a card, whatever the Triton."""
    found = []
    for key, kept in choices().items():
        name, *about = key.split(", ")
        if name == card and (times := _known(kept)):
            best = min(times, key=lambda options: times[options])
            found.append(f"{best} ({', '.join(about[:2])}; {1e6 * times[best]:.0f} us a column of cells)")
    return found


def _path() -> Path:
    return Path(triton.knobs.cache.dir, "kvfetch", "restore_klt.json")


def _known(kept: Any) -> dict[KltOptions, float] | None:
    """Return the times that were kept; None if there are none, or they are of other options."""
    named = {str(options): options for options in OPTIONS}
    if not isinstance(kept, dict) or not kept or not named.keys() >= kept.keys():
        return None
    return {named[name]: float(us) / 1e6 for name, us in kept.items()}


def _keep(key: str, found: Mapping[KltOptions, float]) -> None:
    path = _path()
    kept = {str(options): round(1e6 * s, 1) for options, s in found.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({**choices(), key: kept}, indent=1))
        part.replace(path)
    except OSError as error:
        logger.warning("kvfetch: the choice for restore_klt is not kept, and made again at the next start: %s", error)


def _trial(
    seconds: Seconds, shape: KltShape, dtype: torch.dtype, coefficients: int, device: torch.device
) -> dict[KltOptions, float]:
    """Return the times of the options that can be compiled, and give the bits of the first."""
    cell = made_up_cell(shape, dtype, coefficients, _TOKENS, device)
    table = torch.frombuffer(bytearray(cell.row() * _CELLS), dtype=torch.uint8).to(device)
    slots = torch.arange(_TOKENS, device=device)
    buffers, found = [*cell.model.k, *cell.model.v], dict[KltOptions, float]()
    expected: list[torch.Tensor] | None = None
    for options in OPTIONS:
        # All cells are one, and write the same.
        launch = partial(
            launch_klt, shape, dtype, vector_of(_TOKENS), options, table, slots, 1, _TOKENS, cell.num_exact
        )
        try:
            for buffer in buffers:
                buffer.zero_()
            launch()
            given = [buffer.contiguous().clone().view(torch.uint8) for buffer in buffers]
            expected = expected or given
            if all(torch.equal(x, y) for x, y in zip(given, expected, strict=True)):
                found[options] = seconds(launch)
            else:
                logger.info("kvfetch: restore_klt with %s adds up in another order", options)
        except Exception as error:  # a compiler and a driver fail in many ways
            logger.warning("kvfetch: restore_klt cannot be compiled with %s: %s", options, brief(error))
    return found


def made_up_cell(
    shape: KltShape, dtype: torch.dtype, coefficients: int, num_tokens: int, device: torch.device
) -> KltCell:
    """Return a cell of random integers, of pages of one token and none that is kept exact, with buffers of its own."""
    generator = torch.Generator(device).manual_seed(0)
    k, v = (
        [
            torch.zeros(num_tokens * side.slot, dtype=dtype, device=device).as_strided(
                (num_tokens, shape.heads, side.dim), (side.slot, side.head, 1)
            )
            for _ in range(shape.layers)
        ]
        for side in (shape.k, shape.v)
    )
    channels = shape.layers * shape.heads * (shape.k.dim + shape.v.dim)
    matrix = torch.randn((coefficients, channels), generator=generator, device=device) / coefficients**0.5
    scales = torch.full((256,), 0.1, device=device)
    mean, turns = torch.zeros(channels, device=device), [i % 2 if shape.mixed else 0 for i in range(shape.layers)]
    model = KltModel(shape, matrix.to(torch.bfloat16), mean, scales, k, v, turns)
    integers = torch.randint(0, 256, (coefficients, num_tokens), generator=generator, dtype=torch.uint8, device=device)
    rotations = torch.rand((1 + max(turns), num_tokens, shape.k.rotary_dim), generator=generator, device=device)
    pages = np.arange(num_tokens, dtype=np.int32).tobytes()  # of one token
    packed, num_exact = pack(np.full(num_tokens, 128, dtype=np.uint8), np.empty(0, dtype=np.uint8))
    data = torch.frombuffer(bytearray(pages + packed), dtype=torch.uint8).to(device)
    return KltCell(model, integers, rotations if shape.k.rotary_dim else None, num_tokens, num_exact, data, 0)


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
