"""SGLang's token-to-KV pool, seen as pages."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.fetch.sink import PagePool
from sgl_kvfetch.quant import CellValues
from sgl_kvfetch.types import TENSORS, KVGeometry, TensorName, dtype_name


class DevicePages(PagePool):
    """Reads and writes the pages of an ``MHATokenToKVPool`` in place. A page's slots follow one another.

    On the CPU, where the model computes on the thread that hands pages over, so that whatever was computed before is
    there. On a GPU reads and writes must be ordered with the forward pass's stream: `CudaPages`.
    """

    def __init__(self, pool: Any, page_size: int) -> None:
        """Raises UnsupportedError for a pool that holds more than K and V, or holds them elsewhere or otherwise."""
        # No subclass: one may keep more than K and V, or lay them out in another way.
        if type(pool) is not MHATokenToKVPool or pool.is_quantized_kv_cache:
            raise UnsupportedError(f"device mode does not support pools of the kind {type(pool).__name__}")
        if pool.kv_cache_layout != "nhd":
            raise UnsupportedError(f"device mode does not support the pool layout {pool.kv_cache_layout!r}")
        self._buffers: dict[TensorName, list[torch.Tensor]] = {"k": list(pool.k_buffer), "v": list(pool.v_buffer)}
        k, v = self._buffers["k"][0], self._buffers["v"][0]  # (slots, heads, dim)
        self._dtype = pool.dtype
        self._raw_dtype = k.dtype
        self._offsets = torch.arange(page_size)
        self.first_layer: int = pool.start_layer
        self.geometry = KVGeometry(
            num_layers=len(self._buffers["k"]),
            num_heads=k.shape[1],
            k_head_dim=k.shape[2],
            v_head_dim=v.shape[2],
            page_size=page_size,
            dtype=dtype_name(pool.dtype),
        )

    def fence(self) -> None:
        """On the scheduler's thread, when slots were handed over, and before anything is begun with them: whatever is
        read or restored from now on comes after all that the model was given to compute before."""

    def publish(self) -> None:
        """On the scheduler's thread, before slots go on to others: whatever is computed from now on comes after all
        that was restored before."""

    def write(self, layers: range, heads: range, pages: Sequence[int], values: CellValues) -> None:
        slots = self._slots(pages)
        for tensor, x in zip(TENSORS, values, strict=True):
            rows = x.view(self._raw_dtype)
            for index, layer in enumerate(layers):
                self._buffers[tensor][layer][slots, heads.start : heads.stop] = rows[:, index]

    def read(self, tensor: TensorName, pages: Sequence[int]) -> torch.Tensor:
        slots = self._slots(pages)
        return self._as_pages(torch.stack([buffer[slots] for buffer in self._buffers[tensor]], dim=1), len(pages))

    def page_indices(self, slots: torch.Tensor) -> list[int]:
        """Pages of a run of whole pages, given as every token's slot."""
        size = self.geometry.page_size
        assert slots.numel() % size == 0
        return (slots[::size] // size).tolist()

    def _as_pages(self, rows: torch.Tensor, num_pages: int) -> torch.Tensor:
        """``(tokens, layers, heads, dim)`` as stored -> ``(pages, page_size, layers, heads, dim)``."""
        return rows.view(self._dtype).view(num_pages, -1, *rows.shape[1:])

    def _slots(self, pages: Sequence[int]) -> torch.Tensor:
        return (torch.tensor(pages).unsqueeze(1) * self.geometry.page_size + self._offsets).flatten()


class GuardedSource:
    """Reads from a pool until it is closed: from then on the pages may be somebody else's."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._closed = False

    def read(self, tensor: TensorName, pages: Sequence[int]) -> torch.Tensor | None:
        """None if the source was closed before."""
        with self._lock:
            return None if self._closed else self._pool.read(tensor, pages)

    def close(self) -> None:
        with self._lock:
            self._closed = True
