"""Decides, in host mode, which stored prefixes are fetched, and for how long a fetch is waited for.

SGLang looks prefixes up on one thread, and fetches them on another, one after another in the same order. So a prefix
waits for those before it. There are two queues, the link's and the engine's, and a prefix goes to the one in which its
request would have its first token sooner. Each queue is kept as the time at which it will be empty, by the estimates of
what went into it. A time that has passed means an empty queue: nothing needs to be taken out that SGLang dropped.

Each rank judges by itself: SGLang takes the shortest hit of all ranks.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from sgl_kvfetch.plane import Cost, Found
from sgl_kvfetch.plugin.choice import Decision, FetchLag, FetchOrRecompute
from sgl_kvfetch.plugin.prefill import PrefillSpeed

# How long a first fetch may take while nobody knows how fast the link and the engine are.
FIRST_S = 2.0
_MOST_WAITING = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A prefix that is to be fetched. ``fetch_s``: how long that takes; None if the link is not measured.
    ``compute_s``: how long the engine would take for it. ``within_s``: when the fetch must end, after it began.
    ``expected_s``: when it should end; None if it waited for others."""

    hashes: Collection[str]
    fetch_s: float | None
    compute_s: float
    within_s: float
    expected_s: float | None = None


NO_TURN = Turn((), None, math.inf, math.inf)


class Turns:
    """The prefixes that SGLang will fetch, in order. Any thread; times are arguments."""

    def __init__(self, speed: PrefillSpeed, page_tokens: int, *, may_compute: bool) -> None:
        """``may_compute``: whether a stored prefix may be computed."""
        self._speed = speed
        self._page_tokens = page_tokens
        self._may_compute = may_compute
        self._lock = threading.Lock()
        self._choice = FetchOrRecompute()
        self._lag = FetchLag()
        self._waiting: deque[Turn] = deque(maxlen=_MOST_WAITING)  # SGLang may drop some
        self._link_free_s = -math.inf
        self._engine_free_s = -math.inf

    def looked_up(self, hashes: Sequence[str], found: Found, now_s: float) -> bool:
        """Return whether to fetch the pages that a lookup of ``hashes`` has found."""
        with self._lock:
            num_tokens = found.num_pages * self._page_tokens
            saved_s = self._speed.seconds_saved(num_tokens) if num_tokens else None
            if num_tokens and self._is_fetched(num_tokens, found.cost, saved_s, now_s):
                self._queue(hashes[: found.num_pages], found.cost.seconds, saved_s, now_s)
                return True
            compute_s = self._speed.seconds_for(len(hashes) * self._page_tokens) or 0.0
            self._engine_free_s = max(self._engine_free_s, now_s) + compute_s
            return False

    def _is_fetched(self, num_tokens: int, cost: Cost, saved_s: float | None, now_s: float) -> bool:
        decision = Decision(True, "configured")
        if self._may_compute:
            if saved_s is not None:
                saved_s += max(0.0, self._engine_free_s - now_s)
                saved_s -= max(0.0, self._link_free_s - now_s) + self._lag.seconds(now_s)
            decision = self._choice.decide(num_tokens, cost, saved_s)
        decision.count(num_tokens)
        return decision.is_fetched

    def _queue(self, hashes: Sequence[str], fetch_s: float | None, saved_s: float | None, now_s: float) -> None:
        turn = Turn(frozenset(hashes), fetch_s, math.inf, math.inf)
        if self._may_compute:
            compute_s = FIRST_S if saved_s is None else max(saved_s, 0.0)
            # The pace of a link that was measured tells when to give up, so it needs no deadline.
            turn = replace(turn, compute_s=compute_s, within_s=compute_s if fetch_s is None else math.inf)
        waits = now_s < self._link_free_s
        if fetch_s is None:
            fetch_s = min(turn.within_s, FIRST_S)
        elif not waits:
            turn = replace(turn, expected_s=now_s + fetch_s)
        self._waiting.append(turn)
        self._link_free_s = max(self._link_free_s, now_s) + fetch_s

    def begin(self, hashes: Sequence[str]) -> Turn:
        """Return the turn of pages that SGLang fetches now, and forget those before it."""
        with self._lock:
            for index, turn in enumerate(self._waiting):
                if hashes and hashes[-1] in turn.hashes:
                    for _ in range(index + 1):
                        self._waiting.popleft()
                    return turn
            return NO_TURN

    def end(self, turn: Turn, now_s: float, *, is_whole: bool) -> None:
        """Note that a fetch has ended, and whether all its pages are here."""
        with self._lock:
            self._link_free_s = now_s + sum(FIRST_S if each.fetch_s is None else each.fetch_s for each in self._waiting)
            if is_whole and turn.expected_s is not None:
                self._lag.ended(now_s, turn.expected_s)

    def engine_is_idle(self) -> None:
        """Note that the engine has nothing to compute."""
        self._engine_free_s = -math.inf
