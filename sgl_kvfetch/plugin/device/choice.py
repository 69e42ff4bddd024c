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
    """Decides with hysteresis, for prompts of about one length (within a factor of two) together. What cannot be
    estimated is fetched, and is measured so."""

    def __init__(self) -> None:
        self._recomputed: set[int] = set()  # lengths, as powers of two

    def decide(self, num_tokens: int, cost: FetchCost, recompute_s: float | None) -> Decision:
        """``recompute_s``: what the engine would take to compute these tokens, if it had nothing else to do."""
        fetch_s = cost.seconds
        if fetch_s is None or recompute_s is None:
            return Decision(True, "unmeasured")
        length = num_tokens.bit_length()
        if fetch_s <= recompute_s * (1.0 if length in self._recomputed else MARGIN):
            self._recomputed.discard(length)
            return Decision(True, "faster")
        self._recomputed.add(length)
        return Decision(False, "link" if cost.transmit_s == fetch_s else "decoder")
