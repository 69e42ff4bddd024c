"""SGLang's host pool, seen as pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.pool_host.common import ShmHostTensorAllocator

from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.protocol import SharedPool, StridedPages
from sgl_kvfetch.types import KVGeometry, dtype_name

_FP8_FLAGS = {"auto": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class HostPages(StridedPages):
    """Reads and writes the pages of a host pool in place, whatever its layout.

    MLA keeps one vector a token and layer (DeepSeek-V2, arXiv:2405.04434, section 2.1): a latent vector, which K and V
    are computed from, and the part of K that RoPE rotates. Here the latter is K and the former is V, of one head: so
    the rotated values are in one tensor and all others in the other, as in any model.
    """

    def __init__(self, pool: Any) -> None:
        """Raises UnsupportedError for an unknown layout or dtype."""
        if is_mla(pool):
            latent = pages_view(pool.kv_buffer, pool.layout, pool.page_size)
            k, v = latent[..., pool.kv_lora_rank :], latent[..., : pool.kv_lora_rank]
        else:
            k, v = (pages_view(x, pool.layout, pool.page_size) for x in (pool.k_buffer, pool.v_buffer))
        num_own = pool.target_layer_num  # the others are behind them
        own, packed = [x[:, :, :num_own] for x in (k, v)], [x[:, :, num_own:] for x in (k, v)]
        super().__init__(own)
        self._pool = pool
        self.packed = PackedLayers(packed, pool) if packed[0].shape[2] else None
        self.first_layer: int = pool.start_layer
        self.num_pages: int = k.shape[0]
        self.geometry = KVGeometry(
            num_layers=own[0].shape[2],
            num_heads=k.shape[3],
            k_head_dim=k.shape[4],
            v_head_dim=v.shape[4],
            page_size=pool.page_size,
            dtype=dtype_name(_value_dtype(pool.dtype)),
        )

    def shared(self) -> SharedPool | None:
        """Return the pool's memory, if other processes can map it (`hooks.share_host_pool`)."""
        allocator = getattr(self._pool, "allocator", None)
        if not isinstance(allocator, ShmHostTensorAllocator) or not allocator.fds:  # some devices do not ask it
            return None
        memories = [torch.frombuffer(memory, dtype=torch.uint8) for memory in allocator.mms]
        return SharedPool(list(zip(allocator.fds, memories, strict=True)), self.views)

    def page_indices(self, token_indices: torch.Tensor) -> list[int]:
        """Return the page numbers of a run of whole pages. ``token_indices``: one per token, as SGLang gives them."""
        size = self.geometry.page_size
        assert token_indices.numel() % size == 0
        return (token_indices[::size] // size).tolist()


class PackedLayers:
    """The layers behind the model's own in a host pool. SGLang keeps those there with which the model drafts tokens
    itself (MTP), each as a further layer of every page. They have the interface of SGLang's host pools that `SidePools`
    uses, so they are stored beside the model's layers, as they are."""

    layout = "layer_first"

    def __init__(self, views: Sequence[torch.Tensor], pool: Any) -> None:
        """``views``: K and V of these layers, ``(pages, page_size, layers, heads, dim)`` each."""
        self._views = [view.transpose(1, 2) for view in views]
        self.page_size: int = pool.page_size
        self.dtype: torch.dtype = pool.dtype

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.empty(sum(self._num_bytes), dtype=torch.uint8)

    def get_data_page(self, place: int, flat: bool = True) -> torch.Tensor:
        rows = (view[place // self.page_size] for view in self._views)
        return torch.cat([x.contiguous().flatten().view(torch.uint8) for x in rows])

    def set_from_flat_data_page(self, place: int, page: torch.Tensor) -> None:
        for view, x in zip(self._views, torch.split(page, self._num_bytes), strict=True):
            into = view[place // self.page_size]
            into.copy_(x.clone().view(into.dtype).view(into.shape))  # a copy is aligned for any dtype

    @property
    def _num_bytes(self) -> list[int]:
        return [view[0].nbytes for view in self._views]


def is_mla(pool: Any) -> bool:
    """Return whether a host pool keeps latent vectors instead of K and V."""
    return hasattr(pool, "kv_lora_rank")


def _value_dtype(pool_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a pool's values. SGLang keeps fp8 as bytes, and the host pool does not say which fp8 it is.

    Raises UnsupportedError for bytes that are not fp8.
    """
    if pool_dtype != torch.uint8:
        return pool_dtype
    from sglang.srt.runtime_context import get_model

    # As SGLang's configure_kv_cache_dtype resolves it; "auto" gives bytes only for a checkpoint with an fp8 KV cache.
    # On ROCm all three are another format.
    flag = get_model().kv_cache_dtype
    if flag not in _FP8_FLAGS or torch.version.hip is not None:
        raise UnsupportedError(f"a KV cache that SGLang keeps as bytes (--kv-cache-dtype {flag}) is not supported")
    return _FP8_FLAGS[flag]


def pages_view(buffer: torch.Tensor, layout: str, page_size: int) -> torch.Tensor:
    """View a host pool's buffer of K or V, in any of SGLang's layouts, as ``(pages, page_size, layers, heads, dim)``.
    Raises UnsupportedError for an unknown layout."""
    match layout:
        case "layer_first":  # (layers, tokens, heads, dim)
            return buffer.view(buffer.shape[0], -1, page_size, *buffer.shape[2:]).permute(1, 2, 0, 3, 4)
        case "page_first":  # (tokens, layers, heads, dim)
            return buffer.view(-1, page_size, *buffer.shape[1:])
        case "page_first_direct":  # (pages, layers, page_size, heads, dim)
            return buffer.permute(0, 2, 1, 3, 4)
        case "page_head":  # (pages, heads, page_size, layers, dim)
            return buffer.permute(0, 2, 3, 1, 4)
    raise UnsupportedError(
        f"--hicache-mem-layout {layout} is not supported; "
        "use one of layer_first, page_first, page_first_direct, page_head"
    )
