"""Takes batches of pages from the engine, joins them into runs, and cuts runs into segments. Callers pass the time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from sgl_kvfetch.codec import CodedChunk, Pages, Quantiser, RawPages
from sgl_kvfetch.codec.container.pages import QuantisedPages
from sgl_kvfetch.keys import buddy_split, split_hashes
from sgl_kvfetch.protocol import Arena, messages as m, tensors_in
from sgl_kvfetch.protocol.arena import pages_in
from sgl_kvfetch.types import KVGeometry, SideKey


@dataclass(slots=True, eq=False)
class SpanPages:
    """The pages of one span, which is whole and aligned, so that no segment has only a part of it. Its cells can be
    coded before it is known which segment it will belong to.

    ``pieces``: the pages; none once ``chunks``, those of all cells in storage order, replace them.
    """

    first_page: int
    previous_hash: bytes | None
    page_hashes: Sequence[bytes]
    pieces: list[Pages]
    chunks: Sequence[CodedChunk] = ()

    @property
    def num_bytes(self) -> int:
        coded = (each for chunk in self.chunks for each in chunk.all)
        return sum(piece.num_bytes for piece in self.pieces) + sum(len(each.bitstream) for each in coded)

    def some(self, pages: slice) -> SpanPages:
        assert (pages.start, pages.stop) == (0, len(self.page_hashes)), pages
        return self


@dataclass(frozen=True, slots=True)
class PageBatch:
    """Consecutive pages, in pieces. ``sides``: the side pages of some pages, uint8 ``(bytes,)`` each, with pages
    counted from the first."""

    first_page: int  # position in the sequence
    previous_hash: bytes | None  # page hash of the page before; None at the sequence's start
    page_hashes: Sequence[bytes]
    pieces: list[Pages | SpanPages]
    sides: dict[SideKey, torch.Tensor] = field(default_factory=dict)

    @property
    def end_page(self) -> int:
        return self.first_page + len(self.page_hashes)

    @property
    def spans(self) -> list[SpanPages]:
        return [piece for piece in self.pieces if isinstance(piece, SpanPages)]

    @property
    def size_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces) + sum(x.nbytes for x in self.sides.values())

    @property
    def coded_bytes(self) -> int:
        """The bytes of the spans that are coded."""
        return sum(span.num_bytes for span in self.spans if span.chunks)


def taken_batch(
    command: m.Write,
    start: m.Start,
    geometry: KVGeometry,
    quantiser: Quantiser,
    memory: Arena,
    on_returned: Callable[[], object],
) -> PageBatch:
    """Return what the engine has put into shared ``memory``, which is lent to the batch: see `Arena.lend`."""
    hashes = split_hashes(command.hashes)
    num_tokens, value_bytes = len(hashes) * geometry.page_size, len(hashes) * geometry.page_bytes
    if command.cells:
        value_bytes = num_tokens * (len(command.cells) + sum(num_rows for num_rows, _ in command.cells))
    sizes = [start.sides[pool] for pool, _ in command.sides]
    lent = memory.lend(command.offset, value_bytes + sum(sizes), on_returned)
    pages: Pages
    if command.cells:
        # Copied, too: there are few.
        exact_bytes = sum(size for _, size in command.cells)
        exact = memory.view(command.exact, torch.uint8, (exact_bytes,)).clone()
        cells = quantiser.split_cells(lent[:value_bytes].view(-1, num_tokens), exact, command.cells)
        page_bytes = -(-(value_bytes + len(exact)) // len(hashes))
        pages = QuantisedPages(cells, range(len(hashes)), geometry.page_size, page_bytes)
    else:
        pages = RawPages(*pages_in(lent, geometry, len(hashes)))
    # Copies: they are encoded with their segment, which the memory of their pages should not wait for.
    sides = [x.clone() for x in tensors_in(lent[value_bytes:], torch.uint8, ((size,) for size in sizes))]
    by_page = dict(zip(command.sides, sides, strict=True))
    return PageBatch(command.first_page, command.previous_hash, hashes, [pages], by_page)


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
        taken = self._pages(first_page, end)
        # Of the last batch, only the hash is needed when all of its pages are cut: its memory is the engine's.
        left = [batch for batch in self.batches if batch.end_page > end]
        self.batches = left or [replace(self.batches[-1], pieces=[], sides={})]
        self.next_page, self.previous_hash = end, taken.page_hashes[-1]
        return taken

    def _pages(self, first_page: int, end: int) -> PageBatch:
        """Return pages ``[first_page, end)`` as one batch."""
        hashes: list[bytes] = []
        pieces: list[Pages | SpanPages] = []
        sides: dict[SideKey, torch.Tensor] = {}
        previous = self.previous_hash
        for batch in self.batches:
            lo, hi = max(first_page, batch.first_page), min(end, batch.end_page)
            if batch.first_page < first_page <= batch.end_page:
                previous = batch.page_hashes[first_page - batch.first_page - 1]
            if lo < hi:
                part = slice(lo - batch.first_page, hi - batch.first_page)
                hashes += batch.page_hashes[part]
                (whole,) = batch.pieces
                pieces.append(whole.some(part))
                shift = batch.first_page - first_page
                sides |= {(pool, n + shift): x for (pool, n), x in batch.sides.items() if part.start <= n < part.stop}
        # The pieces are joined later: joining copies them, and this runs on the event loop.
        return PageBatch(first_page, previous, hashes, pieces, sides)

    def new_spans(self, span_pages: int) -> list[SpanPages]:
        """Return the whole spans that have come since the last time. From now on, the run has them as such."""
        found: list[SpanPages] = []
        known = {batch.first_page for batch in self.batches if batch.spans}
        for first in range(-(-self.next_page // span_pages) * span_pages, self.end_page - span_pages + 1, span_pages):
            if first in known:
                continue
            cut = self._pages(first, first + span_pages)
            pieces = [piece for piece in cut.pieces if not isinstance(piece, SpanPages)]
            found.append(span := SpanPages(first, cut.previous_hash, cut.page_hashes, pieces))
            around = [self._pages(lo, hi) for lo, hi in self._ends_of(first, first + span_pages) if lo < hi]
            others = [b for b in self.batches if b.end_page <= first or b.first_page >= first + span_pages]
            batch = PageBatch(first, cut.previous_hash, cut.page_hashes, [span], cut.sides)
            self.batches = sorted([*others, *around, batch], key=lambda each: each.first_page)
        return found

    def _ends_of(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the pages before ``first`` and those from ``end`` on of the batches that have others in between."""
        for batch in self.batches:
            if batch.first_page < end and first < batch.end_page:
                yield batch.first_page, min(first, batch.end_page)
                yield max(end, batch.first_page), batch.end_page


class Gatherer:
    """Collect runs of pages until their segments can be cut.

    A segment that cannot grow is cut at once, the rest by ``flush``, or if no batch joins the run for ``linger_s``.
    """

    def __init__(
        self,
        max_pages: int,
        linger_s: float,
        span_pages: int = 0,
        on_spans: Callable[[list[SpanPages]], None] = lambda spans: None,
    ) -> None:
        """``on_spans`` is called with spans of ``span_pages`` that are whole, before a segment with them is cut; never
        if segments may be shorter."""
        self._max_pages = max_pages
        self._span_pages = span_pages
        self._on_spans = on_spans
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
        if 0 < self._span_pages <= self._max_pages and (spans := run.new_spans(self._span_pages)):
            self._on_spans(spans)
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
