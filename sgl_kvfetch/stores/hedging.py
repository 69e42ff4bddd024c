"""Decide when to hedge a request with a second one, and which replica to ask. Pure: no clock, no I/O.

A request is checked once a tick; a tick is a quarter of the silence limit. Silence is counted in ticks, not in seconds:
an event loop that was busy for a second has read nothing, although bytes may have come. It counts one silent tick.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from sgl_kvfetch.stores.breaker import Breaker

SILENT_TICKS = 4  # a request with so many in a row is stalled
_SILENT_TICKS_OF_SECOND = 2 * SILENT_TICKS

_MOST_MEASURED = 64
_LEAST_MEASURED = 8


class Usual:
    """The limit of what is normal: ``factor`` times a quantile of the last measurements, within bounds."""

    def __init__(self, factor: float, quantile: float, *, least: float, most: float, at_first: float) -> None:
        """``at_first`` is the limit until there are enough measurements."""
        assert 0 <= quantile < 1
        assert least <= at_first <= most
        self._factor, self._quantile = factor, quantile
        self._least, self._most, self._at_first = least, most, at_first
        self._measured: deque[float] = deque(maxlen=_MOST_MEASURED)

    def note(self, measured: float) -> None:
        self._measured.append(measured)

    @property
    def limit(self) -> float:
        if len(self._measured) < _LEAST_MEASURED:
            return self._at_first
        usual = sorted(self._measured)[int(self._quantile * len(self._measured))]
        return min(self._most, max(self._least, self._factor * usual))


@dataclass(slots=True)
class Progress:
    """The bytes that one request has received, checked at every tick."""

    num_bytes: int = 0
    silent_ticks: int = 0  # in a row, up to now
    _bytes_at_tick: int = 0

    def tick(self) -> None:
        self.silent_ticks = self.silent_ticks + 1 if self.num_bytes == self._bytes_at_tick else 0
        self._bytes_at_tick = self.num_bytes


class Verdict(Enum):
    WAIT = auto()
    ASK_AGAIN = auto()  # make a second request for the missing bytes
    END_SECOND = auto()  # the second is not needed, or silent too; another may follow


def judge(first: Progress, second: Progress | None, is_late: bool) -> Verdict:
    """Decide at each tick. ``is_late``: the first request takes far longer than normal, silent or not."""
    if second is None:
        return Verdict.ASK_AGAIN if is_late or first.silent_ticks >= SILENT_TICKS else Verdict.WAIT
    has_resumed = second.num_bytes == 0 and first.silent_ticks == 0 and not is_late
    return Verdict.END_SECOND if has_resumed or second.silent_ticks >= _SILENT_TICKS_OF_SECOND else Verdict.WAIT


class RaceBudget:
    """Limit second requests: a few at once, and a tenth of all requests.

    Second requests that were worth it do not count towards the tenth. So every request to a server that hangs may be
    hedged, but on a link that is only slow, or down, hedging soon stops.
    """

    def __init__(self, most_at_once: int, share: float = 0.1) -> None:
        self._most_at_once = most_at_once
        self._share = share
        self._num_running = 0
        self._tokens = float(most_at_once)

    def request_ended(self) -> None:
        self._add(self._share)

    def try_begin(self) -> bool:
        if self._num_running >= self._most_at_once or self._tokens < 1:
            return False
        self._num_running += 1
        self._tokens -= 1
        return True

    def end(self, was_worth_it: bool) -> None:
        assert self._num_running > 0
        self._num_running -= 1
        if was_worth_it:
            self._add(1)

    def _add(self, tokens: float) -> None:
        self._tokens = min(self._tokens + tokens, float(self._most_at_once))


class ReplicaHealth:
    """Availability and response time of a replica, for one kind of request. All times are in seconds.

    A replica that failed is skipped for a second, then for twice as long each time, up to half a minute.
    """

    _FORGET_S = 60.0  # after so long without a request, one is sent to measure again
    _NEW_WEIGHT = 0.3

    def __init__(self, failures: int) -> None:
        """Skip the replica after so many ``failures`` in a row."""
        self._breaker = Breaker(failures)
        self._failed_s = float("-inf")
        self._asked_s = float("-inf")
        self._answers_in_s: float | None = None

    def is_open(self, now_s: float) -> bool:
        """Return whether to skip the replica now."""
        return self._breaker.is_open(now_s)

    def asked(self, now_s: float) -> None:
        self._asked_s = now_s

    def answered(self, in_s: float) -> None:
        self._breaker.succeeded()
        self._learn(in_s)

    def failed(self, now_s: float, asked_s: float) -> None:
        # Failures of requests that ran at the same time count once.
        if asked_s >= self._failed_s:
            self._breaker.failed(now_s)
            self._failed_s = now_s
        self._learn(now_s - asked_s)

    def _learn(self, in_s: float) -> None:
        known = in_s if self._answers_in_s is None else self._answers_in_s
        self._answers_in_s = known + self._NEW_WEIGHT * (in_s - known)

    def rank(self, now_s: float) -> tuple[bool, int]:
        """Return a sort key; lower is better. Similar times rank equal, so that requests do not alternate."""
        known_s = self._answers_in_s
        if known_s is None or now_s - self._asked_s > self._FORGET_S:
            known_s = 0.0
        return self.is_open(now_s), round(math.log2(max(1.0, known_s * 1e3)))


def ranked(healths: Sequence[ReplicaHealth], now_s: float) -> list[int]:
    """Return the indices of replicas, best first. Equal ones keep the given order."""
    return sorted(range(len(healths)), key=lambda i: healths[i].rank(now_s))


def next_replica(
    ranking: Iterable[int], tried: Sequence[int], failed: frozenset[int], open_: frozenset[int]
) -> int | None:
    """Return the replica to ask next: the best of those tried least often. None if all have failed.

    ``ranking`` is best first; ``tried`` has one entry per earlier attempt. A replica in ``open_`` is asked only if no
    other is left, not even one that was tried before.
    """
    left = [i for i in ranking if i not in failed]
    return min(left, key=lambda i: (i in open_, tried.count(i)), default=None)
