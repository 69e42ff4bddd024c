"""Which variant of a segment to read, chosen as a fetch goes on (KVFetcher, section 3.3.2)."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_kvfetch.adapt.policy import Policy, Situation
from sgl_kvfetch.adapt.pool import DecodePool
from sgl_kvfetch.codecs.base import Decoders
from sgl_kvfetch.container.manifest import Cell
from sgl_kvfetch.container.segment import SegmentReader
from sgl_kvfetch.fetch.link import Link

# Cells are chosen for in runs, since a choice takes milliseconds: so many runs a span.
_RUNS_A_SPAN = 4


class VariantChooser:
    """Asks a policy, with what link and decoders are at. Belongs to one event loop."""

    def __init__(self, policy: Policy, pool: DecodePool[Decoders], link: Link) -> None:
        """``pool``: with a profile; it decodes what was chosen."""
        self._policy = policy
        self._pool = pool
        self._link = link
        self._previous: int | None = None

    def runs(self, reader: SegmentReader, span: int) -> list[tuple[Cell, ...]]:
        """A span's cells, in runs that are chosen for together."""
        cells = list(reader.manifest.span_cells(span))
        step = -(-len(cells) // _RUNS_A_SPAN)
        return [tuple(cells[i : i + step]) for i in range(0, len(cells), step)]

    def choose(self, reader: SegmentReader, run: Sequence[Cell], num_cells_left: int) -> SegmentReader:
        """A reader of the variant in which to read ``run``. ``num_cells_left`` are yet to be asked for, these among
        them, whichever fetch wants them. It is ``reader`` itself where the profile knows fewer than two of the
        segment's variants."""
        profile = self._pool.profile
        readers = {v: r for r in reader.variants if (v := self.profile_variant(r)) is not None}
        if len(readers) < 2:
            return reader
        # A policy looks at one cell at a time: those of a run are alike.
        sizes = [v.size_bytes for v in profile.variants]
        for variant, candidate in readers.items():
            sizes[variant] = -(-sum(end - start for start, end in map(candidate.cell_range, run)) // len(run))
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
        """The profile's index of what ``reader`` reads."""
        return self._pool.profile.find(reader.variant.codec, reader.variant.resolution)

    def work(self, reader: SegmentReader, cell: Cell) -> float:
        """A cell's integers against those of the profile's chunk."""
        chunk_values = self._pool.profile.chunk_values
        return reader.num_integers(cell) / chunk_values if chunk_values else 1.0
