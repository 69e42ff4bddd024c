"""Loads staged prompts into a pool on a GPU, while the batch that needs them already computes.

Coded cells cross the bus as they are, in parts of a layer group or more: two copies, one `ans_decode` for all their
integers, one `restore_klt`, one `xxh3` for their checksums. What takes how long on an H200 says why it is done so
(docs/gpu/model.md): a copy is the copy engine's, `ans_decode` mostly waits, and `restore_klt` fills the chip. So
several parts are under way at once.

* **One stream copies**, and never waits for a kernel but those that used the scratch memory before.
* **A lane** is a stream of kernels with scratch memory of its own. Parts go to the lanes in turn. The copy waits for
  the lane's last use of its memory; the lane waits for the copy. So while one lane decodes, others copy and restore.
* **A layer** is loaded when each lane has restored what was launched for it so far: a forward pass waits for one event
  a lane. Checksums come after a part's restore, so that no pass waits for them.
* **Memory is pinned before it is loaded from**, on a thread of its own: half a GiB for the first prompts and all of
  `memory_cache` from the start, little by little, and whatever else a prompt lies in once it was staged. A load pins
  what is not pinned yet.
* **All are done** when the stream of copies, which fetches the results at the end, has waited for all lanes. Until then
  the batch keeps whatever memory they use, also after a failure.

The number of launches depends on the scratch memory, and not on the number of cells. Values that the data plane has
restored, of other quantisers or codecs, go the same way, a layer at a time.

Statuses and checksums are compared when the pass has been launched: if one is wrong, SGLang aborts the requests of the
load before their results are used.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter

from sgl_kvfetch import metrics
from sgl_kvfetch.codec import Device, Event, Fence, Stream
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.openmp import use_one_thread
from sgl_kvfetch.plane import StagedValues
from sgl_kvfetch.plugin.device.coded_loads import ALIGNMENT, CodedLoad, Works
from sgl_kvfetch.plugin.device.cuda_pages import CudaPages
from sgl_kvfetch.plugin.device.loads import Load, Loader
from sgl_kvfetch.plugin.device.pinned_memory import PinnedMemory

logger = logging.getLogger(__name__)

MiB = 1 << 20
LANES = 2
MOST_SCRATCH_BYTES = 512 * MiB  # two layer groups of 32,768 tokens a lane, of a model like Llama-3.1-8B
LEAST_SCRATCH_BYTES = 64 * MiB
_FIRST_BYTES = 512 * MiB  # of the memory in which prompts are staged, pinned from the start: the first ones lie there
_FREE_SHARE = 8  # the scratch memory is at most that part of what is free at the start

_Part = Callable[[torch.Tensor], Works]  # a part, as a function of its scratch memory


class GpuLayerCounter(LayerWiseLoadCounter):  # type: ignore[misc]
    """Lets the forward pass's stream wait for the events of layers. Its futures hold the events, once launched."""

    def __init__(self, num_layers: int, device: Device) -> None:
        super().__init__(num_layers)
        self._device = device

    def complete(self, index: int, layer: int, fences: Sequence[Fence] = ()) -> None:
        self.futures[index][layer].set_result(fences)

    def wait_until(self, threshold: int) -> None:
        futures = self.futures.get(self.consumer_index)
        if futures is None:
            return
        if futures[threshold].exception() is None:  # waits until the layer is launched, which takes milliseconds
            stream = self._device.current_stream()
            for fence in futures[threshold].result():
                stream.wait_event(fence)
        if self.on_layer_ready is not None:
            self.on_layer_ready(self.consumer_index, threshold)


@dataclass(eq=False)
class _Lane:
    """``free``: after the last use of ``scratch``."""

    stream: Stream
    scratch: torch.Tensor
    free: Fence | None = None


@dataclass(eq=False)
class _Running:
    """A batch's loads, until SGLang has finished them. ``slots``: of each, on the device. ``after``: what the pool's
    slots are written after. ``coded``, and ``slots``, keep memory that the device uses until ``done``. ``launching`` is
    done when all was launched that will be; ``is_complete``: whether it was all."""

    loads: Sequence[Load]
    slots: list[torch.Tensor] = field(default_factory=list)
    after: list[Fence] = field(default_factory=list)
    launching: Future[None] | None = None
    done: Event | None = None
    coded: dict[Load, CodedLoad] = field(default_factory=dict)
    is_complete: bool = False


class GpuLoader(Loader):
    """Loads on streams of its own. ``begin`` and ``finish`` run on the scheduler's thread."""

    def __init__(self, pages: CudaPages, device: Device, scratch_bytes: int | None = None) -> None:
        """``scratch_bytes``: by default, what is free on the device decides. Raises UnsupportedError if the device has
        no room for them."""
        self.counter = GpuLayerCounter(pages.geometry.num_layers, device)
        self._pages = pages
        self._device = device
        self._copies = device.new_stream()
        scratch = self._allocate(scratch_bytes)
        self._lane_bytes = scratch.numel() // LANES // ALIGNMENT * ALIGNMENT
        begins = range(0, LANES * self._lane_bytes, self._lane_bytes)
        self._lanes = [_Lane(pages.new_stream(), scratch[begin:][: self._lane_bytes]) for begin in begins]
        self._turns = itertools.cycle(self._lanes)
        self._running: dict[int, _Running] = {}
        self._memories: list[PinnedMemory] = []  # the newest data plane's last, guarded by the lock
        self._cache_bytes = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._pins = ThreadPoolExecutor(1, "kvfetch-pin")
        self._thread = ThreadPoolExecutor(1, "kvfetch-load", use_one_thread)

    def _allocate(self, num_bytes: int | None) -> torch.Tensor:
        """Allocate scratch memory. Of ``None``, a share of what is free, as forward passes need memory, too."""
        free = self._device.free_bytes()
        share = min(MOST_SCRATCH_BYTES, max(LEAST_SCRATCH_BYTES, free // _FREE_SHARE // MiB * MiB))
        sizes = [num_bytes] if num_bytes else sorted({share, min(share, LEAST_SCRATCH_BYTES)}, reverse=True)
        for size in sizes:
            with contextlib.suppress(torch.OutOfMemoryError):
                scratch = self._device.empty((size,), self._copies)
                about = f"{size / MiB:.0f} MiB of scratch memory on the GPU, where {free / MiB:.0f} were free"
                logger.info("kvfetch: loads use %s", about)
                return scratch
        raise UnsupportedError(
            f"device mode needs {sizes[-1] / MiB:.0f} MiB on the GPU beside the KV pool, where {free / MiB:.0f} are "
            "free: lower --mem-fraction-static"
        )

    def attach(self, memory: torch.Tensor, cache_bytes: int) -> None:
        self._cache_bytes = cache_bytes
        self._memory_of(memory)

    def prepare(self, staged: StagedValues) -> None:
        if not staged.num_pages:
            return
        memory = self._memory_of(staged.memory)
        tensors = staged.values if staged.code is None else [staged.code.packed]
        begins = np.array([x.data_ptr() - memory.whole.data_ptr() for x in tensors])
        ends = begins + [x.nbytes for x in tensors]
        if staged.code is not None:
            cells = staged.code.cells
            begins, ends = np.append(begins, cells["start"]), np.append(ends, cells["start"] + cells["size"])
        self._pins.submit(memory.pin_all, begins, ends)

    def _pin_next(self, memory: PinnedMemory, numbers: Iterator[int]) -> None:
        """Pin a piece, and wait as long again: meanwhile others use the driver. Then what was staged has its turn."""
        number = next(numbers, None)
        if number is None or self._closing.is_set():
            return
        began_s = time.monotonic()
        memory.pin(number)
        self._closing.wait(time.monotonic() - began_s)
        with contextlib.suppress(RuntimeError):  # it was closed
            self._pins.submit(self._pin_next, memory, numbers)

    def begin(self, loads: Sequence[Load]) -> int:
        index: int = self.counter.update_producer()
        self._running[index] = running = _Running(loads)
        page_size = self._pages.geometry.page_size
        for load in loads:
            # Coded cells say which pages of the prompt their tokens are; of values, those are taken that are wanted.
            num_before = 0 if load.staged.code is None else load.first_page * page_size
            running.slots.append(self._pages.open_load(load.slots, num_before))
        running.after += self._pages.fences()
        running.launching = self._thread.submit(self._run, index, running)
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
        self._closing.set()
        self._pins.shutdown(cancel_futures=True)
        for memory in self._memories:
            memory.unpin()
        self._memories.clear()

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

    def _run(self, index: int, running: _Running) -> None:
        try:
            restored: dict[int, Fence] = {}  # by lane
            for lane, fence in itertools.product(self._lanes, running.after):
                lane.stream.wait_event(fence)
            parts_of = [
                self._open(load, slots, running) for load, slots in zip(running.loads, running.slots, strict=True)
            ]
            for layer in range(self._pages.geometry.num_layers):
                for part in itertools.chain.from_iterable(parts(layer) for parts in parts_of):
                    lane = next(self._turns)
                    restored[id(lane)] = self._launch(part(lane.scratch), lane)
                self.counter.complete(index, layer, tuple(restored.values()))
            self._join()
            with self._device.launching(self._copies) as launch:
                for coded in running.coded.values():
                    launch(coded.fetch_results)
            running.is_complete = True
        except Exception as error:
            logger.exception("kvfetch: loading failed; the CPU will decode these segments")
            self.counter.fail(index, error)
        finally:
            if not running.is_complete:
                self._join()  # what was launched may still run
            running.done = self._device.mark(self._copies)

    def _launch(self, works: Works, lane: _Lane) -> Fence:
        """Launch a part. Return the fence after which its slots may be read."""
        if lane.free is not None:
            self._copies.wait_event(lane.free)
        with self._device.launching(self._copies) as launch:
            for work in works.copies:
                launch(work)
        lane.stream.wait_event(self._copies.record_event())
        with self._device.launching(lane.stream) as launch:
            for work in works.restores:
                launch(work)
            restored = lane.free = lane.stream.record_event()
            for work in works.checks:
                launch(work)
        if works.checks:
            lane.free = lane.stream.record_event()
        return restored

    def _join(self) -> None:
        """Let the stream of copies wait for all lanes."""
        for lane in self._lanes:
            self._copies.wait_event(lane.stream.record_event())

    def _open(self, load: Load, slots: torch.Tensor, running: _Running) -> Callable[[int], Iterator[_Part]]:
        """Return a function that yields the parts of a load that a layer needs beside those of layers before."""
        memory, code = self._pinned(load.staged.memory), load.staged.code
        if code is None:
            return partial(self._copy_values, load, memory, slots)
        coded = CodedLoad(self._pages, self._device, self._copies, self._lane_bytes, code, memory, slots)
        running.coded[load] = coded
        with self._device.launching(self._copies) as launch:
            for work in coded.begin():
                launch(work)
        return coded.parts

    def _pinned(self, memory: torch.Tensor) -> PinnedMemory:
        """Return the shared memory of a load; another data plane, after one has ended, has memory of its own."""
        found = self._memory_of(memory)
        with self._lock:
            index = self._memories.index(found)
            former, self._memories = self._memories[:index], self._memories[index:]
        if former:
            self._device.mark(self._copies).synchronize()
            for each in former:
                each.unpin()
        return found

    def _memory_of(self, whole: torch.Tensor) -> PinnedMemory:
        """Return a data plane's shared memory. Of a new one, begin to pin what will be in use."""
        with self._lock:
            for memory in self._memories:
                if memory.whole is whole:
                    return memory
            memory = PinnedMemory(self._device, whole)
            self._memories.append(memory)
        cache = whole.numel() - self._cache_bytes
        first, kept = memory.pieces(0, min(_FIRST_BYTES, cache)), memory.pieces(cache, whole.numel())
        self._pins.submit(self._pin_next, memory, itertools.chain(first, kept))
        return memory

    def _copy_values(self, load: Load, memory: PinnedMemory, slots: torch.Tensor, layer: int) -> Iterator[_Part]:
        first = load.first_page * self._pages.geometry.page_size
        for buffer, values in zip(self._pages.layer_buffers(layer), load.staged.values, strict=True):
            rows = values[layer, first : first + len(slots)].view(buffer.dtype)
            at_once = self._lane_bytes // rows[0].nbytes
            for begin in range(0, len(rows), at_once):
                some = slice(begin, begin + at_once)
                yield partial(_values_part, memory, rows[some], buffer, slots[some])


def _values_part(
    memory: PinnedMemory, rows: torch.Tensor, buffer: torch.Tensor, slots: torch.Tensor, scratch: torch.Tensor
) -> Works:
    there = scratch[: rows.nbytes].view(rows.dtype).view(rows.shape)
    return Works([memory.copy_of(rows, there)], [partial(buffer.index_copy_, 0, slots, there)])
