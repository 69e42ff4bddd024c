"""Restores cells of `klt` in batches: one launch for all cells of a round that come within a short time.

A launch takes some 0.1 ms of Python on the interpreter lock of SGLang's process, and a cell of it 0.01 ms: it is a row
of a table. docs/device-mode-gpu.md has the rules.
"""

from __future__ import annotations

import copy
import threading
from array import array
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Self

import torch

from sgl_kvfetch.codec import CellFrames, Device, KltQuantiser, RegionLayout, Stream, TransformInverse, scales_of
from sgl_kvfetch.plane import Guard, IsFinished
from sgl_kvfetch.plugin.device.staging import ALIGNMENT, StagingRing, aligned
from sgl_kvfetch.triton_kernels.restore_klt import (
    KltCell,
    KltModel,
    KltPlaces,
    compile_klt,
    klt_shape,
    pack,
    region_pixels,
    restore_klt,
)

WAIT_S = 0.002  # for more cells, after the first
_MOST_CELLS = 32
_CELL_BYTES = 4 << 10  # of staging memory: what spans of 1,024 tokens need, and room for exact tokens
_LAUNCHING_THREADS = 4  # a launch that waits for the driver holds up no other

# Calls a function with hashable arguments, and keeps the tensor that it returns on the device for the next call.
Resident = Callable[..., torch.Tensor]
# Launches kernels that write to a round's slots, and notes that.
Write = Callable[[Callable[[], None]], None]
# Calls the function unless kernels of this kind are compiled.
CompileOnce = Callable[[Hashable, Callable[[], None]], None]


class KltBatches:
    """Restores cells of `klt`. Cells of a round share its batches. Thread-safe."""

    def __init__(self, device: Device, ring: StagingRing, page_size: int, compile_once: CompileOnce) -> None:
        self._device = device
        self._ring = ring
        self._page_size = page_size
        self._compile_once = compile_once
        self._threads = ThreadPoolExecutor(_LAUNCHING_THREADS, "kvfetch-launch")

    def open(self, stream: Stream, slots: torch.Tensor, write: Write, resident: Resident) -> Self:
        """Return the batches of a round. ``slots``: int64, of all its pages, on the device. ``resident`` keeps tables
        for kernels on ``stream``."""
        opened = copy.copy(self)
        opened._stream, opened._slots, opened._write, opened._resident = stream, slots, write, resident
        opened._lock = threading.Lock()  # guards what follows
        opened._batch = None
        opened._latest = {}
        return opened

    _stream: Stream
    _slots: torch.Tensor
    _write: Write
    _resident: Resident
    _lock: threading.Lock
    _batch: _Batch | None
    _latest: dict[str, tuple[Any, Any]]  # tables of the latest cell, by name, each with its key: most cells share them

    def restore(
        self, cell: CellFrames, model: KltModel, span_pages: Sequence[int], pages: Sequence[int], guarded: Guard
    ) -> Future[IsFinished]:
        """Add a cell to a batch; see `FramePool.restore`."""
        frames = cell.parts[2]
        most_bytes = 9 * len(cell.place.tokens) + cell.parts[1].nbytes  # with an int32 a page, and one an exact token
        if not cell.is_on_device[2]:
            # Such cells come at the pace of a CPU, and a few of them fill the staging memory: each is a batch.
            own = _Batch(self._ring, model, guarded, 1, most_bytes, [frames])
            try:
                with self._lock:
                    own.add(*self._row(cell, model, own.uploaded[0], span_pages, pages))
            finally:
                launched = self._threads.submit(self._launch, own, 0.0)  # which gives its memory back, in any case
            return launched
        self._device.used_on(frames, self._stream)  # they were allocated for another stream, which has finished
        with self._lock:
            row = self._row(cell, model, frames, span_pages, pages)
            batch = self._batch
            while batch is None or batch.guarded != guarded or not batch.add(*row):
                batch = _Batch(self._ring, model, guarded, _MOST_CELLS, _MOST_CELLS * _CELL_BYTES + most_bytes, [])
                batch.launched = self._threads.submit(self._launch, batch, WAIT_S)
                self._batch = batch
            return batch.launched

    def _row(
        self,
        cell: CellFrames,
        model: KltModel,
        frames: torch.Tensor,
        span_pages: Sequence[int],
        pages: Sequence[int],
    ) -> tuple[KltCell, list[Any]]:
        """Return a cell without its bytes in a batch, and these bytes."""
        layout, tokens, quantiser = cell.layouts[2], cell.place.tokens, cell.quantiser
        assert isinstance(layout, RegionLayout)
        assert isinstance(quantiser, KltQuantiser)
        rope, num_pages = quantiser.profile.rope, len(tokens) // self._page_size
        table = self._kept("pages", (num_pages, span_pages, pages), _page_table)
        pieces, num_exact = pack(table, cell.parts[0], cell.parts[1])
        places = self._kept("places", (layout, len(tokens), model.words[0]), self._make_places)
        rotation = None
        if rope is not None:
            rotation = self._kept("rotation", (tokens.start, len(tokens)), partial(self._resident, rope.table))
        none = frames, 0  # until it is in a batch
        return KltCell(model, places, frames, rotation, num_pages, num_exact, *none), pieces

    def _make_places(self, layout: RegionLayout, num_tokens: int, num_coefficients: int) -> KltPlaces:
        return KltPlaces(layout, num_tokens, self._resident(region_pixels, layout, num_coefficients))

    def _kept(self, name: str, key: tuple[Any, ...], make: Callable[..., Any]) -> Any:
        """Return ``make(*key)``, or what it returned for the latest cell."""
        latest = self._latest.get(name)
        if latest is None or latest[0] != key:
            latest = self._latest[name] = key, make(*key)
        return latest[1]

    def _launch(self, batch: _Batch, wait_s: float) -> IsFinished:
        """Launch a batch after ``wait_s``, or once it is full. Return whether the device has finished with it."""
        batch.is_full.wait(wait_s)
        cells = batch.close()
        try:
            if cells:
                self._device.launch(self._stream, batch.upload)
                kind = cells[0].model.shape, cells[0].model.dtype, cells[0].places.vector
                self._compile_once(kind, partial(compile_klt, *kind, self._slots))
                kernels = partial(restore_klt, cells, batch.table(len(cells)), self._slots, self._page_size)
                batch.guarded(lambda: self._write(kernels))
        finally:
            self._ring.take_back(batch.buffer, self._stream)
        return self._stream.record_event().query


class _Batch:
    """Cells of one launch. Their rows and bytes are in one piece of staging memory."""

    def __init__(
        self,
        ring: StagingRing,
        model: KltModel,
        guarded: Guard,
        most_cells: int,
        num_bytes: int,
        frames: Sequence[torch.Tensor],
    ) -> None:
        """Waits for staging memory. ``frames`` on the host are uploaded with the batch. ``num_bytes``: for cells beside
        rows and frames."""
        self._row_bytes = model.shape.row_bytes
        rows_bytes = most_cells * self._row_bytes + num_bytes + ALIGNMENT
        self.buffer = ring.lend(sum(x.nbytes + ALIGNMENT for x in frames) + rows_bytes)
        self.uploaded, end = self.buffer.put(frames)
        self._first = aligned(end)
        self._end = self._first + most_cells * self._row_bytes
        self._memory = self.buffer.memory
        self._most_cells = most_cells
        self._lock = threading.Lock()
        self._cells: list[KltCell] | None = []  # None once it is closed
        self.guarded = guarded
        self.is_full = threading.Event()
        self.launched: Future[IsFinished]

    def add(self, cell: KltCell, pieces: Sequence[Any]) -> bool:
        """Add a cell and its bytes. Return False if it is for another launch."""
        with self._lock:
            cells, begin = self._cells, self._end
            if cells is None:
                return False
            if (
                len(cells) == self._most_cells
                or begin + sum(map(len, pieces)) > len(self._memory)
                or (cells and (cells[0].model.shape, cells[0].places.vector) != (cell.model.shape, cell.places.vector))
            ):
                self.is_full.set()
                return False
            end = begin
            for piece in pieces:
                self._memory[end : end + len(piece)] = piece
                end += len(piece)
            self._end = end - end % -4  # the next cell begins with an int32
            row = self._first + len(cells) * self._row_bytes
            cell.data, cell.offset = self.buffer.device, begin
            self._memory[row : row + self._row_bytes] = cell.row()
            cells.append(cell)
            if len(cells) == self._most_cells:
                self.is_full.set()
            return True

    def close(self) -> list[KltCell]:
        """Return the cells; none is added from now on, and none is kept."""
        with self._lock:
            cells, self._cells = self._cells, None
        assert cells is not None
        return cells

    def upload(self) -> None:
        self.buffer.upload(self._end)

    def table(self, num_cells: int) -> torch.Tensor:
        return self.buffer.device[self._first : self._first + num_cells * self._row_bytes]


def make_model(
    cell: CellFrames,
    inverse: TransformInverse,
    k: Sequence[torch.Tensor],
    v: Sequence[torch.Tensor],
    resident: Resident,
) -> KltModel:
    """Return what cells of these layers and heads need. The tensors of ``inverse`` are on the device. ``k`` and ``v``:
    each layer's buffer, reduced to the cell's heads."""
    quantiser, rope = cell.quantiser, inverse.rope
    assert isinstance(quantiser, KltQuantiser)
    rotary_dim, is_interleaved = (0, False) if rope is None else (rope.rotary_dim, rope.interleaved)
    shape = klt_shape(k[0], v[0], quantiser.cell_layers, rotary_dim, interleaved=is_interleaved)
    return KltModel(shape, inverse.matrix.contiguous(), inverse.mean, resident(_steps, quantiser.step), k, v)


def _steps(step: float) -> torch.Tensor:
    return scales_of(torch.arange(256, dtype=torch.uint8)) * step


def _page_table(num_pages: int, span_pages: Sequence[int], pages: Sequence[int]) -> bytes:
    table = array("i", (-1,)) * num_pages
    for span_page, page in zip(span_pages, pages, strict=True):
        table[span_page] = page
    return table.tobytes()
