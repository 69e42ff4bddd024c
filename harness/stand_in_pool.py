"""A stand-in for SGLang's token-to-KV pool, with which device mode's pages run where SGLang is not installed."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec

import torch

_MODULE = "sglang.srt.mem_cache.memory_pool"


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


class MLATokenToKVPool:
    """Is never made: it only has to be importable."""


def install_if_missing() -> bool:
    """Make the stand-in importable as SGLang's module, unless SGLang can be imported. Return whether this was done."""
    if importlib.util.find_spec("sglang") is not None:
        return False
    parts = _MODULE.split(".")
    for length in range(1, len(parts) + 1):
        name = ".".join(parts[:length])
        sys.modules[name] = module_from_spec(ModuleSpec(name, None, is_package=True))
    vars(sys.modules[_MODULE]).update(MHATokenToKVPool=MHATokenToKVPool, MLATokenToKVPool=MLATokenToKVPool)
    return True
