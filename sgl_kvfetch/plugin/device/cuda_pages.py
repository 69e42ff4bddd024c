"""SGLang's token-to-KV pool on a GPU, read and restored in parallel with the forward pass.

The work runs on our own streams. Only events order them with SGLang's streams, so that no thread but our own waits on
the host. docs/device-mode-gpu.md explains the design.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import cycle
from typing import Any, Self

import torch

from sgl_kvfetch.codec import CellFrames, CellPlace, CellValues, Decoders, Device, Fence, Quantised, Quantiser, Stream
from sgl_kvfetch.codec.quant import Inverse, TransformInverse
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.log import LimitedLogger, brief
from sgl_kvfetch.plane import FramePool, Guard, IsFinished, consecutive_runs
from sgl_kvfetch.plugin.device.klt_batches import KltLauncher, make_model
from sgl_kvfetch.plugin.device.klt_reads import KltReads, KltRun, PoolCell, open_klt_reads
from sgl_kvfetch.plugin.device.pages import SlotPages
from sgl_kvfetch.plugin.device.restores import CellOutputs, Restore, restores_of
from sgl_kvfetch.plugin.device.staging import StagingRing, needed_bytes
from sgl_kvfetch.triton_kernels.restore_klt import VECTORS, KltModel, compile_klt
from sgl_kvfetch.types import TENSORS, TensorName

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)

MiB = 1 << 20

# Staging memory, on the host and as much on the device. Restores have room for two of the largest buffers: one is
# filled while the other is uploaded. Reads have their own memory: they wait for the forward pass, and restores shall
# not wait for them.
RESTORE_BUFFERS = 2
RESTORE_BUFFER_BYTES = 16 * MiB  # holds a bfloat16 frame of 1080p, or a span of 1024 tokens of eight heads of 128
READ_BUFFER_BYTES = 8 * MiB
DEVICE_BYTES = RESTORE_BUFFERS * RESTORE_BUFFER_BYTES + READ_BUFFER_BYTES

_TABLES = 64  # kept: of rotations, 512 KiB for a span of 1024 tokens, and of pixels, a few KiB
_ROTATED_SPANS = 32  # of which rotations are made at the start; each takes about a millisecond of a CPU
_POLL_S = 0.001  # events have no wait with a deadline
_RESTORE_STREAMS = 4  # a round waits for the passes that ran when it began, and not for those of the next rounds


class CudaPages(SlotPages, FramePool):
    """Pages of an ``MHATokenToKVPool`` on a GPU.

    The scheduler's thread opens a round, or reads, when it hands slots over, before work on them begins. It calls the
    round's ``publish`` before they go on: into the tree, or back to the allocator. Rounds share all but their slots,
    their stream and the event after their last restore. Slots stay on the device: kernels take them from there when
    their turn comes, and no thread waits until SGLang has computed them. Pages are numbered within the opened slots.
    """

    device: Device

    def __init__(
        self,
        pool: Any,
        page_size: int,
        device: Device,
        forward_stream: Stream,
        *,
        spare_decoders: Decoders | None = None,
        restore_buffer_bytes: int = RESTORE_BUFFER_BYTES,
        read_buffer_bytes: int = READ_BUFFER_BYTES,
    ) -> None:
        """``forward_stream``: the stream of SGLang's model if the scheduler overlaps with it; otherwise the model runs
        on the scheduler's own stream. Raises UnsupportedError as `SlotPages` does."""
        super().__init__(pool, page_size)
        self.spare_decoders = spare_decoders or {}
        self.device = device
        self._forward_stream = forward_stream
        self._reads = device.new_stream()
        restores = [device.new_stream() for _ in range(_RESTORE_STREAMS)]
        self._pool_streams = [self._reads, *restores]  # that use the pool
        self._restore_streams = cycle(restores)
        self._restores = next(self._restore_streams)
        # Of the round or the reads, on the device.
        self._slots_there = torch.empty(0, dtype=torch.int64, device=device.torch_device)
        self._restored: Fence | None = None  # after the round's last launched restore; changes only within a guard
        self._restore_buffer_bytes = restore_buffer_bytes
        self._restore_staging = StagingRing(device, RESTORE_BUFFERS * restore_buffer_bytes)
        self._read_staging = StagingRing(device, read_buffer_bytes)
        self._uploads = device.new_stream()
        self._lock = threading.Lock()  # guards the inverses and the tables
        self._tables: OrderedDict[tuple[Hashable, ...], torch.Tensor] = OrderedDict()
        self._inverses: dict[tuple[Quantiser, range, range], Inverse] = {}
        self._outputs_of: dict[tuple[range, range], CellOutputs] = {}
        self._models: dict[tuple[range, range], tuple[Quantiser, KltModel]] = {}
        self._compiling = threading.Lock()  # taken only for kernels that are not compiled yet
        self._compiled: set[Hashable] = set()
        self.launcher = KltLauncher(device, self._restore_staging, page_size, self._compile_once)
        self._batches = self.launcher.open(self._restores, self._slots_there, self._write, self.resident)
        self._klt_reads: KltReads | None = None
        self._klt_run: KltRun | None = None
        self.quantiser: Quantiser | None = None  # that of the store, once it is known

    # Ordering, on the scheduler's thread

    def open_round(self, slots: torch.Tensor) -> Self:
        opened = self._open(slots)
        opened._restores, opened._restored = next(self._restore_streams), None
        opened._batches = self.launcher.open(opened._restores, opened._slots_there, opened._write, opened.resident)
        opened._fence(opened._restores)  # a forward pass under way may still write to slots that were given away since
        return opened

    def open_reads(self, slots: torch.Tensor) -> Self:
        opened = self._open(slots)
        opened._fence(self._reads)  # a forward pass under way may compute what will be read
        if self._klt_reads is not None:
            opened._klt_run = self._klt_reads.open(opened._slots_there, opened._read_slots, self.geometry.page_size)
        return opened

    def _open(self, slots: torch.Tensor) -> Self:
        opened = copy.copy(self)
        opened._slots_there = slots.to(torch.int64)
        return opened

    def _fence(self, stream: Stream) -> None:
        stream.wait_event(self.device.current_stream().record_event())  # slots are computed on this stream
        stream.wait_event(self._forward_stream.record_event())
        self.device.used_on(self._slots_there, stream)

    def new_stream(self) -> Stream:
        """Return a stream for work on the pool beside rounds and reads."""
        self._pool_streams.append(self.device.new_stream())
        return self._pool_streams[-1]

    def open_load(self, slots: torch.Tensor, stream: Stream) -> torch.Tensor:
        """Return ``slots`` for work on ``stream``, int64 on the device, and order what is launched there from now on
        after everything that the model was given to compute so far. Call this on the scheduler's thread."""
        opened = self._open(slots)
        opened._fence(stream)
        return opened._slots_there

    def publish(self) -> None:
        if self._restored is not None:
            # The forward stream waits for the scheduler's stream before each pass.
            self.device.current_stream().wait_event(self._restored)

    def wait_until_unused(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        events = [self.device.mark(stream) for stream in self._pool_streams]
        while not all(event.query() for event in events):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_POLL_S)
        return True

    def close(self) -> None:
        self.launcher.close()

    # Restoring

    def restore(
        self, cell: CellFrames, span_pages: Sequence[int], pages: Sequence[int], guarded: Guard
    ) -> Future[IsFinished]:
        if cell.quantiser.gpu_restores_batches:
            model = self.klt_model(cell.quantiser, cell.place, cell.layers, cell.heads)
            return self._batches.restore(cell, model, span_pages, pages, guarded)
        inverse = self._inverse(cell.quantiser, cell.place)
        assert not isinstance(inverse, TransformInverse)
        slots = self._span_slots(len(cell.place.tokens), span_pages, pages)
        for frames, there in zip(cell.parts, cell.is_on_device, strict=True):
            if there:
                # They were allocated for another stream, which has finished with them.
                self.device.used_on(frames, self._restores)
        for work in restores_of(cell, inverse, self._outputs(cell.layers, cell.heads)):
            step = self._frames_at_once(cell, work)
            firsts = range(0, len(cell.parts[work.parts[0]]), step)
            if not all(self._restore_frames(cell, work, slots, slice(i, i + step), guarded) for i in firsts):
                break
        launched: Future[IsFinished] = Future()
        launched.set_result(self.device.mark(self._restores).query)
        return launched

    def _restore_frames(
        self, cell: CellFrames, work: Restore, slots: torch.Tensor, part: slice, guarded: Guard
    ) -> bool:
        staged = [cell.parts[i][part] for i in work.parts if not cell.is_on_device[i]]
        with self._restore_staging.buffer(needed_bytes([*work.fixed, *staged]), self._restores) as buffer:
            there = buffer.put([*work.fixed, *staged])
            arguments, uploaded = there[: len(work.fixed)], iter(there[len(work.fixed) :])
            frames = [cell.parts[i][part] if cell.is_on_device[i] else next(uploaded) for i in work.parts]
            self.device.launch(self._restores, buffer.upload)
            kind = work.kind, len(cell.layers)
            self._compile_once(kind, lambda: work.launch(torch.full_like(slots, -1), arguments, frames, part.start))
            return guarded(lambda: self._write(partial(work.launch, slots, arguments, frames, part.start)))

    def layer_buffers(self, layer: int) -> list[torch.Tensor]:
        """Return K's and V's buffer of a layer, ``(slots, heads, dim)`` of raw values."""
        return [self._buffers[tensor][layer] for tensor in TENSORS]

    def _write(self, kernel: Callable[[], None]) -> None:
        self.device.launch(self._restores, kernel)
        self._restored = self._restores.record_event()

    def _compile_once(self, kind: Hashable, trial: Callable[[], None]) -> None:
        """Compile kernels before their first use: that takes seconds, too long to do within a guard."""
        if kind in self._compiled:
            return
        with self._compiling:
            if kind not in self._compiled:
                self.device.launch(self._restores, trial)
                self._compiled.add(kind)

    def _frames_at_once(self, cell: CellFrames, work: Restore) -> int:
        """Return how many frames to restore at once. Raises UnsupportedError if a buffer cannot hold one."""
        parts = [cell.parts[i] for i in work.parts if not cell.is_on_device[i]]
        if not parts:
            return len(cell.parts[work.parts[0]])
        room = self._restore_buffer_bytes - needed_bytes(work.fixed)
        at_once = room // needed_bytes([x[:1] for x in parts])
        if at_once < 1:
            raise UnsupportedError(
                f"a frame of {len(parts)} parts, each {tuple(parts[0].shape[1:])}, does not fit into buffers of "
                f"{self._restore_buffer_bytes} bytes, with {needed_bytes(work.fixed)} bytes of scales"
            )
        return at_once

    def prepare(self, quantiser: Quantiser, places: Iterable[CellPlace]) -> None:
        self.quantiser = quantiser
        first, *others = places
        inverse = self._inverse(quantiser, first)
        for place in others:
            self._inverse(quantiser, place)
        if not isinstance(inverse, TransformInverse):
            return
        if inverse.rope is not None:
            num_tokens = len(first.tokens)
            for token in range(0, _ROTATED_SPANS * num_tokens, num_tokens):
                self.launcher.rotation_of(inverse.rope, range(token, token + num_tokens), self.resident)
        model = self.klt_model(quantiser, first, range(len(first.layers)), range(len(first.heads)))
        for vector in VECTORS:
            kind = model.shape, model.dtype, vector
            self._compile_once(kind, partial(compile_klt, *kind, self._slots_there))

    def _inverse(self, quantiser: Quantiser, place: CellPlace) -> Inverse:
        """Return the inverse of a cell's quantiser. Its tensors stay on the device, for later cells."""
        key = quantiser, place.layers, place.heads
        with self._lock:
            if key not in self._inverses:
                for other in [k for k in self._inverses if k[0] is not quantiser]:  # of an earlier attachment
                    del self._inverses[other]
                inverse = quantiser.inverse_of(place)
                if isinstance(inverse, TransformInverse):
                    inverse = self.device.upload(inverse, self._uploads)
                self._inverses[key] = inverse
            return self._inverses[key]

    def klt_model(self, quantiser: Quantiser, place: CellPlace, layers: range, heads: range) -> KltModel:
        """Return what restores of a cell need, whatever it holds. ``layers``, ``heads``: as in `CellFrames`."""
        key = layers, heads
        of_quantiser, model = self._models.get(key, (None, None))
        if of_quantiser is not quantiser or model is None:
            inverse = self._inverse(quantiser, place)
            assert isinstance(inverse, TransformInverse)
            model = make_model(quantiser, inverse, *self._outputs(layers, heads), self.resident)
            self._models[key] = quantiser, model
        return model

    def resident(self, function: Callable[..., torch.Tensor], *args: Hashable) -> torch.Tensor:
        """Return ``function(*args)`` on the device, which keeps the latest such tables for later cells."""
        with self._lock:
            table = self._tables.pop((function, *args), None)
            if table is None:
                table = self.device.upload(function(*args), self._uploads)
            self._tables[function, *args] = table
            if len(self._tables) > _TABLES:
                self._tables.popitem(last=False)
        self.device.used_on(table, self._restores)
        return table

    def _outputs(self, layers: range, heads: range) -> CellOutputs:
        """Return K's and V's buffers of some layers, reduced to some heads, both counted from the pool's first."""
        key = layers, heads
        if key not in self._outputs_of:
            of_layers, of_heads = (slice(x.start, x.stop) for x in key)
            k, v = ([x[:, of_heads] for x in self._buffers[t][of_layers]] for t in TENSORS)
            self._outputs_of[key] = k, v
        return self._outputs_of[key]

    def _span_slots(self, num_tokens: int, span_pages: Sequence[int], pages: Sequence[int]) -> torch.Tensor:
        """Return the slot of every token of a span, int64 ``(num_tokens,)`` on the device, -1 for a token that is not
        wanted. Kernels on the round's stream may use them."""
        size = self.geometry.page_size
        slots = self.device.empty((8 * num_tokens,), self._restores).view(torch.int64)

        def look_up() -> None:
            slots.fill_(-1)
            for span, places in consecutive_runs(span_pages):
                for run, of_run in consecutive_runs(pages[places]):
                    first = (span.start + of_run.start) * size
                    there = self._slots_there[run.start * size : run.stop * size]
                    slots[first : first + len(there)] = there

        self.device.launch(self._restores, look_up)
        return slots

    # Reading

    def read(self, tensor: TensorName, pages: Sequence[int]) -> torch.Tensor:
        """Return a copy of the pages on the host. Waits for the device."""
        size, buffers = self.geometry.page_size, self._buffers[tensor]
        rows = torch.empty((len(pages) * size, len(buffers), *buffers[0].shape[1:]), dtype=self._raw_dtype)
        for run, places in consecutive_runs(pages):
            out = rows[places.start * size : places.stop * size]
            slots = self._slots_there[run.start * size : run.stop * size]
            self._read_in_parts(buffers, slots, out)
        return self._as_pages(rows, len(pages))

    def prepare_writes(self, quantiser: Quantiser, places: Iterable[CellPlace]) -> None:
        self._klt_reads = None
        if not quantiser.gpu_quantises:
            return
        cells: list[PoolCell] = []
        for place in places:
            first_head = cells[0].place.heads.start if cells else place.heads.start
            layers = range(place.layers.start - self.first_layer, place.layers.stop - self.first_layer)
            heads = range(place.heads.start - first_head, place.heads.stop - first_head)
            cells.append(PoolCell(place, layers, heads, self._outputs(layers, heads)))
        opened = open_klt_reads(self.device, self._read_staging, self._reads, quantiser, cells)
        self._klt_reads, result = opened
        logger.info("kvfetch: %s", result)

    def quantise(self, first_page: int, pages: range) -> Sequence[Quantised] | None:
        if self._klt_run is None:
            return None
        try:
            return self._klt_run.quantise(first_page, pages)
        except Exception as e:  # a compiler and a driver fail in many ways
            _limited.warning("quantise", f"pages are quantised on the CPU: {brief(e)}")
            return None

    def _read_slots(self, slots: torch.Tensor) -> CellValues:
        """Return a copy of slots on the host. Waits for the device."""
        found = []
        for tensor in TENSORS:
            buffers = self._buffers[tensor]
            rows = torch.empty((len(slots), len(buffers), *buffers[0].shape[1:]), dtype=self._raw_dtype)
            self._read_in_parts(buffers, slots, rows)
            found.append(rows.view(self._dtype))
        return CellValues(*found)

    def _read_in_parts(self, buffers: Sequence[torch.Tensor], slots: torch.Tensor, out: torch.Tensor) -> None:
        row_bytes = len(buffers) * buffers[0][0].nbytes
        at_once = self._read_staging.num_bytes // row_bytes
        assert at_once, "the read buffer has no room for a token"
        for first in range(0, len(out), at_once):
            self._read_rows(buffers, slots[first : first + at_once], out[first : first + at_once])

    def _read_rows(self, buffers: Sequence[torch.Tensor], slots: torch.Tensor, out: torch.Tensor) -> None:
        with self._read_staging.buffer(out.nbytes, self._reads) as buffer:
            host, device = (x.view(out.dtype).view(out.transpose(0, 1).shape) for x in buffer.room(out.nbytes))

            def gather() -> None:
                for index, layer in enumerate(buffers):
                    torch.index_select(layer, 0, slots, out=device[index])
                host.copy_(device, non_blocking=True)

            self.device.launch(self._reads, gather)
            self.device.mark(self._reads).synchronize()
            out.copy_(host.transpose(0, 1))

    def page_indices(self, slots: torch.Tensor) -> Sequence[int]:
        return range(slots.numel() // self.geometry.page_size)
