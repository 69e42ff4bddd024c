"""A page pool in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_kvfetch.codec.quant.base import CellValues
from sgl_kvfetch.plane.fetch.sink import PagePool, consecutive_runs
from sgl_kvfetch.types import TENSORS, KVGeometry, TensorName


class MemoryPool(PagePool):
    """``values``: for each tensor, ``(pages, page_size, layers, heads, dim)``, filled with ``fill`` at first."""

    def __init__(self, geometry: KVGeometry, num_pages: int, fill: float) -> None:
        shape = num_pages, geometry.page_size, geometry.num_layers, geometry.num_heads
        self.values = {t: torch.full((*shape, geometry.head_dim(t)), fill).to(geometry.torch_dtype) for t in TENSORS}

    def write(self, layers: range, heads: range, pages: Sequence[int], values: CellValues) -> None:
        for whole, part in zip(self.values.values(), values, strict=True):
            into = whole[:, :, layers.start : layers.stop, heads.start : heads.stop]
            rows = part.reshape(len(pages), -1, *part.shape[1:])
            for run, positions in consecutive_runs(pages):
                into[run] = rows[positions]

    def read(self, tensor: TensorName, pages: Sequence[int]) -> torch.Tensor:
        return self.values[tensor][list(pages)]
