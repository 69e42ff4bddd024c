"""SGLang's token-to-KV pool on a GPU, read and restored in parallel with the forward pass.

The work runs on our own streams. Only events order them with SGLang's streams, so that no thread but our own waits on
the host. docs/device-mode-gpu.md explains the design.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, Self

import torch

from sgl_kvfetch.codec import CellFrames, CellValues, Device, Event, Inverse, Quantiser, Stream, TransformInverse
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plane import FramePool, Guard
from sgl_kvfetch.plugin.device.pages import DevicePages
from sgl_kvfetch.plugin.device.restores import CellOutputs, Restore, restores_of
from sgl_kvfetch.types import TENSORS, TensorName

MiB = 1 << 20

# Staging memory, on the host and as much on the device. Restores have room for two of the largest buffers: one is
# filled while the other is uploaded. Reads have their own memory: they wait for the forward pass, and restores shall
# not wait for them.
RESTORE_BUFFERS = 2
RESTORE_BUFFER_BYTES = 16 * MiB  # holds a bfloat16 frame of 1080p, or a span of 1024 tokens of eight heads of 128
READ_BUFFER_BYTES = 8 * MiB
DEVICE_BYTES = RESTORE_BUFFERS * RESTORE_BUFFER_BYTES + READ_BUFFER_BYTES

_ALIGNMENT = 256  # of tensors in staging memory, in bytes
_RESTORE_STREAMS = 4  # a round waits for the passes that ran when it began, and not for those of the next rounds


class CudaPages(DevicePages, FramePool):
    """Pages of an ``MHATokenToKVPool`` on a GPU.

    The scheduler's thread opens a round, or calls ``fence_reads``, when it hands slots over, before work on them
    begins. It calls the round's ``publish`` before they go on: into the tree, or back to the allocator. Rounds share
    all but their stream and the event after their last restore.
    """

    def __init__(
        self,
        pool: Any,
        page_size: int,
        device: Device,
        forward_stream: Stream,
        *,
        restore_buffer_bytes: int = RESTORE_BUFFER_BYTES,
        read_buffer_bytes: int = READ_BUFFER_BYTES,
    ) -> None:
        """``forward_stream``: the stream of SGLang's model if the scheduler overlaps with it; otherwise the model runs
        on the scheduler's own stream. Raises UnsupportedError as `DevicePages` does."""
        super().__init__(pool, page_size)
        self._device = device
        self._forward_stream = forward_stream
        self._reads, self._lookups = device.new_stream(), device.new_stream()
        self._restore_streams = cycle([device.new_stream() for _ in range(_RESTORE_STREAMS)])
        self._restores = next(self._restore_streams)
        self._restored: Event | None = None  # after the round's last launched restore; changes only within a guard
        self._restore_buffer_bytes = restore_buffer_bytes
        self._restore_staging = StagingRing(device, RESTORE_BUFFERS * restore_buffer_bytes)
        self._read_staging = StagingRing(device, read_buffer_bytes)
        self._lock = threading.Lock()  # guards the inverses
        self._inverses: dict[tuple[Quantiser, range, range], Inverse] = {}
        self._compiling = threading.Lock()  # taken only for kernels that are not compiled yet
        self._compiled: set[tuple[Any, ...]] = set()

    # Ordering, on the scheduler's thread

    def open_round(self) -> Self:
        opened = copy.copy(self)
        opened._restores, opened._restored = next(self._restore_streams), None
        opened.fence()
        return opened

    def fence(self) -> None:
        self._fence(self._restores)  # a forward pass under way may still write to slots that were given away since

    def fence_reads(self) -> None:
        self._fence(self._reads)  # a forward pass under way may compute what will be read

    def _fence(self, stream: Stream) -> None:
        scheduled = self._device.current_stream().record_event()
        stream.wait_event(scheduled)
        stream.wait_event(self._forward_stream.record_event())
        self._lookups.wait_event(scheduled)  # slot numbers are computed on the scheduler's stream

    def publish(self) -> None:
        if self._restored is not None:
            # The forward stream waits for the scheduler's stream before each pass.
            self._device.current_stream().wait_event(self._restored)

    # Restoring

    def restore(self, cell: CellFrames, span_pages: Sequence[int], pages: Sequence[int], guarded: Guard) -> None:
        slots = self._span_slots(cell, span_pages, pages)
        for frames, there in zip(cell.parts, cell.is_on_device, strict=True):
            if there:
                # They were allocated for another stream, which has finished with them.
                self._device.used_on(frames, self._restores)
        inverse = self._inverse(cell)
        for work in restores_of(cell, inverse, slots, self._outputs(cell)):
            fixed = [slots, *work.fixed]
            step = self._frames_at_once(cell, work, fixed)
            for first_frame in range(0, len(cell.parts[work.parts[0]]), step):
                part = slice(first_frame, first_frame + step)
                if not self._restore_frames(cell, work, fixed, part, guarded):
                    return

    def _restore_frames(
        self, cell: CellFrames, work: Restore, fixed: Sequence[torch.Tensor], part: slice, guarded: Guard
    ) -> bool:
        staged = [cell.parts[i][part] for i in work.parts if not cell.is_on_device[i]]
        with self._restore_staging.buffer(needed_bytes([*fixed, *staged]), self._restores) as buffer:
            there, num_bytes = buffer.put([*fixed, *staged])
            uploaded = iter(there[len(fixed) :])
            frames = [cell.parts[i][part] if cell.is_on_device[i] else next(uploaded) for i in work.parts]
            slots, *arguments = there[: len(fixed)]
            self._device.launch(self._restores, partial(buffer.upload, num_bytes))
            self._compile(cell, work, lambda: work.launch(torch.full_like(slots, -1), arguments, frames, part.start))

            def restore() -> None:
                work.launch(slots, arguments, frames, part.start)
                work.finish(arguments)

            return guarded(lambda: self._write(restore))

    def _write(self, kernel: Callable[[], None]) -> None:
        self._device.launch(self._restores, kernel)
        self._restored = self._restores.record_event()

    def _compile(self, cell: CellFrames, work: Restore, trial: Callable[[], None]) -> None:
        """Compile a kernel before its first use: that takes seconds, too long to do within a guard."""
        kind = (work.kind, tuple(cell.layouts[i] for i in work.parts), len(cell.layers))
        if kind in self._compiled:
            return
        with self._compiling:
            if kind not in self._compiled:
                self._device.launch(self._restores, trial)
                self._compiled.add(kind)

    def _frames_at_once(self, cell: CellFrames, work: Restore, fixed: Sequence[torch.Tensor]) -> int:
        """Return how many frames to restore at once. Raises UnsupportedError if a buffer cannot hold the minimum."""
        parts = [cell.parts[i] for i in work.parts if not cell.is_on_device[i]]
        num_frames = len(cell.parts[work.parts[0]])
        if not parts:
            return num_frames
        least = 1 if work.by_frame else num_frames
        room = self._restore_buffer_bytes - needed_bytes(fixed)
        times = room // needed_bytes([x[:least] for x in parts])
        if times < 1:
            raise UnsupportedError(
                f"{least} frames of {len(parts)} parts, each {tuple(parts[0].shape[1:])}, do not fit into buffers of "
                f"{self._restore_buffer_bytes} bytes, with {needed_bytes(fixed)} bytes of slots and scales"
            )
        return least * times

    def _inverse(self, cell: CellFrames) -> Inverse:
        """Return the inverse of the cell's quantiser. Its tensors stay on the device, for later cells."""
        key = cell.quantiser, cell.place.layers, cell.place.heads
        with self._lock:
            if key not in self._inverses:
                for other in [k for k in self._inverses if k[0] is not cell.quantiser]:  # of an earlier attachment
                    del self._inverses[other]
                inverse = cell.quantiser.inverse_of(cell.place)
                on_device = inverse.to(self._device.torch_device) if isinstance(inverse, TransformInverse) else inverse
                self._inverses[key] = on_device
            return self._inverses[key]

    def _outputs(self, cell: CellFrames) -> CellOutputs:
        """Return K's and V's buffers of the cell's layers, reduced to its heads."""
        k, v = (
            [x[:, cell.heads.start : cell.heads.stop] for x in self._buffers[t][cell.layers.start : cell.layers.stop]]
            for t in TENSORS
        )
        return k, v

    def _span_slots(self, cell: CellFrames, span_pages: Sequence[int], pages: Sequence[int]) -> torch.Tensor:
        """Return the slot of every token of the span, on the host; -1 for a token that is not wanted."""
        slots = torch.full((len(cell.place.tokens),), -1)
        slots.view(-1, self.geometry.page_size)[list(span_pages)] = self._slots(pages).view(-1, self.geometry.page_size)
        return slots

    # Reading

    def read(self, tensor: TensorName, pages: Sequence[int]) -> torch.Tensor:
        """Return a copy of the pages on the host. Waits for the device."""
        slots = self._slots(pages)
        buffers = self._buffers[tensor]
        row_bytes = buffers[0][0].nbytes
        rows = torch.empty((len(slots), len(buffers), *buffers[0].shape[1:]), dtype=self._raw_dtype)
        step = self._read_staging.num_bytes // (len(buffers) * row_bytes + slots.itemsize)
        assert step > 1, "the read buffer has no room for a token"
        for first in range(0, len(slots), step - 1):  # one token less, to leave room for alignment
            self._read_rows(buffers, slots[first : first + step - 1], rows[first : first + step - 1])
        return self._as_pages(rows, len(pages))

    def _read_rows(self, buffers: Sequence[torch.Tensor], slots: torch.Tensor, out: torch.Tensor) -> None:
        with self._read_staging.buffer(self._read_staging.num_bytes, self._reads) as buffer:
            (slots_there,), end = buffer.put([slots])
            host, device = (x.view(out.dtype).view(out.transpose(0, 1).shape) for x in buffer.room(end, out.nbytes))

            def gather() -> None:
                buffer.upload(end)
                for index, layer in enumerate(buffers):
                    torch.index_select(layer, 0, slots_there, out=device[index])
                host.copy_(device, non_blocking=True)

            self._device.launch(self._reads, gather)
            self._device.mark(self._reads).synchronize()
            out.copy_(host.transpose(0, 1))

    def write(self, layers: range, heads: range, pages: Sequence[int], values: CellValues) -> None:
        raise NotImplementedError("pages on a GPU are restored from frames, not written from values")

    def page_indices(self, slots: torch.Tensor) -> list[int]:
        """Return the page numbers of a run of whole pages. Waits for the device."""
        size = self.geometry.page_size
        assert slots.numel() % size == 0
        indices = torch.empty(slots.numel() // size, dtype=slots.dtype)
        self._device.launch(self._lookups, lambda: indices.copy_(slots[::size] // size))
        self._device.mark(self._lookups).synchronize()
        return indices.tolist()


class StagingBuffer:
    """A piece of pinned host memory, and one of equal size on the device."""

    def __init__(self, host: torch.Tensor, device: torch.Tensor) -> None:
        self._host = host
        self._device = device

    def put(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
        """Copy host tensors into the pinned half. Return a device tensor for each, and how many bytes must be uploaded
        before they can be used."""
        views = []
        end = 0
        for tensor in tensors:
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = begin + tensor.nbytes
            assert end <= self._host.numel(), (end, self._host.numel())
            self._host[begin:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            views.append(self._device[begin:end].view(tensor.dtype).view(tensor.shape))
        return views, end

    def upload(self, num_bytes: int) -> None:
        self._device[:num_bytes].copy_(self._host[:num_bytes], non_blocking=True)

    def room(self, begin: int, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``num_bytes`` of the host half and of the device half, from ``begin``, rounded up to the alignment."""
        begin = -(-begin // _ALIGNMENT) * _ALIGNMENT
        return self._host[begin : begin + num_bytes], self._device[begin : begin + num_bytes]


@dataclass(eq=False)
class _Region:
    begin: int
    end: int
    done: Event | None = None  # marks the end of the work that uses it; None while it is lent


class StagingRing:
    """Staging memory of ``num_bytes``, lent as buffers of any size. Thread-safe.

    Buffers follow each other in memory, so that a thread waits only when the ring is full, and then for the oldest. A
    restore may have to wait for forward passes. Slots and scales take a few KB, so hundreds of restores fit.
    """

    def __init__(self, device: Device, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._gpu = device
        self._host = device.pinned(num_bytes)
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
        self._taking = threading.Lock()  # held while waiting for room: large buffers get their turn, too
        self._regions: deque[_Region] = deque()  # lent or still in use, the oldest first
        self._returned = threading.Condition()

    @contextmanager
    def buffer(self, num_bytes: int, stream: Stream) -> Iterator[StagingBuffer]:
        """Lend a buffer for work on ``stream``. Waits until there is room: until the device has finished with earlier
        buffers. Raises UnsupportedError if the whole ring is too small."""
        region = self._take(num_bytes)
        try:
            yield StagingBuffer(self._host[region.begin : region.end], self._device[region.begin : region.end])
        finally:
            with self._returned:
                region.done = self._gpu.mark(stream)
                self._returned.notify_all()

    def _take(self, num_bytes: int) -> _Region:
        if num_bytes > self.num_bytes:
            raise UnsupportedError(f"{num_bytes} bytes do not fit into staging memory of {self.num_bytes}")
        with self._taking:
            while (begin := self._place(num_bytes)) is None:
                oldest = self._regions[0]
                with self._returned:
                    while oldest.done is None:
                        self._returned.wait()
                oldest.done.synchronize()
                self._regions.popleft()
            self._regions.append(_Region(begin, begin + num_bytes))
            return self._regions[-1]

    def _place(self, num_bytes: int) -> int | None:
        """Return where a buffer of this size may begin, or None if there is no room."""
        if not self._regions:
            return 0
        first, begin = self._regions[0].begin, -(-self._regions[-1].end // _ALIGNMENT) * _ALIGNMENT
        if self._regions[-1].begin < first:  # the ring has wrapped around
            return begin if begin + num_bytes <= first else None
        if begin + num_bytes <= self.num_bytes:
            return begin
        return 0 if num_bytes <= first else None


def needed_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return how many bytes these tensors take in a buffer, at most."""
    return sum(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)
