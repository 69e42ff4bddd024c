"""Chooses how many levels of coefficients to read: all, or fewer if they would come too late."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from sgl_kvfetch.codec import Cell, SegmentReader


@dataclass(frozen=True, slots=True)
class Supply:
    """What stands between now and the end of a fetch. Rates are None until they are measured."""

    num_cells: int  # not requested yet, with those to choose for
    outstanding_bytes: int
    read_bytes_per_s: float | None
    decoded_bytes_per_s: float | None  # of compressed bytes


@dataclass(frozen=True, slots=True)
class LevelPolicy:
    """``most_left_out``: levels, of which each that is left out triples the step. ``within_s``: how long a fetch may
    take before it leaves some out."""

    most_left_out: int = 0
    within_s: float = 0.0

    def due_s(self) -> float:
        """Return when a fetch that begins now should end, on the monotonic clock."""
        return time.monotonic() + self.within_s

    def seconds(self, most_bytes: int, least_bytes: int, bytes_per_s: float) -> float:
        """Return how long a fetch takes at this rate. It leaves levels out only for what takes longer than
        ``within_s``."""
        return min(most_bytes / bytes_per_s, max(least_bytes / bytes_per_s, self.within_s))

    def coarsest(self, reader: SegmentReader) -> SegmentReader:
        """Return the reader of as few levels as may be read."""
        may_leave_out = self.most_left_out - reader.levels_left_out
        return reader.without_levels(max(0, min(reader.num_levels - 1, may_leave_out)))

    def choose(
        self, reader: SegmentReader, cell: Cell, due_s: float, make_supply: Callable[[], Supply]
    ) -> SegmentReader:
        """Return the reader of the most levels with which the fetch ends by ``due_s``, if all cells that are left are
        as large as ``cell`` and read alike; without one, the coarsest."""
        coarsest = self.coarsest(reader)
        if coarsest is reader:
            return reader
        supply = make_supply()
        rates = [rate for rate in (supply.read_bytes_per_s, supply.decoded_bytes_per_s) if rate]
        if not rates:
            return reader
        left_bytes = (due_s - time.monotonic()) * min(rates) - supply.outstanding_bytes
        for count in range(reader.num_levels - coarsest.num_levels):
            if (each := reader.without_levels(count)).coded_bytes(cell) * supply.num_cells <= left_bytes:
                return each
        return coarsest
