"""Shared values that describe the shape of a KV cache.

Torch is imported only when a dtype is requested: a store uses geometries, and starts without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sgl_kvfetch.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

# Torch's names of dtypes, and bytes a value.
KV_DTYPES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}

TensorName = Literal["k", "v"]
TENSORS: tuple[TensorName, TensorName] = ("k", "v")

SideKey = tuple[str, int]  # a side pool, and one of some pages, counted from the first

MAX_LAYERS = 1024
MAX_HEADS = 128
MAX_HEAD_DIM = 1024
MAX_PAGE_TOKENS = 4096


def first_to_last(first: int, end: int) -> str:
    """Return how messages name some neighbouring layers or heads, ``[first, end)``: as ``3-5`` or ``3``."""
    return f"{first}-{end - 1}" if end - first > 1 else str(first)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the stored name of a KV dtype. Raises UnsupportedError if it is not supported."""
    name = str(dtype).removeprefix("torch.")
    if name not in KV_DTYPES:
        raise UnsupportedError(f"KV dtype {dtype} is not supported; supported are {', '.join(KV_DTYPES)}")
    return name


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a stored name."""
    import torch

    assert name in KV_DTYPES, name
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@dataclass(frozen=True, slots=True)
class CellGrid:
    """The division of a KV cache into cells of ``cell_layers`` layers by ``cell_heads`` heads. The last layer group may
    be smaller; heads divide evenly."""

    num_layers: int
    num_heads: int
    cell_layers: int
    cell_heads: int

    def __post_init__(self) -> None:
        assert self.num_heads % self.cell_heads == 0, self

    @property
    def num_layer_groups(self) -> int:
        return -(-self.num_layers // self.cell_layers)

    @property
    def num_head_blocks(self) -> int:
        return self.num_heads // self.cell_heads

    def layers(self, group: int) -> range:
        first = group * self.cell_layers
        return range(first, min(first + self.cell_layers, self.num_layers))

    def heads(self, block: int) -> range:
        return range(block * self.cell_heads, (block + 1) * self.cell_heads)

    def cells(self) -> list[tuple[int, int]]:
        """Return each cell's layer group and head block, in storage order."""
        return [(group, block) for group in range(self.num_layer_groups) for block in range(self.num_head_blocks)]


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Shape of one rank's KV cache. K and V may differ in head dimension only."""

    num_layers: int
    num_heads: int
    k_head_dim: int
    v_head_dim: int
    page_size: int  # tokens
    dtype: str  # a key of KV_DTYPES

    def __post_init__(self) -> None:
        for field, value, most in (
            ("num_layers", self.num_layers, MAX_LAYERS),
            ("num_heads", self.num_heads, MAX_HEADS),
            ("k_head_dim", self.k_head_dim, MAX_HEAD_DIM),
            ("v_head_dim", self.v_head_dim, MAX_HEAD_DIM),
            ("page_size", self.page_size, MAX_PAGE_TOKENS),
        ):
            if not 1 <= value <= most:
                raise UnsupportedError(f"{field} is {value}; supported are 1 to {most}")
        if self.dtype not in KV_DTYPES:
            raise UnsupportedError(f"dtype is {self.dtype!r}; supported are {', '.join(KV_DTYPES)}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch_dtype(self.dtype)

    def head_dim(self, tensor: TensorName) -> int:
        return self.k_head_dim if tensor == "k" else self.v_head_dim

    @property
    def token_bytes(self) -> int:
        """Raw bytes of one token: K and V, all layers."""
        width = self.num_heads * (self.k_head_dim + self.v_head_dim)
        return self.num_layers * width * KV_DTYPES[self.dtype]

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.page_size
