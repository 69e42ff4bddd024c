"""Joins SGLang's page batches into runs, and cuts runs into segments. Pure: callers pass the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sgl_kvfetch.codec import SideKey
from sgl_kvfetch.codec.container import Pages
from sgl_kvfetch.keys import buddy_split


@dataclass(frozen=True, slots=True)
class PageBatch:
    """Consecutive pages, in pieces. ``sides``: the side pages of some pages, uint8 ``(bytes,)`` each, with pages
    counted from the first."""

    first_page: int  # position in the sequence
    previous_hash: bytes | None  # page hash of the page before; None at the sequence's start
    page_hashes: Sequence[bytes]
    pieces: list[Pages]
    sides: dict[SideKey, torch.Tensor] = field(default_factory=dict)

    @property
    def end_page(self) -> int:
        return self.first_page + len(self.page_hashes)

    @property
    def size_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces) + sum(x.nbytes for x in self.sides.values())


@dataclass(slots=True, eq=False)
class _BatchRun:
    """Consecutive batches. Pages before ``next_page`` are already cut into segments."""

    batches: list[PageBatch]
    changed_s: float
    next_page: int
    previous_hash: bytes | None  # of the page before next_page

    @property
    def last_hash(self) -> bytes:
        return self.batches[-1].page_hashes[-1]

    @property
    def end_page(self) -> int:
        return self.batches[-1].end_page

    def cut_pages(self, first_page: int, num_pages: int) -> PageBatch:
        """Cut pages ``[first_page, first_page + num_pages)`` as one batch. Drop batches that are no longer needed."""
        end = first_page + num_pages
        hashes: list[bytes] = []
        pieces: list[Pages] = []
        sides: dict[SideKey, torch.Tensor] = {}
        for batch in self.batches:
            lo, hi = max(first_page, batch.first_page), min(end, batch.end_page)
            if lo < hi:
                part = slice(lo - batch.first_page, hi - batch.first_page)
                hashes += batch.page_hashes[part]
                (whole,) = batch.pieces
                pieces.append(whole.some(part))
                shift = batch.first_page - first_page
                sides |= {(pool, n + shift): x for (pool, n), x in batch.sides.items() if part.start <= n < part.stop}
        self.batches = [batch for batch in self.batches if batch.end_page > end] or self.batches[-1:]
        # The pieces are joined later: joining copies them, and this runs on the event loop.
        taken = PageBatch(first_page, self.previous_hash, hashes, pieces, sides)
        self.next_page, self.previous_hash = end, hashes[-1]
        return taken


class Gatherer:
    """Collect runs of pages until their segments can be cut.

    A segment that cannot grow is cut at once, the rest by ``flush``, or if no batch joins the run for ``linger_s``.
    """

    def __init__(self, max_pages: int, linger_s: float) -> None:
        self._max_pages = max_pages
        self._linger_s = linger_s
        self._runs: list[_BatchRun] = []

    def add_batch(self, batch: PageBatch, now_s: float) -> list[PageBatch]:
        """Add a batch. Return the segments that are ready."""
        before = (batch.first_page, batch.previous_hash)
        run = next((r for r in self._runs if (r.end_page, r.last_hash) == before), None)
        if run is None:
            run = _BatchRun([batch], now_s, *before)
            self._runs.append(run)
        else:
            run.batches.append(batch)
            run.changed_s = now_s
        return self._cut(run, only_longest=True)

    def due(self, now_s: float) -> list[PageBatch]:
        """Return the segments of runs that no batch has joined for ``linger_s``."""
        return self._flush([run for run in self._runs if now_s - run.changed_s >= self._linger_s])

    def flush(self) -> list[PageBatch]:
        return self._flush(self._runs)

    def _flush(self, runs: list[_BatchRun]) -> list[PageBatch]:
        self._runs = [run for run in self._runs if run not in runs]
        return [segment for run in runs for segment in self._cut(run, only_longest=False)]

    def _cut(self, run: _BatchRun, only_longest: bool) -> list[PageBatch]:
        segments = []
        for first_page, num_pages in buddy_split(run.next_page, run.end_page - run.next_page, self._max_pages):
            # A shorter piece is cut too if alignment alone limits it, so that more pages could not make it longer.
            is_aligned = first_page != 0 and num_pages == first_page & -first_page
            if only_longest and num_pages < self._max_pages and not is_aligned:
                break
            segments.append(run.cut_pages(first_page, num_pages))
        return segments
