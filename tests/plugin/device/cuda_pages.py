"""A pool in a fake GPU's memory, segments for it, and what it holds after a fetch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sgl_kvfetch.codec.container.manifest import Cell
from sgl_kvfetch.codec.container.reader import CellFrames, SegmentReader
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.codec.quant.base import Quantiser
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.codec.quant.rope import Rope
from sgl_kvfetch.plane.fetch.sink import GuardedSink
from sgl_kvfetch.plugin.device.cuda_pages import CudaPages
from sgl_kvfetch.plugin.device.pages import SlotPages
from sgl_kvfetch.types import TENSORS, KVGeometry, TensorName
from tests.codec.quant.profiles import make_profile, values_of
from tests.plugin.device.fake_streams import FakeDevice
from tests.segments import make_segment

GEOMETRY = KVGeometry(num_layers=4, num_heads=2, k_head_dim=48, v_head_dim=64, page_size=4, dtype="bfloat16")
# A span of 1024 tokens is three pictures or so.
WIDE = KVGeometry(num_layers=4, num_heads=4, k_head_dim=64, v_head_dim=64, page_size=16, dtype="bfloat16")
NUM_SLOTS = 512
NUM_PAGES = 8
PLACES = [30, 2, 7, 9, 21, 4, 11, 12]
SEEDS = range(8)

Segment = tuple[CodedSegment, dict[TensorName, torch.Tensor]]


def make_pool(geometry: KVGeometry = GEOMETRY, device: str = "cpu") -> MHATokenToKVPool:
    pool = MHATokenToKVPool(
        NUM_SLOTS,
        geometry.page_size,
        geometry.torch_dtype,
        geometry.num_heads,
        geometry.k_head_dim,
        geometry.num_layers,
        device,
        False,
        v_head_dim=geometry.v_head_dim,
    )
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.fill_(float("nan"))
    return pool


def make_pages(device: FakeDevice, geometry: KVGeometry = GEOMETRY, **sizes: Any) -> CudaPages:
    return CudaPages(make_pool(geometry), geometry.page_size, device, device.forward, **sizes)


def cells_of(segment: Segment, quantiser: Quantiser) -> Iterator[tuple[SegmentReader, Cell, memoryview]]:
    coded, _ = segment
    reader = SegmentReader(coded.manifest, quantiser)
    for cell in coded.manifest.cells():
        start, end = reader.cell_range(cell)
        yield reader, cell, memoryview(coded.data)[start:end]


def restore_all(decoded: list[CellFrames], opened: CudaPages) -> None:
    """Restore a segment's cells as a fetch does."""
    sink = GuardedSink(opened)
    launched = []
    for cell in decoded:
        first = cell.place.tokens.start // 4
        launched.append(opened.restore(cell, range(4), range(first, first + 4), sink.run))
    for each in launched:
        each.result(60)
    sink.close()


def unordered(pages: CudaPages, pool_pages: list[int]) -> CudaPages:
    """Open a round that no event orders."""
    return pages._open(slots_of(pool_pages))


def slots_of(pool_pages: list[int], page_size: int = 4) -> torch.Tensor:
    return torch.tensor([page * page_size + i for page in pool_pages for i in range(page_size)])


def memory(pages: SlotPages) -> dict[TensorName, list[torch.Tensor]]:
    """Return the pool's memory, as a forward pass sees it."""
    return pages._buffers


def stored(pages: SlotPages, tensor: TensorName, pool_pages: list[int]) -> torch.Tensor:
    """Return the present values in the pool's memory, ``(tokens, layers, heads, dim)``."""
    return torch.stack([buffer[slots_of(pool_pages)] for buffer in memory(pages)[tensor]], dim=1)


def holds(pages: SlotPages, segment: Segment, pool_pages: list[int]) -> bool:
    return all(torch.equal(stored(pages, t, pool_pages), segment[1][t]) for t in TENSORS)


def set_slots(pages: SlotPages, pool_pages: list[int], value: float) -> None:
    """Overwrite slots, as a forward pass may do."""
    for buffer in (*memory(pages)["k"], *memory(pages)["v"]):
        buffer[slots_of(pool_pages)] = value


def is_set(pages: SlotPages, pool_pages: list[int], value: float) -> bool:
    return all(bool((stored(pages, t, pool_pages) == value).all()) for t in TENSORS)


def always_and_without(test: Callable[[int, bool], bool]) -> tuple[bool, bool]:
    """Return whether ``test`` holds in all orders, with the tested rule and without it."""
    return all(test(seed, True) for seed in SEEDS), all(test(seed, False) for seed in SEEDS)


def make_wide(name: Any) -> tuple[Quantiser, Segment]:
    """Return the quantiser and a segment with one span of 1024 tokens."""
    if name != "klt":
        quantiser = make_quantiser(name)
        return quantiser, make_segment(WIDE, 64, quantiser=quantiser, span_pages=64, first_page=64)
    rope = Rope(inv_freq=tuple(10000.0 ** (-i / 32) for i in range(32)))
    profile = make_profile(num_layers=4, num_heads=4, head_dim=64, cell_heads=1, rope=rope)
    k, v = (x.to(torch.bfloat16) for x in values_of(profile, 1024, 1024))
    v[7::16] *= 1e6  # must be kept exact
    quantiser = KltQuantiser(profile, step=0.5)
    return quantiser, make_segment(WIDE, 64, quantiser=quantiser, span_pages=64, first_page=64, values={"k": k, "v": v})


def frames_bytes(cell: CellFrames) -> int:
    """Return the size of the frames that a kernel needs to restore all of a cell's K, or with klt the whole cell."""
    frames = [x for x, layout in zip(cell.parts, cell.layouts, strict=True) if layout is not None]
    return sum(x.nbytes for x in frames) // (1 if isinstance(cell.quantiser, KltQuantiser) else 2)
