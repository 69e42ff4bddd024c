"""Loads prompts of 32K tokens into a pool as device mode does on GPUs, and checks the values.

A prompt waits in shared memory, which the loader pins. Coded cells are decoded and restored on the device
(`coded_loads`); a prompt of values is copied layer by layer. The prompt repeats one span, as in `benchmarks.memory`.
Without SGLang, stand-ins for its pool and its counter of layers are used.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from benchmarks.gpu_check import passes
from benchmarks.gpu_check.quantise import make_profile
from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.timing import make_busy
from benchmarks.memory import GOAL_BYTES, PAGE_TOKENS, SPAN_TOKENS, Setup, make_pool, repeated_segments
from benchmarks.sampler import Sampler
from harness import stand_in_pool
from harness.coded_prompts import stage_coded
from sgl_kvfetch.codec import CellValues, KltQuantiser, Quantiser
from sgl_kvfetch.codec.container.reader import SegmentReader, cell_place
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.codec.cuda_streams import Device, Stream
from sgl_kvfetch.plane.staging import StagedValues
from sgl_kvfetch.types import TENSORS

if TYPE_CHECKING:
    from sgl_kvfetch.plugin.device.cuda_pages import CudaPages
    from sgl_kvfetch.plugin.device.gpu_loads import GpuLoader

NUM_TOKENS = 32768
MiB = 1 << 20
SCRATCH_MIB = 64, 256, 512
_READ_PAGES = 64
_ORDERS = 8
_ORDERED_TOKENS = 8192  # several parts with the least scratch memory
_LATE_SHARE = 0.2  # of the launches
_LATE_CYCLES = 2_000_000  # about a millisecond
_CHECKED_SPANS = 3
_ROUNDING = 2.0**-7  # of bfloat16, where the order of sums tips it


@dataclass(frozen=True)
class Model(Setup):
    """Like Llama-3.1-8B, for `klt` with a transform that changes nothing."""

    dim: int = 128

    def make_quantiser(self) -> Quantiser:
        return KltQuantiser(make_profile(self.dim, self.layers), step=1.0)


def run(record: Record) -> None:
    if stand_in_pool.install_if_missing():
        record.note("stand-ins for SGLang's pool and counter were used: sglang is not installed")
    torch.zeros(1, device="cuda")
    device = Device(torch.device("cuda", 0))
    forward = cast(Stream, torch.cuda.Stream(device.torch_device))  # type: ignore[no-untyped-call]
    make_pass = partial(make_busy, device=device.torch_device)
    model = Model("klt", "ans", layers=32)
    measure(record, model, NUM_TOKENS, device, forward, make_pass)
    for seed in range(_ORDERS):
        check_order(record, model, _ORDERED_TOKENS, LateDevice(device.torch_device, seed), forward, str(seed))


def measure(
    record: Record,
    model: Model,
    num_tokens: int,
    device: Device,
    forward: Stream,
    make_pass: Callable[[float], Callable[[], object]],
) -> None:
    """Record loads alone and beside passes: see `passes.measure`."""
    from sgl_kvfetch.plugin.device.cuda_pages import CudaPages

    pool = make_pool(model, num_tokens, str(device.torch_device))
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
            if scratch_mib * MiB + then_all > GOAL_BYTES and scratch_mib == SCRATCH_MIB[0]:
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
    from sgl_kvfetch.plugin.device.cuda_pages import CudaPages

    pages = CudaPages(make_pool(model, num_tokens, str(device.torch_device)), PAGE_TOKENS, device, forward)
    prompt, coded = staged_prompt(model, num_tokens, pages)
    with opened(pages, SCRATCH_MIB[0] * MiB) as loader:
        for _ in range(2):
            prompt.load(loader, coded)
            prompt.check(record, f"coded cells, streams held up in order {order}")


@contextmanager
def opened(pages: CudaPages, scratch_bytes: int) -> Iterator[GpuLoader]:
    from sgl_kvfetch.plugin.device.gpu_loads import GpuLoader

    loader = GpuLoader(pages, pages.device, scratch_bytes)
    try:
        yield loader
    finally:
        loader.close()


class Prompt:
    """What is loaded, and where."""

    def __init__(self, segments: list[CodedSegment], quantiser: Quantiser, pages: CudaPages) -> None:
        self._segments, self._pages = segments, pages
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
        from sgl_kvfetch.plugin.device.loads import Load

        device = self._pages.device
        for layer in range(self._pages.geometry.num_layers):
            for buffer in self._pages.layer_buffers(layer):
                buffer.zero_()
        device.mark(device.current_stream()).synchronize()
        started_s = time.monotonic()
        slots = self._slots[: staged.num_pages * PAGE_TOKENS]
        index = loader.begin([Load(staged, 0, slots, lambda is_sound: None)])
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
        return StagedValues(num_pages, num_pages, "landed", memory, CellValues(*views))

    def check(self, record: Record, what: str, num_spans: int | None = None) -> None:
        """Compare some spans with what the CPU makes of them. ``num_spans``: how many were loaded; None for all."""
        last = (num_spans or self._num_pages * PAGE_TOKENS // SPAN_TOKENS) - 1
        for span in sorted({last * i // (_CHECKED_SPANS - 1) for i in range(_CHECKED_SPANS)}):
            if wrong := self._wrong_values(span):
                record.fail(f"{what}: {wrong}")
                return

    def _wrong_values(self, span: int) -> str:
        slots = self._slots[span * SPAN_TOKENS :][:SPAN_TOKENS]
        for layers, heads, values in self._of_cpu(span):
            for index, layer in enumerate(layers):
                for tensor, buffer, x in zip(TENSORS, self._pages.layer_buffers(layer), values, strict=True):
                    found = buffer[slots, heads.start : heads.stop].float()
                    expected = x[:, index].to(found)
                    if not torch.allclose(found, expected, rtol=_ROUNDING, atol=1e-3):
                        most = float((found - expected).abs().max())
                        return f"{tensor} of layer {layer} differs by up to {most:g} in span {span}"
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
                    start, end = reader.cell_range(cell)
                    values = reader.dequantise_cell(cell, reader.decode_cell(cell, segment.data[start:end]))
                    yield manifest.grid.layers(cell.layer_group), reader.heads_of(cell), values
                return
            span -= manifest.num_spans


def wrong_reads(pages: CudaPages, num_pages: int) -> str:
    """Read the first pages as a write does. Return a message if they differ from the pool's."""
    slots = _slots(pages, num_pages)
    opened = pages.open_reads(slots)
    for index, tensor in enumerate(TENSORS):
        layers = range(pages.geometry.num_layers)
        there = torch.stack([pages.layer_buffers(layer)[index][slots] for layer in layers], dim=1)
        if not torch.equal(opened.read(tensor, range(num_pages)).flatten(0, 1), there.cpu()):
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
