"""A pool in a fake GPU's memory, and what it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from harness import stand_in_pool
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.rope import Rope
from sgl_kvfetch.plugin.device.gpu_pages import CudaPages
from sgl_kvfetch.plugin.device.pools import PageRun, SlotPages
from sgl_kvfetch.protocol.arena import pages_in
from sgl_kvfetch.types import TENSORS, KVGeometry, TensorName
from tests.codec.quant.profiles import make_profile
from tests.plugin.device.fake_streams import FakeDevice

GEOMETRY = KVGeometry(num_layers=4, num_heads=2, k_head_dim=48, v_head_dim=64, page_size=4, dtype="bfloat16")
WIDE = KVGeometry(num_layers=4, num_heads=4, k_head_dim=64, v_head_dim=64, page_size=16, dtype="bfloat16")
NUM_SLOTS = 512
NUM_PAGES = 8
PLACES = [30, 2, 7, 9, 21, 4, 11, 12]
SEEDS = range(8)
MARGIN = 64  # bytes around what is read


def make_pool(geometry: KVGeometry = GEOMETRY, device: str = "cpu") -> MHATokenToKVPool:
    pool: MHATokenToKVPool = stand_in_pool.make_pool(geometry, NUM_SLOTS, device)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.fill_(float("nan"))
    return pool


def make_pages(device: FakeDevice, geometry: KVGeometry = GEOMETRY, **sizes: Any) -> CudaPages:
    return CudaPages(make_pool(geometry), geometry.page_size, device, device.forward, **sizes)


def slots_of(pool_pages: list[int], page_size: int = 4) -> torch.Tensor:
    return torch.tensor([page * page_size + i for page in pool_pages for i in range(page_size)])


def memory(pages: SlotPages) -> dict[TensorName, list[torch.Tensor]]:
    """Return the pool's memory, as a forward pass sees it."""
    return pages._buffers


def stored(pages: SlotPages, tensor: TensorName, pool_pages: list[int]) -> torch.Tensor:
    """Return the present values in the pool's memory, ``(tokens, layers, heads, dim)``."""
    return torch.stack([buffer[slots_of(pool_pages)] for buffer in memory(pages)[tensor]], dim=1)


def read_pages(run: PageRun, num_pages: int, geometry: KVGeometry = GEOMETRY) -> list[torch.Tensor]:
    """Return K and V of a run's first pages, as a data plane finds them in shared memory. Nothing else is written."""
    shared = torch.full((MARGIN + num_pages * geometry.page_bytes + MARGIN,), 0xEE, dtype=torch.uint8)
    run.read_into(range(num_pages), shared, MARGIN)
    assert bool((shared[:MARGIN] == 0xEE).all())
    assert bool((shared[-MARGIN:] == 0xEE).all())
    return pages_in(shared[MARGIN:-MARGIN], geometry, num_pages)


def set_slots(pages: SlotPages, pool_pages: list[int], value: float) -> None:
    """Overwrite slots, as a forward pass may do."""
    for buffer in (*memory(pages)["k"], *memory(pages)["v"]):
        buffer[slots_of(pool_pages)] = value


def is_set(pages: SlotPages, pool_pages: list[int], value: float) -> bool:
    return all(bool((stored(pages, t, pool_pages) == value).all()) for t in TENSORS)


def always_and_without(test: Callable[[int, bool], bool]) -> tuple[bool, bool]:
    """Return whether ``test`` holds in all orders, with the tested rule and without it."""
    return all(test(seed, True) for seed in SEEDS), all(test(seed, False) for seed in SEEDS)


def make_klt() -> KltQuantiser:
    """Return the quantiser of a model with the cache ``WIDE``."""
    rope = Rope(inv_freq=tuple(10000.0 ** (-i / 32) for i in range(32)))
    return KltQuantiser(make_profile(num_layers=4, num_heads=4, head_dim=64, cell_heads=1, rope=rope), step=0.5)
