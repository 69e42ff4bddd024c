"""Loads staged prompts into a pool on a GPU, while the batch that needs them already computes.

Coded cells cross the bus as they are, a layer group or a part of it at a time: one copy, one `ans_decode` for all their
integers, one `xxh3` for their checksums, one `restore_klt`. They go through scratch memory of a fixed size, one part
after the other on one stream. So the number of launches depends on the scratch memory, and not on the number of cells.
Values that the data plane has restored, of other quantisers or codecs, are copied layer by layer.

A forward pass waits for the event after a layer. Checksums are compared when the pass has been launched: if one is
wrong, SGLang aborts the requests of the load before their results are used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter

from sgl_kvfetch import metrics
from sgl_kvfetch.codec import Device, Event, Fence
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.openmp import use_one_thread
from sgl_kvfetch.plugin.device.coded_loads import CodedLoad
from sgl_kvfetch.plugin.device.cuda_pages import CudaPages
from sgl_kvfetch.plugin.device.loads import Load, Loader
from sgl_kvfetch.plugin.device.pinned_memory import PinnedMemory

logger = logging.getLogger(__name__)

MiB = 1 << 20
SCRATCH_BYTES = 64 * MiB


class GpuLayerCounter(LayerWiseLoadCounter):  # type: ignore[misc]
    """Lets the forward pass's stream wait for the events of layers. Its futures hold the events, once launched."""

    def __init__(self, num_layers: int, device: Device) -> None:
        super().__init__(num_layers)
        self._device = device

    def complete(self, index: int, layer: int, fence: Fence | None = None) -> None:
        self.futures[index][layer].set_result(fence)

    def wait_until(self, threshold: int) -> None:
        futures = self.futures.get(self.consumer_index)
        if futures is None:
            return
        if futures[threshold].exception() is None:  # waits until the layer is launched, which takes milliseconds
            self._device.current_stream().wait_event(futures[threshold].result())
        if self.on_layer_ready is not None:
            self.on_layer_ready(self.consumer_index, threshold)


@dataclass(eq=False)
class _Running:
    """A batch's loads, until SGLang has finished them. ``coded`` keep memory that the device uses until ``done``.
    ``launching`` is done when all was launched that will be; ``is_complete``: whether it was all."""

    loads: Sequence[Load]
    launching: Future[None] | None = None
    done: Event | None = None
    coded: dict[Load, CodedLoad] = field(default_factory=dict)
    is_complete: bool = False


class GpuLoader(Loader):
    """Loads on a stream of its own. ``begin`` and ``finish`` run on the scheduler's thread."""

    def __init__(self, pages: CudaPages, device: Device, scratch_bytes: int | None = None) -> None:
        """``scratch_bytes``: `SCRATCH_BYTES` by default. Raises UnsupportedError if the device has no room for them."""
        self.counter = GpuLayerCounter(pages.geometry.num_layers, device)
        self._pages = pages
        self._device = device
        self._stream = pages.new_stream()
        self._scratch = self._allocate(scratch_bytes or SCRATCH_BYTES)
        self._running: dict[int, _Running] = {}
        self._memory: PinnedMemory | None = None  # that the last load was read from
        self._thread = ThreadPoolExecutor(1, "kvfetch-load", use_one_thread)

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        try:
            return self._device.empty((num_bytes,), self._stream)
        except torch.OutOfMemoryError as error:
            raise UnsupportedError(
                f"device mode needs {num_bytes / MiB:.0f} MiB on the GPU beside the KV pool, which are not free: lower "
                "--mem-fraction-static"
            ) from error

    def begin(self, loads: Sequence[Load]) -> int:
        index: int = self.counter.update_producer()
        self._running[index] = running = _Running(loads)
        slots = [self._pages.open_load(load.slots, self._stream) for load in loads]
        running.launching = self._thread.submit(self._run, index, running, slots)
        return index

    def finish(self, index: int) -> bool:
        running = self._running.pop(index, None)
        is_launched = bool(self.counter.finish(index))  # waits for the thread
        if running is None:
            return is_launched
        return self._end(running) and is_launched

    def reset(self) -> None:
        for index in list(self._running):
            self.finish(index)
        self.counter.reset()

    def close(self) -> None:
        self._thread.shutdown()
        for running in self._running.values():
            self._end(running)
        self._running.clear()
        if self._memory is not None:
            self._memory.unpin()
            self._memory = None

    def _end(self, running: _Running) -> bool:
        """Wait until the device has finished with a batch's loads, and release what they held. Return whether their
        cells were sound."""
        assert running.launching is not None
        running.launching.exception()
        if running.done is not None:
            running.done.synchronize()
        num_wrong = 0
        for load in running.loads:
            coded = running.coded.get(load)
            wrong = 0 if coded is None or not running.is_complete else coded.num_wrong()
            load.on_end(running.is_complete and not wrong)
            num_wrong += wrong
        if not running.is_complete:
            metrics.MISSES.labels("load", "failed").inc()
        if num_wrong:
            metrics.MISSES.labels("load", "corrupt").inc()
            logger.error("kvfetch: %d cells did not decode on the GPU; the CPU will decode their segments", num_wrong)
        return not num_wrong

    # On the loading thread

    def _run(self, index: int, running: _Running, slots: Sequence[torch.Tensor]) -> None:
        try:
            with self._device.launching(self._stream) as launch:
                pairs = zip(running.loads, slots, strict=True)
                works = [self._work(load, there, running) for load, there in pairs]
                fence = None
                for layer in range(self._pages.geometry.num_layers):
                    launched = [launch(work) for works_of in works for work in works_of(layer)]
                    if launched or fence is None:
                        fence = self._stream.record_event()
                    self.counter.complete(index, layer, fence)
                for coded in running.coded.values():
                    launch(coded.fetch_results)
                running.is_complete = True
        except Exception as error:
            logger.exception("kvfetch: loading failed; the CPU will decode these segments")
            self.counter.fail(index, error)
        finally:
            running.done = self._device.mark(self._stream)  # also after a failure: what was launched may still run

    def _work(
        self, load: Load, slots: torch.Tensor, running: _Running
    ) -> Callable[[int], Iterator[Callable[[], object]]]:
        """Return a function that yields what a load launches for a layer."""
        memory = self._pinned(load.staged.memory)
        if load.staged.code is None:
            return partial(self._copy_values, load, memory, slots)
        coded = CodedLoad(self._pages, self._device, self._stream, self._scratch, load, load.staged.code, memory, slots)
        running.coded[load] = coded
        return coded.works

    def _pinned(self, memory: torch.Tensor) -> PinnedMemory:
        """Return the shared memory of a load; another data plane, after one has ended, has memory of its own."""
        if self._memory is None or self._memory.whole is not memory:
            if self._memory is not None:
                self._device.mark(self._stream).synchronize()
                self._memory.unpin()
            self._memory = PinnedMemory(self._device, memory)
        return self._memory

    def _copy_values(
        self, load: Load, memory: PinnedMemory, slots: torch.Tensor, layer: int
    ) -> Iterator[Callable[[], object]]:
        first = load.first_page * self._pages.geometry.page_size
        for buffer, values in zip(self._pages.layer_buffers(layer), load.staged.values, strict=True):
            rows = values[layer, first : first + len(slots)].view(buffer.dtype)
            at_once = self._scratch.numel() // rows[0].nbytes
            for begin in range(0, len(rows), at_once):
                part = rows[begin : begin + at_once]
                there = self._scratch[: part.nbytes].view(part.dtype).view(part.shape)
                yield memory.copy_of(part, there)
                yield partial(buffer.index_copy_, 0, slots[begin : begin + at_once], there)
