"""Estimates a link's future bandwidth from past transfers. Pure: transfers carry their times.

Whoever chooses between a small variant that decodes slowly and a large one that decodes fast needs more than the mean:
the mean of a link that alternates between 1 and 10 Gbps is a speed that it never has. So the result is a distribution
over what the next chunks will meet, `LinkOutlook`: the logarithm of bandwidth as an autoregressive process, with a
median, a spread, how long deviations last, and how sure the median is. A policy tries its choices on a few paths drawn
from it, always with the same random numbers, so that equal situations get equal answers.

`robust` fits it. A single transfer that is far from the others counts as an outlier: it is clipped. Two in a row on the
same side mean that the link has changed, and everything before is forgotten. With few transfers, a prior stands in.
Simulations and traces judge it (`benchmarks.adaptive`, docs/adaptive.md).
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes that a link carried, over any number of connections. Both times are from one clock, which may be any."""

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
_DECAY = 0.8  # weight of a transfer relative to the next one
# The prior for a link with few transfers, and its weight, in transfers.
_PRIOR_WEIGHT = 2.0
_PRIOR_LOG_SIGMA = 0.3
_PRIOR_PERSISTENCE = 0.6
_MOST_PERSISTENCE = 0.98
_MAD_TO_SIGMA = 1.4826
_LEAST_LOG_SIGMA = 0.05  # lower bound, so that small deviations are no outliers
_FAR_SIGMAS = 3.0


def _draws() -> list[list[float]]:
    """Return standard normal numbers, always the same ones because policies are pure. Half of the paths mirror the
    others, so that the mean is exactly 0."""
    rng = random.Random(1)
    half = [[rng.gauss(0, 1) for _ in range(_MOST_CHUNKS + 1)] for _ in range(_NUM_PATHS // 2)]
    return half + [[-x for x in row] for row in half]


_DRAWS = _draws()


@dataclass(frozen=True, slots=True)
class LinkOutlook:
    """A link's expected bandwidth, as an autoregressive process of order 1 in the logarithm of bits per second.

    The logarithm varies around that of ``median_bps`` with standard deviation ``log_sigma``. The fraction
    ``persistence`` of its deviation remains from one chunk to the next; ``offset`` is the deviation now.
    ``median_log_sigma`` is the median's own uncertainty, as a standard deviation of its logarithm.
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
        """Return equally likely scenarios: for each, the bits per second of each of the next chunks (at most 64)."""
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


# The assumption for a link without transfers: 1 to 40 Gbps lie within 1.5 standard deviations.
UNKNOWN_LINK = LinkOutlook(6.3e9, 1.2)


def robust(transfers: Sequence[Transfer], prior: LinkOutlook = UNKNOWN_LINK) -> LinkOutlook:
    """Estimate median, spread and persistence of recent goodputs; newer transfers have more weight.

    A single outlier is clipped. Two outliers in a row on the same side mean that the link has changed: all earlier
    transfers are then ignored. Without transfers the result is ``prior``. Transfers must not overlap.
    """
    if not transfers:
        return prior
    logs = [math.log(t.goodput_bps) for t in transfers[-_WINDOW:]]
    logs = logs[-2:] if _jumped(logs) else _clipped(logs)
    weights = [_DECAY**age for age in reversed(range(len(logs)))]
    total = sum(weights)
    middle = sum(w * x for w, x in zip(weights, logs, strict=True)) / total
    offsets = [x - middle for x in logs]
    # A single transfer says nothing about the spread, hence the prior.
    seen = sum(w * x**2 for w, x in zip(weights, offsets, strict=True))
    variance = (seen + _PRIOR_WEIGHT * _PRIOR_LOG_SIGMA**2) / (total - 1 + _PRIOR_WEIGHT)
    products = sum(a * b for a, b in pairwise(offsets)) + _PRIOR_WEIGHT * _PRIOR_PERSISTENCE * variance
    persistence = products / (sum(x**2 for x in offsets[:-1]) + _PRIOR_WEIGHT * variance)
    persistence = min(_MOST_PERSISTENCE, max(0.0, persistence))
    sigma = math.sqrt(variance)
    # The standard error of a mean of correlated values.
    middle_sigma = sigma * math.sqrt((1 + persistence) / (1 - persistence) / total)
    return LinkOutlook(
        math.exp(middle), min(middle_sigma, UNKNOWN_LINK.median_log_sigma), sigma, persistence, offsets[-1]
    )


def _clipped(logs: Sequence[float]) -> list[float]:
    """Clip outliers to the outlier threshold, unless a neighbour is an outlier on the same side."""
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
    """Return whether the last two values are outliers on the same side of all earlier ones."""
    before, newest = logs[:-2], logs[-2:]
    if not before:
        return False
    middle, far = _middle_and_far(before)
    return min(newest) > middle + far or max(newest) < middle - far


def _middle_and_far(values: Sequence[float]) -> tuple[float, float]:
    """Return the median, and the distance from it beyond which a value is an outlier."""
    middle = statistics.median(values)
    spread = _MAD_TO_SIGMA * statistics.median(abs(x - middle) for x in values)
    return middle, _FAR_SIGMAS * max(spread, _LEAST_LOG_SIGMA)
