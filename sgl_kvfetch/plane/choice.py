"""Decides whether a stored prefix is fetched or computed. Both modes decide here.

Both times are estimates with noise, and each choice hides the other: whoever computes measures no link, and whoever
fetches measures no computing. So

* a cost that is unknown means fetching, which measures it;
* computing is chosen only once it is 5% sooner, separately for each length, and stays chosen until fetching is: else
  prefixes near the break-even point would be fetched and computed in turns;
* what fetches took beyond the estimate counts as well, but only for a minute (`FetchLag`): once computing is chosen
  because of it, nothing else would correct it.

In host mode, SGLang fetches one prefix after another. So a prefix also waits for those before it (`FetchOrder`).

A wrong decision costs time, and never an answer. All of this belongs to the data plane's event loop.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sgl_kvfetch import metrics
from sgl_kvfetch.log import LimitedLogger

_limited = LimitedLogger(logging.getLogger(__name__))

# Computing must be so many times faster before it is chosen, so that decisions do not alternate when the two estimates
# are nearly equal. A prompt whose prefix is fetched anyway takes at most so many times as long as it could.
MARGIN = 1.05
LAG_COUNTS_S = 60.0
_NUM_LAGS = 24
# How long a prefix is expected to take the engine before it has computed anything like it: at least so long, and as
# long as a fast GPU needs for it. It is only a guess, and ends no fetch over a link that is not measured either: a slow
# machine may take thirty times as long to compute.
FIRST_S = 2.0
_FAST_TOKENS_S = 8192
_MOST_WAITING = 1024
# A link that brings nothing in the time that computing takes is tried again so much later. Probes measure it meanwhile.
_TRIES_EVERY_S = 5.0

Points = Sequence[tuple[int, float]]


def interpolate(points: Points, x: int) -> float:
    """Return the value at ``x`` of a line from the origin through ``points``, which are in ascending order. Behind the
    last point, the line is level."""
    x0, y0 = 0, 0.0
    for x1, y1 in points:
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
        x0, y0 = x1, y1
    return y0


@dataclass(frozen=True, slots=True)
class Cost:
    """The estimated duration of a fetch, from measurements. None: not measured yet, or too long ago."""

    transmit_s: float | None
    decode_s: float | None

    @property
    def seconds(self) -> float | None:
        """The duration of the slower stage, because the stages overlap."""
        return None if self.transmit_s is None else max(self.transmit_s, self.decode_s or 0.0)


class FetchLag:
    """Measures how much later fetches end than link and decoders say: because of the first bytes, the last cells, and
    the way to the scheduler. Pure: times are arguments.

    Only the last minute counts: if computing is chosen because of it, nothing else would correct it.
    """

    def __init__(self) -> None:
        self._lags: deque[tuple[float, float]] = deque(maxlen=_NUM_LAGS)  # when it ended, and how late

    def ended(self, now_s: float, expected_s: float) -> None:
        """Record that a fetch that should have ended at ``expected_s`` has ended now."""
        self._lags.append((now_s, max(0.0, now_s - expected_s)))

    def seconds(self, now_s: float) -> float:
        """Return the median, 0 if there is none."""
        return statistics.median([lag for ended_s, lag in self._lags if now_s < ended_s + LAG_COUNTS_S] or [0.0])


class EngineQueue:
    """Estimates how long the engine will take for the prompts that wait for it.

    It is kept as the time at which the engine will be free, by the estimates of what went in. A time that has passed
    means an empty queue, so nothing needs to be taken out. Times are arguments.
    """

    def __init__(self) -> None:
        self._free_s = -math.inf

    def add(self, compute_s: float, now_s: float) -> None:
        """Add a prompt that takes the engine ``compute_s``."""
        self._free_s = max(self._free_s, now_s) + compute_s

    def seconds(self, now_s: float) -> float:
        """Return how long a prompt that comes now waits."""
        return max(0.0, self._free_s - now_s)

    def clear(self) -> None:
        """Record that the engine has nothing to compute."""
        self._free_s = -math.inf


Basis = Literal["configured", "faster", "unmeasured", "link", "decoder"]


@dataclass(frozen=True, slots=True)
class Decision:
    is_fetched: bool
    basis: Basis  # what decided

    def count(self, num_tokens: int) -> None:
        """Record the decision about so many tokens in the metrics and in the log."""
        metrics.DECISIONS.labels("fetch" if self.is_fetched else "recompute", self.basis).inc()
        if not self.is_fetched:
            metrics.RECOMPUTED_TOKENS.inc(num_tokens)
            message = f"kvfetch: {num_tokens} stored tokens are recomputed, which is faster ({self.basis})"
            _limited.log(logging.INFO, self.basis, message)


class FetchOrRecompute:
    """Decides with hysteresis, separately for each range of lengths (powers of two). Pure. A prefix whose cost is
    unknown is fetched, which also measures the cost."""

    def __init__(self) -> None:
        self._recomputed: set[int] = set()  # lengths, as powers of two

    def decide(self, num_tokens: int, cost: Cost, recompute_s: float | None) -> Decision:
        """Decide about a prefix. ``recompute_s``: how much later the request's first token would come
        without it."""
        fetch_s = cost.seconds
        if fetch_s is None or recompute_s is None:
            return Decision(True, "unmeasured")
        length = num_tokens.bit_length()
        if fetch_s <= recompute_s * (1.0 if length in self._recomputed else MARGIN):
            self._recomputed.discard(length)
            return Decision(True, "faster")
        self._recomputed.add(length)
        return Decision(False, "link" if cost.transmit_s == fetch_s else "decoder")


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A prefix that host mode is to fetch. ``num_pages``: how many there are. ``fetch_s``: how long that takes; None if
    the link is not measured. ``compute_s``: how long the engine would take for it, from when the turn begins; infinite
    if neither that nor the link is measured, or if it is not to be computed. ``end_s``: when the fetch must end.
    ``expected_s``: when it should end; None if it waited for others."""

    hashes: Collection[bytes] = ()
    fetch_s: float | None = None
    compute_s: float = math.inf
    end_s: float = math.inf
    expected_s: float | None = None

    def compute_pages_s(self, num_pages: int) -> float:
        """Return how long the engine would take for some of the pages."""
        return self.compute_s * num_pages / len(self.hashes) if self.hashes else math.inf


NO_TURN = Turn()


class FetchOrder:
    """The prefixes of one rank that are to be fetched, and what decides whether they are.

    There are two queues, the link's and the engine's, and a prefix goes to the one in which its request would have its
    first token sooner. In device mode, the data plane knows what waits for the link (`staging`).

    In host mode, SGLang looks prefixes up on one thread, and fetches them on another, one after another in the same
    order. So the link's queue is a time, as the engine's is: what SGLang drops without a word is over when its time has
    passed.

    Each rank judges by itself: SGLang takes the shortest hit of all ranks. Times are arguments.
    """

    def __init__(self, page_tokens: int, *, may_compute: bool) -> None:
        """``may_compute``: whether a stored prefix may be computed."""
        self._choice, self._lag = FetchOrRecompute(), FetchLag()
        self.engine = EngineQueue()  # prompts that were left to it
        self._page_tokens = page_tokens
        self._may_compute = may_compute
        self._waiting: deque[Turn] = deque(maxlen=_MOST_WAITING)  # SGLang may drop some
        self._present = NO_TURN
        self._link_free_s = -math.inf
        # When a fetch last tried to measure the link, and for how long.
        self._tried_s, self._tried_for_s = -math.inf, 0.0

    # Device mode

    def compute_s(self, num_pages: int, saved_s: Points, now_s: float) -> float | None:
        """Return how much longer a request would take without so many pages: it waits for the engine, which computes
        them. None if that is not to be considered. ``saved_s``: as in `messages.Stage`."""
        if not saved_s or not self._may_compute:
            return None
        return interpolate(saved_s, num_pages) + self.engine.seconds(now_s)

    def computes(self, num_pages: int, saved_s: Points, now_s: float) -> None:
        """Record that the engine is to compute so many pages."""
        self.engine.add(max(0.0, interpolate(saved_s, num_pages)), now_s)

    def is_fetched(self, num_pages: int, num_ahead: int, cost: Cost, saved_s: Points, now_s: float) -> bool:
        """Decide, and note what is left to the engine. The ``num_ahead`` pages that are fetched before these are
        assumed to cost as much each."""
        decision = Decision(True, "configured")
        if self._may_compute:
            times = 1 + num_ahead / num_pages
            stages = (None if seconds is None else times * seconds for seconds in (cost.transmit_s, cost.decode_s))
            compute_s = self.compute_s(num_pages, saved_s, now_s)
            sooner_s = None if compute_s is None else compute_s - self._lag.seconds(now_s)
            decision = self._choice.decide(num_pages * self._page_tokens, Cost(*stages), sooner_s)
        decision.count(num_pages * self._page_tokens)
        if not decision.is_fetched:
            self.computes(num_pages, saved_s, now_s)
        return decision.is_fetched

    def landed(self, now_s: float, expected_s: float) -> None:
        """Record that a fetch that had the link alone, and should have ended at ``expected_s``, has ended now."""
        self._lag.ended(now_s, expected_s)

    # Host mode

    def looked_up(self, hashes: Sequence[bytes], num_found: int, cost: Cost, saved_s: Points, now_s: float) -> bool:
        """Return whether to fetch the first ``num_found`` pages, which a lookup of ``hashes`` has found. ``saved_s``:
        as in `messages.Stage`."""
        if num_found:
            num_tokens = num_found * self._page_tokens
            fetch_s, is_guess = cost.seconds, not saved_s
            compute_s = max(FIRST_S, num_tokens / _FAST_TOKENS_S) if is_guess else interpolate(saved_s, num_found)
            decision = self._decide(num_tokens, cost, compute_s, now_s)
            decision.count(num_tokens)
            if decision.is_fetched:
                expected_s = now_s + fetch_s if fetch_s is not None and now_s >= self._link_free_s else None
                turn_s = math.inf if is_guess and fetch_s is None else compute_s
                self._waiting.append(Turn(frozenset(hashes[:num_found]), fetch_s, turn_s, expected_s=expected_s))
                # Behind a fetch of unknown length, others compute, and measure the engine, for about so long.
                self._link_free_s = max(self._link_free_s, now_s) + (compute_s if fetch_s is None else fetch_s)
                return True
        self.computes(len(hashes), saved_s, now_s)
        return False

    def _decide(self, num_tokens: int, cost: Cost, compute_s: float, now_s: float) -> Decision:
        if not self._may_compute:
            return Decision(True, "configured")
        wait_s = max(0.0, self._link_free_s - now_s)
        if cost.seconds is None and (wait_s or self._was_tried(compute_s, now_s)):
            return Decision(False, "unmeasured")
        sooner_s = self.engine.seconds(now_s) - wait_s - self._lag.seconds(now_s)
        return self._choice.decide(num_tokens, cost, compute_s + sooner_s)

    def _was_tried(self, compute_s: float, now_s: float) -> bool:
        """Return whether a fetch that had about as much time did not measure the link a moment ago."""
        return now_s < self._tried_s + _TRIES_EVERY_S and compute_s <= 2 * self._tried_for_s

    def turn_of(self, hashes: Sequence[bytes], now_s: float, *, is_first: bool) -> Turn:
        """Return the turn of pages that are fetched now. ``is_first``: whether it begins with them; then those before
        it are forgotten."""
        if is_first:
            self._present = self._begin(hashes, now_s)
        return self._present

    def _begin(self, hashes: Sequence[bytes], now_s: float) -> Turn:
        index = next((i for i, turn in enumerate(self._waiting) if hashes and hashes[-1] in turn.hashes), None)
        if index is None:
            return NO_TURN
        turn = self._waiting[index]
        self._waiting = deque(list(self._waiting)[index + 1 :], _MOST_WAITING)
        if not self._may_compute:
            return replace(turn, compute_s=math.inf)
        compute_s = max(turn.compute_s, 0.0) + self.engine.seconds(now_s)
        if turn.fetch_s is None:
            self._tried_s, self._tried_for_s = now_s, compute_s
        # The pace of a link that was measured tells when to give up, so it needs no deadline.
        return replace(turn, compute_s=compute_s, end_s=now_s + compute_s if turn.fetch_s is None else math.inf)

    @property
    def end_s(self) -> float:
        """When the present fetches must end."""
        return self._present.end_s

    def ended(self, now_s: float, *, is_whole: bool) -> None:
        """Record that the present turn has ended, and whether all its pages are here."""
        left_s = [each.compute_s if each.fetch_s is None else each.fetch_s for each in self._waiting]
        self._link_free_s = now_s + sum(FIRST_S if seconds == math.inf else seconds for seconds in left_s)
        if is_whole and self._present.expected_s is not None:
            self._lag.ended(now_s, self._present.expected_s)
        self._present = replace(NO_TURN, end_s=self._present.end_s)  # what belongs to it comes after it
