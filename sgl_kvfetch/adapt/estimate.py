"""What a link will carry, from what it carried. Pure: times come in with the transfers."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes that came in over one connection between two moments of any one clock."""

    size_bytes: int
    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        assert self.size_bytes > 0, self.size_bytes
        assert self.end_s > self.start_s, (self.start_s, self.end_s)

    @property
    def goodput_bps(self) -> float:
        return self.size_bytes * 8 / (self.end_s - self.start_s)


_NUM_PATHS = 8
_MOST_CHUNKS = 64
_WINDOW = 16
_DECAY = 0.8  # weight of a transfer against the one after it
# What is believed of a link before there is much to see of it, and the weight of that, in transfers.
_PRIOR_WEIGHT = 2.0
_PRIOR_LOG_SIGMA = 0.3
_PRIOR_PERSISTENCE = 0.6
_MOST_PERSISTENCE = 0.98
_MAD_TO_SIGMA = 1.4826
_LEAST_LOG_SIGMA = 0.05  # below which nothing lies off
_FAR_SIGMAS = 3.0
_SHORTEST_PIECE = 0.1  # of the longest transfer that runs in it


def _draws() -> list[list[float]]:
    """Standard normal numbers, always the same: policies are pure. In pairs that mirror each other, so that their mean
    is exact."""
    rng = random.Random(1)
    half = [[rng.gauss(0, 1) for _ in range(_MOST_CHUNKS + 1)] for _ in range(_NUM_PATHS // 2)]
    return half + [[-x for x in row] for row in half]


_DRAWS = _draws()


@dataclass(frozen=True, slots=True)
class LinkOutlook:
    """What a link is expected to do. The logarithm of its bandwidth strays by ``log_sigma`` around that of
    ``median_bps``, to which it returns: from one chunk to the next, ``persistence`` of what it is off is left (an
    autoregressive process of order 1). It is off by ``offset`` now. The median itself is known but to
    ``median_log_sigma``.
    """

    median_bps: float
    median_log_sigma: float
    log_sigma: float = 0.0
    persistence: float = 0.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        assert 0 < self.median_bps < math.inf, self.median_bps
        assert 0 <= self.median_log_sigma < math.inf, self.median_log_sigma
        assert 0 <= self.log_sigma < math.inf, self.log_sigma
        assert 0 <= self.persistence < 1, self.persistence

    def paths(self, num_chunks: int) -> list[list[float]]:
        """Bits per second while each of the next chunks is on the link: some courses that it may take, equally likely.
        At most 64 chunks."""
        assert num_chunks <= _MOST_CHUNKS, num_chunks
        fresh = math.sqrt(1 - self.persistence**2) * self.log_sigma
        paths = []
        for first, *draws in _DRAWS:
            median = math.log(self.median_bps) + self.median_log_sigma * first
            off = math.log(self.median_bps) + self.offset - median
            path = []
            for draw in draws[:num_chunks]:
                off = self.persistence * off + fresh * draw
                path.append(math.exp(median + off))
            paths.append(path)
        return paths


# What a link is taken for before anything came over it: 1 to 40 Gbps are within 1.5 standard deviations.
UNKNOWN_LINK = LinkOutlook(6.3e9, 1.2)


def together(transfers: Sequence[Transfer]) -> list[Transfer]:
    """What several connections brought, as if it had come over one: the link's goodput is their sum, whichever
    connections, and whichever fetches, they belong to.

    Time is cut where transfers end, and a transfer's bytes are spread evenly over its time. Time in which none ran does
    not count. Those that still run should be among ``transfers``, with what they have brought so far.
    """
    cut: list[Transfer] = []
    for busy in _busy_stretches(transfers):
        for since_s, until_s in pairwise(_cuts(busy)):
            running = [(max(t.start_s, since_s), t) for t in busy if t.start_s < until_s and t.end_s > since_s]
            size = sum(t.size_bytes * (min(t.end_s, until_s) - s) / (t.end_s - t.start_s) for s, t in running)
            # Whatever runs in this stretch runs on to its end, so that only the earliest start matters.
            cut.append(Transfer(max(1, round(size)), min(start_s for start_s, _ in running), until_s))
    return cut


def _busy_stretches(transfers: Sequence[Transfer]) -> list[list[Transfer]]:
    """Transfers between which the link was never idle, together."""
    stretches: list[list[Transfer]] = []
    busy_until_s = -math.inf
    for transfer in sorted(transfers, key=lambda t: t.start_s):
        if transfer.start_s > busy_until_s:
            stretches.append([])
        stretches[-1].append(transfer)
        busy_until_s = max(busy_until_s, transfer.end_s)
    return stretches


def _cuts(transfers: Sequence[Transfer]) -> list[float]:
    """The first start, and those ends that lie apart. Transfers that share a link end almost together, and how few of
    them are left in the very last moment says nothing about the link."""
    cuts = [min(t.start_s for t in transfers)]
    ends = sorted({t.end_s for t in transfers})
    for end_s in ends:
        longest_s = max(t.end_s - t.start_s for t in transfers if t.start_s < end_s and t.end_s > cuts[-1])
        if end_s - cuts[-1] >= _SHORTEST_PIECE * longest_s:
            cuts.append(end_s)
    if cuts[-1] != ends[-1]:
        cuts[max(1, len(cuts) - 1) :] = [ends[-1]]
    return cuts


def robust(transfers: Sequence[Transfer], prior: LinkOutlook = UNKNOWN_LINK) -> LinkOutlook:
    """Median, spread and persistence of recent goodputs, newer ones weighing more.

    A stall or a burst of one transfer counts only as far as the others vary. A link that changed for good shows in two
    transfers in a row that lie far off on the same side of all before them: those before are then forgotten. Before
    the first transfer it is ``prior``. Transfers over several connections count ``together``.
    """
    if not transfers:
        return prior
    logs = [math.log(t.goodput_bps) for t in together(transfers)[-_WINDOW:]]
    logs = logs[-2:] if _jumped(logs) else _clipped(logs)
    weights = [_DECAY**age for age in reversed(range(len(logs)))]
    total = sum(weights)
    middle = sum(w * x for w, x in zip(weights, logs, strict=True)) / total
    offsets = [x - middle for x in logs]
    # One transfer shows no spread.
    seen = sum(w * x**2 for w, x in zip(weights, offsets, strict=True))
    variance = (seen + _PRIOR_WEIGHT * _PRIOR_LOG_SIGMA**2) / (total - 1 + _PRIOR_WEIGHT)
    products = sum(a * b for a, b in pairwise(offsets)) + _PRIOR_WEIGHT * _PRIOR_PERSISTENCE * variance
    persistence = products / (sum(x**2 for x in offsets[:-1]) + _PRIOR_WEIGHT * variance)
    persistence = min(_MOST_PERSISTENCE, max(0.0, persistence))
    sigma = math.sqrt(variance)
    # Of the mean of so many that resemble their neighbours.
    middle_sigma = sigma * math.sqrt((1 + persistence) / (1 - persistence) / total)
    return LinkOutlook(
        math.exp(middle), min(middle_sigma, UNKNOWN_LINK.median_log_sigma), sigma, persistence, offsets[-1]
    )


def _clipped(logs: Sequence[float]) -> list[float]:
    """With those that lie far off, and their neighbours do not, brought back to where far begins."""
    if len(logs) < 3:
        return list(logs)
    middle, far = _middle_and_far(logs)
    least, most = middle - far, middle + far
    clipped = []
    for i, x in enumerate(logs):
        neighbours = (*logs[max(0, i - 1) : i], *logs[i + 1 : i + 2])
        low, high = min(neighbours) < least, max(neighbours) > most
        clipped.append(max(x, least) if x < least and not low else min(x, most) if x > most and not high else x)
    return clipped


def _jumped(logs: Sequence[float]) -> bool:
    """Whether the last two lie off on one side of those before, by far more than these vary."""
    before, newest = logs[:-2], logs[-2:]
    if not before:
        return False
    middle, far = _middle_and_far(before)
    return min(newest) > middle + far or max(newest) < middle - far


def _middle_and_far(values: Sequence[float]) -> tuple[float, float]:
    """Their median, and how far from it none of them is expected."""
    middle = statistics.median(values)
    spread = _MAD_TO_SIGMA * statistics.median(abs(x - middle) for x in values)
    return middle, _FAR_SIGMAS * max(spread, _LEAST_LOG_SIGMA)
