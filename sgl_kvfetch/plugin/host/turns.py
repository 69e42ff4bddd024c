"""Decides, in host mode, which stored prefixes are fetched, and for how long a fetch is waited for.

SGLang looks prefixes up on one thread, and fetches them on another, one after another in the same order. So a prefix
waits for those before it. There are two queues, the link's and the engine's, and a prefix goes to the one in which its
request would have its first token sooner. The link's is kept like the engine's (`EngineQueue`).

Each rank judges by itself: SGLang takes the shortest hit of all ranks.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from sgl_kvfetch.plane import Cost, Decision, FetchLag, FetchOrRecompute, Found
from sgl_kvfetch.plugin.prefill import PrefillMeter

# How long a prefix is expected to take the engine before it has computed anything like it: at least so long, and as
# long as a fast GPU needs for it. It is only a guess, and ends no fetch over a link that is not measured either: a slow
# machine may take thirty times as long to compute.
FIRST_S = 2.0
_FAST_TOKENS_S = 8192
_MOST_WAITING = 1024
# A link that brings nothing in the time that computing takes is tried again so much later. Probes measure it meanwhile.
_TRIES_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A prefix that is to be fetched. ``fetch_s``: how long that takes; None if the link is not measured.
    ``compute_s``: how long the engine would take for it, from when the turn begins; infinite if neither that nor the
    link is measured. ``within_s``: when the fetch must end, after it began. ``expected_s``: when it should end; None if
    it waited for others."""

    hashes: Collection[str]
    fetch_s: float | None
    compute_s: float
    within_s: float = math.inf
    expected_s: float | None = None


NO_TURN = Turn((), None, math.inf)


class Turns:
    """The prefixes that SGLang will fetch, in order. Any thread; times are arguments."""

    def __init__(self, meter: PrefillMeter, page_tokens: int, *, may_compute: bool) -> None:
        """``may_compute``: whether a stored prefix may be computed."""
        self._speed, self._engine = meter.speed, meter.queue
        self._page_tokens = page_tokens
        self._may_compute = may_compute
        self._lock = threading.Lock()
        self._choice = FetchOrRecompute()
        self._lag = FetchLag()
        self._waiting: deque[Turn] = deque(maxlen=_MOST_WAITING)  # SGLang may drop some
        self._link_free_s = -math.inf
        # When a fetch last tried to measure the link, and for how long.
        self._tried_s, self._tried_for_s = -math.inf, 0.0

    def looked_up(self, hashes: Sequence[str], found: Found, now_s: float) -> bool:
        """Return whether to fetch the pages that a lookup of ``hashes`` has found."""
        with self._lock:
            num_tokens = found.num_pages * self._page_tokens
            if num_tokens:
                fetch_s, saved_s = found.cost.seconds, self._speed.seconds_saved(num_tokens)
                is_guess = saved_s is None
                if saved_s is None:
                    saved_s = max(FIRST_S, num_tokens / _FAST_TOKENS_S)
                decision = self._decide(num_tokens, found.cost, saved_s, now_s)
                decision.count(num_tokens)
                if decision.is_fetched:
                    compute_s = math.inf if is_guess and fetch_s is None else saved_s
                    self._queue(hashes[: found.num_pages], fetch_s, compute_s, now_s)
                    # Behind a fetch of unknown length, others compute, and measure the engine, for about so long.
                    self._link_free_s = max(self._link_free_s, now_s) + (saved_s if fetch_s is None else fetch_s)
                    return True
            compute_s = self._speed.seconds_for(len(hashes) * self._page_tokens) or 0.0
            self._engine.add(compute_s, now_s)
            return False

    def _decide(self, num_tokens: int, cost: Cost, saved_s: float, now_s: float) -> Decision:
        if not self._may_compute:
            return Decision(True, "configured")
        wait_s = max(0.0, self._link_free_s - now_s)
        if cost.seconds is None and (wait_s or self._was_tried(saved_s, now_s)):
            return Decision(False, "unmeasured")
        sooner_s = self._engine.seconds(now_s) - wait_s - self._lag.seconds(now_s)
        return self._choice.decide(num_tokens, cost, saved_s + sooner_s)

    def _was_tried(self, compute_s: float, now_s: float) -> bool:
        """Return whether a fetch that had about as much time did not measure the link a moment ago."""
        return now_s < self._tried_s + _TRIES_EVERY_S and compute_s <= 2 * self._tried_for_s

    def _queue(self, hashes: Sequence[str], fetch_s: float | None, compute_s: float, now_s: float) -> None:
        is_first = now_s >= self._link_free_s
        expected_s = now_s + fetch_s if fetch_s is not None and is_first else None
        self._waiting.append(Turn(frozenset(hashes), fetch_s, compute_s, expected_s=expected_s))

    def begin(self, hashes: Sequence[str], now_s: float) -> Turn:
        """Return the turn of pages that SGLang fetches now, and forget those before it."""
        with self._lock:
            index = next((i for i, turn in enumerate(self._waiting) if hashes and hashes[-1] in turn.hashes), None)
            if index is None:
                return NO_TURN
            turn = self._waiting[index]
            self._waiting = deque(list(self._waiting)[index + 1 :], _MOST_WAITING)
            if not self._may_compute:
                return replace(turn, compute_s=math.inf)
            compute_s = max(turn.compute_s, 0.0) + self._engine.seconds(now_s)
            if turn.fetch_s is None:
                self._tried_s, self._tried_for_s = now_s, compute_s
            # The pace of a link that was measured tells when to give up, so it needs no deadline.
            return replace(turn, compute_s=compute_s, within_s=compute_s if turn.fetch_s is None else math.inf)

    def end(self, turn: Turn, now_s: float, *, is_whole: bool) -> None:
        """Note that a fetch has ended, and whether all its pages are here."""
        with self._lock:
            left_s = [each.compute_s if each.fetch_s is None else each.fetch_s for each in self._waiting]
            self._link_free_s = now_s + sum(FIRST_S if seconds == math.inf else seconds for seconds in left_s)
            if is_whole and turn.expected_s is not None:
                self._lag.ended(now_s, turn.expected_s)
