"""Chooses how to read a run of cells: in which variant, and in how many levels (KVFetcher, section 3.3.2).

Both are offers. An offer has a size, a cost to decode and a divergence: each level that it lacks triples the step, and
variants differ in none. A fetch should end in time with the least divergence. So offers are looked at by divergence,
the finest first. Of those with equal divergence, a policy picks the one with which the fetch ends soonest, if the
machine has a profile of its decoders; else the segment's first readable variant is read. The first pick that ends in
time is taken, and the coarsest if none does. So a segment with video beside its levels is read as video or in all its
levels while there is time, and in fewer levels otherwise.

A choice is made when a run is requested, as late as possible, from what the link and the decoders have shown so far.
The link is measured in one place, `link.Link`, and so are the decoders, `adapt.pool.PoolTracker`. Whether a fetch ends
in time is a question to their means. A policy, which looks ahead, takes the link's transfers and expects a distribution
from them (`adapt.estimate`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from sgl_kvfetch.codec import Cell, Decoders, SegmentReader
from sgl_kvfetch.plane.adapt.policy import Policy, Situation
from sgl_kvfetch.plane.adapt.pool import DecodePool
from sgl_kvfetch.plane.fetch.link import Link
from sgl_kvfetch.plane.fetch.plan import LevelPolicy, ReadSize, neighbours, read_runs

# Runs per span. One choice serves a whole run of cells, since it takes milliseconds.
_RUNS_A_SPAN = 4


@dataclass(frozen=True, slots=True)
class Offer:
    """A way to read a run of cells."""

    reader: SegmentReader
    size_bytes: int  # of one of the cells, on average
    levels_left_out: int
    variant: int | None = None  # the decoders' profile has its decode times under this index


@dataclass(frozen=True, slots=True)
class Supply:
    """What stands between now and the end of a fetch. Rates are None until they are measured."""

    num_cells: int  # not requested yet, with those to choose for; by all fetches
    outstanding_bytes: int
    read_bytes_per_s: float | None
    decoded_bytes_per_s: float | None  # of compressed bytes

    def brings(self, offer: Offer, within_s: float) -> bool:
        """Return whether the fetch ends in time if all cells that are left are like this offer."""
        rates = [rate for rate in (self.read_bytes_per_s, self.decoded_bytes_per_s) if rate]
        if not rates:
            return True
        return offer.size_bytes * self.num_cells <= within_s * min(rates) - self.outstanding_bytes


def best_offer(
    offers: Iterable[Offer], supply: Supply, within_s: float, pick: Callable[[Sequence[Offer]], Offer]
) -> Offer:
    """Return the offer with the least divergence with which the fetch ends within ``within_s``; without one, the
    coarsest. ``pick`` picks among offers of equal divergence."""
    by_divergence = sorted(offers, key=lambda offer: offer.levels_left_out)
    for _, alike in groupby(by_divergence, key=lambda offer: offer.levels_left_out):
        picked = pick(list(alike))
        if supply.brings(picked, within_s):
            break
    return picked


class Chooser:
    """Chooses offers by the current state of link and decoders. Belongs to one event loop."""

    def __init__(self, policy: Policy | None, pool: DecodePool[Decoders], link: Link) -> None:
        """``pool`` decodes what is chosen. With a ``policy``, it must have a profile; without one, variants are not
        chosen."""
        self._policy = policy
        self._pool = pool
        self._link = link
        self._previous: int | None = None

    def runs(self, reader: SegmentReader, span: int, size: ReadSize) -> Sequence[tuple[Cell, ...]]:
        """Return the cells of a span that the rank reads, in runs of neighbours. The cells of a run are read alike."""
        if self._policy is None:
            return read_runs(reader, span, size)
        cells = list(reader.span_cells(span))
        step = -(-len(cells) // _RUNS_A_SPAN)
        return [tuple(run[i : i + step]) for run in neighbours(reader, cells) for i in range(0, len(run), step)]

    def choose(
        self,
        reader: SegmentReader,
        run: Sequence[Cell],
        levels: LevelPolicy,
        within_s: float,
        num_cells_left: int,
        is_here: Callable[[SegmentReader], bool] = lambda _: False,
    ) -> SegmentReader:
        """Return the reader with which to read ``run``. ``reader``: of the segment's default variant. ``levels``: which
        may be left out. ``within_s``: when the fetch should end. ``num_cells_left``: cells not requested yet, of all
        fetches and of ``run``. ``is_here``: whether the bytes of a reader need no link."""
        if not self.is_free(reader, levels):
            return reader
        offers = self._offers(reader, run, levels)
        if len(offers) == 1:
            return offers[0].reader

        def pick(alike: Sequence[Offer]) -> Offer:
            return self._pick(alike, reader, run, num_cells_left)

        finest = min(offer.levels_left_out for offer in offers)
        first = pick([offer for offer in offers if offer.levels_left_out == finest])
        if is_here(first.reader):
            return first.reader
        coarser = [offer for offer in offers if offer.levels_left_out > finest]
        return best_offer([first, *coarser], self.supply(num_cells_left), within_s, pick).reader

    def is_free(self, reader: SegmentReader, levels: LevelPolicy) -> bool:
        """Return whether `choose` may return another reader than ``reader``."""
        return self._policy is not None or levels.coarsest(reader) is not reader

    def supply(self, num_cells_left: int) -> Supply:
        goodput_bps = self._link.goodput_bps  # an old one, too: the first cells correct it
        read_bytes_per_s = None if goodput_bps is None else goodput_bps / 8
        return Supply(num_cells_left, self._link.outstanding_bytes, read_bytes_per_s, self._pool.bytes_per_s)

    def _offers(self, reader: SegmentReader, run: Sequence[Cell], levels: LevelPolicy) -> list[Offer]:
        readers = [reader] if self._policy is None else [*map(levels.finest, reader.variants)] or [reader]
        offers = []
        for each in readers:
            variant = self.profile_variant(each)
            for count in range(each.num_levels - levels.coarsest(each).num_levels + 1):
                coarser = each.without_levels(count)
                # The cells of a run are alike, so one stands for all.
                size_bytes = -(-sum(map(coarser.coded_bytes, run)) // len(run))
                offers.append(Offer(coarser, size_bytes, coarser.levels_left_out, variant))
        return offers

    def _pick(self, alike: Sequence[Offer], reader: SegmentReader, run: Sequence[Cell], num_cells_left: int) -> Offer:
        known = {offer.variant: offer for offer in alike if offer.variant is not None}
        if self._policy is None or len(known) < 2:
            return next((offer for offer in alike if offer.reader.variant is reader.variant), alike[0])
        profile = self._pool.profile
        sizes = [variant.size_bytes for variant in profile.variants]
        for variant, offer in known.items():
            sizes[variant] = offer.size_bytes
        self._previous = self._policy.choose(
            Situation(
                profile=profile,
                pool=self._pool.state(),
                transfers=self._link.transfers,
                remaining=num_cells_left,
                previous=self._previous,
                sizes_bytes=tuple(sizes),
                available=tuple(sorted(known)),
                work=self.work(reader, run[0]),
            )
        )
        return known[self._previous]

    def profile_variant(self, reader: SegmentReader) -> int | None:
        """Return the profile's index of the variant that ``reader`` reads, or None."""
        profile = None if self._policy is None else self._pool.profile
        return None if profile is None else profile.find_variant(reader.variant.codec, reader.variant.resolution)

    def work(self, reader: SegmentReader, cell: Cell) -> float:
        """Return a cell's number of integers relative to that of the profile's chunk."""
        chunk_values = None if self._policy is None else self._pool.profile.chunk_values
        return reader.num_integers(cell) / chunk_values if chunk_values else 1.0
