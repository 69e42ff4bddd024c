"""The stand-ins for SGLang's pool and its counter of loaded layers, beside the real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter

from harness import stand_in_pool


@pytest.mark.parametrize("v_head_dim", [None, 48])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_it_has_the_pools_buffers(dtype: torch.dtype, v_head_dim: int | None) -> None:
    arguments = (100, 16, dtype, 3, 64, 2, "cpu", False)
    ours: Any = stand_in_pool.MHATokenToKVPool(*arguments, v_head_dim=v_head_dim)
    theirs = MHATokenToKVPool(*arguments, v_head_dim=v_head_dim)
    for name in ("dtype", "start_layer", "kv_cache_layout", "is_quantized_kv_cache"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for x, y in zip((*ours.k_buffer, *ours.v_buffer), (*theirs.k_buffer, *theirs.v_buffer), strict=True):
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


@pytest.mark.parametrize("kind", [stand_in_pool.LayerWiseLoadCounter, LayerWiseLoadCounter])
def test_it_counts_layers_as_the_counter_does(kind: Any) -> None:
    counter = kind(2)
    first, second = counter.update_producer(), counter.update_producer()
    counter.set_consumer(second)
    assert (first, second, counter.consumer_index, counter.on_layer_ready) == (0, 1, 1, None)
    for future in counter.futures[first]:
        future.set_result(None)
    counter.futures[second][0].set_result(None)
    counter.fail(second, RuntimeError())
    assert counter.finish(first)
    assert not counter.finish(second)
    assert not counter.futures
    counter.reset()
    assert counter.update_producer() == 0
