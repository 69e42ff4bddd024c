"""Decides whether a stored prefix is fetched or computed. Both modes decide here.

Both times are estimates with noise, and each choice hides the other: whoever computes measures no link, and whoever
fetches measures no computing. So

* a cost that is unknown means fetching, which measures it;
* computing is chosen only once it is 5% sooner, separately for each length, and stays chosen until fetching is: else
  prefixes near the break-even point would be fetched and computed in turns;
* what fetches took beyond the estimate counts as well, but only for a minute (`FetchLag`): once computing is chosen
  because of it, nothing else would correct it.

A wrong decision costs time, and never an answer.
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
from collections import deque
from dataclasses import dataclass
from typing import Literal

from sgl_kvfetch import metrics
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.plane.messages import Cost

_limited = LimitedLogger(logging.getLogger(__name__))

# Computing must be so many times faster before it is chosen, so that decisions do not alternate when the two estimates
# are nearly equal. A prompt whose prefix is fetched anyway takes at most so many times as long as it could.
MARGIN = 1.05
LAG_COUNTS_S = 60.0
_NUM_LAGS = 24


class FetchLag:
    """Measures how much later fetches end than link and decoders say: because of the first bytes, the last cells, and
    the way to the scheduler. Pure: times are arguments. Any thread adds and reads.

    Only the last minute counts: if computing is chosen because of it, nothing else would correct it.
    """

    def __init__(self) -> None:
        self._lags: deque[tuple[float, float]] = deque(maxlen=_NUM_LAGS)  # when it ended, and how late

    def ended(self, now_s: float, expected_s: float) -> None:
        """Note that a fetch that should have ended at ``expected_s`` has ended now."""
        self._lags.append((now_s, max(0.0, now_s - expected_s)))

    def seconds(self, now_s: float) -> float:
        """Return the median, 0 if there is none."""
        return statistics.median([lag for ended_s, lag in list(self._lags) if now_s < ended_s + LAG_COUNTS_S] or [0.0])


class EngineQueue:
    """Estimates how long the engine will take for the prompts that wait for it.

    It is kept as the time at which the engine will be free, by the estimates of what went in. A time that has passed
    means an empty queue, so nothing needs to be taken out. Any thread; times are arguments.
    """

    def __init__(self) -> None:
        self._free_s = -math.inf
        self._lock = threading.Lock()

    def add(self, compute_s: float, now_s: float) -> None:
        """Add a prompt that takes the engine ``compute_s``."""
        with self._lock:
            self._free_s = max(self._free_s, now_s) + compute_s

    def seconds(self, now_s: float) -> float:
        """Return how long a prompt that comes now waits."""
        return max(0.0, self._free_s - now_s)

    def clear(self) -> None:
        """Note that the engine has nothing to compute."""
        with self._lock:
            self._free_s = -math.inf


Reason = Literal["configured", "faster", "unmeasured", "link", "decoder"]


@dataclass(frozen=True, slots=True)
class Decision:
    is_fetched: bool
    reason: Reason

    def count(self, num_tokens: int) -> None:
        """Note the decision about so many tokens in the metrics and in the log."""
        metrics.DECISIONS.labels("fetch" if self.is_fetched else "recompute", self.reason).inc()
        if not self.is_fetched:
            metrics.RECOMPUTED_TOKENS.inc(num_tokens)
            message = f"kvfetch: {num_tokens} stored tokens are computed, which is sooner ({self.reason})"
            _limited.log(logging.INFO, self.reason, message)


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
