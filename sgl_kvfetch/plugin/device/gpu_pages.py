"""SGLang's token-to-KV pool on a GPU: read back to the host for the store, and restored beside the forward pass.

The work runs on our own streams. Only events order them with SGLang's streams, so that no thread but our own waits on
the host. docs/kernels.md explains the design.

**Pages on their way to the store** are quantised there, if the profile can: of 2 bytes a value 0.7 cross the bus, and
no CPU multiplies. Others are gathered as they are. Either way one copy brings a part to shared memory, where the data
plane encodes it, and no thread copies a value.

**Shared memory is pinned piece by piece**, when a copy first needs it, or before. That of loads is as large as the KV
pool, so that one prompt of any length fits, but little of it is in use. Pinning all of it would take that memory from
the host, and a load that pins waits: 5 ms for a piece.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from sgl_kvfetch import metrics
from sgl_kvfetch.codec import CellPlace, CellValues, Device, Fence, Quantised, Quantiser, Stream, why_no_gpu
from sgl_kvfetch.codec.quant.base import TransformInverse
from sgl_kvfetch.codec.quant.klt import exact_bytes, scales_of
from sgl_kvfetch.codec.quant.rope import Rotations
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.log import LimitedLogger, brief
from sgl_kvfetch.plugin.device.pools import PageRun, ReadSidePage, SideBuffers, SlotPages, gather_slots, slots_in
from sgl_kvfetch.triton_kernels.klt_choice import choose_options
from sgl_kvfetch.triton_kernels.quantise_klt import NOT_FINITE, KltCells, KltInput
from sgl_kvfetch.triton_kernels.restore_exact import ExactShape, exact_shape, fault_on_gpu as fault_of_exact
from sgl_kvfetch.triton_kernels.restore_klt import EXACT, OPTIONS, KltModel, KltShape, klt_shape
from sgl_kvfetch.triton_kernels.runtime import uploaded
from sgl_kvfetch.types import TENSORS, TensorName

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)


PIECE_BYTES = 64 << 20


class PinnedMemory:
    """Any thread may pin, one piece at a time. ``whole``: the shared memory of one data plane. Copies of what is not
    pinned, or is unpinned already, wait for the device."""

    def __init__(self, device: Device, whole: torch.Tensor) -> None:
        self._device = device
        self.whole = whole
        self._pinned: dict[int, torch.Tensor] = {}  # pieces, by number
        self._is_refused = self.is_closed = False
        self._lock = threading.Lock()  # held while a piece is pinned, which takes milliseconds

    def copy_of(self, x: torch.Tensor, into: torch.Tensor) -> Callable[[], None]:
        """Pin ``x``, contiguous and in this memory. Return what launches its copy to ``into``, on the device. If it
        cannot be pinned, the copy waits for the device, and is slow."""
        begin = x.data_ptr() - self.whole.data_ptr()
        return self.copies_of(*_range(begin, x.nbytes), into.view(-1).view(torch.uint8), np.zeros(1, dtype=np.int64))

    def copies_of(
        self, begins: np.ndarray, sizes: np.ndarray, into: torch.Tensor, places: np.ndarray
    ) -> Callable[[], None]:
        """Do the same for ranges of this memory, int64 ``(ranges,)`` each, in one launch. ``into``: uint8; the ranges
        go to ``places``."""
        which, begins, sizes, is_pinned = self._pinned_parts(begins, sizes)
        places = places[which[0]] + which[1]
        return partial(self._device.copy_ranges, into, places, self.whole, begins, sizes, is_pinned=is_pinned)

    def copy_into(self, x: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        """The same for a copy to ``x`` of ``source``, which is on the device."""
        begin = x.data_ptr() - self.whole.data_ptr()
        (_, offsets), begins, sizes, is_pinned = self._pinned_parts(*_range(begin, x.nbytes))
        source = source.view(-1).view(torch.uint8)
        return partial(self._device.copy_ranges, self.whole, begins, source, offsets, sizes, is_pinned=is_pinned)

    def _pinned_parts(
        self, begins: np.ndarray, sizes: np.ndarray
    ) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray, np.ndarray, bool]:
        """Pin ranges, and cut them where pieces end: a copy must not reach from one pinned range into another. Return
        of which range each part is, and from which byte of it; where it begins, and its size; whether all are
        pinned."""
        assert (sizes > 0).all(), "an empty range"
        first, last = begins // PIECE_BYTES, (begins + sizes - 1) // PIECE_BYTES
        counts = last - first + 1
        which = np.repeat(np.arange(len(begins)), counts)
        numbers = first[which] + np.arange(len(which)) - (np.cumsum(counts) - counts)[which]
        is_pinned = all([self.pin(number) for number in dict.fromkeys(numbers.tolist())])
        starts = np.maximum(begins[which], numbers * PIECE_BYTES)
        ends = np.minimum((begins + sizes)[which], (numbers + 1) * PIECE_BYTES)
        return (which, starts - begins[which]), starts, ends - starts, is_pinned

    def pieces(self, begin: int, end: int) -> Sequence[int]:
        """Return the numbers of the pieces in which some bytes lie."""
        return range(begin // PIECE_BYTES, -(-end // PIECE_BYTES)) if begin < end else ()

    def pin_all(self, begins: np.ndarray, ends: np.ndarray) -> None:
        """Pin the pieces in which these ranges of bytes lie."""
        ranges = zip(begins.tolist(), ends.tolist(), strict=True)
        for number in sorted({number for begin, end in ranges for number in self.pieces(begin, end)}):
            self.pin(number)

    def pin(self, number: int) -> bool:
        """Pin a piece, unless it is pinned or the memory is not used any more. Return whether it is pinned."""
        if number in self._pinned:  # a load does not wait for another piece
            return True
        with self._lock:
            if self._is_refused or self.is_closed or number in self._pinned:
                return number in self._pinned
            piece = self.whole[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]
            try:
                self._device.pin(piece)
            except RuntimeError as error:
                self._is_refused = True
                logger.warning("kvfetch: shared memory cannot be pinned, so copies to the GPU are slow: %s", error)
            else:
                self._pinned[number] = piece
            return number in self._pinned

    def close(self) -> None:
        """Pin no more."""
        self.is_closed = True

    def unpin(self) -> None:
        """Unpin everything, and pin no more. Call this when no copy is under way."""
        self.close()
        with self._lock:
            while self._pinned:
                self._device.unpin(self._pinned.popitem()[1])


def copy(into: torch.Tensor, x: torch.Tensor) -> None:
    into.copy_(x, non_blocking=True)


def _range(begin: int, num_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    return np.array([begin], dtype=np.int64), np.array([num_bytes], dtype=np.int64)


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


class KltReads:
    """Quantises tokens of a pool's slots. Belongs to the thread that copies pages, once its trial is over."""

    def __init__(self, device: Device, stream: Stream, quantiser: Quantiser, cells: Iterable[PoolCell]) -> None:
        """``cells``: all those of the pool, in storage order. Raises UnsupportedError."""
        assert quantiser.profile is not None
        self._device, self._stream, self._quantiser = device, stream, quantiser
        self._profile = quantiser.profile
        self._places = list(cells)
        self._cells = self._on_device(KltInput(quantiser.forward(c.place), *c.buffers) for c in self._places)

    def _on_device(self, inputs: Iterable[KltInput]) -> KltCells:
        return KltCells(list(inputs), partial(self._device.upload, stream=self._stream))

    @property
    def num_rows(self) -> Sequence[int]:
        """The integers of a token, by cell."""
        found: Sequence[int] = self._cells.num_rows
        return found

    def quantise(
        self, slots: torch.Tensor, first_token: int, reader: SlotReader, memory: torch.Tensor, offset: int
    ) -> list[torch.Tensor] | None:
        """Quantise consecutive tokens of all cells into shared memory. Return each cell's exact tokens; None if a value
        is not finite. Waits for the device, once unless tokens are kept exact. See `process.Quantising`. ``slots``:
        int64, on the device. ``reader`` reads tokens that are kept exact."""
        host = memory[offset:][: self._cells.output_rows * len(slots)]
        with reader.pinned(memory) as pinned:
            rows = self._fetch(self._cells, slots, first_token, host, partial(pinned.copy_into, host))
        exponents = rows[: len(self._places)]
        if bool((exponents == NOT_FINITE).any()):
            return None
        is_exact = exponents == EXACT
        some = is_exact.any(dim=0).nonzero().squeeze(1)
        if not len(some):
            return [rows[0][:0]] * len(self._places)
        values = reader.read(self._chosen(slots, some))
        return [
            exact_bytes(values.cell(cell.layers, cell.heads), which[some])
            for cell, which in zip(self._places, is_exact, strict=True)
        ]

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
        dtype = cell.buffers[0][0].dtype
        values = CellValues(*((_TRIAL_FACTOR * x.float()).to(dtype) for x in quantiser.dequantise(steps, dtype, place)))
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


class SlotReader:
    """Copies slots of a pool to the host, into pinned memory, on a stream of its own. Thread-safe."""

    def __init__(
        self,
        device: Device,
        stream: Stream,
        pinned: torch.Tensor,
        buffers: Mapping[TensorName, Sequence[torch.Tensor]],
        dtype: torch.dtype,
    ) -> None:
        """``pinned``: where side pages come first, uint8. ``buffers``: of raw values, one a layer. ``dtype``: what
        these are."""
        self._device, self._stream, self._pinned = device, stream, pinned
        self._pinned_lock = threading.Lock()  # held while it is copied to and from
        self._buffers, self._dtype = buffers, dtype
        self._token_bytes = sum(x[0].nbytes for layers in buffers.values() for x in layers)
        self._memory: PinnedMemory | None = None  # that was last read into
        self._memory_lock = threading.Lock()  # held while it is copied to

    def after(self, fences: list[Fence]) -> None:
        """Let what is read from now on come after these points, and remove them from the list. Whoever reads calls
        this then, and not when pages are handed over: reads of other pages, handed over before, would wait, too."""
        while fences:
            self._stream.wait_event(fences.pop())

    @contextmanager
    def pinned(self, memory: torch.Tensor) -> Iterator[PinnedMemory]:
        """Lend the shared memory of a data plane, which is pinned as far as it is copied to. When it is returned, all
        copies must have ended. That of a former data plane is left."""
        with self._memory_lock:
            if self._memory is None or self._memory.whole is not memory:
                self._leave()
                self._memory = PinnedMemory(self._device, memory)
            yield self._memory

    def close(self) -> None:
        """Leave the shared memory, once nobody reads into it."""
        with self._memory_lock:
            self._leave()

    def _leave(self) -> None:
        if self._memory is not None:
            self._memory.unpin()
        self._memory = None

    def read_into(self, slots: torch.Tensor, memory: torch.Tensor, offset: int) -> None:
        """Copy some slots into shared memory, as `gather_slots` lays them out. Waits for the device. ``slots``: int64,
        on the device."""
        host = memory[offset:][: len(slots) * self._token_bytes]
        with self.pinned(memory) as pinned:
            self._bring(slots, partial(pinned.copy_into, host))

    def read(self, slots: torch.Tensor) -> CellValues:
        """Return K and V of some slots, ``(tokens, layers, heads, dim)`` each. Waits for the device. ``slots``: int64,
        on the device."""
        host = self._device.pinned(len(slots) * self._token_bytes)
        self._bring(slots, lambda gathered: partial(copy, host, gathered))
        k, v = slots_in(host, self._buffers, len(slots))
        return CellValues(k.view(self._dtype).transpose(0, 1), v.view(self._dtype).transpose(0, 1))

    def _bring(self, slots: torch.Tensor, copier: Callable[[torch.Tensor], Callable[[], None]]) -> None:
        """Gather slots, and copy them by what ``copier`` returns. Waits for the device."""
        gathered = self._device.empty((len(slots) * self._token_bytes,), self._stream)
        self._device.launch(self._stream, partial(gather_slots, self._buffers, slots, gathered))
        self._device.launch(self._stream, copier(gathered))
        self._device.mark(self._stream).synchronize()

    def read_side(self, buffers: SideBuffers, slots: torch.Tensor) -> torch.Tensor:
        """Return a copy of some pages of a side pool, uint8 ``(pages, bytes)``. Waits for the device. ``slots``: int64
        on the device, one page after another."""
        size = buffers.page_size
        out = torch.empty((len(slots) // size, buffers.page_bytes), dtype=torch.uint8)
        for part in buffers.parts(len(out), len(self._pinned)):
            pages, columns = part.pages, part.columns
            host = self._pinned[: len(pages) * len(columns)]
            with self._pinned_lock:
                of_part = slots[pages.start * size : pages.stop * size]
                self._device.launch(self._stream, partial(_bring_side, buffers, of_part, part.buffers, host))
                self._device.mark(self._stream).synchronize()
                out[pages.start : pages.stop, columns.start : columns.stop] = host.view(len(pages), -1)
        return out


def _bring_side(buffers: SideBuffers, slots: torch.Tensor, which: slice, host: torch.Tensor) -> None:
    copy(host, buffers.gather(slots, which).flatten())


class CudaRun(PageRun):
    """A run of pages on a GPU. ``klt`` quantises them there, if the GPU can. They are read after ``fences``."""

    def __init__(
        self, reader: SlotReader, slots: torch.Tensor, page_size: int, klt: KltReads | None, fences: list[Fence]
    ) -> None:
        self._reader, self._slots, self._page_size, self._klt, self._fences = reader, slots, page_size, klt, fences
        self.num_rows = () if klt is None else klt.num_rows

    def read_into(self, pages: Sequence[int], memory: torch.Tensor, offset: int) -> None:
        """Waits for the device. ``pages``: consecutive."""
        self._reader.after(self._fences)
        first, num_slots = pages[0] * self._page_size, len(pages) * self._page_size
        self._reader.read_into(self._slots[first : first + num_slots], memory, offset)

    def quantise(
        self, first_page: int, pages: range, memory: torch.Tensor, offset: int
    ) -> Sequence[torch.Tensor] | None:
        if self._klt is None:
            return None
        slots = self._slots[pages.start * self._page_size : pages.stop * self._page_size]
        first_token = (first_page + pages.start) * self._page_size
        self._reader.after(self._fences)
        try:
            return self._klt.quantise(slots, first_token, self._reader, memory, offset)
        except Exception as e:  # a compiler and a driver fail in many ways
            _limited.warning("quantise", f"pages are quantised on the CPU: {brief(e)}")
            return None


class SideRun:
    """Pages of a side pool on a GPU. As many as fit into the read buffer are brought together: a window has many, of a
    row in each of its layers. They are read in their order, after ``fences``."""

    def __init__(
        self, reader: SlotReader, buffers: SideBuffers, slots: torch.Tensor, most_bytes: int, fences: list[Fence]
    ) -> None:
        self._reader, self._buffers, self._slots, self._fences = reader, buffers, slots, fences
        self._at_once = max(1, most_bytes // buffers.page_bytes)
        self._pages, self._content = range(0), torch.empty(0, dtype=torch.uint8)  # that were brought last

    def read(self, page: int) -> torch.Tensor:
        """Return the bytes of a page, counted from the run's first. Waits for the device."""
        if page not in self._pages:
            self._reader.after(self._fences)
            size = self._buffers.page_size
            slots = self._slots[page * size : (page + self._at_once) * size]
            self._pages = range(page, page + len(slots) // size)
            self._content = self._reader.read_side(self._buffers, slots)
        return self._content[page - self._pages.start]


MiB = 1 << 20

READ_BUFFER_BYTES = 8 * MiB  # of pinned memory on the host, for side pages

_TABLE_BYTES = 64 * MiB  # of rotations that are kept, 512 KiB each for a span of 1024 tokens
_TABLE_SHARE = 16  # or one part in so many of what is free on the device at the start, if that is less
_POLL_S = 0.001  # events have no wait with a deadline


class CudaPages(SlotPages):
    """Pages of a pool of K and V on a GPU.

    The scheduler's thread opens a load, or reads, when it hands slots over, before work on them begins. Slots stay on
    the device: kernels take them from there when their turn comes, and no thread waits until SGLang has computed them.
    """

    device: Device
    exact_shape: ExactShape  # of cells of `exact`, once they are prepared

    def __init__(
        self,
        pool: Any,
        page_size: int,
        device: Device,
        forward_stream: Stream,
        *,
        read_buffer_bytes: int = READ_BUFFER_BYTES,
    ) -> None:
        """``forward_stream``: the stream of SGLang's model if the scheduler overlaps with it; otherwise the model runs
        on the scheduler's own stream. Raises UnsupportedError as `SlotPages` does."""
        super().__init__(pool, page_size)
        self.device = device
        self._free_bytes = device.free_bytes()  # before anything of ours
        self._forward_stream = forward_stream
        self._reads = device.new_stream()
        self._pool_streams = [self._reads]  # that use the pool
        self._read_buffer = device.pinned(read_buffer_bytes)
        self._reader = SlotReader(device, self._reads, self._read_buffer, self._buffers, self._dtype)
        self._uploads = device.new_stream()
        self._lock = threading.Lock()  # guards the inverses
        self._rotations: dict[tuple[Rotations, range], torch.Tensor] = {}  # of the first spans
        self._most_table_bytes = min(_TABLE_BYTES, self._free_bytes // _TABLE_SHARE)
        self._inverses: dict[tuple[Quantiser, range, range], TransformInverse] = {}
        self._outputs_of: dict[tuple[range, range], CellOutputs] = {}
        self._models: dict[tuple[range, range], tuple[Quantiser, KltModel]] = {}
        self._compiled: set[Hashable] = set()
        self.klt_options = OPTIONS[0]  # of restores
        self._klt_reads: KltReads | None = None
        self.quantiser: Quantiser | None = None  # that of the store, once it is known

    # Ordering, on the scheduler's thread

    def open_reads(self, slots: torch.Tensor) -> CudaRun:
        there = self._for_reads(slots)
        return CudaRun(self._reader, there, self.geometry.page_size, self._klt_reads, self.fences())

    def open_side_reads(self, buffers: SideBuffers, slots: torch.Tensor) -> ReadSidePage:
        there = self._for_reads(slots)
        return SideRun(self._reader, buffers, there, len(self._read_buffer), self.fences()).read

    def _for_reads(self, slots: torch.Tensor) -> torch.Tensor:
        there = slots.to(torch.int64)
        self.device.used_on(there, self._reads)
        return there

    def new_stream(self) -> Stream:
        """Return a stream for work on the pool beside the forward pass, such as a load."""
        self._pool_streams.append(self.device.new_stream())
        return self._pool_streams[-1]

    def open_load(self, slots: torch.Tensor) -> torch.Tensor:
        """Return ``slots``, int64 on the device. Call this on the scheduler's thread; nobody may use the result before
        `fences`, or forget it before the work with it is done."""
        return slots.to(torch.int64)

    def fences(self) -> list[Fence]:
        """Return the points after everything that the scheduler's thread and the model were given to compute so
        far. Call this on the scheduler's thread."""
        return [self.device.current_stream().record_event(), self._forward_stream.record_event()]

    def wait_until_unused(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        events = [self.device.mark(stream) for stream in self._pool_streams]
        while not all(event.query() for event in events):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_POLL_S)
        return True

    # Restoring

    def layer_buffers(self, layer: int) -> list[torch.Tensor]:
        """Return K's and V's buffer of a layer, ``(slots, heads, dim)`` of raw values."""
        return [self._buffers[tensor][layer] for tensor in TENSORS]

    def prepare(self, quantiser: Quantiser, places: Iterable[CellPlace]) -> None:
        """Do as `SlotPages.prepare` says. Cells of a kind that is new are restored once, and compared with the CPU.
        Raises UnsupportedError if they differ."""
        self.quantiser = quantiser
        if not quantiser.gpu_restores:
            return
        if quantiser.is_lossless:
            everything = range(self.geometry.num_layers), range(self.geometry.num_heads)
            self.exact_shape = exact_shape(*self.outputs(*everything), quantiser.cell_layers)
            self.device.launch(self._uploads, self._try_exact)
            self.device.mark(self._uploads).synchronize()
            return
        self._rotations, self._inverses = {}, {}  # those of another quantiser
        first, *others = places
        inverse, *_ = (self._inverse(quantiser, place) for place in (first, *others))
        if inverse.rotations is not None:
            x, num_tokens, num_slots = inverse.rotations, len(first.tokens), len(self._buffers["k"][0])
            num_spans = -(-num_slots // num_tokens)  # of the longest prompt
            num_spans = min(num_spans, self._most_table_bytes // self.rotations_of(x, range(num_tokens)).nbytes)
            spans = [range(each * num_tokens, (each + 1) * num_tokens) for each in range(num_spans)]
            self._rotations = {(x, span): self.rotations_of(x, span) for span in spans}
        model = self.klt_model(quantiser, first, range(len(first.layers)), range(len(first.heads)))
        kind = model.shape, model.dtype, model.num_coefficients
        if kind not in self._compiled:
            self.device.launch(self._uploads, partial(self._compile, *kind))
            self.device.mark(self._uploads).synchronize()
            self._compiled.add(kind)

    def _compile(self, shape: KltShape, dtype: torch.dtype, coefficients: int) -> None:
        if self.device.torch_device.type == "cuda":
            self.klt_options, about = choose_options(shape, dtype, coefficients, self.device.torch_device)
            logger.info("kvfetch: %s", about)

    def _try_exact(self) -> None:
        """Raises UnsupportedError if `exact` is not restored bit for bit."""
        where = self.device.torch_device
        if where.type == "cuda" and (fault := fault_of_exact(where, self.exact_shape)):
            raise UnsupportedError(f"restore_exact: {fault}")

    def _inverse(self, quantiser: Quantiser, place: CellPlace) -> TransformInverse:
        """Return the inverse of a cell's quantiser. Its tensors stay on the device, for later cells."""
        key = quantiser, place.layers, place.heads
        with self._lock:
            if key not in self._inverses:
                self._inverses[key] = self.device.upload(quantiser.inverse_of(place), self._uploads)
            return self._inverses[key]

    def klt_model(self, quantiser: Quantiser, place: CellPlace, layers: range, heads: range) -> KltModel:
        """Return what restores of a cell need, whatever it holds. ``layers``, ``heads``: as in `CodedCell`."""
        key = layers, heads
        of_quantiser, model = self._models.get(key, (None, None))
        if of_quantiser is not quantiser or model is None:
            model = self._make_model(quantiser, place, *self.outputs(layers, heads))
            self._models[key] = quantiser, model
        return model

    def _make_model(
        self, quantiser: Quantiser, place: CellPlace, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]
    ) -> KltModel:
        """``k`` and ``v``: each layer's buffer, reduced to the cell's heads."""
        inverse = self._inverse(quantiser, place)
        x, layers = inverse.rotations, quantiser.cell_layers
        shape = klt_shape(k[0], v[0], layers)
        if x is not None:
            of_k = {"interleaved": x.interleaved, "mixed": len(x.ropes) > 1}
            shape = klt_shape(k[0], v[0], layers, x.rotary_dim, **of_k)
        scales = self.device.upload(_steps(inverse.step), self._uploads)
        return KltModel(shape, inverse.matrix.contiguous(), inverse.mean, scales, k, v, inverse.turns)

    def rotations_of(self, rotations: Rotations, tokens: range) -> torch.Tensor:
        """Return ``rotations.make_table`` of a span, on the device. What is not kept is made there, and waited for."""
        if (found := self._rotations.get((rotations, tokens))) is not None:
            return found
        what, made = (tokens.start, len(tokens), self.device.torch_device), list[torch.Tensor]()
        self.device.launch(self._uploads, lambda: made.append(rotations.make_table(*what)))
        self.device.mark(self._uploads).synchronize()
        return made[0]

    def outputs(self, layers: range, heads: range) -> CellOutputs:
        """Return K's and V's buffers of some layers, reduced to some heads, both counted from the pool's first."""
        key = layers, heads
        if key not in self._outputs_of:
            of_layers, of_heads = (slice(x.start, x.stop) for x in key)
            k, v = ([x[:, of_heads].view(self._dtype) for x in self._buffers[t][of_layers]] for t in TENSORS)
            self._outputs_of[key] = k, v
        return self._outputs_of[key]

    # Writing to the store

    def prepare_writes(self, quantiser: Quantiser, places: Iterable[CellPlace]) -> None:
        self._reader.close()
        self._klt_reads = None
        if not quantiser.gpu_quantises:
            return
        cells: list[PoolCell] = []
        for place in places:
            first_head = cells[0].place.heads.start if cells else place.heads.start
            layers = range(place.layers.start - self.first_layer, place.layers.stop - self.first_layer)
            heads = range(place.heads.start - first_head, place.heads.stop - first_head)
            cells.append(PoolCell(place, layers, heads, self.outputs(layers, heads)))
        self._klt_reads, result = open_klt_reads(self.device, self._reads, quantiser, cells)
        logger.info("kvfetch: %s", result)
        metrics.LEFT_TO_CPU.labels("quantise").set(self._klt_reads is None and not why_no_gpu())

    def log_memory(self) -> None:
        logger.info(
            "kvfetch uses %.0f of %.0f MiB that were free on the GPU, which --mem-fraction-static does not count",
            *(num_bytes / MiB for num_bytes in (self._free_bytes - self.device.free_bytes(), self._free_bytes)),
        )

    def release(self) -> None:
        self._reader.close()
        self._klt_reads = None
        with self._lock:
            self._inverses.clear()
        self._rotations = {}
        self._models.clear()


def _steps(step: float) -> torch.Tensor:
    return scales_of(torch.arange(256, dtype=torch.uint8)) * step
