"""Quantises pages on the GPU on their way to the store: of 2 bytes a value 0.7 cross the bus, and no CPU multiplies.

docs/device-mode-gpu.md has the design.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sgl_kvfetch.codec import CellPlace, CellValues, Device, Quantised, Quantiser, Stream, why_no_gpu
from sgl_kvfetch.codec.quant import KltForward, exact_bytes, join_parts
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.log import brief
from sgl_kvfetch.plugin.device.pinned_buffer import PinnedBuffer
from sgl_kvfetch.triton_kernels.quantise_klt import NOT_FINITE, quantise_klt
from sgl_kvfetch.triton_kernels.restore_klt import EXACT

_TOKENS = 2048  # of a block: temporary tensors on the device take some 28 MB
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


class _Cell(NamedTuple):
    cell: PoolCell
    forward: KltForward  # on the device


# Returns the values of some slots, on the host: ``(tokens, layers, heads, dim)`` of all layers and heads.
ReadSlots = Callable[[torch.Tensor], CellValues]


class KltReads:
    """Quantises tokens of a pool's slots."""

    def __init__(
        self, device: Device, buffer: PinnedBuffer, stream: Stream, quantiser: Quantiser, cells: Iterable[PoolCell]
    ) -> None:
        """``cells``: all those of the pool, in storage order. Raises UnsupportedError."""
        assert quantiser.profile is not None
        self._device, self._buffer, self._stream, self._quantiser = device, buffer, stream, quantiser
        self._profile = quantiser.profile
        self._cells = [_Cell(cell, device.upload(quantiser.forward(cell.place), stream)) for cell in cells]
        most_rows = max(1 + cell.forward.num_rows for cell in self._cells)
        self._most_tokens = min(_TOKENS, buffer.num_bytes // most_rows)
        if not self._most_tokens:
            raise UnsupportedError(f"{most_rows} bytes of a token do not fit into a buffer of {buffer.num_bytes}")

    def open(self, slots: torch.Tensor, read: ReadSlots, page_size: int) -> KltRun:
        """Return the reads of a run of whole pages. ``slots``: int64, on the device. ``read`` is for tokens that are
        kept exact."""
        return KltRun(self, slots, read, page_size)

    def quantise(self, slots: torch.Tensor, first_token: int, read: ReadSlots) -> list[Quantised] | None:
        """Return the parts of consecutive tokens for each cell, on the host; None if a value is not finite. Waits for
        the device."""
        pieces = []
        for first in range(0, len(slots), self._most_tokens):
            piece = self._quantise(slots[first : first + self._most_tokens], first_token + first, read)
            if piece is None:
                return None
            pieces.append(piece)
        parts = self._quantiser.parts(torch.uint8)
        return [join_parts(parts, each) for each in zip(*pieces, strict=True)]

    def some_tokens(self, cells: Sequence[Quantised], tokens: slice) -> list[Quantised]:
        return [self._quantiser.some_tokens(cell, tokens) for cell in cells]

    def _quantise(self, slots: torch.Tensor, first_token: int, read: ReadSlots) -> list[Quantised] | None:
        rotations = self._rotations(first_token, len(slots))
        found = [self._integers(forward, cell.buffers, slots, first_token, rotations) for cell, forward in self._cells]
        if any(bool((rows[0] == NOT_FINITE).any()) for rows in found):
            return None
        is_exact = torch.stack([rows[0] == EXACT for rows in found])
        some = is_exact.any(dim=0).nonzero().squeeze(1)
        values = read(self._device.upload(self._on_host(slots)[some] if len(some) else some, self._stream))
        parts: list[Quantised] = []
        for (cell, _), rows, which in zip(self._cells, found, is_exact, strict=True):
            own = values.cell(cell.layers, cell.heads)
            parts.append((rows[0], exact_bytes(own, which[some]), rows[1:]))
        return parts

    def _rotations(self, first_token: int, num_tokens: int) -> torch.Tensor | None:
        rotations = self._profile.rotations
        if rotations is None:
            return None
        uploaded: torch.Tensor = self._device.upload(rotations.inverse_table(first_token, num_tokens), self._stream)
        return uploaded

    def _integers(
        self,
        forward: KltForward,
        buffers: CellOutputs,
        slots: torch.Tensor,
        first_token: int,
        rotations: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return a cell's exponents and integers on the host, uint8 ``(1 + rows, tokens)``."""
        shape = 1 + forward.num_rows, len(slots)
        sinks = max(0, self._profile.num_sinks - first_token)

        def work(host: torch.Tensor) -> None:
            rows = host.view(shape)
            exponents, integers = quantise_klt(forward, *buffers, slots, rotations, sinks)
            rows[0].copy_(exponents, non_blocking=True)
            rows[1:].copy_(integers[: forward.num_rows], non_blocking=True)

        return self._fetched(shape[0] * shape[1], work).view(shape)

    def _on_host(self, slots: torch.Tensor) -> torch.Tensor:
        def work(host: torch.Tensor) -> None:
            host.view(torch.int64).copy_(slots, non_blocking=True)

        return self._fetched(slots.nbytes, work).view(torch.int64)

    def _fetched(self, num_bytes: int, work: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """Return what ``work`` copies into pinned memory, uint8 ``(num_bytes,)``. Waits for the device."""
        with self._buffer.lend(num_bytes) as (host, _):
            self._device.launch(self._stream, lambda: work(host))
            self._device.mark(self._stream).synchronize()
            return host.clone()

    def trial(self) -> str:
        """Quantise made-up values of the first cell, which compiles the kernels. Return what is wrong; an empty string
        if nothing is."""
        (cell, forward), quantiser = self._cells[0], self._quantiser
        first_token, num_tokens = self._profile.num_sinks, min(_TRIAL_TOKENS, self._most_tokens)
        place = CellPlace(cell.place.layers, cell.place.heads, range(first_token, first_token + num_tokens))
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(120, 137, (forward.num_rows, num_tokens), dtype=torch.uint8, generator=generator)
        steps = torch.full_like(rows[0], 128), rows[0][:0], rows
        values = CellValues(*(_TRIAL_FACTOR * x for x in quantiser.dequantise(steps, cell.buffers[0][0].dtype, place)))
        sides: list[list[torch.Tensor]] = []
        for x, buffers in zip(values, cell.buffers, strict=True):
            sides.append([])
            for layer, buffer in enumerate(buffers):
                like = torch.empty_strided(x[:, layer].shape, buffer.stride(), dtype=x.dtype, device=buffer.device)
                sides[-1].append(like.copy_(x[:, layer]))
        slots = self._device.upload(torch.arange(num_tokens), self._stream)
        rotations = self._rotations(first_token, num_tokens)
        found = self._integers(forward, (sides[0], sides[1]), slots, first_token, rotations)
        others = others_in((found[0], found[1:]), quantiser.quantise(values, place))
        for name, share in others._asdict().items():
            if share > _MOST_OTHERS:
                return f"a trial gave {share:.0%} other {name}"
        return ""


class KltRun:
    """Quantises the pages of one run."""

    def __init__(self, reads: KltReads, slots: torch.Tensor, read: ReadSlots, page_size: int) -> None:
        self._reads, self._slots, self._read, self._page_size = reads, slots, read, page_size
        self._block = range(0)  # tokens of the run that were quantised last: callers ask for fewer pages at a time
        self._found: list[Quantised] | None = []  # None if they are left to the CPU

    def quantise(self, first_page: int, pages: range) -> list[Quantised] | None:
        """Return the parts of pages of the run for each cell, on the host; None if a value is not finite. Waits for
        the device.

        ``first_page``: the run's position in the sequence. ``pages``: counted from the run's first.
        """
        wanted = range(pages.start * self._page_size, pages.stop * self._page_size)
        if not (self._block.start <= wanted.start and wanted.stop <= self._block.stop):
            block = range(wanted.start, max(wanted.stop, min(wanted.start + _TOKENS, len(self._slots))))
            first_token = first_page * self._page_size + block.start
            self._block = block
            self._found = self._reads.quantise(self._slots[block.start : block.stop], first_token, self._read)
        if self._found is None:
            return None
        tokens = slice(wanted.start - self._block.start, wanted.stop - self._block.start)
        return self._reads.some_tokens(self._found, tokens)


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
    device: Device, buffer: PinnedBuffer, stream: Stream, quantiser: Quantiser, cells: Iterable[PoolCell]
) -> tuple[KltReads | None, str]:
    """Open the reads, if they pass a trial. Return them, or None, and a sentence about the result. Raises nothing."""
    if why := why_no_gpu():
        return None, f"klt is quantised on the CPU: {why}"
    try:
        reads = KltReads(device, buffer, stream, quantiser, cells)
        fault = reads.trial()
    except Exception as e:  # a compiler and a driver fail in many ways
        fault = brief(e)
    return (None, f"klt is quantised on the CPU: {fault}") if fault else (reads, "klt is quantised on the GPU")
