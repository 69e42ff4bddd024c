"""SGLang's token-to-KV pool, seen as pages."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from sgl_kvfetch.codec import CellPlace, Device, Quantiser
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plane import consecutive_runs
from sgl_kvfetch.types import TENSORS, KVGeometry, TensorName, dtype_name

logger = logging.getLogger(__name__)


class PageRun(ABC):
    """A run of whole pages of a pool, which are read. They are counted from the run's first."""

    @abstractmethod
    def read(self, tensor: TensorName, pages: Sequence[int]) -> torch.Tensor:
        """Return a copy of all layers and heads of ``pages``: ``(pages, page_size, layers, heads, dim)``."""

    num_rows: Sequence[int] = ()  # integers of a token, by cell in storage order; none if it quantises nothing

    def quantise(
        self, first_page: int, pages: range, memory: torch.Tensor, offset: int
    ) -> Sequence[torch.Tensor] | None:
        """Quantise ``pages`` into shared memory, as `plane.Quantising` says. None if they are to be read as they are.
        ``first_page``: the run's position in the sequence."""
        return None


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
        """The same for `PageRun.quantise`."""

    @abstractmethod
    def open_reads(self, slots: torch.Tensor) -> PageRun:
        """Return the pages of some slots for reads, ordered after everything that the model was given to compute so
        far. Call this on the scheduler's thread when slots were handed over. ``slots``: one per token."""

    def wait_until_unused(self, timeout_s: float) -> bool:
        """Wait until no work that was launched uses the pool, for ``timeout_s`` at most. Return whether that is so.
        Call this after all sources were closed."""
        return True


class DevicePages(SlotPages):
    """The pages of a pool on the CPU. The model computes on the thread that hands pages over, so earlier computation
    is complete. On a GPU, reads and writes must be ordered with it; see `CudaPages`."""

    def write_layer(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copy ``k`` and ``v``, ``(tokens, heads, dim)``, into slots of one layer. ``slots``: one per token."""
        size = self.geometry.page_size
        assert slots.numel() % size == 0
        runs = list(consecutive_runs((slots[::size] // size).tolist()))
        for tensor, x in zip(TENSORS, (k, v), strict=True):
            buffer, rows = self._buffers[tensor][layer], x.view(self._raw_dtype)
            for run, positions in runs:
                tokens = slice(positions.start * size, positions.stop * size)
                buffer[run.start * size : run.stop * size] = rows[tokens]

    def open_reads(self, slots: torch.Tensor) -> PageRun:
        return _CpuRun(self._buffers, self._dtype, slots.view(-1, self.geometry.page_size))


class _CpuRun(PageRun):
    def __init__(
        self, buffers: Mapping[TensorName, Sequence[torch.Tensor]], dtype: torch.dtype, slots: torch.Tensor
    ) -> None:
        """``slots``: ``(pages, page_size)``."""
        self._buffers, self._dtype, self._slots = buffers, dtype, slots

    def read(self, tensor: TensorName, pages: Sequence[int]) -> torch.Tensor:
        slots = self._slots[list(pages)]
        return torch.stack([buffer[slots] for buffer in self._buffers[tensor]], dim=2).view(self._dtype)


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
        "kvfetch: device mode has run on one GPU so far, an H200, where a hit did not pay; "
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
    """Reads a run until it is closed, and never afterwards: the pages may then belong to another request."""

    def __init__(self, run: PageRun) -> None:
        self._run = run
        self._lock = threading.Lock()
        self.is_closed = False

    def read(self, tensor: TensorName, pages: Sequence[int]) -> torch.Tensor | None:
        """Return a copy of the pages, or None if the source is closed."""
        with self._lock:
            return None if self.is_closed else self._run.read(tensor, pages)

    @property
    def num_rows(self) -> Sequence[int]:
        return self._run.num_rows

    def quantise(
        self, first_page: int, pages: range, memory: torch.Tensor, offset: int
    ) -> Sequence[torch.Tensor] | None:
        """See `PageRun.quantise`. Also None if the source is closed."""
        with self._lock:
            return None if self.is_closed else self._run.quantise(first_page, pages, memory, offset)

    def close(self) -> None:
        with self._lock:
            self.is_closed = True
