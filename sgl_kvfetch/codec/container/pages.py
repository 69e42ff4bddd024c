"""Consecutive pages on their way into a segment: their values, or what a GPU has quantised already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple, Self

import torch

from sgl_kvfetch.codec.container.manifest import Cell, Manifest
from sgl_kvfetch.codec.container.reader import cell_place
from sgl_kvfetch.codec.quant.base import CellPlace, CellValues, Quantised, Quantiser, join_parts


class RawPages(NamedTuple):
    """The values of pages. ``k`` and ``v``: ``(pages, page_size, layers, heads, dim)``."""

    k: torch.Tensor
    v: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    @property
    def num_tokens(self) -> int:
        return self.k.shape[0] * self.k.shape[1]

    def some(self, pages: slice) -> Self:
        return type(self)(self.k[pages], self.v[pages])

    def quantised(
        self, quantiser: Quantiser, manifest: Manifest, cell: Cell, place: CellPlace, own: slice
    ) -> Quantised:
        values = CellValues(*(x.flatten(0, 1)[own] for x in self))
        layers, heads = manifest.grid.layers(cell.layer_group), manifest.grid.heads(cell.head_block)
        return quantiser.quantise(values.cell(layers, heads), place)


@dataclass(frozen=True, slots=True)
class QuantisedPages:
    """The parts of pages, for quantisers whose parts know their tokens (``Quantiser.some_tokens``).

    ``cells``: the parts of each cell of one span, in storage order. They may cover more pages than these. ``pages``:
    these pages, counted from the first one that ``cells`` cover. ``page_bytes``: a page's average share of the parts.
    """

    cells: Sequence[Quantised]
    pages: range
    page_size: int
    page_bytes: int

    @property
    def num_bytes(self) -> int:
        return len(self.pages) * self.page_bytes

    @property
    def num_tokens(self) -> int:
        return len(self.pages) * self.page_size

    def some(self, pages: slice) -> QuantisedPages:
        return replace(self, pages=self.pages[pages])

    def quantised(
        self, quantiser: Quantiser, manifest: Manifest, cell: Cell, place: CellPlace, own: slice
    ) -> Quantised:
        first = self.pages.start * self.page_size
        parts = self.cells[manifest.cell_index(cell._replace(span=0))]
        return quantiser.some_tokens(parts, slice(first + own.start, first + own.stop))


Pages = RawPages | QuantisedPages


def quantised_cells(quantiser: Quantiser, manifest: Manifest, pieces: Sequence[Pages]) -> Callable[[Cell], Quantised]:
    """Return a function that quantises one cell of a segment. ``pieces``: the segment's pages, in order. Neighbouring
    `RawPages` are copied into one."""
    joined: list[Pages] = []
    for kind, some in groupby(pieces, type):
        same = list(some)
        joined += [RawPages(*map(torch.cat, zip(*same, strict=True)))] if kind is RawPages and same[1:] else same
    parts = quantiser.parts(manifest.geometry.torch_dtype)

    def quantised(cell: Cell) -> Quantised:
        whole, size = cell_place(manifest, cell), manifest.namespace.page_size
        first, end = (page * size for page in manifest.span_range(cell.span))
        found, begin = [], 0  # tokens are counted from the segment's first
        for piece in joined:
            tokens = range(max(first, begin), min(end, begin + piece.num_tokens))
            if tokens:
                shift = whole.tokens.start - first
                place = replace(whole, tokens=range(tokens.start + shift, tokens.stop + shift))
                own = slice(tokens.start - begin, tokens.stop - begin)
                found.append(piece.quantised(quantiser, manifest, cell, place, own))
            begin += piece.num_tokens
        return found[0] if len(found) == 1 else join_parts(parts, found)

    return quantised
