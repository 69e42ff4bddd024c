"""Quantises pages on the GPU on their way to the store: of 2 bytes a value 0.7 cross the bus, and no CPU multiplies.

docs/device-mode-gpu.md has the design.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from sgl_kvfetch.codec import CellPlace, CellValues, Device, Quantised, Quantiser, Stream, why_no_gpu
from sgl_kvfetch.codec.quant import exact_bytes
from sgl_kvfetch.log import brief
from sgl_kvfetch.plugin.device.pinned_memory import PinnedMemory, copy
from sgl_kvfetch.triton_kernels.quantise_klt import NOT_FINITE, KltCells, KltInput
from sgl_kvfetch.triton_kernels.restore_klt import EXACT
from sgl_kvfetch.triton_kernels.runtime import uploaded

_TRIAL_TOKENS = 512  # as many rows as a product of a block has in each dimension
_TRIAL_FACTOR = 0.83  # puts coefficients between integers, where errors of a product show
CellOutputs = tuple[list[torch.Tensor], list[torch.Tensor]]  # K's and V's buffers, one a layer

_MOST_OTHERS = 0.02  # share of exponents, and of integers, that a trial may round in another way


@dataclass(frozen=True)
class PoolCell:
    """``layers`` and ``heads``: counted from the first ones of the pool. ``buffers``: of these layers, reduced to these
    heads."""

    place: CellPlace
    layers: range
    heads: range
    buffers: CellOutputs


# Returns the values of some slots, on the host: ``(tokens, layers, heads, dim)`` of all layers and heads.
ReadSlots = Callable[[torch.Tensor], CellValues]


class KltReads:
    """Quantises tokens of a pool's slots. Belongs to the thread that copies pages, once its trial is over."""

    def __init__(self, device: Device, stream: Stream, quantiser: Quantiser, cells: Iterable[PoolCell]) -> None:
        """``cells``: all those of the pool, in storage order. Raises UnsupportedError."""
        assert quantiser.profile is not None
        self._device, self._stream, self._quantiser = device, stream, quantiser
        self._profile = quantiser.profile
        self._places = list(cells)
        self._cells = self._on_device(KltInput(quantiser.forward(c.place), *c.buffers) for c in self._places)
        self._memory: PinnedMemory | None = None  # that was last written into

    def _on_device(self, inputs: Iterable[KltInput]) -> KltCells:
        return KltCells(list(inputs), partial(self._device.upload, stream=self._stream))

    @property
    def num_rows(self) -> Sequence[int]:
        """The integers of a token, by cell."""
        found: Sequence[int] = self._cells.num_rows
        return found

    def open(self, slots: torch.Tensor, read: ReadSlots, page_size: int) -> KltRun:
        """Return the reads of a run of whole pages. ``slots``: int64, on the device. ``read`` is for tokens that are
        kept exact."""
        return KltRun(self, slots, read, page_size)

    def quantise(
        self, slots: torch.Tensor, first_token: int, read: ReadSlots, memory: torch.Tensor, offset: int
    ) -> list[torch.Tensor] | None:
        """Quantise consecutive tokens of all cells into shared memory. Return each cell's exact tokens; None if a value
        is not finite. Waits for the device, once unless tokens are kept exact. See `plane.Quantising`."""
        if self._memory is None or self._memory.whole is not memory:
            self.close()
            self._memory = PinnedMemory(self._device, memory)
        host = memory[offset:][: self._cells.output_rows * len(slots)]
        rows = self._fetch(self._cells, slots, first_token, host, partial(self._memory.copy_into, host))
        exponents = rows[: len(self._places)]
        if bool((exponents == NOT_FINITE).any()):
            return None
        is_exact = exponents == EXACT
        some = is_exact.any(dim=0).nonzero().squeeze(1)
        if not len(some):
            return [rows[0][:0]] * len(self._places)
        values = read(self._chosen(slots, some))
        return [
            exact_bytes(values.cell(cell.layers, cell.heads), which[some])
            for cell, which in zip(self._places, is_exact, strict=True)
        ]

    def close(self) -> None:
        """Leave the shared memory, which is no longer written into."""
        if self._memory is not None:
            self._memory.unpin()
        self._memory = None

    def _fetch(
        self,
        cells: KltCells,
        slots: torch.Tensor,
        first_token: int,
        host: torch.Tensor,
        copier: Callable[[torch.Tensor], Callable[[], None]],
    ) -> torch.Tensor:
        """Quantise tokens, and return the output in ``host``, uint8 ``(rows, tokens)``. ``copier`` returns what copies
        a tensor of the device there. Waits for the device."""
        rotations, device = self._profile.rotations, self._device.torch_device
        table = None if rotations is None else rotations.inverse_table(first_token, len(slots))
        sinks = max(0, self._profile.num_sinks - first_token)
        output = self._device.empty((cells.output_rows, len(slots)), self._stream)
        copy = copier(output)

        def work() -> None:
            cells.quantise(slots, None if table is None else uploaded(table, device), sinks, output)
            copy()

        self._device.launch(self._stream, work)
        self._device.mark(self._stream).synchronize()
        return host.view(output.shape)

    def _chosen(self, slots: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        """Return some of the slots, on the device. ``which``: int64, on the host."""
        there = self._device.upload(which, self._stream)
        found = torch.empty_like(there)
        self._device.launch(self._stream, lambda: torch.index_select(slots, 0, there, out=found))
        return found

    def trial(self) -> str:
        """Quantise made-up values of the first cell, which compiles the kernels. Return what is wrong; an empty string
        if nothing is."""
        cell, quantiser = self._places[0], self._quantiser
        first_token, num_rows = self._profile.num_sinks, self.num_rows[0]
        place = CellPlace(cell.place.layers, cell.place.heads, range(first_token, first_token + _TRIAL_TOKENS))
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(120, 137, (num_rows, _TRIAL_TOKENS), dtype=torch.uint8, generator=generator)
        steps = torch.full_like(rows[0], 128), rows[0][:0], rows
        values = CellValues(*(_TRIAL_FACTOR * x for x in quantiser.dequantise(steps, cell.buffers[0][0].dtype, place)))
        sides: list[list[torch.Tensor]] = []
        for x, buffers in zip(values, cell.buffers, strict=True):
            sides.append([])
            for layer, buffer in enumerate(buffers):
                like = torch.empty_strided(x[:, layer].shape, buffer.stride(), dtype=x.dtype, device=buffer.device)
                sides[-1].append(like.copy_(x[:, layer]))
        slots = self._device.upload(torch.arange(_TRIAL_TOKENS), self._stream)
        cells = self._on_device([KltInput(quantiser.forward(place), *sides)])
        host = self._device.pinned(cells.output_rows * _TRIAL_TOKENS)
        found = self._fetch(cells, slots, first_token, host, lambda output: partial(copy, host, output.view(-1)))
        others = others_in((found[0], found[1:]), quantiser.quantise(values, place))
        for name, share in others._asdict().items():
            if share > _MOST_OTHERS:
                return f"a trial gave {share:.0%} other {name}"
        return ""


class KltRun:
    """Quantises the pages of one run."""

    def __init__(self, reads: KltReads, slots: torch.Tensor, read: ReadSlots, page_size: int) -> None:
        self._reads, self._slots, self._read, self._page_size = reads, slots, read, page_size
        self.num_rows = reads.num_rows

    def quantise(self, first_page: int, pages: range, memory: torch.Tensor, offset: int) -> list[torch.Tensor] | None:
        """Quantise some pages, as `KltReads.quantise` does. ``first_page``: the run's position in the sequence.
        ``pages``: counted from the run's first."""
        slots = self._slots[pages.start * self._page_size : pages.stop * self._page_size]
        first_token = (first_page + pages.start) * self._page_size
        return self._reads.quantise(slots, first_token, self._read, memory, offset)


class Others(NamedTuple):
    """What a device rounded in another way than the CPU: the share of exponents, and of integers of other tokens. Each
    integer of a token with another exponent is another one, and is not wrong."""

    exponents: float
    integers: float


def others_in(found: tuple[torch.Tensor, torch.Tensor], expected: Quantised) -> Others:
    """Compare exponents, uint8 ``(tokens,)``, and integers, uint8 ``(rows, tokens)``, with the CPU's."""
    exponents, _, integers = expected
    is_same = found[0] == exponents
    different = (found[1] != integers)[:, is_same]
    return Others(float((~is_same).float().mean()), float(different.float().mean()) if different.numel() else 0.0)


def open_klt_reads(
    device: Device, stream: Stream, quantiser: Quantiser, cells: Iterable[PoolCell]
) -> tuple[KltReads | None, str]:
    """Open the reads, if they pass a trial. Return them, or None, and a sentence about the result. Raises nothing."""
    if why := why_no_gpu():
        return None, f"klt is quantised on the CPU: {why}"
    try:
        reads = KltReads(device, stream, quantiser, cells)
        fault = reads.trial()
    except Exception as e:  # a compiler and a driver fail in many ways
        fault = brief(e)
    return (None, f"klt is quantised on the CPU: {fault}") if fault else (reads, "klt is quantised on the GPU")
