"""Loads staged prompts into a pool on a GPU, while the batch that needs them already computes.

Coded cells cross the bus as they are, in parts of a layer group or more: two copies, one `ans_decode` for all their
integers, one `restore_klt` or `restore_exact`, one `xxh3` for their checksums. What takes how long on an H200 says why
it is done so (docs/kernels.md): a copy is the copy engine's, `ans_decode` mostly waits, and `restore_klt` fills the
chip. So several parts are under way at once.

* **One stream copies**, and never waits for a kernel but those that used the scratch memory before.
* **A lane** is a stream of kernels with scratch memory of its own. Parts go to the lanes in turn. The copy waits for
  the lane's last use of its memory; the lane waits for the copy. So while one lane decodes, others copy and restore.
* **Only a restore waits for the pass before**, which may still write the slots. A lane's first part is decoded before.
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

**A part** is cells that go through scratch memory together: a layer group, or several of a short prompt, or what of one
fits. Its tables are made when its turn comes, so the first part is launched before those of the others are made.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter

from sgl_kvfetch import metrics
from sgl_kvfetch.codec import PLANES, Device, Fence, Stream
from sgl_kvfetch.codec.cuda_streams import Event
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plugin.device.gpu_pages import CudaPages, PinnedMemory, copy
from sgl_kvfetch.plugin.device.gpu_restores import Addresses, restores_of
from sgl_kvfetch.plugin.device.pools import EnginePools, Load, Loader, SideBuffers, SidePart
from sgl_kvfetch.processes import use_one_thread
from sgl_kvfetch.protocol import CODE_ALIGNMENT, StagedValues
from sgl_kvfetch.protocol.arena import StagedCode
from sgl_kvfetch.triton_kernels.ans import DECODING_TABLE_BYTES, FittedChunk, ans_decode_table, fitted_decode_table
from sgl_kvfetch.triton_kernels.xxh3 import SUMS, digests_of, xxh3_sums_table

logger = logging.getLogger(__name__)

N = TypeVar("N", int, np.ndarray)
V = TypeVar("V")

ALIGNMENT = 256  # of scratch memory, and of frames in it, in bytes
_MOST_FIELDS, _SUM_FIELDS, _TABLES = len(FittedChunk._fields), 2, 3
_STATUS_BYTES, _SUM_BYTES = 4, 8 * SUMS
_PAGE_BYTES = 4  # of an entry in a page table
_MOST_FAILURES = 2  # loads in a row that the GPU may fail; a fault of one cell fails one
_POINTER_BYTES = 16  # of what kernels get pointers to: for others, Triton would compile them again while SGLang serves

Work = Callable[[], object]  # launches something on the current stream


class Works(NamedTuple):
    """What to launch for a part. ``copies`` fill its scratch memory, ``decodes`` work in it, and ``restores`` write
    slots from it. ``checks`` read it, and nothing waits for them but what uses the scratch memory next."""

    copies: Sequence[Work]
    restores: Sequence[Work]
    decodes: Sequence[Work] = ()
    checks: Sequence[Work] = ()


class _Part(NamedTuple):
    """``cells``: a slice of the prompt's. ``coded``: of their chunks that the GPU decodes, counted among all such, and
    ``status``: the range of their statuses. ``frames_at``: where the decoded frames begin in scratch memory, behind the
    code; decoding tables follow."""

    layer: int
    cells: slice
    coded: slice
    status: slice
    frames_at: int
    frames_bytes: int


class _Needs(NamedTuple):
    """What each cell takes of scratch memory, in bytes, and how many of its chunks are decoded: int64 ``(cells,)``."""

    code: np.ndarray
    frames: np.ndarray
    tables: np.ndarray
    num_coded: np.ndarray


class CodedLoad:
    """Keeps the memory that the device uses."""

    def __init__(
        self,
        pages: CudaPages,
        device: Device,
        stream: Stream,
        scratch_bytes: int,
        code: StagedCode,
        memory: PinnedMemory,
        slots: torch.Tensor,
    ) -> None:
        """``stream``: of copies. ``scratch_bytes``: of a part, a multiple of `ALIGNMENT`. ``memory``: that of the
        prompt. ``slots``: those of the pages that ``code`` has, on the device. Raises UnsupportedError if a cell does
        not fit into the scratch memory."""
        assert pages.quantiser is not None
        self._memory, self._slots = memory, slots
        self._cells, self._chunks = cells, chunks = code.cells, code.chunks
        self._is_coded = chunks["is_coded"] != 0
        self._sizes = chunks["num_rows"] * cells["num_tokens"][:, np.newaxis]
        self._num_frames = -(-chunks["num_rows"] // PLANES)
        frames_bytes = self._num_frames * PLANES * cells["num_tokens"][:, np.newaxis]
        self._frames_bytes = np.where(self._is_coded, _rounded(frames_bytes, ALIGNMENT), 0)
        self._is_fitted = bool(chunks["num_tables"].any())  # distributions of their own
        needs = _Needs(
            _rounded(chunks["size"], CODE_ALIGNMENT).sum(axis=1),
            self._frames_bytes.sum(axis=1),
            chunks["num_tables"].sum(axis=1) * DECODING_TABLE_BYTES,
            self._is_coded.sum(axis=1),
        )
        self._parts = list(_parts(cells["first_layer"], needs, scratch_bytes))
        last = self._parts[-1]
        sizes = last.coded.stop, _rounded(last.status.stop, _POINTER_BYTES)
        self._results, self._on_host = _Results(device, stream, *sizes), _Results(device, None, *sizes)
        self._packed_on_host = code.packed
        self._packed = device.empty((max(1, code.packed.numel()),), stream)[: code.packed.numel()]
        self._restores = restores_of(pages, pages.quantiser, cells)
        row_bytes = self._restores.row_bytes + 8 * (_MOST_FIELDS + _SUM_FIELDS) * chunks.shape[1]
        num_bytes = row_bytes * len(cells) + _TABLES * _POINTER_BYTES * len(self._parts)
        self._pages_bytes = _rounded(code.page_tables.nbytes, _POINTER_BYTES)  # the page tables come first
        num_bytes += self._pages_bytes
        self._tables_on_host, self._tables = device.pinned(num_bytes), device.empty((num_bytes,), stream)
        self._tables_on_host[: code.page_tables.nbytes].view(torch.int32).numpy()[:] = code.page_tables
        self._tables_at: dict[int, int] = {}  # by a part's first cell
        self._tables_end = self._pages_bytes

    def begin(self) -> list[Work]:
        """Return what to launch on the stream of copies before any part."""
        page_tables = [x[: self._pages_bytes] for x in (self._tables, self._tables_on_host)]
        packed = [self._memory.copy_of(self._packed_on_host, self._packed)] if len(self._packed) else []
        return [*packed, partial(copy, *page_tables), self._results.status.zero_]

    def parts(self, layer: int) -> Iterator[Callable[[torch.Tensor], Works]]:
        """Yield the parts without which a layer cannot be read, if they were not yielded for a layer before. A part is
        a function of its scratch memory."""
        return (partial(self._works, part) for part in self._parts if part.layer == layer)

    def fetch_results(self) -> None:
        """Copy to the host what `num_wrong` looks at. Launch this last."""
        copy(self._on_host.memory, self._results.memory)

    def num_wrong(self) -> int:
        """Return how many cells did not decode to what was stored, once all is done."""
        if not self._is_coded.any():
            return 0
        found = digests_of(self._on_host.sums.numpy(), self._sizes[self._is_coded])
        status = np.concatenate([self._on_host.status[part.status] for part in self._parts])
        is_wrong = (status != 0) | (found != self._chunks["digest"][self._is_coded]).any(axis=1)
        return len(np.unique(np.nonzero(self._is_coded)[0][is_wrong]))

    # Parts

    def _works(self, part: _Part, scratch: torch.Tensor) -> Works:
        """Return the copies and launches that restore a part, and those that check it."""
        of, cells = part.cells, self._cells[part.cells]
        chunks, is_coded = self._chunks[of], self._is_coded[of]
        (begins, sizes, places), code_start = _runs(chunks.reshape(-1))
        code_start = code_start.reshape(chunks.shape)
        out_start = (np.cumsum(self._frames_bytes[of]) - self._frames_bytes[of].reshape(-1)).reshape(chunks.shape)
        integers = np.where(is_coded, part.frames_at + out_start, code_start) + scratch.data_ptr()
        packed = cells["packed"] + self._packed.data_ptr()
        at = Addresses(integers, packed, cells["table"] * _PAGE_BYTES + self._tables.data_ptr())
        tables = [
            self._chunk_rows(of, code_start, out_start)[is_coded],
            np.stack([out_start, self._sizes[of]], axis=-1)[is_coded],
            self._restores.rows(cells, at),
        ]
        copy_tables, (table, sums, rows) = self._uploaded(of.start, tables)
        copies: list[Work] = [copy_tables, self._memory.copies_of(begins, sizes, scratch, places)]
        restore = self._restores.launch(cells, rows, self._slots)
        if not is_coded.any():
            return Works(copies, [restore])
        data, rest = scratch[: part.frames_at], scratch[part.frames_at :]
        out, status, most = rest[: part.frames_bytes], self._results.status[part.status], int(cells["num_tokens"].max())
        if self._is_fitted:
            own = rest[part.frames_bytes :][: int(chunks["num_tables"].sum()) * DECODING_TABLE_BYTES].view(torch.int32)
            decode = partial(fitted_decode_table, data, table, most, self._packed, own, out, status)
        else:
            decode = partial(ans_decode_table, data, table, most, out, status)
        check = partial(xxh3_sums_table, out, sums, self._results.sums[part.coded])
        return Works(copies, [restore], [decode], [check])

    def _chunk_rows(self, of: slice, code_start: np.ndarray, out_start: np.ndarray) -> np.ndarray:
        """Return what the decoder gets of chunks: the fields of an `AnsChunk` or a `FittedChunk`."""
        cells, chunks = self._cells[of], self._chunks[of]
        tokens = np.broadcast_to(cells["num_tokens"][:, np.newaxis], chunks.shape)
        begin, size = code_start + chunks["skipped"], chunks["size"] - chunks["skipped"]
        if not self._is_fitted:
            return np.stack([begin, size, self._num_frames[of], tokens, out_start], axis=-1)
        rows = chunks["num_rows"] // cells["num_layers"][:, np.newaxis] * PLANES
        num_tables = chunks["num_tables"]
        first_table = (np.cumsum(num_tables) - num_tables.reshape(-1)).reshape(chunks.shape)
        own = chunks["tables"], num_tables, first_table
        return np.stack([begin, size, rows, tokens, out_start, chunks["num_rows"], *own], axis=-1)

    def _uploaded(self, first_cell: int, tables: list[np.ndarray]) -> tuple[Work, list[torch.Tensor]]:
        """Put a part's int64 tables into pinned memory, at the same place each time. Return their copy to the device,
        and the tables there."""
        begin = end = self._tables_at.setdefault(first_cell, self._tables_end)
        made = []
        for table in tables:
            here = slice(end, end + table.nbytes)
            self._tables_on_host[here].view(torch.int64).numpy()[:] = table.reshape(-1)
            made.append(self._tables[here].view(torch.int64).view(table.shape))
            end = _rounded(here.stop, _POINTER_BYTES)
        self._tables_end = max(self._tables_end, end)
        all_of = slice(begin, end)
        return partial(copy, self._tables[all_of], self._tables_on_host[all_of]), made


class _Results:
    """What the kernels say of each cell: on the device, or pinned on the host if ``stream`` is None."""

    def __init__(self, device: Device, stream: Stream | None, num_cells: int, num_status: int) -> None:
        sizes = [num_cells * _SUM_BYTES, num_status * _STATUS_BYTES]
        self.memory = device.pinned(sum(sizes)) if stream is None else device.empty((sum(sizes),), stream)
        sums, status = self.memory[: sizes[0]], self.memory[sizes[0] :]
        self.sums, self.status = sums.view(torch.int64).view(num_cells, SUMS), status.view(torch.int32)


def _parts(layers: np.ndarray, needs: _Needs, scratch_bytes: int) -> Iterator[_Part]:
    """Cut cells into parts that fit into scratch memory with their frames. ``layers``: the first of each cell.

    A layer group that fits is not cut. The first part has one, each later one up to twice as many as the one before:
    few launches for a short prompt, whose first layers do not wait for the others.
    """
    code, frames, needed, coded = (  # before each cell
        np.concatenate([[0], np.cumsum(each)])
        for each in (needs.code, needs.frames, needs.code + needs.frames + needs.tables, needs.num_coded)
    )
    groups = np.append(np.flatnonzero(layers[1:] != layers[:-1]) + 1, len(layers))  # where layer groups end
    first, most_groups, num_status = 0, 1, 0
    while first < len(layers):
        group = int(np.searchsorted(groups, first, "right"))
        end = int(np.searchsorted(needed[1:], scratch_bytes + needed[first], "right"))  # of what fits
        whole = int(np.searchsorted(groups, end, "right"))  # groups that end there
        end = int(groups[min(whole - 1, group + most_groups - 1)]) if whole > group else min(end, int(groups[group]))
        begin, stop = first, max(end, first + 1)
        frames_at = _rounded(int(code[stop] - code[begin]), ALIGNMENT)
        if end == begin:
            num_bytes = frames_at + int((needed - code)[stop] - (needed - code)[begin])
            raise UnsupportedError(f"{num_bytes} bytes of a cell do not fit into {scratch_bytes} of a part")
        of_coded = slice(int(coded[begin]), int(coded[stop]))
        status = slice(num_status, num_status + of_coded.stop - of_coded.start)
        num_status = _rounded(status.stop * _STATUS_BYTES, _POINTER_BYTES) // _STATUS_BYTES
        frames_bytes = int(frames[stop] - frames[begin])
        yield _Part(int(layers[begin]), slice(begin, stop), of_coded, status, frames_at, frames_bytes)
        first, most_groups = stop, 2 * most_groups


def _runs(chunks: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """Return the fewest ranges that bring a part's code to scratch memory, and where each chunk's code then begins.

    Of a range: where it begins in shared memory, its bytes, and where it goes. A part's chunks lie together in a
    region; those that are held in memory lie together span by span.
    """
    order = np.argsort(chunks["start"], kind="stable")
    starts, sizes = chunks["start"][order], chunks["size"][order]
    rooms = _rounded(sizes, CODE_ALIGNMENT)
    places = np.cumsum(rooms) - rooms
    first = np.concatenate([[0], np.flatnonzero(starts[1:] != (starts + rooms)[:-1]) + 1])
    last = np.append(first[1:], len(chunks)) - 1
    ends, code_start = (starts + sizes)[last], np.empty_like(places)
    code_start[order] = places
    return (starts[first], ends - starts[first], places[first]), code_start


def _rounded(num_bytes: N, unit: int) -> N:
    """Return the next multiple of ``unit``, for a number or an array."""
    return -(-num_bytes // unit) * unit


MiB = 1 << 20
LANES = 2
MOST_SCRATCH_BYTES = 512 * MiB  # two layer groups of 32,768 tokens a lane, of a model like Llama-3.1-8B
LEAST_SCRATCH_BYTES = 64 * MiB
_FIRST_BYTES = 512 * MiB  # of the memory in which prompts are staged, pinned from the start: the first ones lie there
_FREE_SHARE = 8  # the scratch memory is at most that part of what is free at the start


_WorksOfPart = Callable[[torch.Tensor], Works]  # a part, as a function of its scratch memory


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
    """``free``: after the last use of ``scratch``. ``after``: what the stream awaits before it writes slots."""

    stream: Stream
    scratch: torch.Tensor
    free: Fence | None = None
    after: list[Fence] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Launched:
    """What of a batch's loads was launched. ``coded`` keeps memory that the device uses until ``done``."""

    coded: Mapping[Load, CodedLoad]
    done: Event
    is_complete: bool  # whether all loads were


@dataclass(frozen=True, eq=False)
class _Running:
    """A batch's loads, until SGLang has finished them. They keep memory that the device uses, as `_Launched` does."""

    loads: Sequence[Load]
    launching: Future[_Launched]  # done when nothing more will be launched


class GpuLoader(Loader):
    """Loads on streams of its own. ``begin`` and ``finish`` run on the scheduler's thread."""

    def __init__(self, pages: CudaPages, pools: EnginePools, scratch_bytes: int | None = None) -> None:
        """``scratch_bytes``: by default, what is free on the device decides. Raises UnsupportedError if the device has
        no room for them."""
        device = pages.device
        self.counter = GpuLayerCounter(len(pools.layers), device)
        self._pages, self._pools = pages, pools
        self._device = device
        self._copies = device.new_stream()
        scratch = self._allocate(scratch_bytes)
        self._lane_bytes = scratch.numel() // LANES // ALIGNMENT * ALIGNMENT
        begins = range(0, LANES * self._lane_bytes, self._lane_bytes)
        self._lanes = [_Lane(pages.new_stream(), scratch[begin:][: self._lane_bytes]) for begin in begins]
        self._turns = itertools.cycle(self._lanes)
        self._running: dict[int, _Running] = {}
        # Of the present data plane, and of former ones that loads read. Changed on the scheduler's thread alone.
        self._present: PinnedMemory | None = None
        self._memories: tuple[PinnedMemory, ...] = ()
        self._failures = 0  # batches of coded cells in a row
        self._closing, self._may_pin = threading.Event(), threading.Event()
        self._may_pin.set()
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
            f"device mode needs {sizes[-1] / MiB:.0f} MiB on the GPU besides the KV pool, where {free / MiB:.0f} are "
            "free: lower --mem-fraction-static"
        )

    def attach(self, memory: torch.Tensor, cache_bytes: int) -> None:
        if self._present is not None and self._present.whole is memory:
            return
        self._present = present = PinnedMemory(self._device, memory)
        self._memories += (present,)
        self._unpin_former()
        cache = memory.numel() - cache_bytes
        first, kept = present.pieces(0, min(_FIRST_BYTES, cache)), present.pieces(cache, memory.numel())
        self._pins.submit(self._pin_next, present, itertools.chain(first, kept))

    def pause(self) -> None:
        wait([running.launching for running in self._running.values()])
        if not self._may_pin.is_set():  # a paused engine makes no step between two updates
            return
        self._may_pin.clear()
        is_paused = threading.Event()
        self._pins.submit(self._pause_pins, is_paused)
        is_paused.wait()

    def _pause_pins(self, is_paused: threading.Event) -> None:
        is_paused.set()
        self._may_pin.wait()

    def resume(self) -> None:
        self._may_pin.set()

    def detach(self) -> None:
        self._present = None
        self._unpin_former()

    def _unpin_former(self) -> None:
        """Let the thread that pins unpin the memory of former data planes which no load reads."""
        if self._memories == (self._present,):
            return
        read = [load.staged.memory for running in self._running.values() for load in running.loads]
        former = [x for x in self._memories if x is not self._present and not any(x.whole is each for each in read)]
        self._memories = tuple(x for x in self._memories if x not in former)
        for memory in former:
            memory.close()
            self._pins.submit(memory.unpin)

    def prepare(self, staged: StagedValues) -> None:
        if not staged.num_pages:
            return
        memory = self._memory_of(staged.memory)
        tensors = [*(staged.values if staged.code is None else [staged.code.packed]), *staged.sides.values()]
        begins = np.array([x.data_ptr() - memory.whole.data_ptr() for x in tensors])
        ends = begins + [x.nbytes for x in tensors]
        if staged.code is not None:
            starts, sizes = (staged.code.chunks[name].reshape(-1) for name in ("start", "size"))
            begins, ends = np.append(begins, starts), np.append(ends, starts + sizes)
        self._pins.submit(memory.pin_all, begins, ends)

    def _pin_next(self, memory: PinnedMemory, numbers: Iterator[int]) -> None:
        """Pin a piece, and wait as long again: meanwhile others use the driver. Then what was staged has its turn."""
        number = next(numbers, None)
        if number is None or memory.is_closed:
            return
        began_s = time.monotonic()
        memory.pin(number)
        self._closing.wait(time.monotonic() - began_s)
        with contextlib.suppress(RuntimeError):  # it was closed
            self._pins.submit(self._pin_next, memory, numbers)

    def begin(self, loads: Sequence[Load]) -> int:
        index: int = self.counter.update_producer()
        opened = []
        for load in loads:
            sides = [replace(side, slots=self._pages.open_load(side.slots)) for side in load.sides]
            opened.append(replace(load, slots=self._pages.open_load(load.slots), sides=sides))
        self._running[index] = _Running(opened, self._thread.submit(self._run, index, opened, self._pages.fences()))
        return index

    def finish(self, index: int) -> bool:
        running = self._running.pop(index, None)
        is_launched = bool(self.counter.finish(index))  # waits for the thread
        if running is None:
            return is_launched
        is_sound = self._end(running)
        self._unpin_former()
        return is_sound and is_launched

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
        self.resume()
        self.detach()
        self._pins.shutdown()

    def _end(self, running: _Running) -> bool:
        """Wait until the device has finished with a batch's loads, and release what they held. Return whether their
        cells were sound."""
        launched = running.launching.result()
        launched.done.synchronize()
        wrong = {load: coded.num_wrong() for load, coded in launched.coded.items()} if launched.is_complete else {}
        num_wrong = sum(wrong.values())
        if self.restores_code and any(load.staged.code is not None for load in running.loads):
            self._failures = 0 if launched.is_complete and not num_wrong else self._failures + 1
            if self._failures >= _MOST_FAILURES:
                self._restore_no_more()
        for load in running.loads:
            load.on_end(launched.is_complete and not wrong.get(load))
        if not launched.is_complete:
            metrics.MISSES.labels("load", "failed").inc()
        if num_wrong:
            metrics.MISSES.labels("load", "corrupt").inc()
            logger.error("kvfetch: %d cells did not decode on the GPU; the CPU will decode their segments", num_wrong)
        return not num_wrong

    def _restore_no_more(self) -> None:
        self.restores_code = False
        metrics.LEFT_TO_CPU.labels("restore").set(1)
        logger.error(
            "kvfetch: %d loads in a row failed on the GPU: from now on the CPU decodes and restores, until a store is "
            "attached again",
            self._failures,
        )
        self._failures = 0

    # On the loading thread

    def _run(self, index: int, loads: Sequence[Load], after: Sequence[Fence]) -> _Launched:
        """Launch loads layer by layer, on the thread that loads. A failure ends all of them: their requests are
        computed. The pool's slots are written ``after`` these fences."""
        coded: dict[Load, CodedLoad] = {}
        is_complete = False
        try:
            restored: dict[int, Fence] = {}  # by lane
            for lane in self._lanes:
                lane.after = [*after]
            parts_of = [self._twice_at_most(partial(self._open, load, coded)) for load in loads]
            sides = itertools.chain.from_iterable(map(self._side_parts, loads))
            for number, layer in enumerate(self._pools.layers):
                parts = () if layer is None else itertools.chain.from_iterable(parts(layer) for parts in parts_of)
                for part in itertools.chain(sides, parts):  # all side pages before the first layer
                    lane = next(self._turns)
                    restored[id(lane)] = self._twice_at_most(partial(self._launch, part, lane))
                self.counter.complete(index, number, tuple(restored.values()))
            self._join()
            with self._device.launching(self._copies) as launch:
                for each in coded.values():
                    launch(each.fetch_results)
            is_complete = True
        except Exception as error:
            logger.exception("kvfetch: loading failed; the CPU will decode these segments")
            self.counter.fail(index, error)
            self._join()  # what was launched may still run
        return _Launched(coded, self._device.mark(self._copies), is_complete)

    @staticmethod
    def _twice_at_most(launch: Callable[[], V]) -> V:
        """Launch something, and once more if that fails: what it loads is still staged, and SGLang aborts requests
        whose loads fail. Memory may be short for a moment, as while a forward pass has all of it."""
        try:
            return launch()
        except UnsupportedError:  # which will not change
            raise
        except Exception:
            logger.exception("kvfetch: a part of a load could not be launched; it is tried once more")
            return launch()

    def _launch(self, part: _WorksOfPart, lane: _Lane) -> Fence:
        """Launch a part. Return the fence after which its slots may be read. Launching it again, after a failure, uses
        the same memory for the same, so what of it was launched does no harm."""
        works = part(lane.scratch)
        if lane.free is not None:
            self._copies.wait_event(lane.free)
        with self._device.launching(self._copies) as launch:
            for work in works.copies:
                launch(work)
        lane.stream.wait_event(self._copies.record_event())
        with self._device.launching(lane.stream) as launch:
            try:
                for work in works.decodes:
                    launch(work)
                while lane.after:
                    lane.stream.wait_event(lane.after.pop())
                for work in works.restores:
                    launch(work)
                restored = lane.stream.record_event()
                for work in works.checks:
                    launch(work)
            finally:
                lane.free = lane.stream.record_event()
        return restored

    def _join(self) -> None:
        """Let the stream of copies wait for all lanes."""
        for lane in self._lanes:
            self._copies.wait_event(lane.stream.record_event())

    def _open(self, load: Load, opened: dict[Load, CodedLoad]) -> Callable[[int], Iterator[_WorksOfPart]]:
        """Return a function that yields the parts of a load that a layer needs beside those of layers before. What is
        coded is ``opened``."""
        memory, code = self._memory_of(load.staged.memory), load.staged.code
        if code is None:
            return partial(self._copy_values, load, memory)
        coded = CodedLoad(self._pages, self._device, self._copies, self._lane_bytes, code, memory, load.slots)
        opened[load] = coded
        with self._device.launching(self._copies) as launch:
            for work in coded.begin():
                launch(work)
        return coded.parts

    def _memory_of(self, whole: torch.Tensor) -> PinnedMemory:
        """Return a data plane's shared memory. That of one which has ended is not pinned any more."""
        for memory in self._memories:
            if memory.whole is whole:
                return memory
        former = PinnedMemory(self._device, whole)
        former.close()
        return former

    def _copy_values(self, load: Load, memory: PinnedMemory, layer: int) -> Iterator[_WorksOfPart]:
        for buffer, values in zip(self._pages.layer_buffers(layer), load.staged.values, strict=True):
            rows = values[layer].view(buffer.dtype)
            at_once = self._lane_bytes // rows[0].nbytes
            for begin in range(0, len(rows), at_once):
                some = slice(begin, begin + at_once)
                yield partial(_values_part, memory, rows[some], buffer, load.slots[some])

    def _side_parts(self, load: Load) -> Iterator[_WorksOfPart]:
        """Yield the parts that bring a prompt's side pages."""
        for side in load.sides:
            buffers, memory = self._pools.side_buffers[side.pool], self._memory_of(load.staged.memory)
            pages = [load.staged.sides[side.pool, page] for page in side.pages]
            begins = np.array([page.data_ptr() for page in pages], dtype=np.int64) - memory.whole.data_ptr()
            for part in buffers.parts(len(pages), self._lane_bytes):
                yield partial(_side_part, memory, begins, buffers, part, side.slots)


def _side_part(
    memory: PinnedMemory,
    begins: np.ndarray,
    buffers: SideBuffers,
    part: SidePart,
    slots: torch.Tensor,
    scratch: torch.Tensor,
) -> Works:
    """``begins``: where side pages are in shared memory. ``slots``: of all of these."""
    pages, num_bytes, size = part.pages, len(part.columns), buffers.page_size
    there = scratch[: len(pages) * num_bytes].view(len(pages), num_bytes)
    places = np.arange(len(pages), dtype=np.int64) * num_bytes
    sizes = np.full(len(pages), num_bytes, dtype=np.int64)
    bring = memory.copies_of(begins[pages.start : pages.stop] + part.columns.start, sizes, scratch, places)
    of_part = slots[pages.start * size : pages.stop * size]
    return Works([bring], [partial(buffers.scatter, of_part, there, part.buffers)])


def _values_part(
    memory: PinnedMemory, rows: torch.Tensor, buffer: torch.Tensor, slots: torch.Tensor, scratch: torch.Tensor
) -> Works:
    there = scratch[: rows.nbytes].view(rows.dtype).view(rows.shape)
    return Works([memory.copy_of(rows, there)], [partial(buffer.index_copy_, 0, slots, there)])
