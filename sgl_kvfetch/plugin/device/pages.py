"""SGLang's token-to-KV pool, seen as pages."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from sgl_kvfetch.codec import CellPlace, CellValues, Device, Quantised, Quantiser
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plane import PagePool, consecutive_runs
from sgl_kvfetch.types import TENSORS, KVGeometry, TensorName, dtype_name

logger = logging.getLogger(__name__)


class SlotPages(ABC):
    """The pages of SGLang's pool, in place. A page's slots are consecutive. MLA as in `HostPages`. ``device``: the GPU
    that has the pool."""

    device: Device | None = None

    def __init__(self, pool: Any, page_size: int) -> None:
        """``pool``: an ``MHATokenToKVPool`` or ``MLATokenToKVPool``. Raises UnsupportedError for another kind of pool,
        for a quantised one, and for a layout other than ``nhd``."""
        self._buffers = _kv_buffers(pool)
        k, v = self._buffers["k"][0], self._buffers["v"][0]  # (slots, heads, dim)
        self._dtype = pool.dtype
        self._raw_dtype = k.dtype
        self.first_layer: int = pool.start_layer
        self.geometry = KVGeometry(
            num_layers=len(self._buffers["k"]),
            num_heads=k.shape[1],
            k_head_dim=k.shape[2],
            v_head_dim=v.shape[2],
            page_size=page_size,
            dtype=dtype_name(pool.dtype),
        )

    def prepare(self, quantiser: Quantiser, places: Iterable[CellPlace]) -> None:  # noqa: B027, for GPUs
        """Upload what restoring cells of these places needs, and compile the kernels, which takes seconds."""

    def prepare_writes(self, quantiser: Quantiser, places: Iterable[CellPlace]) -> None:  # noqa: B027, for GPUs
        """The same for `quantise`."""

    def open_reads(self, slots: torch.Tensor) -> Self:
        """Return these pages for reads of some slots, ordered after everything that the model was given to compute so
        far. Call this on the scheduler's thread when slots were handed over. ``slots``: one per token; `page_indices`
        tells how the returned object numbers their pages."""
        return self

    def wait_until_unused(self, timeout_s: float) -> bool:
        """Wait until no work that was launched uses the pool, for ``timeout_s`` at most. Return whether that is so.
        Call this after all sinks and sources were closed."""
        return True

    def close(self) -> None:  # noqa: B027, on a CPU there is nothing to release
        """Release threads. Call this after all sinks and sources were closed; `wait_until_unused` still works."""

    @abstractmethod
    def read(self, tensor: TensorName, pages: Sequence[int]) -> torch.Tensor:
        """Return a copy of all layers and heads of ``pages``: ``(pages, page_size, layers, heads, dim)``."""

    def quantise(self, first_page: int, pages: range) -> Sequence[Quantised] | None:
        """Return the parts of a run's pages for each cell, in storage order; None if they are to be read as they are.

        ``first_page``: the run's position in the sequence. ``pages``: counted from the run's first. This default
        quantises nothing: the data plane does.
        """
        return None

    def page_indices(self, slots: torch.Tensor) -> Sequence[int]:
        """Return the page numbers of a run of whole pages that was opened. ``slots``: one per token."""
        size = self.geometry.page_size
        assert slots.numel() % size == 0
        return (slots[::size] // size).tolist()

    def _as_pages(self, rows: torch.Tensor, num_pages: int) -> torch.Tensor:
        """View ``(tokens, layers, heads, dim)`` of raw values as ``(pages, page_size, layers, heads, dim)``."""
        return rows.view(self._dtype).view(num_pages, -1, *rows.shape[1:])


class DevicePages(SlotPages, PagePool):
    """Reads and writes pages on the CPU. The model computes on the thread that hands pages over, so earlier computation
    is complete. On a GPU, both must be ordered with the forward pass's stream; see `CudaPages`."""

    def write(self, layers: range, heads: range, pages: Sequence[int], values: CellValues) -> None:
        size = self.geometry.page_size
        for tensor, x in zip(TENSORS, values, strict=True):
            rows = x.view(self._raw_dtype)
            for run, positions in consecutive_runs(pages):
                slots = slice(run.start * size, run.stop * size)
                tokens = slice(positions.start * size, positions.stop * size)
                for index, layer in enumerate(layers):
                    self._buffers[tensor][layer][slots, heads.start : heads.stop] = rows[tokens, index]

    def write_layer(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copy ``k`` and ``v``, ``(tokens, heads, dim)``, into slots of one layer. ``slots``: one per token."""
        runs = list(consecutive_runs(self.page_indices(slots)))
        size = self.geometry.page_size
        for tensor, x in zip(TENSORS, (k, v), strict=True):
            buffer, rows = self._buffers[tensor][layer], x.view(self._raw_dtype)
            for run, positions in runs:
                tokens = slice(positions.start * size, positions.stop * size)
                buffer[run.start * size : run.stop * size] = rows[tokens]

    def read(self, tensor: TensorName, pages: Sequence[int]) -> torch.Tensor:
        slots = self._slots(pages)
        return self._as_pages(torch.stack([buffer[slots] for buffer in self._buffers[tensor]], dim=1), len(pages))

    def _slots(self, pages: Sequence[int]) -> torch.Tensor:
        size = self.geometry.page_size
        return (torch.tensor(pages, dtype=torch.int64).unsqueeze(1) * size + torch.arange(size)).flatten()


def open_gpu(pool: Any) -> tuple[Device, bool] | None:
    """Return a pool's GPU, and whether ``ans`` is decoded there; None if the pool is on the CPU.

    Raises UnsupportedError for a pool or device that is not supported.
    """
    device = torch.device(pool.device)
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        raise UnsupportedError(f"device mode does not support {device}: add --enable-hierarchical-cache")
    logger.warning(
        "kvfetch: device mode on a GPU has not been run by its authors yet, only tested without one; "
        "--enable-hierarchical-cache gives host mode"
    )
    from sgl_kvfetch.codec.bitstream import try_gpu_ans

    gpu = Device(_kv_buffers(pool)["k"][0].device)  # with its index
    decodes_ans, about = try_gpu_ans(gpu)
    logger.info("kvfetch: %s", about)
    return gpu, decodes_ans


def _kv_buffers(pool: Any) -> dict[TensorName, list[torch.Tensor]]:
    """Return the buffers of K and V, one a layer: ``(slots, heads, dim)``. Raises UnsupportedError."""
    # Subclasses are refused: they may keep more than K and V, or use another layout.
    if type(pool) is MLATokenToKVPool and not pool.use_dsa:
        rank = pool.kv_lora_rank
        return {"k": [x[..., rank:] for x in pool.kv_buffer], "v": [x[..., :rank] for x in pool.kv_buffer]}
    if type(pool) is not MHATokenToKVPool or pool.is_quantized_kv_cache:
        raise UnsupportedError(f"device mode does not support pools of the kind {type(pool).__name__}")
    if pool.kv_cache_layout != "nhd":
        raise UnsupportedError(f"device mode does not support the pool layout {pool.kv_cache_layout!r}")
    return {"k": list(pool.k_buffer), "v": list(pool.v_buffer)}


class GuardedSource:
    """Reads from a pool until it is closed, and never afterwards: the pages may then belong to another request."""

    def __init__(self, pool: SlotPages) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._closed = False

    def read(self, tensor: TensorName, pages: Sequence[int]) -> torch.Tensor | None:
        """Return a copy of the pages, or None if the source is closed."""
        with self._lock:
            return None if self._closed else self._pool.read(tensor, pages)

    def quantise(self, first_page: int, pages: range) -> Sequence[Quantised] | None:
        """See `SlotPages.quantise`. Also None if the source is closed."""
        with self._lock:
            return None if self._closed else self._pool.quantise(first_page, pages)

    def close(self) -> None:
        with self._lock:
            self._closed = True
