"""Fetch a prefix, or compute it? Pure: what is known comes in as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# To compute must be so much faster before we change over to it: computing takes the engine from other requests, and
# estimates that are nearly alike must not make requests go one way and the other in turn.
MARGIN = 1.25

Reason = Literal["faster", "unmeasured", "link", "decoder"]


@dataclass(frozen=True, slots=True)
class FetchCost:
    """What a fetch will take, as measured. None: not measured yet, or too long ago."""

    transmit_s: float | None  # what is ahead of it on the link, too
    decode_s: float | None

    @property
    def seconds(self) -> float | None:
        """The stages overlap."""
        return None if self.transmit_s is None else max(self.transmit_s, self.decode_s or 0.0)


@dataclass(frozen=True, slots=True)
class Decision:
    is_fetched: bool
    reason: Reason


class FetchOrRecompute:
    """Decides with hysteresis. What cannot be estimated is fetched, and is measured so."""

    def __init__(self) -> None:
        self._recomputes = False

    def decide(self, cost: FetchCost, recompute_s: float | None) -> Decision:
        """``recompute_s``: what the engine would take to compute the same tokens, if it had nothing else to do."""
        fetch_s = cost.seconds
        if fetch_s is None or recompute_s is None:
            return Decision(True, "unmeasured")
        self._recomputes = fetch_s > recompute_s * (1.0 if self._recomputes else MARGIN)
        if not self._recomputes:
            return Decision(True, "faster")
        return Decision(False, "link" if cost.transmit_s == fetch_s else "decoder")
