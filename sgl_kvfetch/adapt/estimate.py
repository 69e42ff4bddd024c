"""What a link will carry, from what it carried. Pure: times come in with the transfers."""

from __future__ import annotations

import math
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


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """A log-normal belief: the median, and the standard deviation of the natural logarithm."""

    median_bps: float
    log_sigma: float

    def __post_init__(self) -> None:
        assert 0 < self.median_bps < math.inf, self.median_bps
        assert 0 <= self.log_sigma < math.inf, self.log_sigma

    def at(self, sigmas: float) -> float:
        """bits per second, so many standard deviations from the median."""
        return self.median_bps * math.exp(sigmas * self.log_sigma)

    def shared(self, num_fetches: int) -> LinkEstimate:
        """One fetch's part where so many compete, each for as much."""
        assert num_fetches >= 1, num_fetches
        return LinkEstimate(self.median_bps / num_fetches, self.log_sigma)


# What a link is taken for before anything came over it: 1 to 40 Gbps are within 1.5 standard deviations.
UNKNOWN_LINK = LinkEstimate(6.3e9, 1.2)

_WINDOW = 8
_DECAY = 0.8  # weight of a transfer against the one after it
_PRIOR_WEIGHT = 1.0  # of the spread that is believed in before there is any to see
_PRIOR_LOG_SIGMA = 0.25
_LEAST_LOG_SIGMA = 0.05
_MAD_TO_SIGMA = 1.4826
_JUMP_SIGMAS = 3.0
_SHORTEST_PIECE = 0.1  # of the longest transfer that runs in it


def together(transfers: Sequence[Transfer]) -> list[Transfer]:
    """What several connections brought, as if it had come over one: the link's goodput is their sum, whichever
    connections, and whichever fetches, they belong to.

    Time is cut where transfers end, and a transfer's bytes are spread evenly over its time. Time in which none ran does
    not count. Those that still run should be among ``transfers``, with what they have brought so far.
    """
    cut: list[Transfer] = []
    cuts_s = _cuts(transfers)
    for since_s, until_s in pairwise(cuts_s):
        running = [(max(t.start_s, since_s), t) for t in transfers if t.start_s < until_s and t.end_s > since_s]
        size = sum(t.size_bytes * (min(t.end_s, until_s) - start_s) / (t.end_s - t.start_s) for start_s, t in running)
        # Whatever runs in this stretch runs on to its end, so that only the earliest start matters.
        cut.append(Transfer(max(1, round(size)), min(start_s for start_s, _ in running), until_s))
    return cut


def _cuts(transfers: Sequence[Transfer]) -> list[float]:
    """The first start, and those ends that lie apart. Transfers that share a link end almost together, and how few of
    them are left in the very last moment says nothing about the link."""
    cuts = [min((t.start_s for t in transfers), default=0.0)]
    ends = sorted({t.end_s for t in transfers})
    for end_s in ends:
        longest_s = max(t.end_s - t.start_s for t in transfers if t.start_s < end_s and t.end_s > cuts[-1])
        if end_s - cuts[-1] >= _SHORTEST_PIECE * longest_s:
            cuts.append(end_s)
    if ends and cuts[-1] != ends[-1]:
        cuts[max(1, len(cuts) - 1) :] = [ends[-1]]
    return cuts


def last_chunk(transfers: Sequence[Transfer]) -> LinkEstimate | None:
    """KVFetcher's estimate (section 3.3.2): what the last chunk saw. None before the first."""
    return LinkEstimate(transfers[-1].goodput_bps, 0.0) if transfers else None


def robust(transfers: Sequence[Transfer], prior: LinkEstimate = UNKNOWN_LINK) -> LinkEstimate:
    """A weighted median of recent goodputs, newer ones weighing more, with the spread around it.

    One stall or one burst does not move a median, but widens the spread. A link that changed for good shows in two
    transfers in a row that lie far off on the same side of all before them: those before are then forgotten. Before
    the first transfer it is ``prior``. Transfers over several connections count ``together``.
    """
    if not transfers:
        return prior
    logs = [math.log(t.goodput_bps) for t in together(transfers)[-_WINDOW:]]
    if _jumped(logs):
        logs = logs[-2:]
    weights = [_DECAY**age for age in reversed(range(len(logs)))]
    middle = _weighted_median(logs, weights)
    spread = _MAD_TO_SIGMA * _weighted_median([abs(x - middle) for x in logs], weights)
    seen = sum(weights) - 1  # one transfer shows no spread
    variance = (seen * spread**2 + _PRIOR_WEIGHT * _PRIOR_LOG_SIGMA**2) / (seen + _PRIOR_WEIGHT)
    return LinkEstimate(math.exp(middle), max(_LEAST_LOG_SIGMA, math.sqrt(variance)))


def _jumped(logs: Sequence[float]) -> bool:
    """Whether the last two lie off on one side of those before, by far more than these vary."""
    before, newest = logs[:-2], logs[-2:]
    if not before:
        return False
    middle = _weighted_median(before, [1.0] * len(before))
    spread = _MAD_TO_SIGMA * _weighted_median([abs(x - middle) for x in before], [1.0] * len(before))
    far = _JUMP_SIGMAS * max(spread, _LEAST_LOG_SIGMA)
    return min(newest) > middle + far or max(newest) < middle - far


def _weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The mean of the two middle values where the weights halve between them."""
    pairs = sorted(zip(values, weights, strict=True))
    half, below = sum(weights) / 2, 0.0
    for i, (value, weight) in enumerate(pairs):
        below += weight
        if math.isclose(below, half, rel_tol=1e-9) and i + 1 < len(pairs):
            return (value + pairs[i + 1][0]) / 2
        if below > half:
            return value
    raise AssertionError("weights are positive")
