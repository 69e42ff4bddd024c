"""Decide when to hedge a request with a second one to the same store. Pure: no clock, no I/O.

A request is checked once a tick; a tick is a quarter of the silence limit. Silence is counted in ticks, not in seconds:
an event loop that was busy for a second has read nothing, although bytes may have come. It counts one silent tick.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto

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


class HedgeBudget:
    """Limit second requests: a few at once, and a tenth of all requests.

    Second requests that were worth it do not count towards the tenth. So every request on a connection that hangs may
    be hedged, but on a link that is only slow, or down, hedging soon stops.
    """

    _SHARE = 0.1

    def __init__(self, most_at_once: int) -> None:
        self._most_at_once = most_at_once
        self._num_running = 0
        self._tokens = float(most_at_once)

    def request_ended(self) -> None:
        self._add(self._SHARE)

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
