"""A page pool in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_kvfetch.protocol.arena import StridedPages
from sgl_kvfetch.types import TENSORS, KVGeometry, TensorName


class MemoryPool(StridedPages):
    """``values``: for each tensor, ``(pages, page_size, layers, heads, dim)``, filled with ``fill`` at first."""

    def __init__(self, geometry: KVGeometry, num_pages: int, fill: float) -> None:
        shape = num_pages, geometry.page_size, geometry.num_layers, geometry.num_heads
        self.values = {t: torch.full((*shape, geometry.head_dim(t)), fill).to(geometry.torch_dtype) for t in TENSORS}
        super().__init__(list(self.values.values()))

    def read(self, tensor: TensorName, pages: Sequence[int]) -> torch.Tensor:
        return self.values[tensor][list(pages)]
