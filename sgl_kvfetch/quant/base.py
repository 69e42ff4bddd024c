"""What a quantiser is: KV values of one cell <-> the coded parts of that cell."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sgl_kvfetch.layout.frames import Layout
from sgl_kvfetch.layout.tiles import tile_layout
from sgl_kvfetch.quant.inverse import Inverse
from sgl_kvfetch.types import TENSORS, KVGeometry

# A part of a cell, as bytes or as integers: see `Part`.
Quantised = tuple[torch.Tensor, ...]

VALUE_LAYERS = 3  # layers of a cell whose values lie in tiles: one a colour plane


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a cell. Parts are coded, checksummed and decoded each on its own.

    ``layout``: the name of the layout that its integers, uint8, have in frames; a video codec may code them. None: the
    part is bytes, uint8 ``(n,)``, token after token, for a general-purpose codec. So the parts of a longer span are
    those of its pieces, joined along ``token_dim``.
    """

    name: str
    layout: str | None = None
    token_dim: int = 0


class CellValues(NamedTuple):
    """K and V, of a cell mostly: ``(tokens, layers, heads, dim)`` each."""

    k: torch.Tensor
    v: torch.Tensor

    def tokens(self, which: slice) -> CellValues:
        return CellValues(self.k[which], self.v[which])

    def cell(self, layers: range, heads: range) -> CellValues:
        """Return a view of some layers and heads, counted from the first that is here."""
        return CellValues(*(x[:, layers.start : layers.stop, heads.start : heads.stop] for x in self))


@dataclass(frozen=True, slots=True)
class CellPlace:
    """Where a cell lies: layers and heads of the model, tokens of the sequence."""

    layers: range
    heads: range
    tokens: range


class Quantiser(ABC):
    """Maps the KV values of a cell to 8-bit integers and back. Stateless; works on any device."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """Name and parameters: a part of the namespace, so equal identities restore each other's integers."""

    @abstractmethod
    def parts(self, dtype: torch.dtype) -> tuple[Part, ...]:
        """Return what a cell of values of ``dtype`` consists of, in storage order."""

    @abstractmethod
    def quantise(self, values: CellValues, place: CellPlace) -> Quantised:
        """Return the parts of a cell. Raises QuantiseError for values that the quantiser cannot represent."""

    @abstractmethod
    def dequantise(
        self, quantised: Quantised, dtype: torch.dtype, place: CellPlace, tokens: slice = slice(None)
    ) -> CellValues:
        """Return the values of a cell, or of a run of its tokens, up to rounding. ``place`` is the whole cell's."""

    @abstractmethod
    def inverse_of(self, place: CellPlace) -> Inverse:
        """Return what ``dequantise`` needs for these layers and heads, for kernels that do it elsewhere."""

    @property
    def cell_layers(self) -> int:
        """Layers of a cell; the last cell of a model may have fewer."""
        return VALUE_LAYERS

    def cell_heads(self, num_heads: int) -> int:
        """Return how many of a rank's ``num_heads`` heads a cell has: a divisor."""
        return num_heads

    def num_coefficients(self, layers: range, heads: range) -> int | None:
        """Return how many coefficients a token of this cell has; None where its integers are one a value."""
        return None

    def layouts(
        self, geometry: KVGeometry, cell_heads: int, most_coefficients: int | None, span_tokens: int, resolution: str
    ) -> dict[str, Layout]:
        """Return how integers lie best in frames, by layout name, in spans of up to ``span_tokens`` tokens."""
        return {t: tile_layout(cell_heads, geometry.head_dim(t), span_tokens, resolution) for t in TENSORS}


def join(parts: Sequence[Part], pieces: Sequence[Quantised]) -> Quantised:
    """Return the parts of a span from those of consecutive pieces of it."""
    return tuple(
        torch.cat(each, dim=part.token_dim) for part, each in zip(parts, zip(*pieces, strict=True), strict=True)
    )
