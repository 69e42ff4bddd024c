"""Makes offers, and chooses among them: the one place that knows that a span may be read in several ways.

A segment may be stored in several variants: the same values in other codecs or resolutions, of which some are smaller,
and others decode sooner. Its values may be coded in levels, of which the last may be left out: each that is triples the
step. A way to read is a reader, and an offer says what it costs: bytes that the link has to bring, seconds to decode,
and a divergence. All but this and `codec.container` sees a reader and its bytes.

**Taken is the offer with the least divergence that ends in time; of equals, the one that ends soonest.** If none ends
in time, the coarsest ends soonest. A fetch chooses once a span, as late as possible, from what link and decoders have
shown so far. It has the means of both, and no model of what they will do (`Supply`): its estimate is of a fetch that
goes on with this offer. A plan that knows the link's future is 2% sooner, where rates are known (docs/adaptive.md).

**What was not measured is not guessed.** Over a link that has brought nothing yet, the first way is taken, which is the
first in the manifest that can be decoded. A way that was never decoded is expected to decode a little sooner than the
others (`pool.DecodeRates`). So it is tried, once, where the decoders are the limit, and by its bytes alone where the
link is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from sgl_kvfetch.codec import Decoders, Manifest, Quantiser, SegmentReader
from sgl_kvfetch.codec.container.reader import preferred_reader
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.plane.fetch.link import Link
from sgl_kvfetch.plane.fetch.plan import SpanPart
from sgl_kvfetch.plane.fetch.pool import DecodePool


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How coarse what is read may be, and how late: ``coarseness`` levels may be left out, once a fetch would take
    longer than ``within_s``."""

    coarseness: int = 0
    within_s: float = 1.0

    def reader(
        self, manifest: Manifest, quantiser: Quantiser, rank_heads: range, engine_codecs: Iterable[str] = ()
    ) -> SegmentReader:
        """Return the reader of a segment that offers begin with. ``engine_codecs``: those that video engines decode.
        Raises StoreError if the segment has become too coarse, and what `SegmentReader` raises."""
        reader = preferred_reader(manifest, quantiser, rank_heads, tuple(engine_codecs))
        if found := manifest.too_coarse(self.coarseness):
            raise StoreError("coarse", found)
        return reader

    def coarser(self, reader: SegmentReader) -> SegmentReader | None:
        """Return the reader that leaves one more level out; None if it may not be."""
        return reader.coarser if reader.coarseness < self.coarseness else None

    def coarsest(self, reader: SegmentReader) -> SegmentReader:
        """Return the reader that leaves out as many levels as may be."""
        while (coarser := self.coarser(reader)) is not None:
            reader = coarser
        return reader

    def step(self, reader: SegmentReader) -> float:
        """Return how many times as large as its quantiser's a step may be in what is read of a segment."""
        return 3.0 ** max(self.coarseness, reader.coarseness)

    def seconds(self, parts: Sequence[SpanPart], bytes_per_s: float) -> float:
        """Return how long a fetch takes at this rate. It leaves levels out only for what takes longer than
        ``within_s``."""
        most = sum(part.size_bytes for part in parts)
        least = sum(self.coarsest(part.reader).span_bytes(part.span) for part in parts) if self.coarseness else most
        return min(most / bytes_per_s, max(least / bytes_per_s, self.within_s))


@dataclass(frozen=True, slots=True)
class Offer:
    """What one of a span's cells costs, on average: bytes that the link has to bring, and seconds of a decode
    session."""

    reader: SegmentReader
    num_bytes: float
    decode_s: float
    divergence: int


@dataclass(frozen=True, slots=True)
class Supply:
    """What stands between now and the end of a fetch, and how fast that goes. ``queued_s``: of one decode session."""

    num_cells: int  # not requested yet, with those to choose for; by all fetches
    outstanding_bytes: int
    bytes_per_s: float
    queued_s: float
    num_sessions: int

    def seconds(self, offer: Offer) -> float:
        """Return how long the fetch takes if all cells that are left are like this offer: until the last is here and
        decoded, or until the decoders are done, whichever is later."""
        num_bytes = self.outstanding_bytes + self.num_cells * offer.num_bytes if offer.num_bytes else 0.0
        decode_s = self.queued_s + self.num_cells * offer.decode_s
        return max(num_bytes / self.bytes_per_s + offer.decode_s, decode_s / self.num_sessions)


def best_offer(offers: Iterable[Offer], supply: Supply, within_s: float) -> Offer:
    """Return the offer with the least divergence with which the fetch ends within ``within_s``, the soonest of these;
    without one, the soonest of the coarsest."""
    times = {offer: supply.seconds(offer) for offer in offers}
    coarsest = max(offer.divergence for offer in times)

    def rank(offer: Offer) -> tuple[bool, int, float, float]:
        is_late = times[offer] > within_s
        return is_late, offer.divergence if not is_late else coarsest - offer.divergence, times[offer], offer.num_bytes

    return min(times, key=rank)


class Chooser:
    """Chooses how spans are read. Belongs to one event loop."""

    def __init__(self, tolerance: Tolerance, pool: DecodePool[Decoders], link: Link) -> None:
        """``pool`` decodes what ``link`` brings."""
        self.tolerance, self.link = tolerance, link
        self._pool = pool

    def is_free(self, reader: SegmentReader) -> bool:
        """Return whether `choose` may return another reader than ``reader``."""
        return next(islice(reader.ways(self.tolerance.coarseness), 1, None), None) is not None

    def choose(
        self,
        part: SpanPart,
        within_s: float,
        num_cells_left: int,
        takes: Callable[[SegmentReader], bool],
        is_here: Callable[[SegmentReader], bool],
    ) -> SegmentReader:
        """Return the reader with which to read a span. ``within_s``: when the fetch should end. ``num_cells_left``:
        cells not requested yet, of all fetches and of the span. ``takes``: whether cells of a reader have a place.
        ``is_here``: whether the bytes of a reader need no link."""
        first, goodput_bps = part.reader, self.link.goodput_bps  # an old one, too: the first cells correct it
        ways = [each for each in first.ways(self.tolerance.coarseness) if each is first or takes(each)]
        if len(ways) == 1 or goodput_bps is None:
            return first
        cells = list(first.span_cells(part.span))
        num_integers = sum(map(first.num_integers, cells))
        offers = [
            Offer(
                each,
                0.0 if is_here(each) else each.span_bytes(part.span) / len(cells),
                self._pool.seconds(each.coding, num_integers) / len(cells),
                each.coarseness,
            )
            for each in ways
        ]
        outstanding, sessions = self.link.outstanding_bytes, self._pool.num_sessions
        supply = Supply(num_cells_left, outstanding, goodput_bps / 8, self._pool.queued_s, sessions)
        return best_offer(offers, supply, within_s).reader
