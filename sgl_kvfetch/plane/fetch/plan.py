"""Plans the reads for a request's pages: which bytes, in which variant, and in how many levels (KVFetcher, section
3.3.2).

It reads no clock and does no I/O. A span's cells are cut into runs, and a run is read with one ranged GET of each
object.

**A run may be read in several variants, and with fewer levels.** Both are offers. An offer has a size, a cost to decode
and a divergence: each level that it lacks triples the step, and variants differ in none. A fetch should end in time
with the least divergence. So offers are looked at by divergence, the finest first. Of those with equal divergence, a
policy picks the one with which the fetch ends soonest, if the machine has a profile of its decoders; else the segment's
first readable variant is read. The first pick that ends in time is taken, and the coarsest if none does. So a segment
with video beside its levels is read as video or in all its levels while there is time, and in fewer levels otherwise.

A choice is made when a run is requested, as late as possible, from what the link and the decoders have shown so far.
The link is measured in one place, `link.Link`, and so are the decoders, `fetch.pool.PoolTracker`. Whether a fetch ends
in time is a question to their means. A policy, which looks ahead, takes the link's transfers and expects a distribution
from them (`fetch.link`).

Policies are pure: equal situations get equal answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from sgl_kvfetch.codec import Cell, CellChunks, Decoders, SegmentReader
from sgl_kvfetch.plane.fetch.link import Link, Transfer, robust
from sgl_kvfetch.plane.fetch.pool import DecodePool, DecodeProfile, Pipeline, PoolState

_LEAST_READ_BYTES = 128 << 10

CellsKey = tuple[str, Cell]  # a segment and the first cell of a run
UnitKey = tuple[str, int, Cell, int]  # a data object, the number of levels, the first cell, and the number of cells


@dataclass(frozen=True, slots=True)
class PageSource:
    """Where one page is stored. ``others``: segments with the rest of the rank's heads, if ``reader``'s has not all."""

    reader: SegmentReader
    page: int  # counted from the segment's start
    others: tuple[PageSource, ...] = ()

    @property
    def position(self) -> int:
        """The page's place in the sequence, as the segment's writer has it."""
        return self.reader.manifest.first_page + self.page


@dataclass(frozen=True, slots=True)
class SpanPart:
    """The pages of one span that a request wants, in the rank's heads that the segment has."""

    reader: SegmentReader
    span: int
    request_pages: tuple[int, ...]  # indices into the request
    span_pages: tuple[int, ...]  # indices into the span

    @property
    def is_begun(self) -> bool:
        """Return whether the span has more pages after this part."""
        first, end = self.reader.manifest.span_range(self.span)
        return self.span_pages[-1] + 1 < end - first

    @property
    def size_bytes(self) -> int:
        return self.reader.span_bytes(self.span)


@dataclass(frozen=True)
class ReadUnit:
    """A run of neighbouring cells of one span, read with one ranged GET of each object: one a level."""

    reader: SegmentReader
    cells: tuple[Cell, ...]

    @cached_property
    def reads(self) -> list[tuple[str, int, int]]:
        """The objects to read from, and bytes ``[start, end)`` of each."""
        starts = {each.level: each.start for each in reversed(self.reader.stored(self.cells[0]))}
        ends = {each.level: each.end for each in self.reader.stored(self.cells[-1])}
        return [(name, starts[level], ends[level]) for level, name in enumerate(self.reader.object_names)]

    @property
    def key(self) -> UnitKey:
        return self.reader.data_name, self.reader.num_levels, self.cells[0], len(self.cells)

    @property
    def cells_key(self) -> CellsKey:
        """Return a key for the unit's cells that is the same in all variants."""
        return self.reader.stem, self.cells[0]

    @cached_property
    def size_bytes(self) -> int:
        return sum(end - start for _, start, end in self.reads)

    def split(self, data: bytes | memoryview) -> list[CellChunks]:
        """Return the chunks of each cell. ``data``: the bytes of all objects, one behind the other."""
        view, shifts, end = memoryview(data), [], 0
        for _, first, last in self.reads:
            shifts.append(end - first)
            end += last - first
        assert end == len(view), (end, len(view))
        return [
            [view[shifts[each.level] + each.start : shifts[each.level] + each.end] for each in self.reader.stored(cell)]
            for cell in self.cells
        ]

    def by_object(self, chunks: Sequence[CellChunks]) -> list[list[memoryview]]:
        """Return the chunks of all cells by the objects in which they are stored, in their order there."""
        num_levels = len(self.reads) - 1  # each further object has one chunk of a cell
        first = [x for cell in chunks for x in cell[: len(cell) - num_levels]]
        return [first, *([cell[len(cell) - num_levels + level] for cell in chunks] for level in range(num_levels))]


def span_parts(sources: Sequence[PageSource]) -> list[SpanPart]:
    """Group a request's pages by the spans that hold them, in the order of their first pages."""
    pages: dict[tuple[SegmentReader, int], dict[int, int]] = {}  # of each span: indices into the request, into the span
    for i, source in enumerate(sources):
        for each in (source, *source.others):
            span, page = divmod(each.page, each.reader.manifest.span_pages)
            pages.setdefault((each.reader, span), {})[i] = page
    return [SpanPart(*place, tuple(held), tuple(held.values())) for place, held in pages.items()]


class ReadSize(NamedTuple):
    """How large reads are: ``a_span`` for each span, but of at most about ``most_bytes``, and no very small ones. With
    several for a span, decoding starts when the first one has arrived."""

    most_bytes: int
    a_span: int = 3

    def of(self, span_bytes: int) -> int:
        """Return about how many bytes of a span one read takes."""
        return min(self.most_bytes, max(_LEAST_READ_BYTES, -(-span_bytes // self.a_span)))


def read_units(reader: SegmentReader, span: int, size: ReadSize) -> list[ReadUnit]:
    """Cut the bytes of a span's cells at cell boundaries into reads of about equal size. Equal arguments give equal
    units, so that a read started for one caller can serve another."""
    return [ReadUnit(reader, cells) for cells in read_runs(reader, span, size)]


_runs: WeakKeyDictionary[SegmentReader, dict[tuple[int, ReadSize], list[tuple[Cell, ...]]]] = WeakKeyDictionary()


def read_runs(reader: SegmentReader, span: int, size: ReadSize) -> Sequence[tuple[Cell, ...]]:
    """Return the cells of `read_units`. They are computed once."""
    made = _runs.setdefault(reader, {})
    if (span, size) not in made:
        most = size.of(reader.span_bytes(span))
        runs = neighbours(reader, list(reader.span_cells(span)))
        made[span, size] = [cells for run in runs for cells in _cut(reader, run, most)]
    return made[span, size]


def _cut(reader: SegmentReader, run: Sequence[Cell], most: int) -> list[tuple[Cell, ...]]:
    """Cut neighbours into runs of about equal size in bytes, about ``most``: a cell is in the run in which its middle
    is."""
    ends = list(accumulate(map(reader.coded_bytes, run)))
    count = -(-ends[-1] // most)
    middles = ((start + end) / 2 for start, end in pairwise((0, *ends)))
    where = [int(middle * count / ends[-1]) for middle in middles]
    return [tuple(cell for _, cell in cells) for _, cells in groupby(zip(where, run, strict=True), key=itemgetter(0))]


def neighbours(reader: SegmentReader, cells: Sequence[Cell]) -> Iterator[Sequence[Cell]]:
    """Split cells, which are in storage order, into runs without other cells in between."""
    first = 0
    for i in range(1, len(cells) + 1):
        if i == len(cells) or not reader.are_neighbours(cells[i - 1], cells[i]):
            yield cells[first:i]
            first = i


@dataclass(frozen=True, slots=True)
class LevelPolicy:
    """``most_left_out``: levels, of which each that is left out triples the step. ``within_s``: how long a fetch may
    take before it leaves some out. ``least_left_out``: levels that other servers need, and this one never reads."""

    most_left_out: int = 0
    within_s: float = 0.0
    least_left_out: int = 0

    def seconds(self, most_bytes: int, least_bytes: int, bytes_per_s: float) -> float:
        """Return how long a fetch takes at this rate. It leaves levels out only for what takes longer than
        ``within_s``."""
        return min(most_bytes / bytes_per_s, max(least_bytes / bytes_per_s, self.within_s))

    def finest(self, reader: SegmentReader) -> SegmentReader:
        """Return the reader of as many levels as are wanted."""
        return _leaving_out(reader, self.least_left_out)

    def coarsest(self, reader: SegmentReader) -> SegmentReader:
        """Return the reader of as few levels as may be read."""
        return _leaving_out(reader, self.most_left_out)


def _leaving_out(reader: SegmentReader, count: int) -> SegmentReader:
    """Return the reader that leaves out so many levels, counting those that are lost; level 0 is always read."""
    return reader.without_levels(max(0, min(reader.num_levels - 1, count - reader.levels_left_out)))


@dataclass(frozen=True, slots=True)
class Situation:
    """The inputs to a choice, just before the next cell is requested.

    Variants are indices into ``profile.variants``, and ``profile`` is corrected by observed decode times.
    ``sizes_bytes`` and ``work`` (number of integers relative to the profile's cell) describe the next cell; later
    cells are assumed to be like it. ``remaining`` counts all cells not yet requested, the next one included, also
    those of this process's other fetches, which share link and decoders. ``transfers``: this link's recent transfers,
    oldest first.
    """

    profile: DecodeProfile
    pool: PoolState
    transfers: tuple[Transfer, ...]
    remaining: int
    sizes_bytes: tuple[int, ...]
    available: tuple[int, ...]  # the stored variants of the next cell
    work: float = 1.0

    def __post_init__(self) -> None:
        assert self.remaining >= 1, self.remaining
        assert len(self.sizes_bytes) == len(self.profile.variants)
        assert self.available, "expected at least one stored variant"


class Policy(Protocol):
    def choose(self, situation: Situation) -> int:
        """Return one of ``situation.available``."""


_TIE = 1e-9


@dataclass(frozen=True, slots=True)
class LookAhead:
    """Our policy: choose the variant with which the fetch ends soonest, on average over the link's scenarios.

    A plan is one variant for the next cell and one for all later cells. Each plan is simulated with a model of link
    and pool that starts from the decoders' current work. A variant's score is that of its best plan. Every cell is
    decided anew, so a fetch may use more variants than one plan has. Of variants that end at the same time, the
    smallest is chosen: it leaves more bandwidth to others.

    ``horizon``: cells to look ahead, at most 64, after which the fetch is assumed to end. The computing time grows
    with it.
    """

    horizon: int = 32

    def choose(self, situation: Situation) -> int:
        if len(situation.available) == 1:
            return situation.available[0]
        paths = robust(situation.transfers).paths(min(situation.remaining, self.horizon))
        now = Pipeline.from_state(situation.profile, situation.pool, work=situation.work)
        # Do this once for all plans: while other cells wait, the exact arrival time of the next does not matter.
        now.run_until_waiting(len(situation.pool.sessions))
        scores = {variant: self._finish_s(now, variant, paths, situation) for variant in situation.available}
        best = min(scores.values())
        soonest = [v for v, score in scores.items() if score <= best * (1 + _TIE)]
        return min(soonest, key=lambda v: (situation.sizes_bytes[v], v))

    def _finish_s(self, now: Pipeline, variant: int, paths: Sequence[Sequence[float]], situation: Situation) -> float:
        """Return the end of the fetch with ``variant`` for the next cell and the best one for the rest, summed over
        ``paths``. Each path holds the link's bits per second, by cell."""
        sizes = situation.sizes_bytes
        sums = dict.fromkeys(situation.available, 0.0)
        for first_bps, *rest_bps in paths:
            after, link_free_s = now.copy(), sizes[variant] * 8 / first_bps
            after.deliver_at(link_free_s, variant)
            for following in sums:
                sums[following] += _finish_s(after, following, sizes[following], rest_bps, link_free_s)
        return min(sums.values())


def _finish_s(
    pipeline: Pipeline, variant: int, size_bytes: int, bandwidth_bps: Sequence[float], link_free_s: float
) -> float:
    """Return when the last cell is decoded if the cells are sent one after the other from ``link_free_s`` on."""
    rollout = pipeline.copy()
    for bps in bandwidth_bps:
        link_free_s += size_bytes * 8 / bps
        rollout.deliver_at(link_free_s, variant)
    return rollout.drained_s()


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
        """Return one of several offers that hold the same values: the policy chooses, if it knows two or more of
        them."""
        known = {offer.variant: offer for offer in alike if offer.variant is not None}
        if self._policy is None or len(known) < 2:
            return next((offer for offer in alike if offer.reader.variant is reader.variant), alike[0])
        profile = self._pool.profile
        sizes = [variant.size_bytes for variant in profile.variants]
        for variant, offer in known.items():
            sizes[variant] = offer.size_bytes
        choice = self._policy.choose(
            Situation(
                profile=profile,
                pool=self._pool.state(),
                transfers=self._link.transfers,
                remaining=num_cells_left,
                sizes_bytes=tuple(sizes),
                available=tuple(sorted(known)),
                work=self.work(reader, run[0]),
            )
        )
        return known[choice]

    def profile_variant(self, reader: SegmentReader) -> int | None:
        """Return the profile's index of the variant that ``reader`` reads, or None."""
        profile = None if self._policy is None else self._pool.profile
        return None if profile is None else profile.find_variant(reader.variant.codec, reader.variant.resolution)

    def work(self, reader: SegmentReader, cell: Cell) -> float:
        """Return a cell's number of integers relative to that of the profile's cell."""
        cell_values = None if self._policy is None else self._pool.profile.cell_values
        return reader.num_integers(cell) / cell_values if cell_values else 1.0
