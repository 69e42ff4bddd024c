"""Chooses which variant of a segment to read, during a fetch (KVFetcher, section 3.3.2)."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_kvfetch.codec import Cell, Decoders, SegmentReader
from sgl_kvfetch.plane.adapt.policy import Policy, Situation
from sgl_kvfetch.plane.adapt.pool import DecodePool
from sgl_kvfetch.plane.fetch.link import Link
from sgl_kvfetch.plane.fetch.plan import neighbours

# Runs per span. One choice serves a whole run of cells, since it takes milliseconds.
_RUNS_A_SPAN = 4


class VariantChooser:
    """Asks a policy, given the current state of link and decoders. Belongs to one event loop."""

    def __init__(self, policy: Policy, pool: DecodePool[Decoders], link: Link) -> None:
        """``pool`` decodes the chosen variants, and must have a profile."""
        self._policy = policy
        self._pool = pool
        self._link = link
        self._previous: int | None = None

    def runs(self, reader: SegmentReader, span: int) -> list[tuple[Cell, ...]]:
        """Return the cells of a span that the rank reads, in runs of neighbours. The cells of a run get the same
        variant."""
        cells = list(reader.span_cells(span))
        step = -(-len(cells) // _RUNS_A_SPAN)
        return [tuple(run[i : i + step]) for run in neighbours(reader, cells) for i in range(0, len(run), step)]

    def choose(self, reader: SegmentReader, run: Sequence[Cell], num_cells_left: int) -> SegmentReader:
        """Return a reader of the variant in which to read ``run``, or ``reader`` itself if the profile has fewer than
        two of the segment's variants. ``num_cells_left``: cells not requested yet, of all fetches and of ``run``."""
        profile = self._pool.profile
        readers = {v: r for r in reader.variants if (v := self.profile_variant(r)) is not None}
        if len(readers) < 2:
            return reader
        # A policy sees one cell at a time, so give it the mean size: the cells of a run are alike.
        sizes = [v.size_bytes for v in profile.variants]
        for variant, candidate in readers.items():
            sizes[variant] = -(-sum(map(candidate.coded_bytes, run)) // len(run))
        variant = self._policy.choose(
            Situation(
                profile=profile,
                pool=self._pool.state(),
                transfers=self._link.transfers,
                remaining=num_cells_left,
                previous=self._previous,
                sizes_bytes=tuple(sizes),
                available=tuple(sorted(readers)),
                work=self.work(reader, run[0]),
            )
        )
        self._previous = variant
        return readers[variant]

    def profile_variant(self, reader: SegmentReader) -> int | None:
        """Return the profile's index of the variant that ``reader`` reads, or None."""
        return self._pool.profile.find_variant(reader.variant.codec, reader.variant.resolution)

    def work(self, reader: SegmentReader, cell: Cell) -> float:
        """Return a cell's number of integers relative to that of the profile's chunk."""
        chunk_values = self._pool.profile.chunk_values
        return reader.num_integers(cell) / chunk_values if chunk_values else 1.0
