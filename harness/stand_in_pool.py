"""Stand-ins for SGLang's token-to-KV pool and for its counter of loaded layers, with which device mode's pages and
loader run where SGLang is not installed."""

from __future__ import annotations

import importlib.util
import sys
from concurrent.futures import Future
from enum import StrEnum
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from typing import Any

import torch

from sgl_kvfetch.types import KVGeometry


class MHATokenToKVPool:
    """What device mode uses of the class in SGLang 0.5.23: the same arguments, and the same buffers, all zeros."""

    is_quantized_kv_cache = False
    kv_cache_layout = "nhd"
    start_layer = 0

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: str,
        enable_memory_saver: bool,
        v_head_dim: int | None = None,
    ) -> None:
        self.dtype, self.device = dtype, device
        stored = torch.uint8 if dtype.itemsize == 1 else dtype

        def buffers(dim: int) -> list[torch.Tensor]:
            shape = (size + page_size, head_num, dim)
            return [torch.zeros(shape, dtype=stored, device=device) for _ in range(layer_num)]

        self.k_buffer, self.v_buffer = buffers(head_dim), buffers(v_head_dim or head_dim)


def _importable(*names: str) -> tuple[type, ...]:
    """Return classes of which nothing is ever made: they only have to be importable."""
    return tuple(type(name, (), {}) for name in names)


PoolHitPolicy = StrEnum("PoolHitPolicy", ["ALL_PAGES", "TRAILING_PAGES"])
PoolName = StrEnum("PoolName", ["KV", "SWA", "MAMBA", "INDEXER", "DRAFT", "DRAFT_INDEXER", "DRAFT_SWA"])
ComponentType = StrEnum("ComponentType", ["FULL", "SWA", "MAMBA"])


class LayerWiseLoadCounter:
    """What the loader uses of the class in SGLang 0.5.23."""

    on_layer_ready = None

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.producer_index = self.consumer_index = -1
        self.futures: dict[int, list[Future[Any]]] = {}

    def update_producer(self) -> int:
        self.producer_index += 1
        self.futures[self.producer_index] = [Future() for _ in range(self.num_layers)]
        return self.producer_index

    def set_consumer(self, index: int) -> None:
        self.consumer_index = index

    def fail(self, index: int, error: BaseException) -> None:
        for future in self.futures.get(index, ()):
            if not future.done():
                future.set_exception(error)

    def finish(self, index: int) -> bool:
        """Wait for all layers of a batch. Return whether they are loaded."""
        return all([future.exception() is None for future in self.futures.pop(index, ())])

    def reset(self) -> None:
        self.producer_index = self.consumer_index = -1
        self.futures.clear()


_MODULES: dict[str, tuple[type, ...]] = {
    "sglang.srt.mem_cache.hicache_storage": (PoolHitPolicy, PoolName, *_importable("PoolTransfer")),
    "sglang.srt.mem_cache.memory_pool": (
        MHATokenToKVPool,
        *_importable("DSATokenToKVPool", "HybridLinearKVPool", "MiniMaxSparseKVPool", "MLATokenToKVPool"),
    ),
    "sglang.srt.mem_cache.pool_host.mha": _importable("MHATokenToKVPoolHost"),
    "sglang.srt.mem_cache.swa_memory_pool": _importable("SWAKVPool"),
    "sglang.srt.mem_cache.unified_cache.component_type": (ComponentType,),
    "sglang.srt.mem_cache.unified_cache.unified_cache_linker": (LayerWiseLoadCounter,),
}


def install() -> None:
    """Make the stand-ins importable as SGLang's classes. Nothing of SGLang can be imported afterwards, and nothing may
    have been before."""
    for module, classes in _MODULES.items():
        assert getattr(sys.modules.get(module), "__file__", None) is None, f"{module} is imported already"
        parts = module.split(".")
        for length in range(1, len(parts) + 1):
            name = ".".join(parts[:length])
            sys.modules.setdefault(name, module_from_spec(ModuleSpec(name, None, is_package=True)))
        vars(sys.modules[module]).update({each.__name__: each for each in classes})


def install_if_missing() -> bool:
    """Do that unless SGLang can be imported. Return whether it was done."""
    is_missing = importlib.util.find_spec("sglang") is None
    if is_missing:
        install()
    return is_missing


def make_pool(geometry: KVGeometry, num_tokens: int, device: str = "cpu") -> Any:
    """Return SGLang's pool of this shape, or its stand-in."""
    from sglang.srt.mem_cache import memory_pool

    shape = geometry.num_heads, geometry.k_head_dim, geometry.num_layers
    sizes = num_tokens, geometry.page_size, geometry.torch_dtype
    return memory_pool.MHATokenToKVPool(*sizes, *shape, device, False, v_head_dim=geometry.v_head_dim)
