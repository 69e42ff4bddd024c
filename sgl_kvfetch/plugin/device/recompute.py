"""Decides whether to fetch a prefix or to compute it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgl_kvfetch.plane import Cost

# Computing must be so many times faster before it is chosen: it takes the engine's time from other requests, and
# decisions must not alternate when the two estimates are nearly equal.
MARGIN = 1.25

Reason = Literal["faster", "unmeasured", "link", "decoder"]


@dataclass(frozen=True, slots=True)
class Decision:
    is_fetched: bool
    reason: Reason


class FetchOrRecompute:
    """Decides with hysteresis, separately for each range of lengths (powers of two). Pure. A prefix whose cost is
    unknown is fetched, which also measures the cost."""

    def __init__(self) -> None:
        self._recomputed: set[int] = set()  # lengths, as powers of two

    def decide(self, num_tokens: int, cost: Cost, recompute_s: float | None) -> Decision:
        """``recompute_s``: how long the engine would take to compute these tokens if it had nothing else to do."""
        fetch_s = cost.seconds
        if fetch_s is None or recompute_s is None:
            return Decision(True, "unmeasured")
        length = num_tokens.bit_length()
        if fetch_s <= recompute_s * (1.0 if length in self._recomputed else MARGIN):
            self._recomputed.discard(length)
            return Decision(True, "faster")
        self._recomputed.add(length)
        return Decision(False, "link" if cost.transmit_s == fetch_s else "decoder")
