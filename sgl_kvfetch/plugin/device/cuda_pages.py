"""SGLang's token-to-KV pool on a GPU, read and restored beside the forward pass.

Streams of our own do the work; SGLang's are ordered with them by events alone, so that nothing waits on the host but
our own threads. docs/device-mode-gpu.md has the whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from sgl_kvfetch.container.segment import CellFrames
from sgl_kvfetch.cuda_streams import Device, Event, Stream
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.fetch.sink import FramePool, Guard
from sgl_kvfetch.plugin.device.cuda_staging import Staging, needed_bytes
from sgl_kvfetch.plugin.device.pages import DevicePages
from sgl_kvfetch.quant import Quantiser
from sgl_kvfetch.quant.inverse import ByteInverse, Inverse, StepInverse, TransformInverse
from sgl_kvfetch.triton_kernels.restore import restore
from sgl_kvfetch.triton_kernels.restore_klt import restore_klt
from sgl_kvfetch.types import TensorName

MiB = 1 << 20

# On the host, and as much on the device: two for restores, so that one is filled while another one is on its way, and
# one for reads, which wait for the forward pass and must not keep restores waiting as well.
NUM_RESTORE_BUFFERS = 2
RESTORE_BUFFER_BYTES = 16 * MiB  # holds a bfloat16 frame of 1080p, or a span of 1024 tokens of eight heads of 128
READ_BUFFER_BYTES = 8 * MiB
DEVICE_BYTES = NUM_RESTORE_BUFFERS * RESTORE_BUFFER_BYTES + READ_BUFFER_BYTES


class CudaPages(DevicePages, FramePool):
    """Pages of an ``MHATokenToKVPool`` on a GPU.

    Whoever hands slots over, on the scheduler's thread, calls ``fence`` before anything is begun with them, and
    ``publish`` before they go on: into the tree, or back to the allocator.
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
        """``forward_stream``: where SGLang's model runs when its scheduler overlaps with it; on the scheduler's own
        stream otherwise. Raises UnsupportedError as `DevicePages` does."""
        super().__init__(pool, page_size)
        self._device = device
        self._forward_stream = forward_stream
        self._restores, self._reads, self._lookups = (device.new_stream() for _ in range(3))
        self._restore_staging = Staging(device, NUM_RESTORE_BUFFERS, restore_buffer_bytes)
        self._read_staging = Staging(device, 1, read_buffer_bytes)
        self._launching = threading.Lock()
        self._restored: Event | None = None  # after the last restore that was launched, unless published
        self._lock = threading.Lock()  # of what follows; a kernel is compiled with it held
        self._inverses: dict[tuple[Quantiser, TensorName, int, int], Inverse] = {}
        self._compiled: set[tuple[Any, ...]] = set()

    # Order, on the scheduler's thread

    def fence(self) -> None:
        scheduled = self._device.current_stream().record_event()
        forwarded = self._forward_stream.record_event()
        # A forward pass under way may still write what the scheduler has given away since, or compute what is read.
        for stream in (self._restores, self._reads):
            stream.wait_event(scheduled)
            stream.wait_event(forwarded)
        self._lookups.wait_event(scheduled)  # slot numbers are made on the scheduler's stream

    def publish(self) -> None:
        with self._launching:
            restored, self._restored = self._restored, None
        if restored is not None:
            # The forward stream waits for the scheduler's before each pass.
            self._device.current_stream().wait_event(restored)

    # Restoring

    def restore(self, cell: CellFrames, span_pages: Sequence[int], pages: Sequence[int], guarded: Guard) -> None:
        inverse = self._inverse(cell)
        fixed = [self._span_slots(cell, span_pages, pages)]
        if cell.scales is not None:
            fixed.append(cell.scales)
        if isinstance(inverse, TransformInverse) and inverse.rope is not None:
            fixed.append(inverse.rope.table(cell.tokens.start, len(cell.tokens)))
        for frames in _planes(cell, on_device=True):
            self._device.used_on(
                frames, self._restores
            )  # they were made for another stream, which is through with them
        step = self._frames_at_once(cell, fixed)
        for first_frame in range(0, cell.frames[0].shape[0], step):
            if not self._restore_frames(cell, inverse, fixed, slice(first_frame, first_frame + step), guarded):
                return

    def _restore_frames(
        self, cell: CellFrames, inverse: Inverse, fixed: Sequence[torch.Tensor], part: slice, guarded: Guard
    ) -> bool:
        with self._restore_staging.buffer(self._restores) as buffer:
            staged = [plane[part] for plane in _planes(cell, on_device=False)]
            (slots, *arguments), num_bytes = buffer.put([*fixed, *staged])
            uploaded = iter(arguments[len(fixed) - 1 :])
            frames = [
                plane[part] if is_on_device else next(uploaded)
                for plane, is_on_device in zip(cell.frames, cell.is_on_device, strict=True)
            ]
            arguments = [*arguments[: len(fixed) - 1], *frames]
            kernel = partial(_restore, cell, inverse, self._outputs(cell), arguments, part.start)
            self._device.launch(self._restores, partial(buffer.upload, num_bytes))
            self._compile(cell, inverse, partial(kernel, slots, is_trial=True))
            return guarded(partial(self._write, partial(kernel, slots)))

    def _write(self, kernel: Callable[[], None]) -> None:
        with self._launching:
            self._device.launch(self._restores, kernel)
            self._restored = self._restores.record_event()

    def _compile(self, cell: CellFrames, inverse: Inverse, trial: Callable[[], None]) -> None:
        """Have a kernel that was not used yet compiled now, which takes seconds, and not within a guard."""
        has_rope = isinstance(inverse, TransformInverse) and inverse.rope is not None
        kind = (cell.layout, cell.tensor, len(cell.layers), type(inverse), has_rope)
        with self._lock:
            if kind not in self._compiled:
                self._device.launch(self._restores, trial)
                self._compiled.add(kind)

    def _frames_at_once(self, cell: CellFrames, fixed: Sequence[torch.Tensor]) -> int:
        """Raises UnsupportedError if there is no room for one."""
        staged = [plane[:1] for plane in _planes(cell, on_device=False)]
        if not staged:
            return len(cell.frames[0])
        room = self._restore_staging.num_bytes - needed_bytes(fixed)
        num = room // needed_bytes(staged)
        if num < 1:
            height, width = cell.layout.height, cell.layout.width
            raise UnsupportedError(
                f"{len(staged)} byte planes of pictures of {width}x{height} do not fit into buffers of "
                f"{self._restore_staging.num_bytes} bytes, with {needed_bytes(fixed)} bytes of slots and scales"
            )
        return num

    def _inverse(self, cell: CellFrames) -> Inverse:
        """With its tensors on the device, where they stay: they are a part of the model."""
        key = cell.quantiser, cell.tensor, cell.model_layer, len(cell.layers)
        with self._lock:
            if key not in self._inverses:
                for other in [k for k in self._inverses if k[0] is not cell.quantiser]:  # of an earlier attachment
                    del self._inverses[other]
                inverse = cell.quantiser.inverse_of(*key[1:])
                on_device = inverse.to(self._device.torch_device) if isinstance(inverse, TransformInverse) else inverse
                self._inverses[key] = on_device
            return self._inverses[key]

    def _outputs(self, cell: CellFrames) -> list[torch.Tensor]:
        return self._buffers[cell.tensor][cell.layers.start : cell.layers.stop]

    def _span_slots(self, cell: CellFrames, span_pages: Sequence[int], pages: Sequence[int]) -> torch.Tensor:
        """Of every token of the span, on the host; -1 where it is not wanted."""
        slots = torch.full((len(cell.tokens),), -1)
        slots.view(-1, self.geometry.page_size)[list(span_pages)] = self._slots(pages).view(len(pages), -1)
        return slots

    # Reading

    def read(self, tensor: TensorName, pages: Sequence[int]) -> torch.Tensor:
        """Waits for the device."""
        slots = self._slots(pages)
        buffers = self._buffers[tensor]
        row_bytes = buffers[0][0].nbytes
        rows = torch.empty((len(slots), len(buffers), *buffers[0].shape[1:]), dtype=self._raw_dtype)
        step = self._read_staging.num_bytes // (len(buffers) * row_bytes + slots.itemsize)
        assert step > 1, "no room for a token"
        for first in range(0, len(slots), step - 1):  # one less, for the alignment
            self._read_rows(buffers, slots[first : first + step - 1], rows[first : first + step - 1])
        return self._as_pages(rows, len(pages))

    def _read_rows(self, buffers: Sequence[torch.Tensor], slots: torch.Tensor, out: torch.Tensor) -> None:
        with self._read_staging.buffer(self._reads) as buffer:
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

    def write(self, tensor: TensorName, first_layer: int, pages: Sequence[int], values: torch.Tensor) -> None:
        raise NotImplementedError("frames are restored, values are not written")

    def page_indices(self, slots: torch.Tensor) -> list[int]:
        """Waits for the device."""
        size = self.geometry.page_size
        assert slots.numel() % size == 0
        indices = torch.empty(slots.numel() // size, dtype=slots.dtype)
        self._device.launch(self._lookups, lambda: _copy(slots[::size] // size, indices))
        self._device.mark(self._lookups).synchronize()
        return indices.tolist()


def _planes(cell: CellFrames, *, on_device: bool) -> list[torch.Tensor]:
    return [plane for plane, there in zip(cell.frames, cell.is_on_device, strict=True) if there == on_device]


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def _restore(
    cell: CellFrames,
    inverse: Inverse,
    outputs: Sequence[torch.Tensor],
    arguments: Sequence[torch.Tensor],
    first_frame: int,
    slots: torch.Tensor,
    *,
    is_trial: bool = False,
) -> None:
    """Launch the kernel. ``arguments``: scales and rotation, as far as there are any, and the frames of each plane. A
    trial does all but write."""
    if is_trial:
        slots = torch.full_like(slots, -1)
    match inverse:
        case ByteInverse():
            restore(arguments, cell.layout, slots, outputs, first_frame=first_frame)
        case StepInverse(centres):
            scales, frames = arguments
            restore([frames], cell.layout, slots, outputs, scales=scales, centres=centres, first_frame=first_frame)
        case TransformInverse(matrices, step, means, rope):
            scales, *rotation, frames = arguments
            restore_klt(
                frames,
                cell.layout,
                slots,
                outputs,
                scales=scales,
                inverse=matrices,
                step=step,
                means=means,
                rotation=rotation[0] if rotation else None,
                interleaved=rope is not None and rope.interleaved,
                first_frame=first_frame,
            )
