"""Consecutive pages on their way into a segment: their values, or what a GPU has quantised already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple, Self

import torch

from sgl_kvfetch.codec.container.manifest import Cell, Manifest
from sgl_kvfetch.codec.container.reader import cell_place
from sgl_kvfetch.codec.quant.base import CellValues, Quantised, Quantiser, join_parts


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

    def values(self, manifest: Manifest, cell: Cell, own: slice) -> CellValues:
        """Return a view of a cell's values, of the tokens ``own`` of these pages."""
        layers, heads = manifest.grid.layers(cell.layer_group), manifest.grid.heads(cell.head_block)
        return CellValues(*(x.flatten(0, 1)[own] for x in self)).cell(layers, heads)


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

    def quantised(self, quantiser: Quantiser, manifest: Manifest, cell: Cell, own: slice) -> Quantised:
        """Return the parts of a cell, of the tokens ``own`` of these pages."""
        first = self.pages.start * self.page_size
        parts = self.cells[manifest.cell_index(cell._replace(span=0))]
        return quantiser.some_tokens(parts, slice(first + own.start, first + own.stop))


Pages = RawPages | QuantisedPages


def quantised_cells(
    quantiser: Quantiser, manifest: Manifest, pieces: Sequence[Pages | int]
) -> Callable[[Cell], Quantised]:
    """Return a function that quantises one cell of a segment. ``pieces``: the segment's pages, in order; a number
    stands for so many pages whose cells are not asked for."""
    parts = quantiser.parts(manifest.geometry.torch_dtype)

    def pieces_of(cell: Cell) -> Iterator[tuple[Pages, slice]]:
        """Yield the pieces that have tokens of a cell, and which of the piece's tokens these are."""
        size = manifest.namespace.page_size
        first, end = (page * size for page in manifest.span_range(cell.span))
        begin = 0  # tokens are counted from the segment's first
        for piece in pieces:
            if isinstance(piece, int):
                begin += piece * size
                continue
            lo, hi = max(first, begin), min(end, begin + piece.num_tokens)
            if lo < hi:
                yield piece, slice(lo - begin, hi - begin)
            begin += piece.num_tokens

    def quantised(cell: Cell) -> Quantised:
        place, found = cell_place(manifest, cell), []
        begin = place.tokens.start
        # Neighbouring pieces of values are one to the quantiser.
        for is_raw, some in groupby(pieces_of(cell), lambda item: isinstance(item[0], RawPages)):
            if is_raw:
                values = [piece.values(manifest, cell, own) for piece, own in some if isinstance(piece, RawPages)]
                end = begin + sum(len(each.k) for each in values)
                found.append(quantiser.quantise_pieces(values, replace(place, tokens=range(begin, end))))
                begin = end
            else:
                for piece, own in some:
                    assert isinstance(piece, QuantisedPages)
                    found.append(piece.quantised(quantiser, manifest, cell, own))
                    begin += own.stop - own.start
        return found[0] if len(found) == 1 else join_parts(parts, found)

    return quantised
