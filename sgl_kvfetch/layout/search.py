"""Find the layout that a model's own KV is smallest in: candidates, and measuring them.

KVFetcher, section 3.2, searches head and dim tilings within a token (3.2.2) and the order of tokens over frames
(3.2.1). To these come tilings that leave a few pixels empty, blocks of tokens within a tile
(``FrameLayout.token_rows``) and, as an experiment, channels sorted by their variance. The product of all is too large
to measure, so it is walked in rounds over one cell, each on from the best of the one before: how heads and dims are
tiled, then blocks of tokens, then how tokens are spread over frames. Only the best are measured on all cells.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import msgspec
import torch

from sgl_kvfetch.layout.choose import RESOLUTIONS, channel_layout, default_layout
from sgl_kvfetch.layout.frames import FrameLayout, InterFrame
from sgl_kvfetch.layout.tiling import Tiling, layout_of

# Blocks of tokens that are tried: squares, and what fits where a square does not. The encoder's units are 8 to 32 wide.
TOKEN_BLOCKS = (
    (1, 1), (4, 4), (8, 8), (16, 16), (24, 24), (32, 32), (32, 16), (16, 32), (32, 8), (8, 32), (1, 8), (1, 32)
)  # fmt: skip
_FIRST_BLOCKS = ((1, 1), (8, 8), (16, 16))
_MAX_PADDED_ROWS = 8
NUM_FINALISTS, NUM_SINGLE = 10, 2

CHANNEL_MAJOR = "channel-major"

Order = Literal["stored", "variance"]
Encode = Callable[[torch.Tensor], bytes]


@dataclass(frozen=True)
class Candidate:
    """``order``: channels as they are, or by falling variance within each head. Only the former can be stored: nothing
    in a manifest says how a reader would sort them back."""

    tiling: Tiling
    order: Order = "stored"

    def __str__(self) -> str:
        return f"{self.tiling}, by variance" if self.order == "variance" else str(self.tiling)


@dataclass(frozen=True)
class Measured:
    """What a candidate takes: on the sample, and on all cells if it got that far. Bits are bitstreams' alone, as the
    rest does not depend on the layout. ``name`` marks a candidate that is there for comparison."""

    candidate: Candidate
    layout: FrameLayout
    sample_bits: float
    bits: float | None = None
    name: str = ""


@dataclass(frozen=True)
class Found:
    """``finalists`` and ``others``, each with the smallest first."""

    finalists: list[Measured]
    others: list[Measured]

    @property
    def winner(self) -> Measured:
        """The smallest of those that can be stored."""
        return next(m for m in self.finalists if m.candidate.order == "stored")

    @property
    def gain(self) -> float:
        """What the winner saves of the size of the channel-major layout, as a part of it."""
        bits = next(m.bits for m in self.finalists if m.name == CHANNEL_MAJOR)
        assert bits is not None
        assert self.winner.bits is not None
        return 1 - self.winner.bits / bits


def factorisations(count: int) -> list[tuple[int, int]]:
    """All ``(rows, cols)`` with ``rows * cols == count``."""
    return [(rows, count // rows) for rows in range(1, count + 1) if count % rows == 0]


def dim_tilings(head_dim: int) -> list[tuple[int, int]]:
    """All factorisations, and a few rows that leave part of the last one empty."""
    padded = [(rows, -(-head_dim // rows)) for rows in range(1, min(_MAX_PADDED_ROWS, head_dim) + 1)]
    return list(
        dict.fromkeys(factorisations(head_dim) + [dims for dims in padded if -(-head_dim // dims[1]) == dims[0]])
    )


def tilings(num_heads: int, head_dim: int, span_tokens: int, resolution: str) -> list[Tiling]:
    """The first round: every head tiling with every dim tiling, for single tokens and small blocks.

    Without those whose tile, of a single token even, is larger than the resolution, unless all are.
    """
    width, height = RESOLUTIONS[resolution]
    blocks: list[tuple[tuple[int, int], InterFrame]] = [((1, 1), "sliced")]
    blocks += [(block, "sequential") for block in _FIRST_BLOCKS]
    fitting: list[Tiling] = []
    larger: list[Tiling] = []
    for heads, dims, (block, inter_frame) in product(factorisations(num_heads), dim_tilings(head_dim), blocks):
        tiling = _tiling(heads, dims, block, inter_frame)
        layout = layout_of(tiling, span_tokens, resolution)
        if _block(layout) == block:  # otherwise it is there with a smaller one
            (fitting if layout.tile_width <= width and layout.tile_height <= height else larger).append(tiling)
    return fitting or larger


def blocks(tiling: Tiling, span_tokens: int, resolution: str) -> list[Tiling]:
    """The second round: the tiling with every block of tokens that has room."""
    found = []
    for rows, cols in TOKEN_BLOCKS:
        other = msgspec.structs.replace(tiling, token_rows=rows, token_cols=cols)
        if _block(layout_of(other, span_tokens, resolution)) == (rows, cols):
            found.append(other)
    return found


def spreads(tiling: Tiling, span_tokens: int, resolution: str) -> list[Tiling]:
    """The third round: the tiling with both orders over frames and all group lengths that make a difference."""
    found = {layout_of(tiling, span_tokens, resolution): tiling}
    orders: tuple[InterFrame, ...] = ("sequential", "sliced")
    frame_tokens: int | None = None
    while frame_tokens != 1:
        for inter_frame in orders:
            spread = msgspec.structs.replace(tiling, inter_frame=inter_frame, frame_tokens=frame_tokens)
            layout = layout_of(spread, span_tokens, resolution)
            if _block(layout) == (tiling.token_rows, tiling.token_cols):
                found.setdefault(layout, spread)
        frame_tokens = max(1, (frame_tokens or span_tokens) // 2)
    return [spread for spread in found.values() if spread != tiling]


def references(num_heads: int, head_dim: int, span_tokens: int, resolution: str) -> dict[str, Tiling]:
    """What is used where nobody searched, by what the tables call it."""
    layouts = {
        "near-square": default_layout(num_heads, head_dim, span_tokens, resolution),
        CHANNEL_MAJOR: channel_layout(num_heads, head_dim, span_tokens, resolution),
    }
    return {
        name: _tiling(
            (layout.head_rows, layout.head_cols),
            (layout.dim_rows, layout.dim_cols),
            _block(layout),
            layout.inter_frame,
        )
        for name, layout in layouts.items()
    }


def _block(layout: FrameLayout) -> tuple[int, int]:
    return layout.token_rows, layout.token_cols


def _tiling(
    heads: tuple[int, int],
    dims: tuple[int, int],
    block: tuple[int, int],
    inter_frame: InterFrame,
) -> Tiling:
    return Tiling(
        head_rows=heads[0],
        head_cols=heads[1],
        dim_rows=dims[0],
        dim_cols=dims[1],
        token_rows=block[0],
        token_cols=block[1],
        inter_frame=inter_frame,
    )


class Search:
    """One tensor's search over cells of one span length.

    ``cells``: uint8, ``(tokens, layers <= 3, heads, dim)`` each. ``sample``: which of them the rounds before the last
    look at. ``encode`` makes frames a bitstream; it runs on ``workers`` threads. ``on_measured`` is called after each
    candidate.
    """

    def __init__(
        self,
        cells: Sequence[torch.Tensor],
        resolution: str,
        encode: Encode,
        *,
        sample: int = 0,
        workers: int = 1,
        on_measured: Callable[[], None] = lambda: None,
    ) -> None:
        assert cells
        assert len({(cell.shape[0], *cell.shape[2:]) for cell in cells}) == 1, [cell.shape for cell in cells]
        self._cells = cells
        self._sample = [cells[sample]]
        self._resolution = resolution
        self._encode = encode
        self._workers = workers
        self._on_measured = on_measured
        self._span_tokens, _, self._num_heads, self._head_dim = cells[0].shape

    def run(self) -> Found:
        """Measure, and sort by size."""
        shape = (self._num_heads, self._head_dim, self._span_tokens, self._resolution)
        named = references(*shape)
        measured = self._measure_on_sample([*named.values(), *tilings(*shape)])
        for further in (blocks, spreads):
            candidates = [t for m in self._best(measured) for t in further(m.candidate.tiling, *shape[2:])]
            measured += self._measure_on_sample(candidates, {self._pictures(m.layout) for m in measured})

        finalists = list(dict.fromkeys([*self._best(measured), *measured[: len(named)]]))
        by_variance = replace(finalists[0], candidate=replace(finalists[0].candidate, order="variance"))
        last = [*finalists, by_variance]
        names = {self._pictures(self._layout(tiling)): name for name, tiling in named.items()}
        final = [
            replace(m, bits=bits, name=names.get(self._pictures(m.layout), "") if m.candidate.order == "stored" else "")
            for m, bits in zip(last, self._bits([m.candidate for m in last], self._cells), strict=True)
        ]
        others = [m for m in measured if m not in finalists]
        return Found(sorted(final, key=lambda m: m.bits or 0.0), sorted(others, key=lambda m: m.sample_bits))

    @staticmethod
    def _best(measured: Iterable[Measured]) -> list[Measured]:
        """The smallest, and the smallest of those that the paper knows of, so that one sees what blocks are worth."""
        single = [m for m in measured if m.layout.tokens_per_tile == 1]
        return list(dict.fromkeys([*_smallest(measured, NUM_FINALISTS), *_smallest(single, NUM_SINGLE)]))

    def _layout(self, tiling: Tiling) -> FrameLayout:
        return layout_of(tiling, self._span_tokens, self._resolution)

    def _pictures(self, layout: FrameLayout) -> FrameLayout:
        """Equal for layouts that give the same pictures: in one frame, tokens have one order."""
        if layout.num_frames(self._span_tokens) > 1:
            return layout
        return msgspec.structs.replace(layout, inter_frame="sequential")

    def _measure_on_sample(
        self, tilings: Iterable[Tiling], known: Collection[FrameLayout] = frozenset()
    ) -> list[Measured]:
        """In their order, without those whose pictures are ``known``; of those that give the same, the first."""
        distinct: dict[FrameLayout, Candidate] = {}
        for tiling in tilings:
            if (pictures := self._pictures(self._layout(tiling))) not in known:
                distinct.setdefault(pictures, Candidate(tiling))
        candidates = distinct.values()
        return [
            Measured(candidate, self._layout(candidate.tiling), bits)
            for candidate, bits in zip(candidates, self._bits(candidates, self._sample), strict=True)
        ]

    def _bits(self, candidates: Iterable[Candidate], cells: Sequence[torch.Tensor]) -> list[float]:
        """Bits a value over ``cells``, for each candidate."""

        def size(candidate: Candidate, cell: torch.Tensor) -> int:
            layout = self._layout(candidate.tiling)
            return len(self._encode(layout.to_frames(_ordered(cell, candidate.order))))

        num_values = sum(cell.numel() for cell in cells)
        bits = []
        with ThreadPoolExecutor(self._workers) as pool:
            try:
                for sizes in [[pool.submit(size, candidate, cell) for cell in cells] for candidate in candidates]:
                    bits.append(8 * sum(future.result() for future in sizes) / num_values)
                    self._on_measured()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # an interrupt waits for what runs, not for all
                raise
        return bits


def _smallest(measured: Iterable[Measured], count: int) -> list[Measured]:
    return sorted(measured, key=lambda m: m.sample_bits)[:count]


def _ordered(cell: torch.Tensor, order: Order) -> torch.Tensor:
    """The channels of each layer and head in the order asked for. The permutation itself costs nothing here: it would
    be one a model."""
    if order == "stored":
        return cell
    by_variance = cell.float().var(dim=0, correction=0).argsort(dim=-1, descending=True, stable=True)
    return cell.gather(-1, by_variance.expand_as(cell))
