"""Measures the GPU memory that a fetch of 32K tokens needs besides its slots, and its time beside forward passes, and
checks the restored values. The prefix repeats one span, as in `benchmarks.memory`, which measures host memory. Without
SGLang, a stand-in for its pool is used."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from benchmarks.gpu_check import passes
from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.timing import make_busy
from benchmarks.memory import GOAL_BYTES, MAX_SEGMENT_TOKENS, PAGE_TOKENS, Setup, repeated_segments
from benchmarks.sampler import Sampler
from harness import stand_in_pool
from harness.fetching import fetch_pages
from sgl_kvfetch.codec.bitstream.base import Decoders
from sgl_kvfetch.codec.bitstream.nvdec import MAX_SURFACE_BYTES, open_nvdec
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.codec.cuda_streams import Device, Stream
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.plane.adapt.pool import DecodePool
from sgl_kvfetch.plane.fetch.fetcher import Fetcher
from sgl_kvfetch.plane.fetch.plan import PageSource
from sgl_kvfetch.plane.fetch.sink import GuardedSink
from sgl_kvfetch.types import TENSORS

if TYPE_CHECKING:
    from sgl_kvfetch.plugin.device.cuda_pages import CudaPages

NUM_TOKENS = 32768
_SESSIONS = 8
_TIMEOUT_S = 60.0
_READ_PAGES = 64


def run(record: Record) -> None:
    if stand_in_pool.install_if_missing():
        record.note("a stand-in for SGLang's pool was used: sglang is not installed")
    torch.zeros(1, device="cuda")
    device = Device(torch.device("cuda", 0))
    setup = Setup("uint8", "hevc", layers=6)
    segments = repeated_segments(setup, NUM_TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(store_segments(Path(folder), segments))
        for on_nvdec in (True, False):
            _measure(record, setup, segments, Path(folder), on_nvdec, device)
        forward = torch.cuda.Stream(device.torch_device)  # type: ignore[no-untyped-call]
        make_pass = partial(make_busy, device=device.torch_device)
        _measure_beside_passes(record, setup, segments, Path(folder), device, cast(Stream, forward), make_pass)


def _measure(
    record: Record,
    setup: Setup,
    segments: Sequence[CodedSegment],
    folder: Path,
    on_nvdec: bool,
    device: Device,
) -> None:
    from sgl_kvfetch.plugin.device.cuda_pages import DEVICE_BYTES, CudaPages

    pool = make_pool(setup, NUM_TOKENS, str(device.torch_device))
    _, before = _held_bytes()
    nvdec, about = open_nvdec(device) if on_nvdec else (None, "")
    if on_nvdec and (nvdec is None or "hevc" not in nvdec.codecs):
        record.note(f"memory with NVDEC was not measured: {about}")
        return
    decoded_on = "NVDEC" if on_nvdec else "the CPU"
    sessions = [{} if nvdec is None else nvdec.open_session() for _ in range(_SESSIONS)]
    pages = CudaPages(pool, PAGE_TOKENS, device, device.new_stream())
    # Warm up: compile kernels, create decoders, allocate the first blocks.
    asyncio.run(fetch(folder, setup, segments, pages, MAX_SEGMENT_TOKENS // PAGE_TOKENS, sessions))
    torch.cuda.synchronize()
    made_once = _held_bytes()[1] - before
    with Sampler(_held_bytes) as sampler:
        started_s = time.monotonic()
        num_pages, failures = asyncio.run(fetch(folder, setup, segments, pages, NUM_TOKENS // PAGE_TOKENS, sessions))
        torch.cuda.synchronize()
        seconds = time.monotonic() - started_s
    then_torch, then_all = sampler.peaks
    record.row(
        "Memory on the GPU for a fetch",
        decoded_on=decoded_on,
        tokens=num_pages * PAGE_TOKENS,
        seconds=seconds,
        fixed_buffers_mb=DEVICE_BYTES / 1e6,
        once_mb=made_once / 1e6,  # the fixed buffers, decoders, kernels and the allocator's blocks
        surfaces_counted_mb=0 if nvdec is None else nvdec.held_surface_bytes / 1e6,
        surfaces_bound_mb=0 if nvdec is None else MAX_SURFACE_BYTES / 1e6,
        then_torch_mb=then_torch / 1e6,
        then_all_mb=then_all / 1e6,
        samples=sampler.num_samples,
    )
    if num_pages * PAGE_TOKENS != NUM_TOKENS:
        record.fail(f"decoded on {decoded_on}: only {num_pages} pages restored: {'; '.join(map(str, failures))}")
    elif wrong := wrong_values(setup, segments[0], pages, NUM_TOKENS) or wrong_reads(pages, _READ_PAGES):
        record.fail(f"decoded on {decoded_on}: {wrong}")
    if (held := made_once + then_all) > GOAL_BYTES:
        record.note(f"decoded on {decoded_on}: {held / 1e6:.0f} MB in all; the goal is {GOAL_BYTES / 1e6:.0f}")


def _measure_beside_passes(
    record: Record,
    setup: Setup,
    segments: Sequence[CodedSegment],
    folder: Path,
    device: Device,
    forward: Stream,
    make_pass: Callable[[float], Callable[[], object]],
) -> None:
    """``forward``, ``make_pass``: as in `passes.measure`."""
    from sgl_kvfetch.plugin.device.cuda_pages import CudaPages

    nvdec, about = open_nvdec(device)
    if nvdec is None:
        record.note(f"a fetch beside forward passes was not measured: {about}")
        return
    sessions = [nvdec.open_session() for _ in range(_SESSIONS)]
    pool = make_pool(setup, NUM_TOKENS, str(device.torch_device))
    pages = CudaPages(pool, PAGE_TOKENS, device, forward)
    num_pages = NUM_TOKENS // PAGE_TOKENS

    def fetch_all() -> float:
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.zero_()
        started_s = time.monotonic()
        num_restored, failures = asyncio.run(fetch(folder, setup, segments, pages, num_pages, sessions))
        device.mark(device.current_stream()).synchronize()  # which waits for the restores
        if num_restored != num_pages:
            record.fail(f"beside forward passes: only {num_restored} pages: {'; '.join(map(str, failures))}")
        return time.monotonic() - started_s

    def check() -> None:
        if wrong := wrong_values(setup, segments[0], pages, NUM_TOKENS):
            record.fail(f"beside forward passes: {wrong}")

    fetch_all()  # creates decoders, and blocks of memory
    passes.measure(record, device, forward, fetch_all, check, make_pass)


def make_pool(setup: Setup, num_tokens: int, device: str) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    geometry = setup.geometry(setup.make_quantiser())
    return MHATokenToKVPool(
        num_tokens,
        PAGE_TOKENS,
        geometry.torch_dtype,
        geometry.num_heads,
        geometry.k_head_dim,
        geometry.num_layers,
        device,
        False,
        v_head_dim=geometry.v_head_dim,
    )


async def store_segments(folder: Path, segments: Sequence[CodedSegment]) -> None:
    store = LocalStore(folder)
    for segment in segments:
        await store.put(segment.data_name, segment.data)
    await store.close()


async def fetch(
    folder: Path,
    setup: Setup,
    segments: Sequence[CodedSegment],
    pages: CudaPages,
    num_pages: int,
    sessions: Sequence[Decoders],
) -> tuple[int, Sequence[Exception]]:
    """Fetch into the pool's pages from 1 on. Return the number of restored pages, and the failures."""
    opened = pages.open_round(_slots(pages, num_pages))
    store = LocalStore(folder)
    sources = []
    for segment in segments:
        reader = SegmentReader(segment.manifest, setup.make_quantiser())
        sources += [PageSource(reader, page) for page in range(len(segment.manifest.page_hashes))]
    with closing(DecodePool(sessions)) as pool:
        fetcher = Fetcher(
            store,
            pool,
            read_bytes=4 << 20,
            inflight_bytes=256 << 20,
            may_delete=False,
            decode_bytes=64 << 20,  # as in device mode
        )
        result = await fetch_pages(fetcher, sources[:num_pages], range(num_pages), GuardedSink(opened), _TIMEOUT_S)
    await store.close()
    opened.publish()
    return result.num_pages, result.failures


def wrong_values(setup: Setup, segment: CodedSegment, pages: CudaPages, num_tokens: int) -> str:
    """Compare all spans with the one that they repeat, dequantised on the CPU. Return a message if they differ."""
    reader = SegmentReader(segment.manifest, setup.make_quantiser())
    for cell in segment.manifest.cells():
        if cell.span:
            break
        start, end = reader.cell_range(cell)
        values = reader.dequantise_cell(cell, reader.decode_cell(cell, segment.data[start:end]))
        grid = segment.manifest.grid
        heads = grid.heads(cell.head_block)
        for tensor, x in zip(TENSORS, values, strict=True):
            for index, layer in enumerate(grid.layers(cell.layer_group)):
                rows = pages._buffers[tensor][layer][PAGE_TOKENS : PAGE_TOKENS + num_tokens, heads.start : heads.stop]
                expected = x[:, index].to(rows.device)
                if not bool((torch.unflatten(rows, 0, (-1, len(expected))) == expected).all()):
                    return f"{tensor} of layer {layer} differs from the CPU's values"
    return ""


def wrong_reads(pages: CudaPages, num_pages: int) -> str:
    """Read the first pages as a write does. Return a message if they differ from the pool's."""
    slots = _slots(pages, num_pages)
    opened = pages.open_reads(slots)
    for tensor in TENSORS:
        there = torch.stack([x[slots] for x in pages._buffers[tensor]], dim=1)
        if not torch.equal(opened.read(tensor, range(num_pages)).flatten(0, 1), there.cpu()):
            return f"{tensor} of pages that were read differs from the pool's"
    return ""


def _slots(pages: CudaPages, num_pages: int) -> torch.Tensor:
    """Return the slots of the pool's pages from 1 on."""
    return torch.arange(PAGE_TOKENS, (1 + num_pages) * PAGE_TOKENS, device=pages._buffers["k"][0].device)


def _held_bytes() -> tuple[int, int]:
    """Return the bytes held by torch's allocator, and on the whole device, with decoders and other processes."""
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated(), total - free
