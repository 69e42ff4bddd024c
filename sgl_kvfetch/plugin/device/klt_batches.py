"""Restores cells of `klt` in batches: one launch for all cells of a round that come within a short time.

A launch takes some 0.1 ms of Python on the interpreter lock of SGLang's process, and a cell of it 0.01 ms: it is a row
of a table. docs/device-mode-gpu.md has the rules.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from sgl_kvfetch.codec import CellFrames, Device, Quantiser, Stream
from sgl_kvfetch.codec.layout import RegionLayout
from sgl_kvfetch.codec.quant import Rope, TransformInverse, scales_of
from sgl_kvfetch.openmp import use_one_thread
from sgl_kvfetch.plane import Guard, IsFinished
from sgl_kvfetch.plugin.device.staging import StagingBuffer, StagingRing, aligned, needed_bytes
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
_MOST_BYTES = 128 << 10  # of staging memory, for several cells: 1 KiB each, and room for exact tokens
_LAUNCHING_THREADS = 4  # a launch that waits for the driver holds up no other

# Calls a function with hashable arguments, and keeps the tensor that it returns on the device for the next call.
Resident = Callable[..., torch.Tensor]
# Launches kernels that write to a round's slots, and notes that.
Write = Callable[[Callable[[], None]], None]
# Calls the function unless kernels of this kind are compiled.
CompileOnce = Callable[[Hashable, Callable[[], None]], None]


class KltLauncher:
    """What the batches of all rounds share."""

    def __init__(self, device: Device, ring: StagingRing, page_size: int, compile_once: CompileOnce) -> None:
        self.device = device
        self.ring = ring
        self.page_size = page_size
        self.compile_once = compile_once
        self.threads = ThreadPoolExecutor(_LAUNCHING_THREADS, "kvfetch-launch")
        self._rotating = ThreadPoolExecutor(1, "kvfetch-rotate", use_one_thread)  # a team of OpenMP threads would spin

    def close(self) -> None:
        """End the threads when what was submitted is done. Call this after all rounds."""
        self.threads.shutdown(wait=False)
        self._rotating.shutdown(wait=False)

    def rotation_of(self, rope: Rope, tokens: range, resident: Resident) -> torch.Tensor:
        """Return ``rope.table`` of a span, on the device."""
        return resident(self._rotation, rope.table, tokens.start, len(tokens))

    def _rotation(self, table: Callable[[int, int], torch.Tensor], first_token: int, num_tokens: int) -> torch.Tensor:
        return self._rotating.submit(table, first_token, num_tokens).result()

    def open(self, stream: Stream, slots: torch.Tensor, write: Write, resident: Resident) -> KltBatches:
        """Return the batches of a round. ``slots``: int64, of all its pages, on the device. ``resident`` keeps tables
        for kernels on ``stream``."""
        return KltBatches(self, stream, slots, write, resident)


class KltBatches:
    """Restores cells of `klt`. Cells of a round share its batches. Thread-safe."""

    def __init__(
        self, launcher: KltLauncher, stream: Stream, slots: torch.Tensor, write: Write, resident: Resident
    ) -> None:
        self._launcher = launcher
        self._device, self._ring, self._page_size = launcher.device, launcher.ring, launcher.page_size
        self._stream, self._slots, self._write, self._resident = stream, slots, write, resident
        self._lock = threading.Lock()  # guards what follows
        self._batch: _Batch | None = None  # to which cells are added
        self._places: dict[tuple[RegionLayout, int, int], KltPlaces] = {}
        self._span: _Span | None = None  # of the latest cell: most cells share it with the next

    def restore(
        self, cell: CellFrames, model: KltModel, span_pages: Sequence[int], pages: Sequence[int], guarded: Guard
    ) -> Future[IsFinished]:
        """Add a cell to a batch; see `FramePool.restore`."""
        frames, on_host = cell.parts[2], not cell.is_on_device[2]
        if not on_host:
            self._device.used_on(frames, self._stream)  # they were allocated for another stream, which has finished
        with self._lock:
            restored, packed = self._cell(cell, model, span_pages, pages)
            words = b"" if on_host else restored.words()
            batch = self._batch
            if batch is None or batch.guarded != guarded or not batch.add(restored, words, packed):
                # So that each launching thread has room for a batch's frames, and copies them while the others do.
                self._batch = batch = _Batch(guarded, self._ring.num_bytes // _LAUNCHING_THREADS)
                batch.add(restored, words, packed)
                batch.launched = self._launcher.threads.submit(self._launch, batch)
            return batch.launched

    def _cell(
        self, cell: CellFrames, model: KltModel, span_pages: Sequence[int], pages: Sequence[int]
    ) -> tuple[KltCell, bytes]:
        """Return a cell without its bytes in a batch, and these bytes."""
        layout, tokens, quantiser, frames = cell.layouts[2], cell.place.tokens, cell.quantiser, cell.parts[2]
        assert isinstance(layout, RegionLayout)
        assert quantiser.profile is not None
        span, shape = self._span, (layout, len(tokens), model.num_coefficients)
        if span is None or span[:3] != (tokens, span_pages, pages):
            table = _page_table(len(tokens) // self._page_size, span_pages, pages)
            rope = quantiser.profile.rope
            rotation = None if rope is None else self._launcher.rotation_of(rope, tokens, self._resident)
            span = self._span = _Span(tokens, span_pages, pages, table, rotation)
        if (places := self._places.get(shape)) is None:
            pixels = self._resident(region_pixels, layout, model.num_coefficients)
            places = self._places[shape] = KltPlaces(layout, len(tokens), pixels)
        packed, num_exact = pack(span.table, cell.parts[0], cell.parts[1])
        none = frames, 0  # until it is in a batch
        return KltCell(model, places, frames, span.rotation, len(span.table) // 4, num_exact, *none), packed

    def _launch(self, batch: _Batch) -> IsFinished:
        """Launch a batch after a while, or once it is full. Return whether the device has finished with it."""
        batch.is_full.wait(WAIT_S)
        with self._lock:
            if self._batch is batch:
                self._batch = None  # no cell is added from now on
        buffer = self._ring.lend(batch.num_bytes)
        try:
            table = batch.fill(buffer)
            self._device.launch(self._stream, buffer.upload)
            kind = batch.cells[0].model.shape, batch.cells[0].model.dtype, batch.cells[0].places.vector
            self._launcher.compile_once(kind, partial(compile_klt, *kind, self._slots))
            kernels = partial(restore_klt, batch.cells, table, self._slots, self._page_size)
            batch.guarded(lambda: self._write(kernels))
        finally:
            self._ring.take_back(buffer, self._stream)
        return self._device.mark(self._stream).query


class _Span(NamedTuple):
    """What the cells of a span share."""

    tokens: range
    span_pages: Sequence[int]
    pages: Sequence[int]
    table: bytes  # of pages
    rotation: torch.Tensor | None


class _Batch:
    """Cells of one launch, with their bytes. Frames on the host are uploaded with them."""

    def __init__(self, guarded: Guard, most_frames_bytes: int) -> None:
        """``most_frames_bytes``: of the frames of several cells that are on the host."""
        self.guarded = guarded
        self.cells: list[KltCell] = []
        self._words: list[bytes] = []
        self._packed: list[bytes] = []
        self._most_frames_bytes = most_frames_bytes
        self._rows_bytes = self._frames_bytes = 0
        self.is_full = threading.Event()
        self.launched: Future[IsFinished]

    def add(self, cell: KltCell, words: bytes, packed: bytes) -> bool:
        """Add a cell. Return False if it is for another launch. ``words``: none if its frames are on the host."""
        shape = cell.model.shape
        rows_bytes = self._rows_bytes + shape.row_bytes + len(packed)
        frames_bytes = self._frames_bytes + (0 if words else aligned(cell.frames.nbytes))
        if self.cells and (
            self.is_full.is_set()
            or rows_bytes > _MOST_BYTES
            or frames_bytes > self._most_frames_bytes
            or (self.cells[0].model.shape, self.cells[0].places.vector) != (shape, cell.places.vector)
        ):
            self.is_full.set()
            return False
        self._rows_bytes, self._frames_bytes = rows_bytes, frames_bytes
        self.cells.append(cell)
        self._words.append(words)
        self._packed.append(packed)
        if len(self.cells) == _MOST_CELLS:
            self.is_full.set()
        return True

    @property
    def num_bytes(self) -> int:
        """The size of the buffer that it needs."""
        return self._rows_bytes + self._frames_bytes

    def fill(self, buffer: StagingBuffer) -> torch.Tensor:
        """Copy all into a buffer of ``num_bytes``. Return the table of the cells, on the device."""
        on_host = [cell for cell, words in zip(self.cells, self._words, strict=True) if not words]
        frames = [cell.frames for cell in on_host]
        for cell, uploaded in zip(on_host, buffer.put(frames), strict=True):
            cell.frames = uploaded
        begin = needed_bytes(frames)
        end = first = begin + len(self.cells) * self.cells[0].model.shape.row_bytes
        for cell, packed in zip(self.cells, self._packed, strict=True):
            cell.data, cell.offset = buffer.device, end
            end += len(packed)
        buffer.memory[begin:end] = b"".join([*map(KltCell.row, self.cells, self._words), *self._packed])
        return buffer.device[begin:first]


def make_model(
    quantiser: Quantiser,
    inverse: TransformInverse,
    k: Sequence[torch.Tensor],
    v: Sequence[torch.Tensor],
    resident: Resident,
) -> KltModel:
    """Return what cells of these layers and heads need. The tensors of ``inverse`` are on the device. ``k`` and ``v``:
    each layer's buffer, reduced to the cell's heads."""
    rope = inverse.rope
    rotary_dim, is_interleaved = (0, False) if rope is None else (rope.rotary_dim, rope.interleaved)
    shape = klt_shape(k[0], v[0], quantiser.cell_layers, rotary_dim, interleaved=is_interleaved)
    return KltModel(shape, inverse.matrix.contiguous(), inverse.mean, resident(_steps, inverse.step), k, v)


def _steps(step: float) -> torch.Tensor:
    return scales_of(torch.arange(256, dtype=torch.uint8)) * step


def _page_table(num_pages: int, span_pages: Sequence[int], pages: Sequence[int]) -> bytes:
    table = array("i", (-1,)) * num_pages
    for span_page, page in zip(span_pages, pages, strict=True):
        table[span_page] = page
    return table.tobytes()
