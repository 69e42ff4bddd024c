"""Measures how fast the engine computes prompts.

Nothing but finished batches is known, and their times are noisy: the first ones compile kernels, others share the
machine. So estimates are medians, of slopes and of remainders, and never averages. An estimate that is too low makes
the engine compute, which measures and corrects it; one that is too high would have everything fetched, and stay. So
where little is known, the lower one is taken.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any

WINDOW = 24  # how many of the latest batches count
MIN_BATCHES = 4  # with fewer, the fastest one counts
# From batches of fewer tokens, a prompt of more than _FARTHEST times as many is not estimated.
_SHORT, _FARTHEST = 1024, 8
# If all batches have about the same size, the cost of a batch cannot be told from the cost of its tokens.
_MIN_SPREAD = 2.0
# A batch whose requests have so many times as many tokens before it as in it is what is left to compute after a fetch.
_TAIL_FACTOR = 8
_PARTS = (16, 4, 1)  # the engine's time is told for a whole prefix and for these parts of it
_NEAR = 0.1  # doublings; batches whose sizes differ by less have about the same weight


class PrefillSpeed:
    """Estimates how long a prompt takes to compute: a time per batch, plus a time per token.

    The time per token is the median slope over all pairs of batches, weighted by their difference in size. The time per
    batch is the median of the remainders (Theil 1950, Sen 1968). So outliers do not count, up to about a quarter of the
    batches. Attention makes a token of a long batch slower than one of a short batch. So the estimate is corrected by
    how batches of about this size differed from the line.

    A prompt longer than the largest batch is estimated as several such batches, because SGLang may split it. If SGLang
    does not split it, or if all batches have about the same size, the estimate is too high rather than too low. Short
    batches cost more a token, so they do not tell how long a much longer prompt takes.

    The first batches compile kernels. So until there are a few, the fastest counts. An estimate that is too low makes
    the engine compute, which corrects it; one that is too high would stay.

    What is left to compute after a fetch is a small batch, but its attention reads the whole prefix. On a CPU that may
    take half as long as computing the prefix. So such batches are kept apart, as a time per token of the prefix.

    Pure, without a clock. One thread adds batches; any thread reads.
    """

    def __init__(self) -> None:
        self._batches: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._tails: deque[tuple[int, int, float]] = deque(maxlen=WINDOW)  # tokens before, tokens, seconds
        self._fit: _Fit | None = None  # None before the first batch
        self._is_fitted = True

    def add_batch(self, num_tokens: int, seconds: float, num_before: int = 0) -> None:
        """Add a batch. ``num_tokens``: computed tokens of all its requests. ``num_before``: their prefixes' tokens."""
        if num_tokens <= 0 or seconds <= 0:
            return
        if num_before >= _TAIL_FACTOR * num_tokens:
            self._tails.append((num_before, num_tokens, seconds))
        else:
            self._batches.append((num_tokens, seconds))
            self._is_fitted = False

    def seconds_for(self, num_tokens: int) -> float | None:
        """Return how long ``num_tokens`` would take. None if no batch of about as many tokens has been seen."""
        fit = self._current_fit()
        if fit is None or (fit.largest < _SHORT and num_tokens > _FARTHEST * fit.largest):
            return None
        batches = list(self._batches)
        if len(batches) < MIN_BATCHES:
            return fit.seconds_for(num_tokens)
        ratios = [(seconds / fit.seconds_for(size), size) for size, seconds in batches]
        return fit.seconds_for(num_tokens) * _median_near(ratios, num_tokens)

    def seconds_saved(self, num_tokens: int) -> float | None:
        """Return how much less time a prompt takes if ``num_tokens`` of its tokens are fetched. The batch that computes
        its other tokens, at least one, saves nothing. None as for `seconds_for`."""
        fit, whole_s = self._current_fit(), self.seconds_for(num_tokens)
        if fit is None or whole_s is None:
            return None
        tails = list(self._tails)
        costs = [(max(0.0, seconds - fit.seconds_for(size)) / before, before) for before, size, seconds in tails]
        return whole_s - fit.batch_s - num_tokens * (_median_near(costs, num_tokens) if costs else 0.0)

    def saved_s(self, num_pages: int, page_size: int) -> list[tuple[int, float]]:
        """Return how much longer a prompt takes without so many pages, for a few numbers of pages, ascending. It is
        empty as where `seconds_for` is None."""
        counts = sorted({max(1, num_pages // part) for part in _PARTS})
        times = [(count, self.seconds_saved(count * page_size)) for count in counts]
        return [(count, seconds) for count, seconds in times if seconds is not None]

    def _current_fit(self) -> _Fit | None:
        if not self._is_fitted:
            self._is_fitted = True  # set first, so that a batch added in the meantime causes a new fit
            self._fit = _fit(list(self._batches))
        return self._fit


@dataclass(frozen=True, slots=True)
class _Fit:
    batch_s: float
    token_s: float
    largest: int  # tokens in the largest batch that was seen

    def seconds_for(self, num_tokens: int) -> float:
        if num_tokens > self.largest:
            return self.seconds_for(self.largest) * num_tokens / self.largest
        return self.batch_s + self.token_s * num_tokens


class PrefillMeter:
    """Measures batches as their results come in, on the scheduler's thread."""

    def __init__(self) -> None:
        self.speed = PrefillSpeed()
        self._last_result_s = 0.0

    def finished(self, batch: Any, now_s: float) -> None:
        """Measure ``batch``, SGLang's ``ScheduleBatch``, whose result was processed just now.

        With overlap scheduling, a batch's own time begins when the result of the previous batch arrives.
        """
        begin_s = max(batch.launch_ts or now_s, self._last_result_s)
        self._last_result_s = now_s
        mode = batch.forward_mode
        if not mode.is_extend_without_speculative() or mode.is_split_prefill():
            return
        # A mixed batch has a token of each request that decodes, behind the prompts.
        num_decoding, prefix_lens = len(batch.decoding_reqs or ()), batch.prefix_lens or ()
        num_tokens = (batch.extend_num_tokens or 0) - num_decoding
        self.speed.add_batch(num_tokens, now_s - begin_s, sum(prefix_lens[: len(prefix_lens) - num_decoding]))


def _fit(batches: list[tuple[int, float]]) -> _Fit:
    sizes = [tokens for tokens, _ in batches]
    if len(batches) < MIN_BATCHES:
        return _Fit(0.0, min(seconds / tokens for tokens, seconds in batches), max(sizes))
    token_s = 0.0
    if max(sizes) >= _MIN_SPREAD * min(sizes):
        pairs = [(*a, *b) for a, b in itertools.combinations(batches, 2) if a[0] != b[0]]
        token_s = _weighted_median([((t2 - t1) / (n2 - n1), abs(n2 - n1)) for n1, t1, n2, t2 in pairs])
    if token_s <= 0.0:
        return _Fit(0.0, statistics.median(seconds / tokens for tokens, seconds in batches), max(sizes))
    batch_s = statistics.median(seconds - token_s * tokens for tokens, seconds in batches)
    return _Fit(max(0.0, batch_s), token_s, max(sizes))


def _median_near(values: list[tuple[float, int]], num_tokens: int) -> float:
    """Return the weighted median of pairs ``(value, tokens)``. Those of about ``num_tokens`` have most weight."""
    return _weighted_median([(value, (_NEAR + abs(math.log2(tokens / num_tokens))) ** -2) for value, tokens in values])


def _weighted_median(values: list[tuple[float, float]]) -> float:
    """Return the weighted median of pairs ``(value, weight)``."""
    values.sort()
    half = sum(weight for _, weight in values) / 2
    for value, weight in values:
        half -= weight
        if half <= 0:
            return value
    raise AssertionError("no values")
