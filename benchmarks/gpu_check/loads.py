"""Loads prompts of 32K tokens into a pool as device mode does on GPUs, and checks the values.

A prompt waits in shared memory, which the loader pins. Coded cells are decoded and restored on the device
(`coded_loads`); a prompt of values is copied layer by layer. The prompt repeats one span, as in `prefixes`.
Without SGLang, stand-ins for its pool and its counter of layers are used.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from benchmarks.gpu_check import passes
from benchmarks.gpu_check.prefixes import PAGE_TOKENS, SPAN_TOKENS, Model, Sampler, repeated_segments
from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.timing import make_busy
from harness import stand_in_pool
from harness.coded_prompts import stage_coded
from sgl_kvfetch.codec import CellValues, Quantiser
from sgl_kvfetch.codec.container.reader import SegmentReader, cell_place
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.codec.cuda_streams import Device, Stream
from sgl_kvfetch.protocol.arena import StagedValues, pages_in
from sgl_kvfetch.types import TENSORS

if TYPE_CHECKING:
    from sgl_kvfetch.plugin.device.gpu_loads import GpuLoader
    from sgl_kvfetch.plugin.device.gpu_pages import CudaPages
    from sgl_kvfetch.plugin.device.pools import SideBuffers

NUM_TOKENS = 32768
MiB = 1 << 20
_GOAL_BYTES = 64 << 20  # beside the scratch memory
SCRATCH_MIB = 64, 256, 512
_READ_PAGES = 64
_ORDERS = 8
_ORDERED_TOKENS = 8192  # several parts with the least scratch memory
_LATE_SHARE = 0.2  # of the launches
_LATE_CYCLES = 2_000_000  # about a millisecond
_COPY_ROUNDS = 8
_CHECKED_SPANS = 3
_ROUNDING = 2.0**-7  # of bfloat16, where the order of sums tips it


@dataclass(frozen=True)
class SideSizes:
    """Windows like those of Gemma 3 4B, a state like that of Qwen3-Next, and an indexer's keys like DeepSeek V3.2's."""

    window_layers: int = 29
    window_tokens: int = 1024
    heads: int = 4
    dim: int = 256
    state_layers: int = 36
    state_values: int = 1 << 19  # of a layer, in float32
    key_layers: int = 61
    key_bytes: int = 132  # of a token

    def windows(self, device: torch.device) -> SideBuffers:
        """Return buffers with room for twice the window."""
        from sgl_kvfetch.plugin.device.pools import SideBuffers

        shape = 2 * self.window_tokens, self.heads, self.dim
        buffers = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2 * self.window_layers)]
        return SideBuffers(buffers, PAGE_TOKENS, torch.bfloat16)

    def states(self, device: torch.device) -> SideBuffers:
        """Return buffers of four states of linear attention, and of the convolutions before it."""
        from sgl_kvfetch.plugin.device.pools import SideBuffers

        parts = (self.state_values, torch.float32), (self.state_values // 16, torch.bfloat16)
        buffers = [
            torch.zeros((4, size), dtype=dtype, device=device)
            for size, dtype in parts
            for _ in range(self.state_layers)
        ]
        return SideBuffers(buffers, 1, torch.bfloat16, torch.bfloat16, torch.float32)

    def keys(self, device: torch.device) -> SideBuffers:
        """Return buffers with as many rows as there are pages, with room for twice the window."""
        from sgl_kvfetch.plugin.device.pools import SideBuffers

        shape = 2 * self.window_tokens // PAGE_TOKENS, PAGE_TOKENS * self.key_bytes
        buffers = [torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(self.key_layers)]
        return SideBuffers(buffers, PAGE_TOKENS, torch.bfloat16, rows_are_pages=True)


def run(record: Record) -> None:
    if stand_in_pool.install_if_missing():
        record.note("stand-ins for SGLang's pool and counter were used: sglang is not installed")
    torch.zeros(1, device="cuda")
    device = Device(torch.device("cuda", 0))
    forward = cast(Stream, torch.cuda.Stream(device.torch_device))  # type: ignore[no-untyped-call]
    make_pass = partial(make_busy, device=device.torch_device)
    klt, exact = Model(32), Model(32, coding="exact")
    measure(record, klt, NUM_TOKENS, device, forward, make_pass)
    measure(record, exact, NUM_TOKENS, device, forward, make_pass)
    measure_sides(record, device, forward, SideSizes())
    for seed in range(_ORDERS):
        late = LateDevice(device.torch_device, seed)
        check_order(record, (klt, exact)[seed % 2], _ORDERED_TOKENS, late, forward, str(seed))


def run_ranks(record: Record) -> None:
    stand_in_pool.install_if_missing()
    torch.zeros(1, device="cuda")
    device = Device(torch.device("cuda", 0))
    forward = cast(Stream, torch.cuda.Stream(device.torch_device))  # type: ignore[no-untyped-call]
    for coding in ("exact", "klt"):
        model = Model(6, coding=coding)
        check_agreed(record, model, _ORDERED_TOKENS, device, forward)


def measure(
    record: Record,
    model: Model,
    num_tokens: int,
    device: Device,
    forward: Stream,
    make_pass: Callable[[float], Callable[[], object]],
) -> None:
    """Record loads alone and beside passes: see `passes.measure`."""
    from sgl_kvfetch.plugin.device.gpu_pages import CudaPages

    pool = stand_in_pool.make_pool(model.geometry(), num_tokens, str(device.torch_device))
    _, before = _held_bytes()
    pages = CudaPages(pool, PAGE_TOKENS, device, forward)
    prompt, coded = staged_prompt(model, num_tokens, pages)
    for scratch_mib in SCRATCH_MIB:
        with opened(pages, scratch_mib * MiB) as loader:
            load = partial(prompt.load, loader, coded)
            load()  # allocates the first blocks, and pins the shared memory
            once = _held_bytes()[1] - before
            with Sampler(_held_bytes) as sampler:
                seconds, launched_s = load()
            then_torch, then_all = sampler.peaks
            record.row(
                "A load of coded cells",
                coding=model.coding,
                tokens=num_tokens,
                coded_mb=prompt.coded_bytes / 1e6,
                scratch_mib=scratch_mib,
                ms=1e3 * seconds,
                launched_ms=1e3 * launched_s,
                once_mb=once / 1e6,
                then_torch_mb=then_torch / 1e6,
                then_all_mb=then_all / 1e6,
            )
            prompt.check(record, f"coded cells, {scratch_mib} MiB of scratch memory")
            if scratch_mib * MiB + then_all > _GOAL_BYTES and scratch_mib == SCRATCH_MIB[0]:
                record.note(f"a load held {then_all / 1e6:.0f} MB beside {scratch_mib} MiB of scratch memory")
    with opened(pages, SCRATCH_MIB[-1] * MiB) as loader:  # as a server does that has the memory
        check = partial(prompt.check, record, "coded cells beside forward passes")
        passes.measure(record, device, forward, lambda: prompt.load(loader, coded)[0], check, make_pass)
        values = prompt.values()
        prompt.load(loader, values)
        seconds, _ = prompt.load(loader, values)
        num_bytes = sum(x.nbytes for x in values.values)
        record.row("A load of values", tokens=SPAN_TOKENS, ms=1e3 * seconds, gb_a_second=num_bytes / seconds / 1e9)
        prompt.check(record, "values", num_spans=1)
    if wrong := wrong_reads(pages, min(_READ_PAGES, num_tokens // PAGE_TOKENS)):
        record.fail(wrong)


def measure_sides(record: Record, device: Device, forward: Stream, sizes: SideSizes) -> None:
    """Load a window, a state and an indexer's keys beside a page of values, read them back as a write does, and compare
    the bytes."""
    from sgl_kvfetch.plugin.device.gpu_loads import GpuLoader
    from sgl_kvfetch.plugin.device.gpu_pages import CudaPages
    from sgl_kvfetch.plugin.device.pools import EnginePools, Load, SideSlots

    there = device.torch_device
    pool = stand_in_pool.make_pool(Model(layers=1).geometry(), 2 * PAGE_TOKENS, str(there))
    pages = CudaPages(pool, PAGE_TOKENS, device, forward)
    pools = {"swa": sizes.windows(there), "mamba": sizes.states(there), "indexer": sizes.keys(there)}
    last = torch.arange(sizes.window_tokens, 2 * sizes.window_tokens, device=there)
    slots = {"swa": last, "mamba": torch.tensor([2], device=there), "indexer": last}
    keys = [(name, page) for name, x in pools.items() for page in range(len(slots[name]) // x.page_size)]
    value_bytes = pages.geometry.page_bytes
    generator = torch.Generator().manual_seed(0)
    num_bytes = value_bytes + sum(pools[name].page_bytes for name, _ in keys)
    memory = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
    memory[:value_bytes].zero_()
    sides, begin = {}, value_bytes
    for name, page in keys:
        sides[name, page] = memory[begin : (begin := begin + pools[name].page_bytes)]
    k, v = memory[:value_bytes].view(pages.geometry.torch_dtype).view(2, 1, PAGE_TOKENS, *pool.k_buffer[0].shape[1:])
    staged = StagedValues(1, 1, memory, CellValues(k, v), sides=sides)
    wanted = [SideSlots(name, [page for pool, page in keys if pool == name], x) for name, x in slots.items()]
    loader = GpuLoader(pages, EnginePools(pool, [0], pools), SCRATCH_MIB[0] * MiB)
    loader.attach(memory, 0)
    try:
        for _ in range(2):  # the first one pins the memory
            started_s = time.monotonic()
            index = loader.begin([Load(staged, _slots(pages, 1), lambda is_sound: None, wanted)])
            if not loader.finish(index):
                raise RuntimeError("a load of side pages failed: see the log")
            load_s = time.monotonic() - started_s
    finally:
        loader.close()
    started_s = time.monotonic()
    reads = {name: pages.open_side_reads(pools[name], x) for name, x in slots.items()}
    found = {key: reads[key[0]](key[1]) for key in keys}
    read_s = time.monotonic() - started_s
    side_mb = (num_bytes - value_bytes) / 1e6
    record.row("A window, a state, an indexer's keys", mb=side_mb, load_ms=1e3 * load_s, read_ms=1e3 * read_s)
    for name in pools:
        if wrong := [
            page for pool, page in keys if pool == name and not torch.equal(found[pool, page], sides[pool, page])
        ]:
            record.fail(
                f"side pages: {len(wrong)} of the pool {name} are other bytes, of which the first is {wrong[0]}"
            )


def measure_copies(record: Record, device: Device, num_spans: int, num_bytes: int) -> None:
    """Record what copies of ranges of pinned memory take, all of them launched at once, and one by one. Every other
    range stays where it is."""
    stream = device.new_stream()
    source = torch.arange(2 * num_spans * num_bytes, dtype=torch.int32).to(torch.uint8)
    into = device.empty((num_spans * num_bytes,), stream)
    places = np.arange(num_spans, dtype=np.int64) * num_bytes
    sizes = np.full(num_spans, num_bytes)
    expected = source.view(num_spans, 2, num_bytes)[:, 1].reshape(-1)
    device.pin(source)
    for is_at_once in (True, False):
        copy = partial(device.copy_ranges, into, places, source, 2 * places + num_bytes, sizes, is_pinned=is_at_once)
        device.launch(stream, into.zero_)
        cpu_s, taken_s = [], []
        for _ in range(_COPY_ROUNDS):
            started_s, started_cpu_s = time.perf_counter(), time.thread_time()
            device.launch(stream, copy)
            cpu_s.append(time.thread_time() - started_cpu_s)
            device.mark(stream).synchronize()
            taken_s.append(time.perf_counter() - started_s)
        record.row(
            "Copies of a part from memory_cache",
            launched="at once" if is_at_once else "one by one",
            copies=num_spans,
            launch_cpu_us=1e6 * statistics.median(cpu_s),
            ms=1e3 * min(taken_s),
            gb_a_second=into.nbytes / min(taken_s) / 1e9,
        )
        if not torch.equal(into.cpu(), expected):
            record.fail(f"copies of {num_spans} ranges, {'at once' if is_at_once else 'one by one'}: other bytes")
    device.unpin(source)


def measure_pinning(record: Record, device: Device, num_bytes: int, num_launches: int) -> None:
    """Record what launches take, beside nothing and beside a thread that pins memory as a loader's does: a piece, and a
    pause as long."""
    from sgl_kvfetch.plugin.device.gpu_pages import PinnedMemory

    stream, is_over = device.new_stream(), threading.Event()
    memory = PinnedMemory(device, torch.zeros(num_bytes, dtype=torch.uint8))  # touched, as what was received is
    small, piece_s = device.empty((1024,), stream), list[float]()

    def pin() -> None:
        try:
            for number in memory.pieces(0, num_bytes):
                began_s = time.perf_counter()
                memory.pin(number)
                piece_s.append(time.perf_counter() - began_s)
                time.sleep(piece_s[-1])
        finally:
            is_over.set()

    def launches(go_on: Callable[[int], bool]) -> list[float]:
        found: list[float] = []
        while go_on(len(found)):
            began_s = time.perf_counter()
            device.launch(stream, small.zero_)
            found.append(time.perf_counter() - began_s)
            if len(found) % 100 == 0:
                device.mark(stream).synchronize()  # or the stream's queue would fill
        return found

    launches(lambda done: done < num_launches // 10)
    alone_s = launches(lambda done: done < num_launches)
    thread = threading.Thread(target=pin)
    thread.start()
    beside_s = launches(lambda done: not done or not is_over.is_set())
    thread.join()
    device.mark(stream).synchronize()
    memory.unpin()
    for beside, seconds in (("nothing", alone_s), ("pinning", beside_s)):
        record.row(
            "Launches while memory is pinned",
            beside=beside,
            launches=len(seconds),
            median_us=1e6 * statistics.median(seconds),
            longest_us=1e6 * max(seconds),
            longest_ms_of_a_piece=1e3 * max(piece_s) if beside == "pinning" else None,
        )


def staged_prompt(model: Model, num_tokens: int, pages: CudaPages) -> tuple[Prompt, StagedValues]:
    """Return a prompt that ``pages`` is ready for, and its coded cells in shared memory."""
    quantiser, segments = model.make_quantiser(), repeated_segments(model, num_tokens)
    manifest = segments[0].manifest
    pages.prepare(quantiser, [cell_place(manifest, cell) for cell in manifest.span_cells(0)])
    return Prompt(segments, quantiser, pages), stage_coded(segments, quantiser)


class LateDevice(Device):
    """Holds work up at random, so that whatever should wait for it, and does not, runs before it."""

    def __init__(self, device: torch.device, seed: int) -> None:
        super().__init__(device)
        self._random = random.Random(seed)

    @contextmanager
    def launching(self, stream: Stream) -> Iterator[Callable[[Callable[[], object]], object]]:
        def late(work: Callable[[], object]) -> object:
            if self._random.random() < _LATE_SHARE:
                torch.cuda._sleep(_LATE_CYCLES)  # type: ignore[no-untyped-call]
            return launch(work)

        with super().launching(stream) as launch:
            yield late


def check_order(record: Record, model: Model, num_tokens: int, device: Device, forward: Stream, order: str) -> None:
    """Check the values of two loads, of which the second takes the scratch memory of the first. ``order``: for the
    message, if they are wrong."""
    from sgl_kvfetch.plugin.device.gpu_pages import CudaPages

    pool = stand_in_pool.make_pool(model.geometry(), num_tokens, str(device.torch_device))
    pages = CudaPages(pool, PAGE_TOKENS, device, forward)
    prompt, coded = staged_prompt(model, num_tokens, pages)
    with opened(pages, SCRATCH_MIB[0] * MiB) as loader:
        for _ in range(2):
            prompt.load(loader, coded)
            prompt.check(record, f"coded cells, streams held up in order {order}")


def check_agreed(record: Record, model: Model, num_tokens: int, device: Device, forward: Stream) -> None:
    """Load less of a prompt than was staged, as ranks do of which another one has fewer pages, and requests that share
    its beginning. Every other slot of the pool must stay as it was."""
    from sgl_kvfetch.plugin.device.gpu_pages import CudaPages

    pool = stand_in_pool.make_pool(model.geometry(), num_tokens, str(device.torch_device))
    pages = CudaPages(pool, PAGE_TOKENS, device, forward)
    prompt, coded = staged_prompt(model, num_tokens, pages)
    num_pages = coded.num_pages
    with opened(pages, SCRATCH_MIB[0] * MiB) as loader:
        for agreed in (range(num_pages), range(1), range(num_pages - 1), range(1, num_pages // 2 + 1)):
            prompt.load(loader, coded.of_pages(agreed, PAGE_TOKENS))
            wrong = prompt.wrong_beside(agreed)
            record.row(
                "Loads of some pages", coding=model.coding, pages=str(agreed), found=wrong or "these, and no other"
            )
            if wrong:
                record.fail(f"{model.coding}, pages {agreed} of {num_pages}: {wrong}")


@contextmanager
def opened(pages: CudaPages, scratch_bytes: int) -> Iterator[GpuLoader]:
    from sgl_kvfetch.plugin.device.gpu_loads import GpuLoader
    from sgl_kvfetch.plugin.device.pools import EnginePools

    loader = GpuLoader(pages, EnginePools(None, range(pages.geometry.num_layers)), scratch_bytes)
    try:
        yield loader
    finally:
        loader.close()


class Prompt:
    """What is loaded, and where."""

    def __init__(self, segments: list[CodedSegment], quantiser: Quantiser, pages: CudaPages) -> None:
        self._segments, self._pages, self._quantiser = segments, pages, quantiser
        self._readers = [SegmentReader(segment.manifest, quantiser) for segment in segments]
        self._num_pages = sum(len(segment.manifest.page_hashes) for segment in segments)
        self._slots = _slots(pages, self._num_pages)
        self._expected: dict[int, list[tuple[range, range, CellValues]]] = {}  # by span

    @property
    def coded_bytes(self) -> int:
        return sum(len(segment.data) for segment in self._segments)

    def load(self, loader: GpuLoader, staged: StagedValues) -> tuple[float, float]:
        """Load a prompt into a pool of zeros, and wait. Return the seconds in all, and those until all was launched:
        SGLang's scheduler waits for that before a layer. Raises RuntimeError if it failed."""
        from sgl_kvfetch.plugin.device.pools import Load

        device = self._pages.device
        for layer in range(self._pages.geometry.num_layers):
            for buffer in self._pages.layer_buffers(layer):
                buffer.zero_()
        device.mark(device.current_stream()).synchronize()
        loader.attach(staged.memory, 0)
        started_s = time.monotonic()
        slots = self._slots[: staged.num_pages * PAGE_TOKENS]
        index = loader.begin([Load(staged, slots, lambda is_sound: None)])
        loader.counter.futures[index][-1].exception()  # without an order for streams: passes beside it are others'
        launched_s = time.monotonic()
        is_loaded = loader.finish(index)
        ended_s = time.monotonic()
        if not is_loaded:
            raise RuntimeError("a load failed: see the log")
        return ended_s - started_s, launched_s - started_s

    def values(self) -> StagedValues:
        """Return the values of the first span, as a prompt that the data plane has restored."""
        geometry = self._pages.geometry
        common = geometry.num_layers, SPAN_TOKENS, geometry.num_heads
        sides = [torch.zeros((*common, geometry.head_dim(t)), dtype=geometry.torch_dtype) for t in TENSORS]
        for layers, heads, values in self._of_cpu(0):
            for side, x in zip(sides, values, strict=True):
                side[layers.start : layers.stop, :, heads.start : heads.stop] = x.transpose(0, 1)
        memory = torch.cat([x.view(torch.uint8).flatten() for x in sides])
        parts = torch.split(memory, [x.nbytes for x in sides])
        views = [part.view(geometry.torch_dtype).view(x.shape) for part, x in zip(parts, sides, strict=True)]
        num_pages = SPAN_TOKENS // PAGE_TOKENS
        return StagedValues(num_pages, num_pages, memory, CellValues(*views))

    def check(self, record: Record, what: str, num_spans: int | None = None) -> None:
        """Compare some spans with what the CPU makes of them. ``num_spans``: how many were loaded; None for all."""
        last = (num_spans or self._num_pages * PAGE_TOKENS // SPAN_TOKENS) - 1
        for span in sorted({last * i // (_CHECKED_SPANS - 1) for i in range(_CHECKED_SPANS)}):
            if wrong := self._wrong_values(span, range(self._num_pages * PAGE_TOKENS)):
                record.fail(f"{what}: {wrong}")
                return

    def _wrong_values(self, span: int, loaded: range) -> str:
        """Say what is wrong of a span, of which those tokens count that are in ``loaded``, tokens of the prompt."""
        begin, end = max(loaded.start, span * SPAN_TOKENS), min(loaded.stop, (span + 1) * SPAN_TOKENS)
        slots = self._slots[begin - loaded.start : end - loaded.start]
        tokens = slice(begin - span * SPAN_TOKENS, end - span * SPAN_TOKENS)
        for layers, heads, values in self._of_cpu(span):
            for index, layer in enumerate(layers):
                for tensor, buffer, x in zip(TENSORS, self._pages.layer_buffers(layer), values, strict=True):
                    found = buffer[slots, heads.start : heads.stop].float()
                    expected = x[tokens, index].to(found)
                    if not self._are_alike(found, expected):
                        most = float((found - expected).abs().max())
                        return f"{tensor} of layer {layer} differs by up to {most:g} in span {span}"
        return ""

    def _are_alike(self, found: torch.Tensor, expected: torch.Tensor) -> bool:
        if self._quantiser.is_lossless:
            return torch.equal(found, expected)
        return torch.allclose(found, expected, rtol=_ROUNDING, atol=1e-3)

    def wrong_beside(self, agreed: range) -> str:
        """Say what is wrong in a pool of zeros, into which the pages ``agreed`` alone were loaded."""
        loaded = range(agreed.start * PAGE_TOKENS, agreed.stop * PAGE_TOKENS)
        slots = self._slots[: len(loaded)]
        for span in range(loaded.start // SPAN_TOKENS, -(-loaded.stop // SPAN_TOKENS)):
            if wrong := self._wrong_values(span, loaded):
                return wrong
        for layer in range(self._pages.geometry.num_layers):
            for buffer in self._pages.layer_buffers(layer):
                others = torch.ones(len(buffer), dtype=torch.bool, device=buffer.device)
                others[slots] = False
                if bool(buffer[others].any()):
                    return f"other slots of layer {layer} were written to"
        return ""

    def _of_cpu(self, span: int) -> list[tuple[range, range, CellValues]]:
        """Return the layers, heads and values of the cells of a span of the prompt, as the CPU decodes them."""
        if span not in self._expected:
            self._expected[span] = list(self._decoded(span))
        return self._expected[span]

    def _decoded(self, span: int) -> Iterator[tuple[range, range, CellValues]]:
        for segment, reader in zip(self._segments, self._readers, strict=True):
            manifest = segment.manifest
            if span < manifest.num_spans:
                for cell in manifest.span_cells(span):
                    quantised = reader.decode_cell(cell, reader.chunks_in(cell, [segment.data]))
                    values = reader.dequantise_cell(cell, quantised)
                    yield manifest.grid.layers(cell.layer_group), reader.heads_of(cell), values
                return
            span -= manifest.num_spans


def wrong_reads(pages: CudaPages, num_pages: int) -> str:
    """Read the first pages as a write does. Return a message if they differ from the pool's."""
    slots = _slots(pages, num_pages)
    memory = torch.empty(num_pages * pages.geometry.page_bytes, dtype=torch.uint8)
    pages.open_reads(slots).read_into(range(num_pages), memory, 0)
    for index, (tensor, found) in enumerate(zip(TENSORS, pages_in(memory, pages.geometry, num_pages), strict=True)):
        layers = range(pages.geometry.num_layers)
        there = torch.stack([pages.layer_buffers(layer)[index][slots] for layer in layers], dim=1)
        if not torch.equal(found.flatten(0, 1), there.cpu()):
            return f"{tensor} of pages that were read differs from the pool's"
    return ""


def _slots(pages: CudaPages, num_pages: int) -> torch.Tensor:
    """Return the slots of the pool's pages from 1 on."""
    return torch.arange(PAGE_TOKENS, (1 + num_pages) * PAGE_TOKENS, device=pages.device.torch_device)


def _held_bytes() -> tuple[int, int]:
    """Return the bytes held by torch's allocator, and on the whole device, with other processes."""
    if not torch.cuda.is_available():
        return 0, 0
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated(), total - free
