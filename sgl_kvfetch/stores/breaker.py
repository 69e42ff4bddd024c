"""Circuit breaker: skip a store that keeps failing, so that its outage does not delay requests."""

from __future__ import annotations


class Breaker:
    """Opens after ``threshold`` failures in a row, for a pause that doubles with each further failure. Callers pass
    the current time in seconds."""

    def __init__(self, threshold: int = 3, first_pause_s: float = 1.0, longest_pause_s: float = 30.0) -> None:
        self._threshold = threshold
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._num_failures = 0
        self._open_until_s = float("-inf")

    def is_open(self, now_s: float) -> bool:
        return now_s < self._open_until_s

    def succeeded(self) -> None:
        self._num_failures = 0
        self._open_until_s = float("-inf")

    def failed(self, now_s: float, longest_pause_s: float | None = None) -> None:
        """Note a failure. ``longest_pause_s``: after this one; None for the breaker's own."""
        self._num_failures += 1
        over = self._num_failures - self._threshold
        if over >= 0:
            longest_s = self._longest_pause_s if longest_pause_s is None else longest_pause_s
            self._open_until_s = now_s + min(longest_s, self._first_pause_s * 2.0 ** min(over, 30))
