"""Decides whether to fetch a prefix or to compute it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgl_kvfetch.config import KVFetchConfig
from sgl_kvfetch.dataplane.plane import Cost
from sgl_kvfetch.metrics import DEVICE_DECISIONS
from sgl_kvfetch.plugin.device.prefill import PrefillSpeed

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


class Verdicts:
    """This rank's decisions, for use from several threads. Ranks may differ, so they must agree before they act."""

    def __init__(self, config: KVFetchConfig, speed: PrefillSpeed, page_size: int) -> None:
        self._config = config
        self._speed = speed
        self._page_size = page_size
        self._choice = FetchOrRecompute()

    def is_fetched(self, num_pages: int, cost: Cost, num_ahead: int) -> bool:
        """Return whether to fetch ``num_pages`` pages. ``cost``: of these pages alone. ``num_ahead``: pages that will
        be fetched before them; each is assumed to cost as much."""
        if self._config.recompute == "never":
            DEVICE_DECISIONS.labels("fetch", "configured").inc()
            return True
        num_tokens, times = num_pages * self._page_size, 1 + num_ahead / num_pages
        in_turn = Cost(*(None if seconds is None else times * seconds for seconds in (cost.transmit_s, cost.decode_s)))
        decision = self._choice.decide(num_tokens, in_turn, self._speed.seconds_for(num_tokens))
        DEVICE_DECISIONS.labels("fetch" if decision.is_fetched else "recompute", decision.reason).inc()
        return decision.is_fetched
